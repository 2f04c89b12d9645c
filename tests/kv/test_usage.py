"""The sums of keys and bytes always equal a recount."""

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.kv.engine import Engine
from rallypoint.kv.snapshot import restore, snapshot
from rallypoint.kv.types import Add, Batch, Change, Delete, DeleteRange, Grant, Item, Put, Revoke, Tick, Txn
from rallypoint.kv.usage import run_of
from rallypoint.kv.watches import History

KEYS = [
    "/rallypoint/a/x",
    "/rallypoint/a:data/y",
    "/rallypoint/b/x",
    "/rallypoint/b:data/store/1/k",
    "odd",
    "/odd",
    "/o/dd",
]
keys = st.sampled_from(KEYS)
operations = st.one_of(
    st.builds(
        lambda key, value, lease: Txn((), (Put(key, value, lease),)), keys, st.binary(max_size=9), st.integers(0, 2)
    ),
    st.builds(lambda key: Txn((), (Delete(key),)), keys),
    st.builds(lambda prefix: Txn((), (DeleteRange(prefix),)), st.sampled_from(["/rallypoint/a", "/", "odd", ""])),
    st.builds(lambda key: Add(key, 7), keys),
    st.builds(lambda lease: Grant(5.0, lease), st.integers(1, 2)),
    st.builds(Revoke, st.integers(1, 2)),
    st.just(Tick()),
)


def counted(engine: Engine) -> dict[str, tuple[int, int]]:
    runs: dict[str, tuple[int, int]] = {}
    for key, item in engine.items.items():
        count, size = runs.get(run_of(key), (0, 0))
        runs[run_of(key)] = (count + 1, size + len(key) + len(item.value))
    return runs


@given(st.lists(st.tuples(operations, st.floats(0, 3)), max_size=40))
def test_sums_after_any_operations_equal_a_recount(history):
    engine, now = Engine(), 0.0
    for op, later in history:
        now += later
        engine.apply(op, now)
    for one in (engine, restore(snapshot(engine), now)):
        runs = counted(one)
        assert {run: (used.keys, used.size) for run, used in one.usage.runs.items()} == runs
        assert one.usage.keys == sum(count for count, _ in runs.values())
        assert one.usage.size == sum(size for _, size in runs.values())


def test_control_and_data_keys_belong_to_the_same_run_and_other_keys_to_none():
    assert [run_of(key) for key in KEYS] == ["a", "a", "b", "b", "", "", ""]


def test_history_of_a_large_value_that_is_written_often_is_bounded():
    history = History(1_000_000, 0, limit_bytes=10_000)
    for revision in range(1, 1_001):
        item = Item("/big", bytes(1_000), 1, revision, revision)
        history.append(Batch(revision, (Change("/big", item),)))
        assert len(history.batches) <= 10
    assert history.oldest == 990
    history.append(Batch(1_001, (Change("/big", Item("/big", bytes(50_000), 1, 1_001, 1_001)),)))
    assert [batch.revision for batch in history.batches] == [1_001]
    history.append(Batch(1_002, (Change("/big", None),)))
    assert [batch.revision for batch in history.batches] == [1_002]
