"""The store engine: `apply(op, now) -> Outcome`. It is the store of all backends except etcd.

A linearizable, revisioned key-value store with transactions, leases and watches. It is a pure state machine: it reads
no clock, draws no random number and does no I/O, so the same operations with the same times give the same state,
answers and events on any machine. Time is an argument and never goes back (an earlier `now` counts as the latest one
seen). Expired leases end before the operation is executed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import cast

from sortedcontainers import SortedList

from rallypoint.kv import watches as watching
from rallypoint.kv.dedupe import Dedupe
from rallypoint.kv.leases import Lease, Leases
from rallypoint.kv.types import (
    Add,
    AddResult,
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
    Failure,
    FailureCode,
    Get,
    GotItem,
    GotRange,
    Grant,
    Item,
    KeepAlive,
    LeaseResult,
    ModRevisionIs,
    Op,
    Origin,
    Outcome,
    Put,
    PutDone,
    Range,
    RangeEmpty,
    Result,
    Revoke,
    Shorten,
    Tick,
    Ticked,
    Txn,
    TxnResult,
    ValueIs,
    VersionIs,
    WatchEvent,
    WatchStarted,
    WatchTooOld,
)
from rallypoint.kv.usage import Usage

DEFAULT_HISTORY = 100_000
LEAST_NUMBER, GREATEST_NUMBER = -(2**63), 2**63 - 1
MOST_DIGITS = 19


class Engine:
    """One store. `history` is the number of changes that a watch may lag behind before it has to scan again."""

    def __init__(self, history: int = DEFAULT_HISTORY, first: int = 1) -> None:
        self.revision = first
        self.now = float("-inf")
        self.items: dict[str, Item] = {}
        self.usage = Usage()
        self.leases = Leases(first)
        self.dedupe = Dedupe()
        self.history = watching.History(history, self.revision - 1)
        self._keys: SortedList[str] = SortedList()
        self._watches = watching.Watches()
        self._events: list[WatchEvent] = []

    # --- operations ---------------------------------------------------------------------------------------------------

    def apply(self, op: Op, now: float, origin: Origin | None = None) -> Outcome:
        """Execute one operation at time `now`. A request whose `origin` was executed before is only answered again."""
        if now > self.now:
            self.now = now
        else:
            now = self.now
        self._events = []
        expired = 0
        while (lease := self.leases.pop_expired(now)) is not None:
            self._end(lease)
            expired += 1
        result = self.dedupe.lookup(origin) if origin is not None else None
        if result is None:
            result = self._execute(op, now, expired)
            if origin is not None:
                self.dedupe.remember(origin, result)
        return Outcome(result, tuple(self._events)) if self._events else Outcome(result)

    def next_deadline(self) -> float | None:
        """When the next lease ends if none is renewed: apply `Tick` then. None: never."""
        return self.leases.next_deadline()

    def end_due(self, now: float) -> tuple[int, tuple[WatchEvent, ...]] | None:
        """End one expired lease, as the next `apply` would; its id and the events, or None if none has expired.

        For callers that have to know which leases expire: call it until None, then `apply` at the same `now`.
        """
        self.now = max(self.now, now)
        lease = self.leases.pop_expired(self.now)
        if lease is None:
            return None
        self._events = []
        self._end(lease)
        return lease.id, tuple(self._events)

    def watch(self, watch: int, prefix: str, after_revision: int) -> WatchStarted | WatchTooOld:
        """Report every change under `prefix` after a revision to `watch`. Watches are not part of the state.

        The revision may be past, 0 (for the whole history, while it is complete), or future.
        """
        return watching.start(self._watches, self.history, watch, prefix, after_revision, self.revision)

    def unwatch(self, watch: int) -> None:
        """End a watch; unknown watches are ignored."""
        self._watches.remove(watch)

    def _execute(self, op: Op, now: float, expired: int) -> Result:
        match op:
            case Txn():
                return self._txn(op)
            case Add():
                return self._add(op)
            case KeepAlive(lease_id):
                lease = self.leases.get(lease_id)
                if lease is None:
                    return LeaseResult(lease_id, 0.0, False)
                lease.deadline = now + lease.ttl_s
                return LeaseResult(lease_id, lease.ttl_s, True)
            case Grant(ttl_s, wanted):
                if not 0 < ttl_s < float("inf"):
                    return Failure(FailureCode.INVALID, f"a lease needs a positive time to live, not {ttl_s}")
                if wanted < 0 or self.leases.get(wanted) is not None:
                    return Failure(FailureCode.INVALID, f"{wanted} is not a free id for a lease")
                lease = self.leases.grant(float(ttl_s), now, wanted)
                return LeaseResult(lease.id, lease.ttl_s, True)
            case Revoke(lease_id):
                lease = self.leases.remove(lease_id)
                if lease is not None:
                    self._end(lease)
                return LeaseResult(lease_id, 0.0, False)
            case Shorten(lease_id, within_s):
                lease = self.leases.shorten(lease_id, now + max(0.0, within_s))
                return LeaseResult(lease_id, lease.ttl_s if lease else 0.0, lease is not None)
            case Tick():
                return Ticked(expired)

    # --- transactions -------------------------------------------------------------------------------------------------

    def _txn(self, op: Txn) -> Result:
        committed = self._hold(op.compares)
        branch = op.then if committed else op.otherwise or tuple(_reader(compare) for compare in op.compares)
        if len(branch) == 1 and type(only := branch[0]) is Put:  # the common case
            return self._put_alone(only, committed)
        if set(map(type, branch)) == _PUTS:  # a coordinator's writes
            return self._put_several(cast(tuple[Put, ...], branch), committed)
        if (failure := self._invalid(branch)) is not None:
            return failure
        changes: list[Change] = []
        results = tuple([self._do(step, self.revision + 1, changes) for step in branch])
        if changes:
            self._commit(tuple(changes))
        return TxnResult(committed, self.revision, results)

    def _put_alone(self, put: Put, committed: bool) -> Result:
        """A branch with one `Put` and nothing else."""
        old = self.items.get(put.key)
        is_new = old is None or old.lease != put.lease  # else key and lease are valid
        if is_new and (failure := self._invalid_put(put.key, put.lease)) is not None:
            return failure
        self._commit((self._put(put.key, put.value, put.lease, self.revision + 1),))
        return TxnResult(committed, self.revision, _ONE_PUT_DONE)

    def _put_several(self, puts: tuple[Put, ...], committed: bool) -> Result:
        """A branch with several `Put`s and nothing else."""
        keys, leases = {put.key for put in puts}, {put.lease for put in puts}
        leases.discard(0)
        if len(keys) < len(puts) or "" in keys or not self.leases.are_alive(leases):
            failure = self._invalid(puts)
            assert failure is not None
            return failure
        items, revision, changes = self.items, self.revision + 1, []
        for put in puts:
            key = put.key
            if key in items:
                changes.append(self._put(key, put.value, put.lease, revision))
                continue
            items[key] = item = Item(key, put.value, revision, revision, 1, put.lease)  # as in `_put`
            changes.append(Change(key, item))
            self._keys.add(key)
            self.usage.change(key, 1, len(key) + len(put.value))
            if put.lease:
                self.leases.attach(put.lease, key)
        self._commit(tuple(changes))
        return TxnResult(committed, revision, _ONE_PUT_DONE * len(puts))

    def _add(self, op: Add) -> Result:
        if not self._hold(op.compares):
            return AddResult(False, self.revision, 0)
        item = self.items.get(op.key)
        number = _number(item.value) if item is not None else 0
        if number is None:
            return Failure(FailureCode.NOT_A_NUMBER, f"the value of {op.key!r} is not a decimal number")
        value = number + op.amount
        if not LEAST_NUMBER <= value <= GREATEST_NUMBER:
            return Failure(FailureCode.INVALID, f"the sum under {op.key!r} would not fit into 64 bits")
        is_new = item is None or item.lease != op.lease
        if is_new and (failure := self._invalid_put(op.key, op.lease)) is not None:
            return failure
        self._commit((self._put(op.key, b"%d" % value, op.lease, self.revision + 1),))
        return AddResult(True, self.revision, value)

    def _hold(self, compares: tuple[Compare, ...]) -> bool:
        for compare in compares:  # noqa: SIM110 - a generator is slower
            if not self._holds(compare):
                return False
        return True

    def _holds(self, compare: Compare) -> bool:
        if isinstance(compare, RangeEmpty):
            return next(self._range(compare.prefix), None) is None
        item = self.items.get(compare.key)
        if isinstance(compare, ModRevisionIs):  # the most common compare
            return (item.mod_revision if item else 0) == compare.revision
        if isinstance(compare, ValueIs):
            return item is not None and item.value == compare.value
        match compare:
            case CreateRevisionIs():
                return (item.create_revision if item else 0) == compare.revision
            case Exists():
                return (item is not None) == compare.wanted
            case VersionIs():
                return (item.version if item else 0) == compare.version

    def _invalid(self, branch: tuple[BranchOp, ...]) -> Failure | None:
        """Why a branch must not be executed: an ended lease, a key that is written twice, or an invalid argument.

        A branch that passes this check cannot fail, so it is executed as a whole or not at all.
        """
        written: set[str] = set()
        cleared: list[str] = []
        alive = 0
        for step in branch:
            if isinstance(step, Put) and (not step.key or step.lease != alive):  # a lease is checked once in a row
                if (failure := self._invalid_put(step.key, step.lease)) is not None:
                    return failure
                alive = step.lease
            if isinstance(step, (Put, Delete)):
                if step.key in written:
                    return Failure(FailureCode.INVALID, f"{step.key!r} is written twice in one transaction")
                written.add(step.key)
            elif isinstance(step, DeleteRange):
                cleared.append(step.prefix)
            elif isinstance(step, Range) and step.limit < 0:
                return Failure(FailureCode.INVALID, f"a range cannot be limited to {step.limit} keys")
        for prefix in cleared:
            if any(key.startswith(prefix) for key in written):
                return Failure(FailureCode.INVALID, f"keys under {prefix!r} are written twice in one transaction")
        return None

    def _invalid_put(self, key: str, lease: int) -> Failure | None:
        if lease and self.leases.get(lease) is None:
            return Failure(FailureCode.LEASE_GONE, f"lease {lease} of {key!r} has ended", lease)
        if not key:
            return Failure(FailureCode.INVALID, "an empty key cannot be written")
        return None

    def _do(self, step: BranchOp, revision: int, changes: list[Change]) -> BranchResult:
        match step:
            case Put():
                changes.append(self._put(step.key, step.value, step.lease, revision))
                return _PUT_DONE
            case Get(key):
                return GotItem(self.items.get(key))
            case Range(prefix, limit, count_only):
                if count_only:
                    return GotRange((), self._count(prefix))
                if limit:
                    count = self._count(prefix)
                    keys = islice(self._range(prefix), min(limit, count))
                    return GotRange(tuple([self.items[key] for key in keys]), count)
                items = tuple([self.items[key] for key in self._range(prefix)])
                return GotRange(items, len(items))
            case Delete(key):
                return Deleted(self._delete([key], changes))
            case DeleteRange(prefix):
                return Deleted(self._delete(list(self._range(prefix)), changes))

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _put(self, key: str, value: bytes, lease: int, revision: int) -> Change:
        old = self.items.get(key)
        if old is None:
            item = Item(key, value, revision, revision, 1, lease)
            self._keys.add(key)
            self.usage.change(key, 1, len(key) + len(value))
        else:
            item = Item(key, value, old.create_revision, revision, old.version + 1, lease)
            if old.lease and old.lease != lease:
                self._detach(old)
            if len(value) != len(old.value):
                self.usage.change(key, 0, len(value) - len(old.value))
        if lease and (old is None or old.lease != lease):
            found = self.leases.get(lease)
            assert found is not None, "checked before the first change"
            found.keys.add(key)
        self.items[key] = item
        return Change(key, item)

    def _delete(self, keys: Iterable[str], changes: list[Change]) -> int:
        count = 0
        for key in keys:
            item = self.items.pop(key, None)
            if item is not None:
                self._keys.remove(key)
                self.usage.change(key, -1, -len(key) - len(item.value))
                self._detach(item)
                changes.append(Change(key, None))
                count += 1
        return count

    def _detach(self, item: Item) -> None:
        lease = self.leases.get(item.lease) if item.lease else None
        if lease is not None:
            lease.keys.discard(item.key)

    def _range(self, prefix: str) -> Iterator[str]:
        """The keys under a prefix in order, lazily."""
        return self._keys.irange(prefix, _end_of(prefix), inclusive=(True, False))

    def _count(self, prefix: str) -> int:
        """The number of keys under a prefix, in O(log n)."""
        end = _end_of(prefix)
        upto = len(self._keys) if end is None else self._keys.bisect_left(end)
        return upto - self._keys.bisect_left(prefix)

    def _commit(self, changes: tuple[Change, ...]) -> None:
        """Make one revision of the changes and collect the events of the watches."""
        self.revision += 1
        batch = Batch(self.revision, changes)
        self.history.append(batch)
        self._events += self._watches.events(batch)

    # --- leases -------------------------------------------------------------------------------------------------------

    def _end(self, lease: Lease) -> None:
        """Remove the keys of an ended lease, in one revision."""
        changes: list[Change] = []
        self._delete(sorted(lease.keys), changes)
        if changes:
            self._commit(tuple(changes))

    def adopt(self, item: Item) -> None:
        """Add a key from a snapshot: no revision, no event."""
        self.items[item.key] = item
        self._keys.add(item.key)
        self.usage.change(item.key, 1, len(item.key) + len(item.value))

    def adopt_all(self, items: Iterable[Item]) -> None:
        """Add many keys from a snapshot, much faster than one by one."""
        for item in items:
            self.items[item.key] = item
            self.usage.change(item.key, 1, len(item.key) + len(item.value))
        self._keys.update(self.items.keys() - set(self._keys))


_PUTS = {Put}
_PUT_DONE = PutDone()
_ONE_PUT_DONE = (_PUT_DONE,)


def _end_of(prefix: str) -> str | None:
    """The first string after all strings that start with `prefix`; None: there is none."""
    stem = prefix.rstrip(chr(sys.maxunicode))
    return stem[:-1] + chr(ord(stem[-1]) + 1) if stem else None


def _number(text: bytes) -> int | None:
    """The number in a value; None if it is none. Stricter than `int`, which accepts blanks and underscores."""
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > MOST_DIGITS:
        return None
    number = int(text)
    return number if LEAST_NUMBER <= number <= GREATEST_NUMBER else None


def _reader(compare: Compare) -> BranchOp:
    """The read that shows why a compare failed."""
    return Range(compare.prefix, limit=1) if isinstance(compare, RangeEmpty) else Get(compare.key)
