"""Watches of the engine: their events, and where they may start."""

import pytest

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import (
    Batch,
    Change,
    Delete,
    DeleteRange,
    Exists,
    Get,
    Item,
    Put,
    Tick,
    Txn,
    WatchStarted,
    WatchTooOld,
)
from tests.kv.stores import Store

LAST = chr(0x10FFFF)


def written(key: str, revision: int) -> Batch:
    """The event of a key that was created empty."""
    return Batch(revision, (Change(key, Item(key, b"", revision, revision, 1)),))


def keys_of(batches: list[Batch]) -> list[list[str]]:
    return [[change.key for change in batch.changes] for batch in batches]


def store_with(history: int) -> Store:
    return Store(Engine(history))


# Events


def test_a_watch_gets_every_change_under_its_prefix() -> None:
    store = Store()
    watch = store.watch("a/")
    store.put("a/x")
    store.put("a")
    store.put("b")
    store.txn(DeleteRange(""))
    assert store.told[watch] == [written("a/x", 2), Batch(5, (Change("a/x", None),))]


def test_a_watch_on_a_whole_key_also_covers_keys_that_start_with_it() -> None:
    store = Store()
    watch = store.watch("node1")
    for key in ["node1", "node10", "node", "node2"]:
        store.put(key)
    assert keys_of(store.told[watch]) == [["node1"], ["node10"]]


@pytest.mark.parametrize("prefix", ["", LAST, "a" + LAST, "\ud7ff", "é"])
def test_a_watch_covers_the_same_keys_as_a_range_of_its_prefix(prefix: str) -> None:
    store = Store()
    watch = store.watch(prefix)
    for key in [
        "a",
        "b",
        "a" + LAST,
        "a" + LAST + "x",
        LAST,
        LAST + LAST,
        "\ud7ff",
        "\ud7ffx",
        "\ue000",
        "é",
        "éx",
        "ê",
    ]:
        store.put(key)
    told = [change.key for batch in store.told[watch] for change in batch.changes]
    assert sorted(told) == store.keys(prefix)


def test_a_batch_is_one_revision_and_contains_only_covered_keys() -> None:
    store = Store()
    everything, some, none = store.watch(""), store.watch("a"), store.watch("c")
    store.txn(Put("a2", b""), Put("b", b""), Put("a1", b""))
    assert keys_of(store.told[everything]) == [["a2", "b", "a1"]]
    assert keys_of(store.told[some]) == [["a2", "a1"]]
    assert store.told[none] == []


def test_several_watches_on_one_prefix_get_the_same_events() -> None:
    store = Store()
    watches = [store.watch("a") for _ in range(3)]
    store.put("a")
    assert [store.told[watch] for watch in watches] == [[written("a", 2)]] * 3


@pytest.mark.parametrize("keys", [["a1"], ["a1", "a2"], ["a1", "b", "a2"]])
def test_watches_of_one_prefix_share_one_batch(keys: list[str]) -> None:
    engine = Engine()
    for watch, prefix in enumerate(["a", "a", "", "a", ""]):
        engine.watch(watch, prefix, 1)
    events = engine.apply(Txn((), tuple([Put(key, b"") for key in keys])), 0.0).events
    batches = {event.watch: event.batch for event in events}
    assert batches[0] is batches[1] is batches[3]
    assert batches[2] is batches[4]
    assert keys_of([batches[0], batches[2]]) == [[key for key in keys if key.startswith("a")], keys]


def test_events_of_one_operation_come_in_order_of_revision() -> None:
    engine = Engine()
    store = Store(engine)
    for ttl_s in (2.0, 1.0):
        store.put(f"ttl{ttl_s}", lease=store.grant(ttl_s))
    store.watch("ttl")
    store.watch("")
    events = engine.apply(Txn((), (Put("ttl", b""),)), 5.0).events
    assert [event.batch.revision for event in events] == [4, 4, 5, 5, 6, 6]
    assert keys_of([event.batch for event in events[::2]]) == [["ttl1.0"], ["ttl2.0"], ["ttl"]]


def test_events_are_ordered_by_length_of_prefix_and_then_by_registration() -> None:
    engine = Engine()
    for watch, prefix in [(1, "abc"), (2, "a"), (3, "abc"), (4, ""), (5, "a")]:
        engine.watch(watch, prefix, 1)
    events = engine.apply(Txn((), (Put("abc", b""),)), 0.0).events
    assert [event.watch for event in events] == [4, 2, 5, 1, 3]


@pytest.mark.parametrize(
    "op",
    [Txn((), (Get("a"),)), Txn((), (Delete("b"),)), Txn((Exists("b"),), (Put("a", b""),)), Tick()],
)
def test_operations_that_change_nothing_make_no_event(op) -> None:
    store = Store()
    store.put("a")
    watch = store.watch("")
    store.apply(op)
    assert store.told[watch] == []


def test_a_refused_transaction_makes_no_event() -> None:
    store = Store()
    watch = store.watch("")
    store.apply(Txn((), (Put("a", b""), Put("a", b""))))
    assert store.told[watch] == []


