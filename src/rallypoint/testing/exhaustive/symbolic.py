"""Symbolic revisions and instants: only the order of revisions and the distances of instants matter.

The real code holds revisions and times in many places. Here they are `Rev`, whose number may be replaced while the code
holds it, as long as the order stays the same, and `Moment`, which remains one under addition and subtraction, so that a
fingerprint can distinguish "7 s ago" from the number 7. Two states that differ only in the number of used revisions, or
in the time, have equal fingerprints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from rallypoint.kv.types import (
    Add,
    AddResult,
    Batch,
    Change,
    CreateRevisionIs,
    GotItem,
    GotRange,
    Item,
    ModRevisionIs,
    Txn,
    TxnResult,
)

FAR_S = 100_000.0
"""Later timers never fire here."""

Rename: TypeAlias = Callable[[int], int]


class Rev(int):
    """A revision inside a process. Compares by `at`, which may be replaced."""

    at: int

    def __new__(cls, at: int) -> Rev:
        made = super().__new__(cls, 1)
        made.at = at
        return made

    def __eq__(self, other: object) -> bool:
        return self.at == (other.at if isinstance(other, Rev) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: int) -> bool:
        return self.at < number(other)

    def __le__(self, other: int) -> bool:
        return self.at <= number(other)

    def __gt__(self, other: int) -> bool:
        return self.at > number(other)

    def __ge__(self, other: int) -> bool:
        return self.at >= number(other)

    def __hash__(self) -> int:
        raise TypeError("a symbolic revision has no hash: its number may change")

    def __repr__(self) -> str:
        return f"Rev({self.at})"


def number(revision: int) -> int:
    """The plain number."""
    return revision.at if isinstance(revision, Rev) else revision


class Moment(float):
    """An instant of a process's own clock."""

    def __add__(self, other: float) -> Moment:
        return Moment(float(self) + float(other))

    __radd__ = __add__

    def __sub__(self, other: float) -> Any:
        difference = float(self) - float(other)
        return difference if isinstance(other, Moment) else Moment(difference)


# --- renaming of revisions in items, answers and requests -------------------------------------------------------------


def rename_item(item: Item, to: Rename) -> Item:
    """The item with its revisions renamed. Zero, a blank revision, stays."""
    created, modified = item.create_revision, item.mod_revision
    if not modified:
        return item
    return Item(item.key, item.value, to(created) if created else 0, to(modified), item.version, item.lease)


def rename_answer(answer: Any, to: Rename) -> Any:
    """An answer of the engine, or batches of a watch, or anything without revisions."""
    kind = type(answer)
    if kind is tuple:
        return tuple([rename_answer(part, to) for part in answer])
    if kind is Batch:
        changes = [c if c.item is None else Change(c.key, rename_item(c.item, to)) for c in answer.changes]
        return Batch(answer.revision, tuple(changes))
    if kind is TxnResult:
        results = tuple([rename_answer(result, to) for result in answer.results])
        return TxnResult(answer.committed, to(answer.revision) if answer.revision else 0, results)
    if kind is GotItem:
        return answer if answer.item is None else GotItem(rename_item(answer.item, to))
    if kind is GotRange:
        return GotRange(tuple([rename_item(item, to) for item in answer.items]), answer.count)
    if kind is AddResult:
        return AddResult(answer.committed, to(answer.revision) if answer.revision else 0, answer.value)
    return answer


def rename_op(op: Any, to: Rename) -> Any:
    """A request with its compared revisions renamed. Zero, which means "absent", stays."""
    match op:
        case Txn():
            return Txn(tuple([_rename_compare(compare, to) for compare in op.compares]), op.then, op.otherwise)
        case Add():
            compares = tuple([_rename_compare(compare, to) for compare in op.compares])
            return Add(op.key, op.amount, op.lease, compares)
        case _:
            return op


def _rename_compare(compare: Any, to: Rename) -> Any:
    if isinstance(compare, ModRevisionIs | CreateRevisionIs) and number(compare.revision) != 0:
        return type(compare)(compare.key, to(compare.revision))
    return compare


def revisions_in(answer: Any, found: set[int]) -> None:
    """Add all revisions that `rename_answer` would rename."""
    kind = type(answer)
    if kind is tuple:
        for part in answer:
            revisions_in(part, found)
    elif kind is Batch:
        for change in answer.changes:
            if change.item is not None:
                found.add(change.item.mod_revision)
                found.add(change.item.create_revision)
    elif kind is TxnResult:
        found.add(answer.revision)
        for result in answer.results:
            revisions_in(result, found)
    elif kind is GotItem:
        if answer.item is not None:
            found.add(answer.item.mod_revision)
            found.add(answer.item.create_revision)
    elif kind is GotRange:
        for item in answer.items:
            found.add(item.mod_revision)
            found.add(item.create_revision)
    elif kind is AddResult:
        found.add(answer.revision)


def revisions_compared(op: Any, found: set[int]) -> None:
    """Add all revisions that `rename_op` would rename."""
    for compare in getattr(op, "compares", ()):
        if isinstance(compare, ModRevisionIs | CreateRevisionIs):
            found.add(compare.revision)
