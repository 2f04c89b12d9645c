"""The kept events of a run: numbered without gap or repetition, bounded, grouped, continued by the next coordinator."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rallypoint.backends.contract import Backend, Limits
from rallypoint.errors import LeaseGone, OutcomeUnknown, Unavailable
from rallypoint.events import (
    CoordinatorElected,
    Event,
    JoinStarted,
    ManyJoined,
    ManyLost,
    NodeGone,
    NodeLeft,
    NodeLost,
    RoundActive,
    RoundForming,
    RoundOver,
)
from rallypoint.kv.types import Delete, Item, Put, TxnResult
from rallypoint.rendezvous.kept_events import (
    KEPT,
    KEPT_BYTES,
    MOST_NAMES,
    EventsRecord,
    KeptEvents,
    PastEvent,
    read_events,
)
from rallypoint.rendezvous.records import decode
from tests.rendezvous.fake_run import KEYS
from tests.rendezvous.kit import CheckedWorld, InterceptingBackend, TxnHook, run_scenario

Execute = Callable[[], Awaitable[TxnResult]]


def intercept(hook: TxnHook | None, limits: Limits | None = None) -> Callable[[str, Backend], Backend]:
    return lambda _, backend: InterceptingBackend(backend, hook, limits)


class Kept:
    """Kept events with a store of their own, whose every write is executed."""

    def __init__(self, items: dict[str, Item] | None = None) -> None:
        self.kept = KeptEvents(KEYS, "server", lambda: 1000.0)
        self.items = dict(items or {})
        self.kept.load(self.items.values())

    def write(self, room: int = 100, *, answered: bool = True) -> None:
        writes = self.kept.writes(7, room)
        for op in writes.ops:
            if isinstance(op, Put):
                self.items[op.key] = Item(op.key, op.value, 1, 1, 1, op.lease)
            elif isinstance(op, Delete):
                self.items.pop(op.key, None)
        assert len(writes.ops) <= room
        if answered:
            self.kept.written(writes, 0.0)

    def note(self, *events: Event) -> None:
        for event in events:
            self.kept.note(event, 0.0)

    @property
    def past(self) -> list[PastEvent]:
        return [one for key in sorted(self.items) for one in read_events(self.items[key], "run")]

    @property
    def events(self) -> list[Event]:
        return [one.event for one in self.past]


def joined(name: str, join: int = 1) -> JoinStarted:
    return JoinStarted(run_id="run", by=name, join=join)


def lost(name: str) -> NodeLost:
    return NodeLost(run_id="run", by="server", node=name, round=1, reason="its session ended")


def active(number: int) -> RoundActive:
    return RoundActive(run_id="run", by="server", round=number, size=2, reason="all 2 places are taken")


def over(number: int, why: str = "2 joined again") -> RoundOver:
    return RoundOver(run_id="run", by="server", round=number, kind="member lost", reason=why)


def test_events_are_read_as_they_were_noted() -> None:
    one = Kept()
    one.note(joined("a"), joined("b"))
    one.kept.note(active(1), 0.0, ["a", "b"])
    one.note(lost("b"))
    one.write()
    assert one.past == [
        PastEvent(1000.0, joined("a"), (), 1),
        PastEvent(1000.0, joined("b"), (), 2),
        PastEvent(1000.0, active(1), ("a", "b"), 3),
        PastEvent(1000.0, lost("b"), (), 4),
    ]


def test_nothing_is_written_if_nothing_happened() -> None:
    one = Kept()
    assert one.kept.due_at is None
    assert one.kept.writes(7, 100).ops == ()
    one.note(joined("a"))
    assert one.kept.due_at is not None
    one.write()
    assert one.kept.due_at is None


def test_thousands_of_nodes_are_one_event_with_the_first_names() -> None:
    one = Kept()
    names = [f"n{number}" for number in range(10_000)]
    one.note(*(joined(name) for name in names))
    one.note(active(1))
    one.note(*(lost(name) for name in names[:7]))
    one.write()
    many, _, gone = one.events
    assert many == ManyJoined(run_id="run", by="server", nodes=tuple(names[:MOST_NAMES]), count=10_000)
    assert many.text() == "10000 nodes ask to join: n0, n1, n2, n3, n4 and 9995 more"
    assert isinstance(gone, ManyLost)
    assert gone.text() == (
        "7 nodes (members of round 1) are lost: n0, n1, n2, n3, n4 and 2 more; the first: its session ended"
    )
    assert sum(len(item.value) for item in one.items.values()) < 1500


def test_many_members_that_are_gone_leave_room_for_what_follows() -> None:
    one = Kept()
    names = [f"n{number}" for number in range(2 * KEPT)]
    one.note(*(NodeGone(run_id="run", by="server", node=name, round=3, reason="it went before") for name in names))
    one.note(RoundOver(run_id="run", by="server", round=3, kind="member lost", reason="n0 is gone"))
    one.write()
    gone, over = one.events
    assert gone.text() == "400 members of round 3 are gone (it went before): n0, n1, n2, n3, n4 and 395 more"
    assert isinstance(over, RoundOver)


def test_joins_before_and_after_a_round_are_not_one_event() -> None:
    one = Kept()
    one.note(joined("a"), active(1), joined("a", 2))
    one.write()
    assert one.events == [joined("a"), active(1), joined("a", 2)]


@pytest.mark.parametrize("room", [3, 100])
def test_only_the_last_events_are_kept(room: int) -> None:
    one = Kept()
    for number in range(1, 4 * KEPT):
        one.note(over(number, "x" * (number % 90)))
        one.write(room)
    numbers = [past.number for past in one.past]
    assert numbers == list(range(numbers[0], 4 * KEPT))
    assert KEPT / 2 < len(numbers) <= KEPT
    for number in range(4 * KEPT, 6 * KEPT):
        one.note(over(number, "y" * 5000))
        one.write(room)
    assert sum(len(item.value) for item in one.items.values()) <= KEPT_BYTES
    assert [past.number for past in one.past][-1] == 6 * KEPT - 1


def test_later_coordinator_continues_the_numbers_and_repeats_no_round() -> None:
    first = Kept()
    first.note(joined("a"), active(1), over(1), active(2))
    first.write()
    first.note(joined("c"))
    first.write()
    second = Kept(first.items)
    second.note(active(2), over(1), over(2))
    second.kept.note_present(joined("c"), 0.0)
    second.kept.note_present(joined("d"), 0.0)
    second.write()
    assert [(past.number, past.event) for past in second.past[-2:]] == [(6, over(2)), (7, joined("d"))]


def test_later_coordinator_repeats_no_round_whose_event_is_not_kept_any_more() -> None:
    first = Kept()
    first.note(active(1))
    first.write()
    for join in range(KEPT + 1):
        first.note(joined("a", join))
        first.write()
    assert not [event for event in first.events if not isinstance(event, JoinStarted)]
    second = Kept(first.items)
    second.note(active(1), active(2))
    second.write()
    assert [event for event in second.events if not isinstance(event, JoinStarted)] == [active(2)]


def test_events_of_another_incarnation_are_dropped_also_after_a_failed_write() -> None:
    one = Kept()
    one.kept.begin("one")
    one.note(active(5))
    one.write(answered=False)
    one.items.clear()  # it was not executed
    one.kept.settle(None, 0.0)
    one.kept.begin("two")
    one.note(active(1))
    one.write()
    assert one.events == [active(1)]


def test_events_of_a_later_version_and_damaged_records_are_left_out() -> None:
    one = Kept()
    one.note(joined("a"))
    one.write()
    one.note(joined("b"))
    one.write()
    first, second = sorted(one.items)
    value = one.items[first].value.replace(b'"JoinStarted"', b'"FromTheFuture"')
    one.items[first] = Item(first, value, 1, 1, 1)
    assert one.events == [joined("b")]
    one.items[second] = Item(second, b"\xff", 1, 1, 1)
    later = Kept(one.items)
    later.note(joined("c"))
    later.write()
    assert sorted(later.items)[-1] == KEYS.kept_events(3)


def test_write_without_an_answer_is_looked_for() -> None:
    for was_executed in (True, False):
        one = Kept()
        one.note(joined("a"))
        before = dict(one.items)
        one.write(answered=False)
        if not was_executed:
            one.items = before
        one.note(over(1))
        assert one.kept.in_doubt is not None
        one.kept.settle(one.items.get(one.kept.in_doubt), 0.0)
        one.write()
        assert [(past.number, past.event) for past in one.past] == [(1, joined("a")), (2, over(1))]


# --- in a run ---------------------------------------------------------------------------------------------------------


def kept_in(world: CheckedWorld) -> list[PastEvent]:
    items = sorted(world.server.engine.items.items())
    return [one for key, item in items if key.startswith(KEYS.events) for one in read_events(item, KEYS.run_id)]


def test_run_keeps_what_happened_from_its_first_node_on() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        await asyncio.sleep(5.0)
        (elected,) = [one.event for one in kept_in(world) if isinstance(one.event, CoordinatorElected)]
        victim, *others = sorted({"a", "b", "c"} - {elected.by})
        world.crash(victim)
        await asyncio.sleep(30.0)
        await world.join_all(elected.by, *others)
        await asyncio.sleep(5.0)
        await world.node(others[0]).leave("done")
        await asyncio.sleep(5.0)
        past = kept_in(world)
        assert [one.number for one in past] == list(range(1, len(past) + 1))
        events = [one.event for one in past]
        rounds = [(type(event), event.round) for event in events if isinstance(event, RoundForming | RoundActive)]
        assert rounds == [(RoundForming, 1), (RoundActive, 1), (RoundForming, 2), (RoundActive, 2)]
        assert [event.node for event in events if isinstance(event, NodeLost)] == [victim]
        assert [(event.by, event.reason) for event in events if isinstance(event, NodeLeft)] == [(others[0], "done")]
        (ended,) = [event for event in events if isinstance(event, RoundOver)]
        (told,) = world.of(RoundOver)
        assert (ended.round, ended.reason) == (told.round, told.reason)
        members = [one.nodes for one in past if isinstance(one.event, RoundActive)]
        assert [set(names) for names in members] == [{"a", "b", "c"}, {elected.by, *others}]

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_idle_run_writes_nothing() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await asyncio.sleep(5.0)
        before = world.server.engine.revision
        await asyncio.sleep(600.0)
        assert world.server.engine.revision == before

    run_scenario(scenario, min_nodes=2)


@pytest.mark.parametrize(
    ("error", "executed"),
    [
        (Unavailable("x"), False),
        (LeaseGone("x", lease=1), False),
        (OutcomeUnknown("x"), False),
        (OutcomeUnknown("x"), True),
    ],
)
def test_no_event_is_missing_or_there_twice_after_a_failed_write(error: Exception, executed: bool) -> None:
    failed: list[set[str]] = []

    async def fail_some(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
        if "events" in writes and len(failed) < 4:
            failed.append(writes)
            if executed:
                await execute()
            raise error
        return await execute()

    async def scenario(world: CheckedWorld) -> None:
        for _ in range(3):
            await world.join_all("a", "b")
        await asyncio.sleep(20.0)
        assert len(failed) == 4
        past = kept_in(world)
        assert [one.number for one in past] == list(range(1, len(past) + 1))
        kinds = RoundForming | RoundActive | RoundOver
        told = [event for _, event in world.events if isinstance(event, kinds)]
        assert [one.event for one in past if isinstance(one.event, kinds)] == told

    run_scenario(scenario, wrap=intercept(fail_some), min_nodes=2)


def test_next_coordinator_notes_a_round_that_the_last_one_did_not() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        dead = world.coordinator()
        world.crash(dead)  # at once: nothing of the round is kept yet
        await asyncio.sleep(30.0)
        past = kept_in(world)
        assert [one.event.round for one in past if isinstance(one.event, RoundActive)] == [1]
        assert [one.event.node for one in past if isinstance(one.event, NodeGone)] == [dead]
        assert [event.node for event in world.of(NodeLost)] == [dead]
        assert [one.number for one in past] == list(range(1, len(past) + 1))

    run_scenario(scenario, min_nodes=2, max_nodes=3)


def test_small_transactions_are_enough() -> None:
    async def scenario(world: CheckedWorld) -> None:
        for _ in range(120):
            await world.join_all("a", "b")
        await asyncio.sleep(5.0)
        past = kept_in(world)
        assert [one.number for one in past] == list(range(past[0].number, past[-1].number + 1))
        assert 20 < len(past) <= KEPT
        size = sum(len(item.value) for key, item in world.server.engine.items.items() if key.startswith(KEYS.events))
        assert size <= KEPT_BYTES
        assert all(
            decode(EventsRecord, item).events
            for key, item in world.server.engine.items.items()
            if key.startswith(KEYS.events)
        )

    run_scenario(scenario, wrap=intercept(None, limits=Limits(max_txn_ops=5)), min_nodes=2)
