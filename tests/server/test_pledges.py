"""Who waits for a node's place may confirm it beforehand: the coordinator writes that with the attempt."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest

from rallypoint._marks import collect
from rallypoint.backends.contract import Asked
from rallypoint.events import Emitter, RoundActive, RoundForming
from rallypoint.kv.types import Grant, ModRevisionIs, Put, Revoke, Txn
from rallypoint.rendezvous import coordinator
from rallypoint.rendezvous.records import (
    ClosedRecord,
    ConfigRecord,
    HistoryRecord,
    NodePhase,
    NodeRecord,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
    encode,
)
from rallypoint.server import soon
from rallypoint.server.hub import Hub
from rallypoint.server.limits import ServerLimits
from rallypoint.server.pledges import Pledges
from rallypoint.server.standing import MOST_PLEDGED_BYTES, MOST_PLEDGED_S, Standing
from rallypoint.settings import Settings
from rallypoint.testing.disk import MemoryDisk
from rallypoint.wire.messages import NOW, Do, Hold, Place, Pledge, Stand, WatchStart
from tests.server.durable_kit import serving_from
from tests.server.kit import eventually, run, serving
from tests.server.standing_kit import KEYS, NODE, assign, come, nothing, own_key, scene, state

LEASE = 77
LAPSED = -1.0


def confirmation(node_id=NODE, number=1, join=4, **fields):
    fields = {"phase": NodePhase.MEMBER, "name": node_id, "addr": "a", "session": LEASE, "floor": number, **fields}
    return NodeRecord(id=node_id, join=join, round=number, **fields)


VALUE, AS_ZERO = encode(confirmation()), encode(confirmation(addr0="zero", port0=5))


def pledge(on, for_s=60.0, number=1, join=4, incarnation="life", lease=LEASE, as_zero=AS_ZERO):
    said = VALUE if (number, join) == (1, 4) else encode(confirmation(number=number, join=join))
    return Pledge(for_s, number, join, incarnation, lease, on, said, as_zero if said == VALUE else b"")


@asynccontextmanager
async def joined(monkeypatch, **options):
    """The scene, with the node's key there; and the revision of that."""
    async with scene(monkeypatch, **options) as there:
        there.server.hub.execute(Grant(60.0, LEASE))
        yield there, there.write(msgspec.structs.replace(own_key(0), lease=LEASE))


async def hears(raw, *messages):
    """Say something to the server; it has taken all of it in."""
    raw.send(*messages, Do(1, Txn((), ())))
    await raw.answer(1)


def confirmed(there, on, rank=2, *others):
    """What the coordinator is told, if it asks for the place of the node, and of others."""
    asked = [Asked(NODE, 4, rank, on), *others]
    return list(there.server.pledges.confirmed("run", 1, "life", asked))


AS_SAID = [Put(KEYS.node(NODE), VALUE, LEASE)]


def test_a_place_that_was_confirmed_beforehand_is_known_with_how_it_is_confirmed(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            assert confirmed(there, revision) == AS_SAID
            assert confirmed(there, revision, 0) == [Put(KEYS.node(NODE), AS_ZERO, LEASE)]
            assert confirmed(there, revision, 2, Asked("another", 1, 1, 5)) == [*AS_SAID, None]

    run(main())


def test_a_pledge_that_was_renewed_in_time_counts(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision, LAPSED), Pledge(60.0))
            assert confirmed(there, revision) == AS_SAID

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
        lambda on: (pledge(0, lease=LEASE + 1),),  # the key was not made under that session
        lambda on: (pledge(on, lease=LEASE + 1),),
        lambda on: (pledge(on), pledge(on, lease=LEASE + 1)),
    ],
    ids=[
        *("over", "ended", "of nothing", "number", "join", "incarnation", "revision", "taken back", "lease"),
        *("lease of that revision", "taken back by another session"),
    ],
)
def test_a_place_that_was_not_confirmed_beforehand_is_not(monkeypatch, said):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, *said(revision))
            assert confirmed(there, revision) == []

    run(main())


@pytest.mark.parametrize(
    "value",
    [
        b"no record",
        encode(confirmation("another")),
        encode(confirmation(phase=NodePhase.JOINING)),
        encode(confirmation(join=5)),
        encode(confirmation(number=2)),
        encode(confirmation(labels={"a": "x" * MOST_PLEDGED_BYTES})),
    ],
    ids=["unreadable", "node", "phase", "join", "number", "size"],
)
def test_what_does_not_say_what_it_is_said_to_say_is_not_taken(monkeypatch, value):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            for said in ({"value": value}, {"as_zero": value}):
                await hears(there.other, pledge(revision), msgspec.structs.replace(pledge(revision), **said))
                assert confirmed(there, revision) == []
                assert len(there.server.pledges) == 0

    run(main())


