"""Conversion to etcd's messages: prefixes become ranges, compares agree with the engine, events become batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import Rejected
from rallypoint.kv.engine import Engine
from rallypoint.kv.types import (
    Batch,
    Change,
    CreateRevisionIs,
    Delete,
    DeleteRange,
    Exists,
    Get,
    Item,
    ModRevisionIs,
    Put,
    Range,
    RangeEmpty,
    Txn,
    ValueIs,
    VersionIs,
)

pytest.importorskip("google.protobuf", reason="needs protobuf: pip install 'rallypoint[etcd]'")

from rallypoint.backends.etcd import rpc_pb2 as rpc
from rallypoint.backends.etcd.conversion import batches_of, check_branch, holds, key_of, range_of, reader_of

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
keys = st.sampled_from(["a", "a/1", "a/2", "b"])
numbers = st.integers(0, 4)
compares = st.one_of(
    st.builds(Exists, keys, st.booleans()),
    st.builds(ValueIs, keys, st.sampled_from([b"", b"1", b"2"])),
    st.builds(VersionIs, keys, numbers),
    st.builds(CreateRevisionIs, keys, numbers),
    st.builds(ModRevisionIs, keys, numbers),
    st.builds(RangeEmpty, st.sampled_from(["", "a", "a/", "b", "c"])),
)
writes = st.lists(
    st.one_of(st.builds(Put, keys, st.sampled_from([b"", b"1", b"2"])), st.builds(Delete, keys)), max_size=4
)


@given(texts, texts)
def test_range_of_a_prefix_holds_exactly_the_keys_that_start_with_it(prefix, key):
    start, end = range_of(prefix)
    inside = not prefix or start <= key_of(key) < end
    assert inside == key.startswith(prefix)


def test_key_that_is_not_utf_8_is_rejected():
    with pytest.raises(Rejected):
        key_of("\ud800")


@given(writes, compares)
def test_compare_evaluated_on_a_read_agrees_with_the_engine(history, compare):
    engine = Engine()
    for op in history:
        engine.apply(Txn((), (op,)), 0.0)
    read = engine.apply(Txn((), (reader_of(compare),)), 0.0).result.results[0]
    assert holds(compare, read) == engine.apply(Txn((compare,), ()), 0.0).result.committed


@pytest.mark.parametrize(
    "branch",
    [
        (Put("a", b""), Put("a", b"")),
        (Put("a", b""), Delete("a")),
        (Delete("a"), Delete("a")),
        (DeleteRange("a"), Delete("a/1")),
        (Put("", b""),),
        (Range("a", limit=-1),),
    ],
)
def test_branch_that_the_engine_would_not_execute_is_rejected(branch):
    with pytest.raises(Rejected):
        check_branch(branch)
    failed = Engine().apply(Txn((), branch), 0.0).result
    assert type(failed).__name__ == "Failure"


def test_branch_that_writes_each_key_once_is_accepted():
    check_branch((Put("a", b""), DeleteRange("b"), Get("a"), Range("a")))


def test_events_of_one_revision_are_one_batch():
    def put(key: bytes, revision: int) -> rpc.Event:
        kv = rpc.KeyValue(key=key, value=b"x", create_revision=1, mod_revision=revision, version=2, lease=7)
        return rpc.Event(type=rpc.Event.PUT, kv=kv)

    gone = rpc.Event(type=rpc.Event.DELETE, kv=rpc.KeyValue(key=b"b", mod_revision=3))
    found = batches_of([put(b"a", 3), gone, put(b"c", 5)])
    item = Item("a", b"x", 1, 3, 2, 7)
    assert found == [
        Batch(3, (Change("a", item), Change("b", None))),
        Batch(5, (Change("c", Item("c", b"x", 1, 5, 2, 7)),)),
    ]
    assert batches_of([]) == []
