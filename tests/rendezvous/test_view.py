"""The coordinator's view: updated change by change it equals one loaded from a scan, and a change costs O(1)."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.kv.types import BranchOp, Delete, Put
from rallypoint.rendezvous.decide import Form, decide, summarise
from rallypoint.rendezvous.records import (
    ClosedRecord,
    CoordinatorRecord,
    DrainRecord,
    HealthRecord,
    LeaveCause,
    LeaveKind,
    NodePhase,
    RosterMember,
    RoundPhase,
    WaitingRecord,
    encode,
)
from rallypoint.rendezvous.view import Arrival, Departure, Unreadable, View
from tests.rendezvous.fake_run import KEYS, FakeRun, config, node, round_record, steps

NOW = 100.0
IDS = ("n0", "n1", "n2", "n3")
ROSTER = [RosterMember(node_id, 1, node_id, node_id) for node_id in IDS[:3]]


def groups(view: View) -> dict[str, object]:
    """Everything in a view that depends on the keys alone."""
    return {
        "nodes": {node_id: (seen.record, seen.mod_revision, seen.lease) for node_id, seen in view.nodes.items()},
        "members": set(view.members),
        "candidates": set(view.candidates),
        "excluded": set(view.excluded),
        "above": set(view.above),
        "rejoined": set(view.rejoined),
        "arrived": set(view.arrived),
        "drains": view.drains,
        "held": set(view.hold_back.held()),
        "health": view.hold_back.records,
        "config": view.config,
        "rules": view.rules,
        "round": (view.round, view.round_revision),
        "closed": (view.closed, view.closed_revision),
        "waiting": view.waiting,
        "coordinator": view.coordinator_revision,
        "unreadable": view.unreadable,
        "active": (view.is_active, view.ever_active, view.lost, view.is_closed, view.is_gathering),
        "number": view.next_number(),
        "revision": view.revision,
    }


def assert_in_one_group_each(view: View) -> None:
    for node_id, seen in view.nodes.items():
        count = sum(node_id in group for group in (view.members, view.candidates, view.excluded))
        assert count == (0 if seen.record.phase is NodePhase.LEFT else 1), node_id
    for group in (view.members, view.candidates, view.excluded):
        assert all(view.nodes[node_id] is seen for node_id, seen in group.items())
    for named in (view.above, view.rejoined, view.arrived):
        assert set(named) <= set(view.nodes)


# All kinds of changes of the control keys, valid or not. Losses never lead to a hold here: holds depend on the times of
# the losses, not on the keys alone.
NODES = st.builds(
    node,
    st.sampled_from(IDS),
    join=st.integers(1, 2),
    phase=st.sampled_from(NodePhase),
    round=st.integers(0, 4),
    floor=st.integers(0, 5),
)
CONFIGS = st.builds(
    config,
    incarnation=st.sampled_from(["first", "second"]),
    max_nodes=st.sampled_from([2, 4]),
    hold_back_losses=st.just(0),
)
ROUNDS = st.builds(
    round_record,
    st.integers(1, 4),
    st.sampled_from(RoundPhase),
    st.integers(1, 4),
    incarnation=st.sampled_from(["first", "second"]),
    last_active=st.integers(0, 4),
)
KEY_NAMES = {
    **{f"node {node_id}": KEYS.node(node_id) for node_id in IDS},
    **{f"drain {node_id}": KEYS.drain(node_id) for node_id in IDS},
    **{f"health {node_id}": KEYS.health(node_id) for node_id in IDS},
    "round": KEYS.round,
    "closed": KEYS.closed,
    "waiting": KEYS.waiting,
    "config": KEYS.config,
    "coordinator": KEYS.coordinator,
}


def put(key: str) -> Callable[[Any], Put]:
    return lambda record: Put(key, encode(record))


CHANGES: st.SearchStrategy[BranchOp] = st.one_of(
    NODES.map(lambda record: Put(KEYS.node(record.id), encode(record))),
    NODES.map(lambda record: Put(KEYS.node(record.id), encode(record))),
    st.sampled_from(IDS).map(lambda node_id: Delete(KEYS.node(node_id))),
    NODES.map(lambda record: Put(KEYS.node("n3"), encode(record))),
    ROUNDS.map(put(KEYS.round)),
    CONFIGS.map(put(KEYS.config)),
    st.booleans().map(lambda closed: Put(KEYS.closed, encode(ClosedRecord(closed=closed)))),
    st.builds(WaitingRecord, number=st.integers(0, 4), waiting=st.integers(0, 2)).map(put(KEYS.waiting)),
    st.sampled_from(IDS).map(lambda node_id: Put(KEYS.drain(node_id), encode(DrainRecord(by="ops")))),
    st.sampled_from(IDS).map(
        lambda name: Put(KEYS.health(name), encode(HealthRecord(name=name, losses=3, hold_s=30.0)))
    ),
    st.just(Put(KEYS.coordinator, encode(CoordinatorRecord(id="n0", name="n0")))),
    st.sampled_from(sorted(KEY_NAMES.values())).map(Delete),
    st.sampled_from(sorted(KEY_NAMES.values())).map(lambda key: Put(key, b"damaged")),
)
TRANSACTIONS = st.lists(CHANGES, min_size=1, max_size=4, unique_by=lambda op: getattr(op, "key", ""))


@given(st.lists(TRANSACTIONS, max_size=12), st.data())
def test_view_updated_by_changes_equals_a_loaded_one(history: list[list[BranchOp]], data: st.DataObject) -> None:
    run = FakeRun(hold_back_losses=0)
    run.view.set_roster(1, ROSTER)
    for transaction in history:
        run.write(*transaction)
        assert_in_one_group_each(run.view)
    loaded = View(KEYS, run.now)
    loaded.set_roster(1, ROSTER)
    loaded.load(data.draw(st.permutations(run.scan())), run.engine.revision, run.now)
    assert_in_one_group_each(loaded)
    expected = groups(loaded)
    expected["revision"] = run.view.revision
    assert groups(run.view) == expected


@given(st.lists(TRANSACTIONS, max_size=6), st.lists(TRANSACTIONS, max_size=6), st.lists(TRANSACTIONS, max_size=3))
def test_scan_makes_up_for_missed_changes(
    seen: list[list[BranchOp]], missed: list[list[BranchOp]], after: list[list[BranchOp]]
) -> None:
    run, other = FakeRun(hold_back_losses=0), FakeRun(hold_back_losses=0)
    for one in (run, other):
        one.view.set_roster(1, ROSTER)
        for transaction in seen:
            one.write(*transaction)
    kept, run.view = run.view, View(KEYS, NOW)
    for transaction in missed:
        run.write(*transaction)
        other.write(*transaction)
    run.view = kept
    run.view.load(run.scan(), run.engine.revision, NOW)
    other.view.revision = run.engine.revision
    for transaction in after:
        run.write(*transaction)
        other.write(*transaction)
    assert_in_one_group_each(run.view)
    assert groups(run.view) == groups(other.view)


@given(st.lists(TRANSACTIONS, max_size=8))
def test_loading_the_same_scan_again_changes_nothing(history: list[list[BranchOp]]) -> None:
    run = FakeRun(hold_back_losses=0)
    for transaction in history:
        run.write(*transaction)
    run.view.facts.clear()
    before = groups(run.view)
    run.view.load(run.scan(), run.view.revision, run.now)
    assert groups(run.view) == before
    assert run.view.facts == []


# By example


def test_node_is_in_the_group_of_its_key() -> None:
    run = FakeRun()
    run.activate(1, "a", "b")
    run.join("c", "d", "e")
    run.drain("d")
    run.hold("e")
    view = run.view
    assert (set(view.members), set(view.candidates), set(view.excluded)) == ({"a", "b"}, {"c"}, {"d", "e"})


def test_member_that_joins_again_is_rejoined_and_not_lost() -> None:
    run = FakeRun()
    run.activate(1, "a", "b", "c")
    run.join("a", join=2)
    run.lose("b")
    assert (set(run.view.rejoined), run.view.lost) == ({"a"}, 1)


def test_member_of_an_attempt_that_was_given_up_is_a_candidate() -> None:
    run = FakeRun()
    run.put(KEYS.round, round_record(3, RoundPhase.FORMING))
    run.confirm(3, "a")
    assert set(run.view.candidates) == {"a"}


def test_member_above_the_known_round_blocks_forming_and_its_number_counts() -> None:
    run = FakeRun()
    run.confirm(9, "a", floor=12)
    assert set(run.view.above) == {"a"}
    assert run.view.next_number() == 13
    run.lose("a")
    assert not run.view.above


def test_next_number_is_above_all_seen_numbers() -> None:
    run = FakeRun()
    assert run.view.next_number() == 1
    run.put(KEYS.round, round_record(4, RoundPhase.FORMING))
    assert run.view.next_number() == 5
    run.join("a", floor=7)
    run.confirm(9, "b", floor=0)
    assert run.view.next_number() == 10


def test_order_of_joining_is_kept_while_a_join_lasts() -> None:
    run = FakeRun()
    run.join("a", "b")
    first = run.view.nodes["a"].order
    run.confirm(1, "a")
    assert run.view.nodes["a"].order == first
    run.join("a", join=2)
    assert run.view.nodes["a"].order > run.view.nodes["b"].order


def test_departures_become_facts_and_the_last_ones_are_kept() -> None:
    run = FakeRun()
    run.activate(1, "a", "b")
    run.now += 12
    run.join("c")
    run.now += 3
    run.lose("a", "c")
    run.leave("b", why="done")
    run.lose("b")
    assert list(run.view.departures) == [
        Departure("a", 0.0, 15.0, 1, False, "its session ended"),
        Departure("c", 12.0, 15.0, 0, False, "its session ended"),
        Departure("b", 0.0, 15.0, 1, True, "done"),
    ]
    assert [fact for fact in run.view.facts if isinstance(fact, Departure)] == list(run.view.departures)
    assert Arrival("c", 1) in run.view.facts


def test_earlier_departures_are_dropped_when_a_round_becomes_active() -> None:
    run = FakeRun()
    run.join("a", "b", "c")
    run.lose("c")
    run.activate(1, "a", "b")
    assert not run.view.departures


def test_new_active_round_resets_departures_and_the_last_call() -> None:
    run = FakeRun()
    run.activate(1, "a", "b", "c")
    run.now += 100
    run.lose("c")
    assert run.view.departures
    run.join("a", "b", join=2)
    run.put(KEYS.round, round_record(2))
    assert not run.view.departures
    assert run.view.started_at == run.now
    assert run.view.minimum_since is None


def test_unreadable_node_is_skipped_and_reported_once() -> None:
    run = FakeRun()
    run.join("a")
    run.write(Put(KEYS.node("b"), b"{}"))
    (fact,) = (fact for fact in run.view.facts if isinstance(fact, Unreadable))
    assert fact.key == KEYS.node("b")
    assert set(run.view.nodes) == {"a"}
    assert not run.view.unreadable


def test_node_whose_key_becomes_unreadable_is_gone() -> None:
    run = FakeRun()
    run.activate(1, "a", "b")
    run.write(Put(KEYS.node("a"), b"\xff"))
    assert set(run.view.members) == {"b"}
    assert run.view.lost == 1


def test_record_under_the_key_of_another_node_is_skipped() -> None:
    run = FakeRun()
    run.join("a", "c")
    run.put(KEYS.node("b"), node("a"))
    assert set(run.view.nodes) == {"a", "c"}
    assert isinstance(run.view.facts[-1], Unreadable)
    run.decide()
    assert isinstance(run.decide(after_s=60), Form)


@pytest.mark.parametrize(
    "shared",
    [
        {},
        {"min_nodes": "two"},
        {"step": 0},
        {"min_nodes": 0},
        {"max_nodes": 1},
        {"ranks": "by luck"},
        {"last_call_mode": "never"},
    ],
)
def test_config_with_invalid_settings_is_unreadable(shared: dict[str, int | str]) -> None:
    run = FakeRun()
    good = config()
    record = type(good)(
        incarnation="i",
        shared={**good.shared, **shared} if shared else {},
        timing=good.timing,
        run_lease=1,
        data_lease=2,
    )
    run.put(KEYS.config, record)
    assert run.view.rules is None
    assert set(run.view.unreadable) == {KEYS.config}
    run.put(KEYS.config, good)
    assert run.view.rules is not None
    assert not run.view.unreadable


def test_hold_ends_when_its_record_is_damaged() -> None:
    run = FakeRun()
    run.join("a")
    run.hold("a")
    assert set(run.view.excluded) == {"a"}
    run.write(Put(KEYS.health("a"), b"damaged"))
    assert set(run.view.candidates) == {"a"}


# Cost


def many_candidates(size: int) -> FakeRun:
    run = FakeRun(min_nodes=size + 10, max_nodes=size + 20)
    run.join(*(f"node{index:06d}" for index in range(size)))
    return run


def many_members(size: int) -> FakeRun:
    run = FakeRun(min_nodes=2, max_nodes=size + 20)
    run.activate(1, *(f"node{index:06d}" for index in range(size)))
    return run


def many_leaving(size: int) -> FakeRun:
    """Half of the members have joined again, to admit a node."""
    run = many_members(size)
    run.join("new")
    left = LeaveCause(kind=LeaveKind.ADMISSION, why="to admit new", round=1)
    run.join(*list(run.view.members)[size // 2 :], join=2, left=left)
    return run


def many_losses(size: int) -> FakeRun:
    run = many_members(2 * size)
    run.lose(*list(run.view.members)[size:])
    return run


def many_confirming(size: int) -> FakeRun:
    run = FakeRun(min_nodes=2, max_nodes=size + 20)
    names = [f"node{index:06d}" for index in range(size)]
    run.join(*names)
    run.plan(1, *names)
    return run


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (many_candidates, lambda run: run.join("late")),
        (many_candidates, lambda run: run.lose("node000005")),
        (many_candidates, lambda run: run.drain("node000005")),
        (many_candidates, lambda run: run.hold("node000005")),
        (many_candidates, lambda run: run.join("node000005", join=2)),
        (many_candidates, lambda run: run.write(Put(KEYS.node("damaged"), b""))),
        (many_members, lambda run: run.join("late")),
        (many_members, lambda run: run.lose("node000005")),
        (many_members, lambda run: run.leave("node000005")),
        (many_members, lambda run: run.join("node000005", join=2)),
        (many_leaving, lambda run: run.join("node000005", join=2)),
        (many_leaving, lambda run: run.lose("node000005")),
        (many_losses, lambda run: run.lose("node000005")),
        (many_confirming, lambda run: run.confirm(1, "node000005")),
        (many_confirming, lambda run: run.lose("node000005")),
        (many_confirming, lambda run: run.join("late")),
    ],
)
def test_change_and_decision_cost_the_same_for_any_size(
    make: Callable[[int], FakeRun], change: Callable[[FakeRun], object]
) -> None:
    costs = []
    for size in (20, 2_000):
        run = make(size)
        run.decide()
        batch = _as_batch(run, change)

        def update(run: FakeRun = run, batch: Any = batch) -> None:
            run.view.apply(batch.changes, batch.revision, run.now)
            run.view.tick(run.now)
            summarise(run.view, decide(run.view, run.now), run.now)

        costs.append(steps(update))
    assert costs[1] <= costs[0] * 1.1 + 50, costs


def _as_batch(run: FakeRun, change: Callable[[FakeRun], object]) -> Any:
    """The batch of a change, without applying it to the view of the run."""
    view, run.view = run.view, View(KEYS, run.now)
    run.view.load(run.scan(), run.engine.revision, run.now)
    change(run)
    run.view = view
    return run.engine.history.batches[-1]


def test_cost_of_forming_is_almost_linear() -> None:
    costs = []
    for size in (100, 1_000):
        run = many_candidates(size)
        run.put(KEYS.config, config(min_nodes=size, max_nodes=size))
        run.view.tick(run.now)
        costs.append(steps(lambda run=run: decide(run.view, run.now)) / size)
    assert costs[1] <= costs[0] * 1.5, costs