def test_rank_0_is_asked_if_nothing_was_said_for_that(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision, as_zero=b""))
            assert confirmed(there, revision, 0) == []

    run(main())


def test_a_pledge_of_one_who_has_just_joined_is_on_top_of_that(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(0))
            assert confirmed(there, revision) == AS_SAID
            again = there.write(msgspec.structs.replace(own_key(0), lease=LEASE))
            await hears(there.other, pledge(0))
            assert confirmed(there, again) == [], "it is not the first that was written there"

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
            server.hub.execute(Txn((), (msgspec.structs.replace(own_key(0), lease=LEASE),)))
            revision = server.hub.engine.items[KEYS.node(NODE)].mod_revision
            told.pledge(pledge(revision, for_s))
            asked, now = Asked(NODE, 4, 2, revision), asyncio.get_running_loop().time()
            assert told.confirms(1, "life", asked, now) is not None
            assert told.confirms(1, "life", asked, now + MOST_PLEDGED_S + 1.0) is None

    run(main())


def test_nothing_is_confirmed_for_one_whose_connection_is_closed(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            there.other.close()
            await eventually(lambda: len(there.server.connections) == 1, "it is gone")
            assert confirmed(there, revision) == []
            assert len(there.server.pledges) == 0

    run(main())


def test_nothing_is_confirmed_for_a_node_whose_connection_is_closed(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            there.node.close()
            await eventually(lambda: len(there.server.connections) == 1, "it is gone")
            assert confirmed(there, revision) == []
            assert len(there.server.pledges) == 0

    run(main())


def test_nobody_can_confirm_for_a_node_that_is_waited_for_elsewhere(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.node, pledge(revision))
            assert confirmed(there, revision) == []

    run(main())


def test_only_whoever_stands_last_for_a_node_confirms(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            third = await come(there.server, "third")
            await hears(third, Stand("node", NODE))
            assert confirmed(there, revision) == []
            await hears(there.other, pledge(revision))
            assert confirmed(there, revision) == []
            await hears(third, pledge(revision))
            assert confirmed(there, revision) == AS_SAID

    run(main())


def test_whoever_waits_for_another_node_confirms_nothing_for_the_first_any_more(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            await come(there.server, "node 2", "run")
            await hears(there.other, Stand("node 2", "n2"))
            assert confirmed(there, revision) == []
            assert len(there.server.pledges) == 0

    run(main())


def test_a_node_that_waits_for_another_one_is_waited_for_all_the_same(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            await hears(there.node, Stand("nobody", "n9"))
            assert confirmed(there, revision) == AS_SAID
            there.write(state(RoundPhase.FORMING), assign())
            assert not (await there.other.next_message()).is_active

    run(main())


def test_what_was_confirmed_of_an_attempt_is_not_taken_for_another(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            there.write(state(RoundPhase.FORMING), assign(), *confirmed(there, revision))
            await nothing(there.other)
            there.write(state(RoundPhase.FORMING, 2), assign(2))
            place = await there.other.next_message()
            assert (place.is_active, place.number) == (False, 2)

    run(main())


def test_only_what_is_forgotten_by_whoever_said_it_is_forgotten(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            pledges = there.server.pledges
            pledges.forget("run", NODE, Nobody())
            assert len(pledges) == 1
            pledges.keep("run", NODE, nobody := Nobody())
            pledges.forget("run", NODE, nobody)
            assert len(pledges) == 0
            assert pledges._known == {}, "nor is anything kept of its run"

    run(main())


class Nobody:
    """Confirms nothing."""

    def confirms(self, number, incarnation, asked, now):
        return None


def test_nothing_is_taken_beforehand_that_cannot_be_kept(monkeypatch):
    async def main():
        async with joined(monkeypatch) as (there, revision):
            await hears(there.other, pledge(revision))
            monkeypatch.setattr(Hub, "is_able", property(lambda hub: False))
            assert confirmed(there, revision) == []

    run(main())


def test_coordinators_of_a_server_with_data_are_told_of_what_was_confirmed_beforehand():
    async def main():
        async with serving_from(MemoryDisk()) as server:
            asked = Asked(NODE, 4, 2, 1)
            put = Put(KEYS.node(NODE), VALUE, LEASE)
            server.pledges.keep("run", NODE, SimpleNamespace(confirms=lambda *said: put))
            assert list(server.make_local().confirmed("run", 1, "life", [asked])) == [put]

    run(main())


def test_a_pledge_that_there_is_no_room_for_is_left_to_the_node(monkeypatch):
    async def main():
        async with joined(monkeypatch, limits=ServerLimits(max_value=600)) as (there, revision):
            large = encode(confirmation(labels={"a": "x" * 2_000}))
            await hears(there.other, msgspec.structs.replace(pledge(revision), value=large))
            assert confirmed(there, revision) == []

    run(main())


def test_what_a_quota_has_no_room_for_any_more_when_it_counts_is_asked(monkeypatch):
    async def main():
        async with joined(monkeypatch, limits=ServerLimits(max_bytes_per_run=20_000)) as (there, revision):
            large = encode(confirmation(labels={"a": "x" * 10_000}))
            await hears(there.other, msgspec.structs.replace(pledge(revision), value=large))
            there.other.send(Do(5, Txn((), (Put("/rallypoint/run/x", bytes(15_000)),))))
            await there.other.answer(5)
            assert confirmed(there, revision) == []

    run(main())


def test_answers_to_a_join_with_a_pledge_go_out_with_what_follows(monkeypatch):
    monkeypatch.setattr(soon, "QUIET_S", 60.0)
    monkeypatch.setattr(soon, "MOST_QUIET_S", 60.0)

    async def main():
        async with scene(monkeypatch) as there:
            join = Txn((ModRevisionIs(KEYS.node(NODE), 0),), (msgspec.structs.replace(own_key(0), lease=LEASE),))
            there.other.send(Do(1, Grant(60.0, LEASE)), Hold(LEASE, 1.0), Do(2, join), pledge(0))
            await nothing(there.other)
            there.write(state(RoundPhase.ACTIVE), assign())
            assert (await there.other.next_message()).is_active
            assert [(await there.other.next_message()).seq for _ in range(2)] == [1, 2]

    run(main())


# --- with a coordinator -----------------------------------------------------------------------------------------------

OTHER, OTHER_LEASE = "n2", 78


class Pair:
    """A run of two nodes: that of the scene, which confirms beforehand, and another one."""

    def __init__(self, there, ask):
        self.there, self.ask = there, ask
        self.items = there.server.hub.engine.items
        self.hits = collect()

    @property
    def round(self):
        item = self.items.get(KEYS.round)
        return decode(RoundRecord, item) if item is not None else None

    def phase(self, node_id):
        return decode(NodeRecord, self.items[KEYS.node(node_id)]).phase

    async def pledges(self, raw, node_id, lease, number=1, join=4):
        """Have somebody confirm beforehand, whatever the place."""
        own = self.items[KEYS.node(node_id)]
        said = encode(confirmation(node_id, number, join, session=lease, addr0="zero", port0=5))
        await hears(raw, Pledge(60.0, number, join, "life", lease, own.mod_revision, said, said))

    def comes(self):
        """The second node joins; the revision."""
        return self.there.write(_joining(OTHER, OTHER_LEASE))

    async def told(self, raw):
        """The next place that is told there, past answers."""
        while not isinstance(said := await raw.next_message(), Place):
            pass
        return said

    async def is_active(self):
        await eventually(lambda: self.round is not None and self.round.phase is RoundPhase.ACTIVE, "it is active")
        return self.round


def _joining(node_id, lease, join=4):
    record = confirmation(node_id, number=0, join=join, phase=NodePhase.JOINING, session=lease)
    return Put(KEYS.node(node_id), encode(record), lease)


@asynccontextmanager
async def pair(monkeypatch, min_nodes=2, **options):
    async with scene(monkeypatch, **options) as there:
        for lease in (LEASE, OTHER_LEASE):
            there.server.hub.execute(Grant(60.0, lease))
        settings = Settings.build(scheme="tcp", run_id="run", min_nodes=min_nodes, max_nodes=2)
        shared, timing = settings.shared(), settings.timing()
        config = ConfigRecord(incarnation="life", shared=shared, timing=timing, run_lease=0, data_lease=0)
        there.write(Put(KEYS.config, encode(config)))
        there.write(_joining(NODE, LEASE))
        node = await come(there.server, "node 2", "run")
        node.send(WatchStart(1, KEYS.round, NOW), WatchStart(2, KEYS.assign(OTHER), NOW))
        other = await come(there.server, "other 2")
        await hears(other, Stand("node 2", OTHER))
        both = Pair(there, other)
        await both.pledges(there.other, NODE, LEASE)
        yield both
        node.close()


def _pledges_as_it_comes(both, monkeypatch):
    """The second node joins, and whoever waits for it pledges at once; what the coordinator asks for then."""
    seen = []
    plain = Pledges.confirmed

    def confirmed_by(pledges, run_id, number, incarnation, asked):
        asked = list(asked)
        seen.append([one.node_id for one in asked])
        return plain(pledges, run_id, number, incarnation, asked)

    monkeypatch.setattr(Pledges, "confirmed", confirmed_by)
    own = Pledge(60.0, 1, 4, "life", OTHER_LEASE, 0, encode(confirmation(OTHER, session=OTHER_LEASE)), b"")
    join = _joining(OTHER, OTHER_LEASE)
    both.ask.send(Do(2, Txn((ModRevisionIs(join.key, 0),), (join,))), own)
    return seen


def test_a_round_that_all_members_have_confirmed_beforehand_is_active_at_once(monkeypatch):
    async def main():
        async with pair(monkeypatch) as both:
            asked = _pledges_as_it_comes(both, monkeypatch)
            record = await both.is_active()
            assert asked == [[NODE, OTHER]]
            assert both.items[KEYS.round].version == 1, "it was never anything else"
            assert (record.addr, record.port, record.size) == ("zero", 5, 2)
            written = {both.items[key].mod_revision for key in (KEYS.round, KEYS.node(NODE), KEYS.node(OTHER))}
            assert len(written) == 1
            assert [both.items[KEYS.node(one)].lease for one in (NODE, OTHER)] == [LEASE, OTHER_LEASE]
            place = await both.there.other.next_message()
            assert place == Place(True, 1, 4, "life", 0, 2, written.pop(), "zero", 5)
            assert (await both.told(both.ask)).is_active
            assert "coordinator.at_once" in both.hits
            assert len(both.there.server.pledges) == 0, "nobody waits any more"

    run(main())


def test_who_has_not_is_asked_and_who_has_hears_when_the_round_is_active(monkeypatch):
    async def main():
        async with pair(monkeypatch) as both:
            both.comes()
            place = await both.ask.next_message()
            assert (place.is_active, place.rank) == (False, 1)
            assert both.phase(NODE) is NodePhase.MEMBER
            assert both.phase(OTHER) is NodePhase.JOINING
            assert both.items[KEYS.node(NODE)].mod_revision == both.items[KEYS.round].mod_revision
            await nothing(both.there.other)
            said = encode(confirmation(OTHER, session=OTHER_LEASE))
            own = ModRevisionIs(KEYS.node(OTHER), place.revision)
            both.there.server.hub.execute(Txn((own,), (Put(KEYS.node(OTHER), said, OTHER_LEASE),)))
            await both.is_active()
            assert (await both.there.other.next_message()).is_active
            assert "coordinator.at_once" not in both.hits

    run(main())


@pytest.mark.parametrize("change", ["rewritten", "gone"])
def test_if_that_does_not_hold_any_more_everybody_is_asked(monkeypatch, change):
    plain = Pledges.confirmed

    async def main():
        async with pair(monkeypatch) as both:

            def then_changed(*given):
                said = plain(*given)
                if change == "gone":
                    both.there.server.hub.execute(Revoke(LEASE))
                else:
                    both.there.write(_joining(NODE, LEASE))
                return said

            monkeypatch.setattr(Pledges, "confirmed", then_changed)
            both.comes()
            if change == "gone":
                await eventually(lambda: KEYS.node(NODE) not in both.items, "it is gone")
                await nothing(both.ask)
                assert both.round is None
                return
            for raw, rank in ((both.there.other, 0), (both.ask, 1)):
                place = await raw.next_message()
                assert (place.is_active, place.rank, place.number) == (False, rank, 1)
            assert both.phase(NODE) is NodePhase.JOINING

    run(main())


def test_what_an_earlier_life_left_in_the_store_is_cleared_before_the_round_is_active(monkeypatch):
    async def main():
        async with pair(monkeypatch) as both:
            left = f"{KEYS.store(1)}old"
            both.there.write(Put(left, b"old"))
            asked = _pledges_as_it_comes(both, monkeypatch)
            for raw, node_id, lease in ((both.there.other, NODE, LEASE), (both.ask, OTHER, OTHER_LEASE)):
                place = await both.told(raw)
                assert not place.is_active
                own = ModRevisionIs(KEYS.node(node_id), place.revision)
                said = encode(confirmation(node_id, session=lease))
                both.there.server.hub.execute(Txn((own,), (Put(KEYS.node(node_id), said, lease),)))
            assert len(asked) == 1, "they were taken at their word once: it might never hold"
            await both.is_active()
            assert left not in both.items

    run(main())


def test_an_attempt_from_before_a_close_is_not_active_at_once(monkeypatch):
    plain = Pledges.confirmed

    async def main():
        async with pair(monkeypatch) as both:

            def then_closed_and_reopened(*given):
                said = plain(*given)
                monkeypatch.setattr(Pledges, "confirmed", plain)
                both.there.write(Put(KEYS.closed, encode(ClosedRecord(closed=False, why="reopened"))))
                return said

            monkeypatch.setattr(Pledges, "confirmed", then_closed_and_reopened)
            own = Pledge(60.0, 1, 4, "life", OTHER_LEASE, 0, encode(confirmation(OTHER, session=OTHER_LEASE)), b"")
            join = _joining(OTHER, OTHER_LEASE)
            both.ask.send(Do(2, Txn((ModRevisionIs(join.key, 0),), (join,))), own)
            assert not (await both.told(both.ask)).is_active
            assert "coordinator.at_once" in both.hits, "it was tried"

    run(main())


def test_rounds_that_are_active_at_once_one_after_the_other_are_told_of_and_cleared_up_as_any(monkeypatch):
    events = []

    async def main():
        async with pair(monkeypatch, emit=Emitter(events.append)) as both:
            hub = both.there.server.hub
            for number in (1, 2, 3):
                lease = OTHER_LEASE + 10 * number
                if number > 1:
                    both.there.write(Put(f"{KEYS.store(number - 1)}key", b"of that round"))
                    hub.execute(Revoke(lease - 10))  # it is lost, and another session takes its place
                    both.ask.send(Stand("node 2", OTHER))
                    await hears(both.there.other, Stand("node", NODE))
                    both.there.write(_joining(NODE, LEASE, join=number))
                    await both.pledges(both.there.other, NODE, LEASE, number, number)
                value = encode(confirmation(OTHER, session=lease, number=number))
                join = Txn((), (_joining(OTHER, lease),))
                own = Pledge(60.0, number, 4, "life", lease, 0, value, value)
                both.ask.send(Do(2 * number, Grant(60.0, lease)), Do(2 * number + 1, join), own)
                await eventually(lambda n=number: both.round and both.round.number == n, "the next round")
                assert (await both.is_active()).number == number
                assert both.items[KEYS.round].version == number, "each was written once"
                assert "lost" not in decode(WaitingRecord, both.items[KEYS.waiting]).reason
                assert (await both.told(both.ask)).is_active
                await eventually(lambda n=number: _named(events, RoundActive) == list(range(1, n + 1)), "it is said")
            assert _named(events, RoundForming) == [1, 2, 3]
            report = decode(HistoryRecord, both.items[KEYS.history(3)])
            assert [name for name, _ in report.last_arrivals] == [NODE, OTHER]
            await eventually(lambda: not _left_of(both, 1), "what is left of the round before last is cleared up")
            assert _left_of(both, 2)

    run(main())


def test_what_is_waited_for_is_put_together_for_practice_and_nothing_comes_of_it(monkeypatch):
    async def main():
        async with pair(monkeypatch) as both:
            server, before = both.there.server, dict(both.items)
            await eventually(lambda: _practised(server) is not None, "the node is known to have joined")
            writes = _practised(server)
            assert {KEYS.round, KEYS.node(NODE), KEYS.assign(NODE), KEYS.history(1)} <= {op.key for op in writes.ops}
            server.runs.practise(["run", "another"])
            assert both.items.keys() - before.keys() <= {KEYS.waiting}
            assert list(server.pledges.runs) == ["run"]
            _pledges_as_it_comes(both, monkeypatch)
            assert (await both.is_active()).number == 1
            assert both.items[KEYS.round].version == 1, "it was not taken at its word for that"
            assert _practised(server) is None, "nobody waits"

    run(main())


@pytest.mark.parametrize("most", [1, 0])
def test_only_a_few_nodes_are_gone_through_for_practice(monkeypatch, most):
    monkeypatch.setattr(coordinator, "MOST_PRACTISED", most)

    async def main():
        async with pair(monkeypatch) as both:
            await eventually(lambda: KEYS.waiting in both.items, "the node is known to have joined")
            assert (_practised(both.there.server) is not None) is (most == 1)

    run(main())


def _practised(server):
    return server.runs._runs["run"].coordinator.practise()


def _named(events, kind):
    return [event.round for event in events if isinstance(event, kind)]


def _left_of(both, number):
    return [key for key in both.items if key.startswith((KEYS.store(number), KEYS.roster(number)))]
