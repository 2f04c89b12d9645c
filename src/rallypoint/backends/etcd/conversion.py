"""Converts between the contract's types and etcd's messages. No I/O.

A key is text in the contract and bytes in etcd. UTF-8 keeps the order of code points, so a prefix is a range of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rallypoint.backends.etcd import rpc_pb2 as rpc
from rallypoint.errors import Rejected
from rallypoint.kv.types import (
    Batch,
    BranchOp,
    BranchResult,
    Change,
    Compare,
    CreateRevisionIs,
    Delete,
    Deleted,
    DeleteRange,
    Exists,
    Get,
    GotItem,
    GotRange,
    Item,
    ModRevisionIs,
    Put,
    PutDone,
    Range,
    RangeEmpty,
    ValueIs,
    VersionIs,
)

EVERYTHING = b"\0"
"""As the end of a range: no end. As the start: the first possible key."""


def key_of(text: str) -> bytes:
    """A key in etcd's form. Rejected if the text cannot be encoded, such as half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise Rejected(f"the key {text!r} cannot be encoded as UTF-8: {error.reason}") from None


def range_of(prefix: str) -> tuple[bytes, bytes]:
    """The first possible key with this prefix, and the first key after all of them."""
    start = key_of(prefix)
    if not start:
        return EVERYTHING, EVERYTHING
    # UTF-8 has no byte 0xff, so the last byte can be incremented.
    return start, start[:-1] + bytes([start[-1] + 1])


def item_of(kv: rpc.KeyValue) -> Item:
    """A key as it was at some revision. A key that is not UTF-8 (not written by Rallypoint) is shown with escapes."""
    key = kv.key.decode(errors="backslashreplace")
    return Item(key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


# --- transactions -----------------------------------------------------------------------------------------------------


def compare_of(compare: Compare) -> rpc.Compare:
    """A compare. `RangeEmpty` becomes "every key in the range was created at revision 0"."""
    match compare:
        case RangeEmpty(prefix):
            start, end = range_of(prefix)
            return rpc.Compare(target=rpc.Compare.CREATE, key=start, range_end=end, create_revision=0)
        case Exists(key, wanted):
            result = rpc.Compare.NOT_EQUAL if wanted else rpc.Compare.EQUAL
            return rpc.Compare(result=result, target=rpc.Compare.CREATE, key=key_of(key), create_revision=0)
        case ValueIs(key, value):
            return rpc.Compare(target=rpc.Compare.VALUE, key=key_of(key), value=value)
        case VersionIs(key, version):
            return rpc.Compare(target=rpc.Compare.VERSION, key=key_of(key), version=version)
        case CreateRevisionIs(key, revision):
            return rpc.Compare(target=rpc.Compare.CREATE, key=key_of(key), create_revision=revision)
        case ModRevisionIs(key, revision):
            return rpc.Compare(target=rpc.Compare.MOD, key=key_of(key), mod_revision=revision)


def op_of(op: BranchOp) -> rpc.RequestOp:
    match op:
        case Put(key, value, lease):
            return rpc.RequestOp(request_put=rpc.PutRequest(key=key_of(key), value=value, lease=lease))
        case Get(key):
            return rpc.RequestOp(request_range=rpc.RangeRequest(key=key_of(key)))
        case Range(prefix, limit, count_only):
            start, end = range_of(prefix)
            asked = rpc.RangeRequest(key=start, range_end=end, limit=limit, count_only=count_only)
            return rpc.RequestOp(request_range=asked)
        case Delete(key):
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key_of(key)))
        case DeleteRange(prefix):
            start, end = range_of(prefix)
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=start, range_end=end))


def result_of(op: BranchOp, answer: rpc.ResponseOp) -> BranchResult:
    """The result of a step."""
    match op:
        case Put():
            return PutDone()
        case Get():
            kvs = answer.response_range.kvs
            return GotItem(item_of(kvs[0]) if kvs else None)
        case Range():
            found = answer.response_range
            return GotRange(tuple([item_of(kv) for kv in found.kvs]), found.count)
        case Delete() | DeleteRange():
            return Deleted(answer.response_delete_range.deleted)


def reader_of(compare: Compare) -> BranchOp:
    """The read that shows why a compare failed."""
    return Range(compare.prefix, limit=1) if isinstance(compare, RangeEmpty) else Get(compare.key)


def holds(compare: Compare, read: BranchResult) -> bool:
    """Whether a compare holds for the result of its `reader_of`."""
    if isinstance(compare, RangeEmpty):
        return isinstance(read, GotRange) and read.count == 0
    assert isinstance(read, GotItem)
    item = read.item
    match compare:
        case Exists():
            return (item is not None) == compare.wanted
        case ValueIs():
            return item is not None and item.value == compare.value
        case VersionIs():
            return (item.version if item else 0) == compare.version
        case CreateRevisionIs():
            return (item.create_revision if item else 0) == compare.revision
        case ModRevisionIs():
            return (item.mod_revision if item else 0) == compare.revision


def check_branch(branch: Sequence[BranchOp]) -> None:
    """Rejected for a branch that writes a key twice or is invalid otherwise; etcd accepts some of these."""
    written: set[str] = set()
    cleared: list[str] = []
    for step in branch:
        if isinstance(step, Put | Delete):
            if isinstance(step, Put) and not step.key:
                raise Rejected("an empty key cannot be written")
            if step.key in written:
                raise Rejected(f"{step.key!r} is written twice in one transaction")
            written.add(step.key)
        elif isinstance(step, DeleteRange):
            cleared.append(step.prefix)
        elif isinstance(step, Range) and step.limit < 0:
            raise Rejected(f"a range cannot be limited to {step.limit} keys")
    for prefix in cleared:
        if any(key.startswith(prefix) for key in written):
            raise Rejected(f"keys under {prefix!r} are written twice in one transaction")


def leases_of(*branches: Sequence[BranchOp]) -> list[int]:
    """The leases that the puts of the branches name, each once."""
    named = (step.lease for branch in branches for step in branch if isinstance(step, Put) and step.lease)
    return list(dict.fromkeys(named))


# --- watches ----------------------------------------------------------------------------------------------------------


def batches_of(events: Iterable[rpc.Event]) -> list[Batch]:
    """One batch per revision; the events are in order of revision."""
    batches: list[Batch] = []
    changes: list[Change] = []
    revision = 0
    for event in events:
        if event.kv.mod_revision != revision:
            if changes:
                batches.append(Batch(revision, tuple(changes)))
            changes, revision = [], event.kv.mod_revision
        gone = event.type == rpc.Event.DELETE
        key = event.kv.key.decode(errors="backslashreplace")
        changes.append(Change(key, None if gone else item_of(event.kv)))
    if changes:
        batches.append(Batch(revision, tuple(changes)))
    return batches
