"""Who waits for a node's place may confirm it beforehand: it is written down, and only the active round is told."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from quorate.kv.types import Grant, ModRevisionIs, Put, Txn
from quorate.rendezvous.records import RoundPhase
from quorate.server import soon
from quorate.server.limits import ServerLimits
from quorate.server.local import LocalBackend
from quorate.server.standing import MOST_PLEDGED_S, Standing
from quorate.wire.messages import Do, Hold, Place, Pledge
from tests.server.kit import eventually, run, serving
from tests.server.standing_kit import KEYS, NODE, assign, come, nothing, own_key, scene, state

LEASE = 77
VALUE, AS_ZERO = b"the confirmation", b"the confirmation of rank 0"
LAPSED = -1.0


def pledge(on, for_s=60.0, number=1, join=4, incarnation="life", lease=LEASE, as_zero=AS_ZERO):
    return Pledge(for_s, number, join, incarnation, lease, on, VALUE, as_zero)


@asynccontextmanager
async def joined(monkeypatch, **options):
    """The scene, with the node's key there; and the revision of that."""
    async with scene(monkeypatch, **options) as there:
        there.server.hub.execute(Grant(60.0, LEASE))
        yield there, there.write(own_key(0))


async def hears(raw, *messages):
    """Say something to the server; it has taken all of it in."""
    raw.send(*messages, Do(1, Txn((), ())))
    await raw.answer(1)


def form(there, number=1, rank=2):
    return there.write(state(RoundPhase.FORMING, number), assign(number, rank))


def own(there):
    return there.server.hub.engine.items[KEYS.node(NODE)]


def test_a_place_that_was_confirmed_beforehand_is_written_down_and_the_active_round_is_what_is_told(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            formed = form(there)
            await eventually(lambda: own(there).value == VALUE, "it is written")
            assert own(there).lease == LEASE
            assert own(there).mod_revision == formed + 1
            await nothing(there.other)
            await nothing(there.node)
            there.activate()
            assert await there.other.next_message() == Place(True, 1, 4, "life", 2, 3, formed + 1, "zero", 5)

    run(main())


def test_what_rank_0_confirms_is_what_was_said_for_that(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            form(there, rank=0)
            await eventually(lambda: own(there).value == AS_ZERO, "it is written")

    run(main())


def test_a_pledge_that_was_renewed_in_time_counts(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision, LAPSED), Pledge(60.0))
            form(there)
            await eventually(lambda: own(there).value == VALUE, "it is written")

    run(main())


@pytest.mark.parametrize(
    "said",
    [
        lambda on: (pledge(on, LAPSED),),
        lambda on: (pledge(on), Pledge(LAPSED)),
        lambda on: (Pledge(60.0),),
        lambda on: (pledge(on, number=2),),
        lambda on: (pledge(on, join=5),),
        lambda on: (pledge(on, incarnation="another"),),
        lambda on: (pledge(on - 1),),
        lambda on: (pledge(on), pledge(on, number=2)),
        lambda on: (pledge(on, lease=LEASE + 1),),
        lambda on: (pledge(0),),  # the key was not made under that session
    ],
    ids=["over", "ended", "of nothing", "number", "join", "incarnation", "revision", "taken back", "lease", "not new"],
)
def test_a_place_that_was_not_confirmed_beforehand_is_told(monkeypatch, said):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, *said(revision))
            form(there)
            place = await there.other.next_message()
            assert (place.is_active, place.revision) == (False, revision)
            assert own(there).mod_revision == revision

    run(main())


def test_rank_0_is_told_if_nothing_was_said_for_that(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision, as_zero=b""))
            form(there, rank=0)
            assert not (await there.other.next_message()).is_active
            assert own(there).mod_revision == revision

    run(main())


