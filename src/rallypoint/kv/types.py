"""The words of the store: items, compares, operations, results, changes.

All of them are frozen values without behaviour, so that one definition serves the engine, the backend contract, a wire
protocol and a log. A key is a string, a value is bytes. Revision 0, version 0 and lease 0 mean "none": comparing a
version or a revision with 0 asks that the key is absent, as etcd has it.
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
    """The key is there (or, with `wanted=False`, is not)."""

    key: str
    wanted: bool = True


class ValueIs(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The key is there and holds exactly this value."""

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


# --- what a branch of a transaction may do -------------------------------------------------------------------------


class Put(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Write a key, which must not be empty; its former lease is replaced by `lease` (0: none)."""

    key: str
    value: bytes
    lease: int = 0


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Remove a key, if it is there."""

    key: str


class DeleteRange(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Remove every key that starts with `prefix`."""

    prefix: str


class Get(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Read a key."""

    key: str


class Range(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Read the keys that start with `prefix`, in order.

    At most `limit` of them (0: all; negative: refused), or with `count_only` just their number.
    """

    prefix: str
    limit: int = 0
    count_only: bool = False


BranchOp: TypeAlias = Put | Delete | DeleteRange | Get | Range


class PutDone(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Answer to `Put`."""


class Deleted(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Answer to `Delete` and `DeleteRange`: how many keys went."""

    count: int


class GotItem(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Answer to `Get`."""

    item: Item | None


class GotRange(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Answer to `Range`: the items (up to the limit) and how many there are in all."""

    items: tuple[Item, ...]
    count: int


BranchResult: TypeAlias = PutDone | Deleted | GotItem | GotRange


# --- operations -----------------------------------------------------------------------------------------------------


class Txn(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """If all `compares` hold, do `then`, else do `otherwise`; one revision for everything that changes.

    With an empty `otherwise`, a refusal reads what was compared: one answer per compare, in order.
    """

    compares: tuple[Compare, ...]
    then: tuple[BranchOp, ...]
    otherwise: tuple[BranchOp, ...] = ()


class Add(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Add `amount` to the decimal number under `key` (absent counts as 0) if all `compares` hold.

    A number is an optional minus and ASCII digits, nothing else, and fits into 64 bits with its sign; a sum that does
    not is refused. The key is written as by `Put`: its former lease is replaced by `lease`.
    """

    key: str
    amount: int
    lease: int = 0
    compares: tuple[Compare, ...] = ()


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Make a lease that ends `ttl_s` after its last renewal; `lease` is the id that the caller chose (0: any)."""

    ttl_s: float
    lease: int = 0


class KeepAlive(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """Renew a lease for its full time to live."""

    lease: int


class Revoke(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """End a lease now; its keys go in one revision."""

    lease: int


class Shorten(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """End a lease within `within_s`, unless it is renewed before; its time to live stays what it is."""

    lease: int
    within_s: float


class Tick(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Nothing but the passing of time: leases whose time is over end."""


Op: TypeAlias = Txn | Add | Grant | KeepAlive | Revoke | Shorten | Tick


# --- results ----------------------------------------------------------------------------------------------------------


class TxnResult(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Which branch was taken, the store's revision after it, and one answer per operation of that branch."""

    committed: bool
    revision: int
    results: tuple[BranchResult, ...]


class AddResult(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """The number after adding; not committed (a compare failed): 0, and nothing changed."""

    committed: bool
    revision: int
    value: int


class LeaseResult(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The lease as it is now; `alive` is False when it had ended (or has been ended by this)."""

    lease: int
    ttl_s: float
    alive: bool


class Ticked(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    """How many leases ended."""

    expired: int


class FailureCode(enum.Enum):
    """Why an operation was refused as a whole; nothing changed."""

    LEASE_GONE = "lease gone"
    NOT_A_NUMBER = "not a number"
    INVALID = "invalid"
    TOO_OLD = "too old"
    UNAVAILABLE = "unavailable"
    """Not the engine's: whoever has it cannot execute anything just now."""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The operation makes no sense or cannot be answered any more; `lease` is set for LEASE_GONE."""

    code: FailureCode
    message: str
    lease: int = 0


Result: TypeAlias = TxnResult | AddResult | LeaseResult | Ticked | Failure


# --- changes and watches ----------------------------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A key was written (`item`) or went away (`item` is None)."""

    key: str
    item: Item | None


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All changes of one revision that a watch covers."""

    revision: int
    changes: tuple[Change, ...]


class WatchEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A batch for one watch."""

    watch: int
    batch: Batch


class WatchStarted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The watch is registered; `backlog` is what happened between its start and `revision`, which is now."""

    revision: int
    backlog: tuple[Batch, ...]


class WatchTooOld(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The watch is not registered: changes after its start are no longer kept. `oldest` is the first possible start."""

    oldest: int


class Origin(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who sent a request: `seq` counts from 1; answers up to `acked` were received and may be forgotten."""

    client: str
    seq: int
    acked: int = 0


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What applying an operation gave: the answer, and what the watches have to be told, in order of revision."""

    result: Result
    events: tuple[WatchEvent, ...] = ()
