"""Sessions while etcd has no majority: kept if it is certain that there is no leader, else given up in time."""

import asyncio
import time

import pytest

from tests.backends.etcd.kit import needs, running

pytest.importorskip("grpc", reason="needs grpcio: pip install 'rallypoint[etcd]'")

import grpc

from rallypoint.backends.etcd.cluster import Cluster
from rallypoint.backends.etcd.probe import Problem
from rallypoint.backends.etcd.security import Security
from rallypoint.kv.types import Put
from tests.backends.etcd.test_etcd import fresh, open_at, run

REFUSED = Problem("connection refused", is_down=True)
LEADERLESS = Problem("it knows of no leader", is_down=True)
SILENT = Problem("no answer within 2 s")
TTL_S = 3.0
TRIES = 4


@pytest.mark.parametrize(
    ("problems", "is_certain"),
    [
        ([REFUSED, REFUSED, LEADERLESS], True),
        ([LEADERLESS, LEADERLESS, LEADERLESS], True),
        ([REFUSED, REFUSED, REFUSED], True),
        ([REFUSED, REFUSED, SILENT], False),  # a paused leader continues where it stopped
        ([SILENT, SILENT, LEADERLESS], False),  # two members that this client cannot reach may reach each other
        ([REFUSED, REFUSED], False),  # the third may be a leader for a moment
        ([], False),
    ],
)
def test_it_is_certain_that_no_lease_ends_only_if_every_member_is_down(problems, is_certain):
    async def check():
        cluster = Cluster(("a:1", "b:2", "c:3"), Security())
        cluster._members = 3
        found = cluster._nothing_ended_at({f"{n}": problem for n, problem in enumerate(problems)}, 7.0)
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


class FailingChannel:
    """A channel whose calls fail with a status code."""

    endpoint = "a:1"

    def __init__(self, code):
        self.code = code

    async def ask(self, *_):
        raise grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no")


@pytest.mark.parametrize(
    ("code", "is_certain"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, True),  # then the URL is assumed to name all members
        (grpc.StatusCode.DEADLINE_EXCEEDED, False),
        (grpc.StatusCode.UNAVAILABLE, False),
    ],
)
def test_one_endpoint_is_not_taken_for_all_members_because_a_call_failed(code, is_certain):
    async def check():
        cluster = Cluster(("a:1",), Security())
        await cluster._count_members(FailingChannel(code))
        found = cluster._nothing_ended_at({"a:1": REFUSED}, 7.0)
        await cluster.close()
        return found

    assert run(check()) == (7.0 if is_certain else None)


async def has_key(endpoints: str, key: str) -> bool:
    async with open_at(*endpoints.split(",")) as other:
        return (await other.get(key)).item is not None


async def through(cluster, members, do, undo):
    """Open a session, do something to some members for three times its time to live, and undo it.

    Returns whether the session was lost at the client, whether its key still exists when etcd is back, and how long
    etcd took to be back.
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
    """Assert that a session is kept while some members are dead, and that its key exists when they are back.

    A starting member does not answer until there is a leader, and silence proves nothing. If the election takes longer
    than the rest of the session's time (8 s were seen on a busy machine), the test is repeated.
    """
    for _ in range(TRIES):
        lost, is_there, took_s = run(through(cluster, choose(), lambda m: m.kill(), lambda m: m.start()))
        assert not lost
        if took_s < TTL_S / 2:
            assert is_there
            return
    pytest.skip(f"etcd took {took_s:.1f} s to elect a leader, {TRIES} times more than {TTL_S / 2:g} s")


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
def test_session_is_given_up_when_a_majority_does_not_answer_though_etcd_may_have_kept_it(three):
    """Two followers are paused: to the client it looks as if they were cut off and one of them were the leader."""
    lost, _, _ = run(through(three, followers(three), lambda m: m.pause(), lambda m: m.resume()))
    assert lost


@pytest.mark.slow
def test_session_is_given_up_when_a_majority_with_the_leader_is_paused_and_etcd_ends_it(three):
    """Why silence does not count as an outage: the leader continues and ends the leases that have expired.

    Sometimes another leader is elected first, which gives the lease its full time.
    """
    for _ in range(TRIES):
        members = [three.leader, followers(three)[0]]
        lost, is_there, _ = run(through(three, members, lambda m: m.pause(), lambda m: m.resume()))
        assert lost
        if not is_there:
            return
    pytest.fail("an etcd with a fix for its #15247 keeps the lease: then a node could keep its session, too")