def test_a_pledge_of_one_who_has_just_joined_is_on_top_of_that(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            there.server.hub.execute(Grant(60.0, LEASE))
            there.write(msgspec.structs.replace(own_key(0), lease=LEASE))
            await hears(there.other, pledge(0))
            form(there)
            await eventually(lambda: own(there).value == VALUE, "it is written")

    run(main())


def test_answers_to_a_join_with_a_pledge_go_out_with_what_follows(monkeypatch):
    monkeypatch.setattr(soon, "QUIET_S", 60.0)
    monkeypatch.setattr(soon, "MOST_QUIET_S", 60.0)

    async def main():
        async with scene(monkeypatch) as there:
            join = Txn((ModRevisionIs(KEYS.node(NODE), 0),), (msgspec.structs.replace(own_key(0), lease=LEASE),))
            there.other.send(Do(1, Grant(60.0, LEASE)), Hold(LEASE, 1.0), Do(2, join), pledge(0))
            await nothing(there.other)
            form(there)
            await eventually(lambda: own(there).value == VALUE, "it is written")
            there.activate()
            assert (await there.other.next_message()).is_active
            assert [(await there.other.next_message()).seq for _ in range(2)] == [1, 2]

    run(main())


def test_a_session_that_is_opened_with_a_pledge_and_nothing_else_is_answered(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            there.other.send(Do(1, Grant(60.0, LEASE)), pledge(0))
            assert (await there.other.answer(1)).lease == LEASE

    run(main())


@pytest.mark.parametrize("for_s", [float("nan"), float("inf"), 1e300])
def test_nobody_confirms_for_longer_than_a_moment(for_s):
    async def main():
        async with serving() as server:
            node = await come(server, "node", "run")
            server.hub.execute(Grant(60.0, LEASE))
            told = Standing(server, "run", NODE, node)
            server.hub.execute(Txn((), (own_key(0),)))
            revision = server.hub.engine.items[KEYS.node(NODE)].mod_revision
            told.pledge(pledge(revision, for_s))
            place = Place(False, 1, 4, "life", 2, 3, revision)
            now = asyncio.get_running_loop().time()
            told._clock = lambda: now + MOST_PLEDGED_S + 1.0
            assert not told._is_pledged(place)

    run(main())


def test_a_pledge_is_for_one_attempt(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            form(there)
            await eventually(lambda: own(there).value == VALUE, "it is written")
            again = there.write(own_key(0))  # the node has joined again since
            form(there)
            assert not (await there.other.next_message()).is_active
            assert own(there).mod_revision == again

    run(main())


def test_nothing_is_confirmed_for_one_whose_connection_is_closed(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            there.other.close()
            await eventually(lambda: len(there.server.connections) == 1, "it is gone")
            formed = form(there)
            batch = (await there.node.next_message()).batch
            assert batch.revision == formed
            assert own(there).mod_revision == revision

    run(main())


def test_nobody_can_confirm_for_a_node_that_is_waited_for_elsewhere(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.node, pledge(revision))
            form(there)
            assert not (await there.other.next_message()).is_active
            assert own(there).mod_revision == revision

    run(main())


def test_a_pledge_that_there_is_no_room_for_is_left_to_the_node(monkeypatch):
    async def main():
        limits = ServerLimits(max_value=600)
        async with joined(monkeypatch, limits=limits) as (there, revision):
            large = msgspec.structs.replace(pledge(revision), value=bytes(2_000))
            await hears(there.other, large)
            form(there)
            assert not (await there.other.next_message()).is_active
            assert own(there).mod_revision == revision

    run(main())


def test_what_a_quota_has_no_room_for_any_more_when_it_counts_is_told(monkeypatch):
    async def main():
        limits = ServerLimits(max_bytes_per_run=20_000)
        async with joined(monkeypatch, limits=limits) as (there, revision):
            await hears(there.other, msgspec.structs.replace(pledge(revision), value=bytes(10_000)))
            there.other.send(Do(5, Txn((), (Put("/quorate/run/x", bytes(15_000)),))))
            await there.other.answer(5)
            form(there)
            assert not (await there.other.next_message()).is_active
            assert own(there).mod_revision == revision

    run(main())


def test_a_defect_of_one_who_is_told_keeps_neither_the_coordinator_nor_others_from_anything(monkeypatch):
    class Broken:
        def say(self, place):
            raise RuntimeError("broken")

    async def main():
        async with scene(monkeypatch) as there:
            said = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["exception"]))
            hub, place = there.server.hub, Place(False, 1, 4, "life", 2, 3, 7)
            for key in ("/a/1", "/b/1"):
                there.server.pledges.keep(key[:2], ModRevisionIs(key, 99), Put(key, VALUE), Broken(), place)
            there.server.pledges.keep("/c", ModRevisionIs("/c/1", 0), Put("/c/1", VALUE), Broken(), place)
            assert (await LocalBackend(hub).txn((), [Put("/d", b"")])).committed
            assert hub.engine.items["/c/1"].value == VALUE
            assert [str(error) for error in said] == ["broken", "broken"]

    run(main())


def test_one_that_does_not_hold_any_more_is_told_and_keeps_nobody_else_from_being_written(monkeypatch):
    class Told:
        def __init__(self):
            self.places = []

        def say(self, place):
            self.places.append(place)

    async def main():
        async with scene(monkeypatch) as there:
            pledges, told, other = there.server.pledges, Told(), Told()
            place = Place(False, 1, 4, "life", 2, 3, 7)
            written = there.write(Put("/a", b""), Put("/b", b""))
            pledges.keep("run", ModRevisionIs("/a", written - 1), Put("/a", VALUE), told, place)
            pledges.keep("run", ModRevisionIs("/b", written), Put("/b", VALUE), other, place)
            await eventually(lambda: told.places, "it is told")
            items = there.server.hub.engine.items
            assert (items["/a"].value, items["/b"].value) == (b"", VALUE)
            assert told.places == [place]
            assert other.places == []

    run(main())


def test_all_of_one_run_are_one_revision_and_runs_are_apart(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            hub = there.server.hub
            pledges = there.server.pledges
            before = hub.engine.revision
            for key in ("/a/1", "/a/2", "/b/1"):
                pledges.keep(key[:2], ModRevisionIs(key, 0), Put(key, VALUE), None, None)
            assert pledges.write()
            assert not pledges.write(), "nothing is due any more"
            revisions = [hub.engine.items[key].mod_revision for key in ("/a/1", "/a/2", "/b/1")]
            assert revisions == [before + 1, before + 1, before + 2]

    run(main())
