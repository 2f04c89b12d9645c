"""Sessions while etcd has no majority: kept when that is certain, and given up, in time, when it is not."""

import asyncio
import time

import pytest

from tests.backends.etcd.kit import needs, running

pytest.importorskip("grpc", reason="needs grpcio: pip install 'rallypoint[etcd]'")

import grpc

from rallypoint.backends.etcd.cluster import Cluster
from rallypoint.backends.etcd.probe import Trouble
from rallypoint.backends.etcd.security import Security
from rallypoint.kv.types import Put
from tests.backends.etcd.test_etcd import fresh, open_at, run

REFUSED = Trouble("connection refused", is_out=True)
LEADERLESS = Trouble("it knows of no leader", is_out=True)
SILENT = Trouble("nothing was heard from it within 2 s")
TTL_S = 3.0
TRIES = 4


@pytest.mark.parametrize(
    ("troubles", "is_certain"),
    [
        ([REFUSED, REFUSED, LEADERLESS], True),
        ([LEADERLESS, LEADERLESS, LEADERLESS], True),
        ([REFUSED, REFUSED, REFUSED], True),
        ([REFUSED, REFUSED, SILENT], False),  # a leader that is paused goes on where it stopped
        ([SILENT, SILENT, LEADERLESS], False),  # two that do not hear us may hear each other
        ([REFUSED, REFUSED], False),  # the third has a leader, if only itself, and for a moment
        ([], False),
    ],
)
def test_it_is_certain_that_nothing_ends_only_if_every_member_is_out(troubles, is_certain):
    async def check():
        cluster = Cluster(("a:1", "b:2", "c:3"), Security())
        cluster._members = 3
        found = cluster._nothing_ended_at({f"{n}": trouble for n, trouble in enumerate(troubles)}, 7.0)
        await cluster.close()
        return found

    assert run(check()) == (7.0 if is_certain else None)


def test_members_that_the_url_does_not_name_count():
    async def check():
        cluster = Cluster(("a:1", "b:2"), Security())
        cluster._members = 3
        found = cluster._nothing_ended_at({"a:1": REFUSED, "b:2": LEADERLESS}, 7.0)
        await cluster.close()
        return found

    assert run(check()) is None


class Deaf:
    """A link whose calls fail with a code."""

    endpoint = "a:1"

    def __init__(self, code):
        self.code = code

    async def ask(self, *_):
        raise grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no")


@pytest.mark.parametrize(
    ("code", "is_certain"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, True),  # then it has to be believed that the URL names all
        (grpc.StatusCode.DEADLINE_EXCEEDED, False),
        (grpc.StatusCode.UNAVAILABLE, False),
    ],
)
def test_one_endpoint_is_not_taken_for_all_members_because_a_call_failed(code, is_certain):
    async def check():
        cluster = Cluster(("a:1",), Security())
        await cluster._count_members(Deaf(code))
        found = cluster._nothing_ended_at({"a:1": REFUSED}, 7.0)
        await cluster.close()
        return found

    assert run(check()) == (7.0 if is_certain else None)


async def has_key(endpoints: str, key: str) -> bool:
    async with open_at(*endpoints.split(",")) as other:
        return (await other.get(key)).item is not None


async def through(cluster, members, do, undo):
    """A session, whose renewals are met by what is done to some members for three times its time to live.

    Whether it was lost here, whether its key is there when etcd is back, and how long etcd took for that.
    """
    async with open_at(*cluster.endpoints.split(",")) as backend:
        key = fresh() + "a"
        session = await backend.open_session(TTL_S)
        await backend.txn((), [Put(key, b"", session.lease)])
        await asyncio.sleep(TTL_S / 2)  # it is renewed
        for member in members:
            do(member)
        await asyncio.sleep(3 * TTL_S)
        lost = session.lost.is_set()
        undone_at = time.monotonic()
        for member in members:
            undo(member)
        await asyncio.to_thread(cluster.wait_ready)
        return lost, await has_key(cluster.endpoints, key), time.monotonic() - undone_at


def outlives(cluster, choose) -> None:
    """A session is kept while some members are dead, and is there when they are back.

    A member that starts says nothing until there is a leader, and silence proves nothing. Elections that take longer
    than the session has left (seen with a machine that others use: 8 s) are no case of this: once more.
    """
    for _ in range(TRIES):
        lost, is_there, took_s = run(through(cluster, choose(), lambda m: m.kill(), lambda m: m.start()))
        assert not lost
        if took_s < TTL_S / 2:
            assert is_there
            return
    pytest.skip(f"etcd took {took_s:.1f} s to have a leader again, {TRIES} times more than {TTL_S / 2:g} s")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with running(needs("system"), tmp_path_factory.mktemp("etcd"), 3) as cluster:
        yield cluster


def followers(cluster):
    leader = cluster.leader
    return [member for member in cluster.members if member is not leader]


@pytest.mark.slow
def test_session_outlives_a_majority_that_was_killed(three):
    outlives(three, lambda: followers(three))


@pytest.mark.slow
def test_session_outlives_a_majority_with_the_leader_that_was_killed(three):
    outlives(three, lambda: [three.leader, followers(three)[0]])


@pytest.mark.slow
def test_session_is_given_up_when_a_majority_says_nothing_though_etcd_may_have_kept_it(three):
    """Two followers that are paused: from here it looks as if they were cut off, with a leader between them."""
    lost, _, _ = run(through(three, followers(three), lambda m: m.pause(), lambda m: m.resume()))
    assert lost


@pytest.mark.slow
def test_session_is_given_up_when_a_majority_with_the_leader_is_paused_and_etcd_ends_it(three):
    """Why silence is not taken for an outage: the leader wakes up, and ends what has run out meanwhile.

    Now and then another one is elected before it gets to that, which gives the lease its full time.
    """
    for _ in range(TRIES):
        members = [three.leader, followers(three)[0]]
        lost, is_there, _ = run(through(three, members, lambda m: m.pause(), lambda m: m.resume()))
        assert lost
        if not is_there:
            return
    pytest.fail("an etcd that mends #15247 keeps it: then see whether a node could, too")
