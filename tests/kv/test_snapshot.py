"""Snapshot and restore of the engine."""

import hashlib
import os
import subprocess
import sys

import msgspec
import pytest

from rallypoint.kv.engine import Engine
from rallypoint.kv.snapshot import FORMAT, SnapshotError, restore, snapshot
from rallypoint.kv.types import (
    Add,
    AddResult,
    Delete,
    FailureCode,
    Grant,
    KeepAlive,
    Origin,
    Put,
    Revoke,
    Tick,
    Ticked,
    Txn,
    WatchStarted,
    WatchTooOld,
)
from tests.kv.stores import Store, refusal


def a_store() -> Store:
    """A store with every kind of content of a snapshot."""
    store = Store()
    for key in ["b", "a", "\U0010ffff", "é"]:
        store.put(key, key.encode())
    store.put("a", b"again")
    store.txn(Delete("b"))
    lease, ended = store.grant(5.0), store.grant(7.0)
    for number in range(20):
        store.put(f"leased/{number}", lease=lease)
    store.apply(Revoke(ended))
    store.apply(Add("n", 2**63 - 1), Origin("zoe", 1))
    store.apply(Add("n", 1), Origin("zoe", 2))
    store.apply(Txn((), (Put("x", b"", 99),)), Origin("adam", 7, 6))
    return store


def restored(store: Store, now: float = 0.0, history: int | None = None) -> Store:
    again = Store(restore(snapshot(store.engine), now, history))
    again.now = now
    return again


def test_a_restored_store_has_all_keys_and_the_revision() -> None:
    store = a_store()
    again = restored(store)
    assert again.engine.items == store.engine.items
    assert again.revision == store.revision
    assert again.keys() == store.keys()
    assert again.keys("leased/1") == store.keys("leased/1")


def test_a_restored_store_has_the_same_snapshot() -> None:
    store = a_store()
    assert snapshot(restored(store).engine) == snapshot(store.engine)


def test_an_empty_store_can_be_restored() -> None:
    again = restored(Store())
    assert again.revision == 1
    assert again.put("a") == 2


def test_a_restored_store_shares_no_state_with_the_first() -> None:
    store = a_store()
    before = snapshot(store.engine)
    again = restored(store)
    again.put("new", lease=1)
    again.apply(Add("n", -1), Origin("zoe", 3, 2))
    again.apply(Revoke(1))
    assert snapshot(store.engine) == before


def test_restored_leases_have_their_full_time_again_and_their_keys() -> None:
    store = a_store()
    store.now = 4.9
    store.apply(Tick())
    again = restored(store, now=1_000.0)
    assert again.engine.next_deadline() == 1_005.0
    again.now = 1_004.9
    assert len(again.keys("leased/")) == 20
    again.now = 1_005.0
    revision = again.revision
    assert again.apply(Tick()) == Ticked(1)
    assert again.keys("leased/") == []
    assert again.revision == revision + 1


def test_a_restored_store_starts_at_the_given_time() -> None:
    store = a_store()
    store.now = 1_000_000.0
    store.apply(KeepAlive(1))
    again = restored(store, now=3.0)
    again.now = 1.0
    again.apply(Tick())
    assert again.engine.now == 3.0


def test_numbering_of_leases_continues_after_a_restore() -> None:
    store = Store()
    store.apply(Revoke(store.grant(5.0)))
    assert restored(store).grant(5.0) == 2


def test_a_lease_granted_for_whole_seconds_is_the_same_after_a_restore() -> None:
    store = Store()
    store.apply(Grant(5), Origin("client", 1))
    again = restored(store)
    assert snapshot(again.engine) == snapshot(store.engine)


def test_a_request_from_before_the_restore_is_still_answered_and_not_executed() -> None:
    again = restored(a_store())
    assert again.apply(Add("n", 2**63 - 1), Origin("zoe", 1)) == AddResult(
        True, again.item("n").mod_revision, 2**63 - 1
    )
    assert refusal(again.apply(Add("n", -1), Origin("zoe", 2))) is FailureCode.INVALID
    assert refusal(again.apply(Tick(), Origin("adam", 7, 6))) is FailureCode.LEASE_GONE
    assert refusal(again.apply(Tick(), Origin("adam", 6))) is FailureCode.TOO_OLD


def test_a_watch_can_continue_from_its_revision_after_a_restore() -> None:
    store = a_store()
    again = restored(store)
    for after in range(store.revision + 1):
        assert again.start("", after) == store.start("", after)


def test_watches_are_not_restored() -> None:
    store = Store()
    store.watch("")
    again = restored(store)
    again.put("a")
    assert again.told == {}


def test_dropped_history_is_missing_after_a_restore_too() -> None:
    store = Store(Engine(history=2))
    for number in range(4):
        store.put(f"a{number}")
    again = restored(store, history=2)
    assert again.start("", 2) == WatchTooOld(3)
    assert again.start("", 3) == store.start("", 3)
    again.put("b")
    assert again.start("", 3) == WatchTooOld(4)


def test_a_restored_store_may_keep_less_history() -> None:
    store = Store()
    for number in range(4):
        store.put(f"a{number}")
    again = restored(store, history=1)
    assert again.start("", 3) == WatchTooOld(4)
    assert isinstance(again.start("", 4), WatchStarted)


def test_engines_that_came_to_the_same_state_by_other_leases_have_their_keys_in_order() -> None:
    snapshots = []
    for order in (["a", "b", "c"], ["c", "a", "b"]):
        store = Store(Engine(history=0))
        lease = store.grant(5.0)
        store.txn(*[Put(key, b"", lease) for key in order])
        store.put("last")
        snapshots.append(snapshot(store.engine))
    assert snapshots[0] == snapshots[1]


def test_a_snapshot_does_not_depend_on_the_order_of_hashes() -> None:
    program = "import hashlib; from tests.kv.test_snapshot import digest; print(digest())"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {digest()}


def digest() -> str:
    """Of a store in which a lease with many keys has ended: its history contains the order of their removal."""
    store = a_store()
    store.now = 5.0
    store.apply(Tick())
    return hashlib.sha256(snapshot(store.engine)).hexdigest()


# Invalid bytes


@pytest.mark.parametrize("data", [b"", b"\x00", b"{}", b"\xc1", b"[1, 2]", msgspec.msgpack.encode([FORMAT])])
def test_bytes_that_are_not_a_snapshot_are_refused(data: bytes) -> None:
    with pytest.raises(SnapshotError, match="not a snapshot of a store"):
        restore(data, 0.0)


def test_a_truncated_snapshot_is_refused() -> None:
    data = snapshot(a_store().engine)
    for length in range(len(data)):
        with pytest.raises(SnapshotError):
            restore(data[:length], 0.0)


def test_a_snapshot_of_another_format_is_refused_by_its_number() -> None:
    whole = msgspec.msgpack.decode(snapshot(Store().engine))
    for data in ([FORMAT + 1, *whole[1:]], [FORMAT + 1, {"laid": "out", "in": "another way"}]):
        with pytest.raises(SnapshotError, match=f"format {FORMAT + 1} is not known"):
            restore(msgspec.msgpack.encode(data), 0.0)


@pytest.mark.parametrize("flipped", [0x01, 0x80, 0xFF])
def test_a_damaged_snapshot_is_refused_or_gives_a_store_that_works(flipped: int) -> None:
    whole = snapshot(a_store().engine)
    refused = 0
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= flipped
        try:
            store = Store(restore(bytes(data), 0.0))
        except SnapshotError:
            refused += 1
        else:
            store.keys("a")
            store.now = 10.0
            store.put("z")
    assert refused
