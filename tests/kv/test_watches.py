"""Watches of the engine: what they are told, and where they may start."""

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
    """What a watch sees of a key that was created empty."""
    return Batch(revision, (Change(key, Item(key, b"", revision, revision, 1)),))


def keys_of(batches: list[Batch]) -> list[list[str]]:
    return [[change.key for change in batch.changes] for batch in batches]


def store_with(history: int) -> Store:
    return Store(Engine(history))


# What is told


def test_a_watch_is_told_of_every_change_under_its_prefix() -> None:
    store = Store()
    watch = store.watch("a/")
    store.put("a/x")
    store.put("a")
    store.put("b")
    store.txn(DeleteRange(""))
    assert store.told[watch] == [written("a/x", 2), Batch(5, (Change("a/x", None),))]


def test_a_watch_on_a_whole_key_covers_what_begins_with_it_too() -> None:
    store = Store()
    watch = store.watch("node1")
    for key in ["node1", "node10", "node", "node2"]:
        store.put(key)
    assert keys_of(store.told[watch]) == [["node1"], ["node10"]]


@pytest.mark.parametrize("prefix", ["", LAST, "a" + LAST, "\ud7ff", "é"])
def test_a_watch_covers_what_a_range_of_its_prefix_covers(prefix: str) -> None:
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


def test_a_batch_is_one_revision_and_only_what_the_watch_covers() -> None:
    store = Store()
    everything, some, none = store.watch(""), store.watch("a"), store.watch("c")
    store.txn(Put("a2", b""), Put("b", b""), Put("a1", b""))
    assert keys_of(store.told[everything]) == [["a2", "b", "a1"]]
    assert keys_of(store.told[some]) == [["a2", "a1"]]
    assert store.told[none] == []


def test_several_watches_on_one_prefix_are_told_alike() -> None:
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


def test_shorter_prefixes_are_told_first_and_then_in_order_of_registration() -> None:
    engine = Engine()
    for watch, prefix in [(1, "abc"), (2, "a"), (3, "abc"), (4, ""), (5, "a")]:
        engine.watch(watch, prefix, 1)
    events = engine.apply(Txn((), (Put("abc", b""),)), 0.0).events
    assert [event.watch for event in events] == [4, 2, 5, 1, 3]


@pytest.mark.parametrize(
    "op",
    [Txn((), (Get("a"),)), Txn((), (Delete("b"),)), Txn((Exists("b"),), (Put("a", b""),)), Tick()],
)
def test_what_changes_nothing_is_not_told(op) -> None:
    store = Store()
    store.put("a")
    watch = store.watch("")
    store.apply(op)
    assert store.told[watch] == []


def test_a_refused_transaction_is_not_told() -> None:
    store = Store()
    watch = store.watch("")
    store.apply(Txn((), (Put("a", b""), Put("a", b""))))
    assert store.told[watch] == []


def test_a_watch_that_was_stopped_is_told_no_more() -> None:
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


def test_a_watch_number_in_use_cannot_be_taken_but_a_free_one_can() -> None:
    engine = Engine()
    engine.watch(1, "a", 1)
    with pytest.raises(ValueError, match="watch 1 is registered already"):
        engine.watch(1, "b", 1)
    engine.unwatch(1)
    assert engine.watch(1, "b", 1) == WatchStarted(1, ())


# Where a watch may start


def test_a_watch_from_the_past_gets_what_it_missed_and_then_what_comes() -> None:
    store = Store()
    for key in ["a1", "b", "a2"]:
        store.put(key)
    started = store.start("a", after=2)
    assert started == WatchStarted(4, (written("a2", 4),))
    store.put("a3")
    assert store.told[1] == [written("a3", 5)]


@pytest.mark.parametrize("after", [0, 1])
def test_a_watch_may_start_at_the_very_beginning_while_nothing_is_forgotten(after: int) -> None:
    store = Store()
    assert store.start("", after) == WatchStarted(1, ())
    store.put("a")
    assert store.start("", after) == WatchStarted(2, (written("a", 2),))


def test_a_watch_from_now_has_nothing_to_catch_up_with() -> None:
    store = Store()
    store.put("a")
    assert store.start("a", after=2) == WatchStarted(2, ())


def test_a_watch_from_the_future_is_told_only_of_changes_after_its_start() -> None:
    store = Store()
    assert store.start("a", after=4) == WatchStarted(1, ())
    for number in range(1, 6):
        store.put(f"a{number}")
    assert [batch.revision for batch in store.told[1]] == [5, 6]


def test_a_watch_from_the_future_that_was_stopped_leaves_nothing_for_its_successor() -> None:
    engine = Engine()
    store = Store(engine)
    engine.watch(1, "a", 50)
    engine.unwatch(1)
    engine.watch(1, "a", 1)
    store.txn(Put("a1", b""), Put("a2", b""))
    assert keys_of(store.told[1]) == [["a1", "a2"]]


def test_a_watch_from_before_the_history_is_told_where_it_may_start() -> None:
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


def test_history_that_the_watch_does_not_cover_is_needed_all_the_same() -> None:
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


def test_watches_are_no_part_of_what_operations_do() -> None:
    watched, unwatched = Store(), Store()
    watched.watch("")
    for store in (watched, unwatched):
        store.put("a")
    assert watched.item("a") == unwatched.item("a")
