"""The types of the store: items, compares, operations, results, changes.

All of them are frozen values without behaviour, so that one definition serves the engine, the backend contract, the
wire protocol and the log. A key is a string, a value is bytes. Revision 0, version 0 and lease 0 mean "none": comparing
a version or a revision with 0 requires that the key is absent, as in etcd.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One key as it was at some revision."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


# --- compares: all of them must hold for a transaction to take its first branch -----------------------------------


class Exists(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The key exists (or, with `wanted=False`, does not)."""

    key: str
    wanted: bool = True


class ValueIs(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The key exists and has exactly this value."""

    key: str
    value: bytes


class VersionIs(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The key was written this many times since it was created; 0: it is absent."""

    key: str
    version: int


class CreateRevisionIs(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The key was created at this revision; 0: it is absent."""

    key: str
    revision: int


class ModRevisionIs(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The key was last written at this revision; 0: it is absent."""

    key: str
    revision: int


class RangeEmpty(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """No key starts with this prefix."""

    prefix: str


Compare: TypeAlias = Exists | ValueIs | VersionIs | CreateRevisionIs | ModRevisionIs | RangeEmpty


# --- operations of a branch ------------------------------------------------------------------------------------------


class Put(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Write a key, which must not be empty; its former lease is replaced by `lease` (0: none)."""

    key: str
    value: bytes
    lease: int = 0


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Remove a key, if it exists."""

    key: str


class DeleteRange(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Remove every key that starts with `prefix`."""

    prefix: str


class Get(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Read a key."""

    key: str


class Range(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Read the keys that start with `prefix`, in order.

    At most `limit` of them (0: all; negative: refused), or with `count_only` only their number.
    """

    prefix: str
    limit: int = 0
    count_only: bool = False


BranchOp: TypeAlias = Put | Delete | DeleteRange | Get | Range


class PutDone(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Answer to `Put`."""


class Deleted(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Answer to `Delete` and `DeleteRange`: the number of removed keys."""

    count: int


class GotItem(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Answer to `Get`."""

    item: Item | None


class GotRange(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Answer to `Range`: the items (up to the limit) and the total number."""

    items: tuple[Item, ...]
    count: int


BranchResult: TypeAlias = PutDone | Deleted | GotItem | GotRange


# --- operations -----------------------------------------------------------------------------------------------------


class Txn(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """If all `compares` hold, execute `then`, else `otherwise`; all changes get one revision.

    With an empty `otherwise`, a refused transaction reads what was compared: one answer per compare, in order.
    """

    compares: tuple[Compare, ...]
    then: tuple[BranchOp, ...]
    otherwise: tuple[BranchOp, ...] = ()


class Add(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Add `amount` to the decimal number under `key` (absent counts as 0) if all `compares` hold.

    A number is an optional minus and ASCII digits, and fits into a signed 64-bit integer; a sum that does not fit is
    refused. The key is written as by `Put`: its former lease is replaced by `lease`.
    """

    key: str
    amount: int
    lease: int = 0
    compares: tuple[Compare, ...] = ()


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Create a lease that ends `ttl_s` after its last renewal; `lease` is the id chosen by the caller (0: any)."""

    ttl_s: float
    lease: int = 0


class KeepAlive(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Renew a lease for its full time to live."""

    lease: int


class Revoke(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """End a lease now; its keys are removed in one revision."""

    lease: int


class Shorten(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """End a lease within `within_s` unless it is renewed before; its time to live does not change."""

    lease: int
    within_s: float


class Tick(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """End the leases that have expired."""


Op: TypeAlias = Txn | Add | Grant | KeepAlive | Revoke | Shorten | Tick


# --- results ----------------------------------------------------------------------------------------------------------


class TxnResult(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Whether `then` was executed, the store's revision afterwards, one answer per operation of the executed branch."""

    committed: bool
    revision: int
    results: tuple[BranchResult, ...]


class AddResult(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The sum; if not committed (a compare failed) it is 0, and nothing changed."""

    committed: bool
    revision: int
    value: int


class LeaseResult(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The lease after the operation; `alive` is False if it had ended before or was ended by the operation."""

    lease: int
    ttl_s: float
    alive: bool


class Ticked(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The number of leases that ended."""

    expired: int


class FailureCode(enum.Enum):
    """Why an operation was refused; nothing changed."""

    LEASE_GONE = "lease gone"
    NOT_A_NUMBER = "not a number"
    INVALID = "invalid"
    TOO_OLD = "too old"
    UNAVAILABLE = "unavailable"
    """Not from the engine: its server cannot execute anything at the moment."""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The operation is invalid or can no longer be answered; `lease` is set for LEASE_GONE."""

    code: FailureCode
    message: str
    lease: int = 0


Result: TypeAlias = TxnResult | AddResult | LeaseResult | Ticked | Failure


# --- changes and watches ----------------------------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A key was written (`item`) or removed (`item` is None)."""

    key: str
    item: Item | None


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All changes of one revision under the prefix of a watch."""

    revision: int
    changes: tuple[Change, ...]


class WatchEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A batch for one watch."""

    watch: int
    batch: Batch


class WatchStarted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The watch is registered; `backlog` is what changed after its start, up to the current `revision`."""

    revision: int
    backlog: tuple[Batch, ...]


class WatchTooOld(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The watch is not registered: changes after its start are no longer kept. `oldest` is the earliest valid start."""

    oldest: int


class Origin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sender and number of a request: `seq` counts from 1; answers up to `acked` were received."""

    client: str
    seq: int
    acked: int = 0


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The answer to an operation, and the events for the watches, in order of revision."""

    result: Result
    events: tuple[WatchEvent, ...] = ()