def test_a_stopped_watch_gets_no_more_events() -> None:
    store = Store()
    stopped, other = store.watch("a"), store.watch("a")
    store.put("a1")
    store.engine.unwatch(stopped)
    store.put("a2")
    assert keys_of(store.told[stopped]) == [["a1"]]
    assert keys_of(store.told[other]) == [["a1"], ["a2"]]


def test_stopping_an_unknown_watch_is_ignored() -> None:
    store = Store()
    watch = store.watch("a")
    store.engine.unwatch(99)
    store.engine.unwatch(watch)
    store.engine.unwatch(watch)
    store.put("a")
    assert store.told == {}


def test_a_watch_id_in_use_is_refused_and_a_free_one_is_accepted() -> None:
    engine = Engine()
    engine.watch(1, "a", 1)
    with pytest.raises(ValueError, match="watch 1 is already registered"):
        engine.watch(1, "b", 1)
    engine.unwatch(1)
    assert engine.watch(1, "b", 1) == WatchStarted(1, ())


# Where a watch may start


def test_a_watch_from_the_past_gets_missed_changes_and_then_new_ones() -> None:
    store = Store()
    for key in ["a1", "b", "a2"]:
        store.put(key)
    started = store.start("a", after=2)
    assert started == WatchStarted(4, (written("a2", 4),))
    store.put("a3")
    assert store.told[1] == [written("a3", 5)]


@pytest.mark.parametrize("after", [0, 1])
def test_a_watch_may_start_at_the_very_beginning_while_the_history_is_complete(after: int) -> None:
    store = Store()
    assert store.start("", after) == WatchStarted(1, ())
    store.put("a")
    assert store.start("", after) == WatchStarted(2, (written("a", 2),))


def test_a_watch_from_now_has_no_backlog() -> None:
    store = Store()
    store.put("a")
    assert store.start("a", after=2) == WatchStarted(2, ())


def test_a_watch_from_the_future_gets_only_changes_after_its_start() -> None:
    store = Store()
    assert store.start("a", after=4) == WatchStarted(1, ())
    for number in range(1, 6):
        store.put(f"a{number}")
    assert [batch.revision for batch in store.told[1]] == [5, 6]


def test_start_of_a_stopped_watch_does_not_apply_to_a_new_watch_with_its_id() -> None:
    engine = Engine()
    store = Store(engine)
    engine.watch(1, "a", 50)
    engine.unwatch(1)
    engine.watch(1, "a", 1)
    store.txn(Put("a1", b""), Put("a2", b""))
    assert keys_of(store.told[1]) == [["a1", "a2"]]


def test_refusal_of_a_watch_from_before_the_history_contains_the_earliest_start() -> None:
    store = store_with(history=2)
    for number in range(5):
        store.put(f"a{number}")
    assert store.start("a", after=3) == WatchTooOld(oldest=4)
    assert store.start("a", after=4) == WatchStarted(6, (written("a3", 5), written("a4", 6)))


def test_a_watch_that_starts_too_early_is_not_registered() -> None:
    store = store_with(history=1)
    store.put("a")
    store.put("a")
    assert store.engine.watch(7, "a", 1) == WatchTooOld(2)
    store.put("a")
    assert store.told == {}
    assert isinstance(store.engine.watch(7, "a", 3), WatchStarted)


def test_dropped_history_of_other_keys_prevents_a_start_too() -> None:
    store = store_with(history=1)
    store.put("a")
    store.put("b")
    assert store.start("c", after=1) == WatchTooOld(2)


@pytest.mark.parametrize("limit", [0, 1])
def test_the_smallest_history_holds_the_last_revision(limit: int) -> None:
    store = store_with(limit)
    assert store.start("", after=1) == WatchStarted(1, ())
    store.put("a")
    assert store.start("", after=1) == WatchStarted(2, (written("a", 2),))
    store.put("b")
    assert store.start("", after=1) == WatchTooOld(2)
    assert store.start("", after=2) == WatchStarted(3, (written("b", 3),))
    assert store.start("", after=3) == WatchStarted(3, ())


def test_history_is_bounded_by_changes_and_never_cuts_a_revision() -> None:
    store = store_with(history=4)
    store.txn(Put("a1", b""), Put("a2", b""))
    store.txn(Put("b1", b""), Put("b2", b""))
    assert isinstance(store.start("", after=1), WatchStarted)
    store.put("c")
    assert store.start("", after=1) == WatchTooOld(2)
    started = store.start("", after=2)
    assert isinstance(started, WatchStarted)
    assert keys_of(list(started.backlog)) == [["b1", "b2"], ["c"]]


def test_a_revision_larger_than_the_history_is_kept_whole_until_the_next() -> None:
    store = store_with(history=2)
    store.txn(*[Put(f"a{number}", b"") for number in range(5)])
    started = store.start("", after=1)
    assert isinstance(started, WatchStarted)
    assert len(started.backlog[0].changes) == 5
    store.put("b")
    assert store.start("", after=1) == WatchTooOld(2)


def test_watches_do_not_affect_results_of_operations() -> None:
    watched, unwatched = Store(), Store()
    watched.watch("")
    for store in (watched, unwatched):
        store.put("a")
    assert watched.item("a") == unwatched.item("a")
