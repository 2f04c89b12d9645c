"""The store as a value: its keys and leases, changed by the real engine, one operation at a time."""

from __future__ import annotations

from typing import NamedTuple

from rallypoint.kv.engine import Engine
from rallypoint.kv.leases import Lease
from rallypoint.kv.types import (
    Add,
    Batch,
    BranchResult,
    Change,
    CreateRevisionIs,
    Delete,
    DeleteRange,
    GotItem,
    GotRange,
    Grant,
    Item,
    Op,
    Put,
    Result,
    Revoke,
    Txn,
    TxnResult,
    VersionIs,
)
from rallypoint.rendezvous.keys import RunKeys

FOREVER_S = 1e12


class StoreState(NamedTuple):
    """The keys in order, and the living leases.

    Fields that the algorithm never compares are blank, so that they make no states different: versions, create
    revisions except that of `coordinator`, all revisions of data keys. `StoreModel` refuses compares on them.
    """

    items: tuple[Item, ...] = ()
    leases: tuple[int, ...] = ()


class Applied(NamedTuple):
    """The result of an operation: the store afterwards, the answer, and the events of the watches."""

    store: StoreState
    answer: Result
    events: tuple[tuple[int, Batch], ...]
    """Watch (its index among the given ones) and batch."""


def is_write(op: Op) -> bool:
    """Whether the operation could change a key."""
    match op:
        case Txn():
            return any(isinstance(step, Put | Delete | DeleteRange) for step in op.then)
        case _:
            return isinstance(op, Add | Revoke)


class StoreModel:
    """Applies operations to store values. Caches the results."""

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys
        self._known: dict[tuple[StoreState, int, Op, int, tuple[str, ...]], Applied] = {}

    def apply(self, store: StoreState, revision: int, op: Op, lease: int, watches: tuple[str, ...]) -> Applied:
        """Execute on a store at `revision`; a granted lease gets the id `lease`."""
        key = (store, revision, op, lease, watches)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._apply(*key)
        return found

    def _apply(self, store: StoreState, revision: int, op: Op, lease: int, watches: tuple[str, ...]) -> Applied:
        engine = Engine()
        engine.revision = revision
        for item in store.items:
            engine.adopt(item)
        for lease_id in store.leases:
            held = {item.key for item in store.items if item.lease == lease_id}
            engine.leases.insert(Lease(lease_id, FOREVER_S, FOREVER_S, held))
        for number, prefix in enumerate(watches):
            engine.watch(number, prefix, revision)
        engine.leases.next_id = lease
        outcome = engine.apply(self._prepared(op), 0.0)
        items = tuple([self._blanked(engine.items[key]) for key in sorted(engine.items)])
        leases = tuple(sorted(lease.id for lease in engine.leases))
        events = tuple((event.watch, self._event_batch(event.batch)) for event in outcome.events)
        return Applied(StoreState(items, leases), self._answer(outcome.result, is_write(op)), events)

    def _prepared(self, op: Op) -> Op:
        if isinstance(op, Grant):
            return Grant(FOREVER_S)
        if not isinstance(op, Txn):
            return op
        for compare in op.compares:
            blank = isinstance(compare, VersionIs) or getattr(compare, "key", "").startswith(self._keys.data)
            if blank or (isinstance(compare, CreateRevisionIs) and compare.key != self._keys.coordinator):
                raise NotImplementedError(f"{compare} uses a blank field: do not blank it, now that it is compared")
        return op

    def _blanked(self, item: Item) -> Item:
        if item.key.startswith(self._keys.data):
            return Item(item.key, item.value, 0, 0, 1, item.lease)
        created = item.create_revision if item.key == self._keys.coordinator else 0
        return Item(item.key, item.value, created, item.mod_revision, 1, item.lease)

    def _event_batch(self, batch: Batch) -> Batch:
        """Batches without their revision: only the revisions of their items are used."""
        changes = [c if c.item is None else Change(c.key, self._blanked(c.item)) for c in batch.changes]
        return Batch(0, tuple(changes))

    def _answer(self, answer: Result, was_write: bool) -> Result:
        """Answers to reads without their revision: it is only used to start a watch."""
        if not isinstance(answer, TxnResult):
            return answer
        results: list[BranchResult] = []
        for result in answer.results:
            match result:
                case GotItem(item) if item is not None:
                    results.append(GotItem(self._blanked(item)))
                case GotRange(items, count):
                    results.append(GotRange(tuple([self._blanked(item) for item in items]), count))
                case _:
                    results.append(result)
        revision = answer.revision if was_write and answer.committed else 0
        return TxnResult(answer.committed, revision, tuple(results))
