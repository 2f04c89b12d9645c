"""The coordinator's writes: each one compares its term and the `state/round` that it was decided on.

A coordinator whose session has ended, and one whose view is old, cannot commit anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rallypoint._marks import mark
from rallypoint.backends.contract import Backend
from rallypoint.errors import LeaseGone
from rallypoint.kv.types import BranchOp, Compare, CreateRevisionIs, DeleteRange, GotItem, ModRevisionIs, Put, TxnResult
from rallypoint.rendezvous.keys import RunKeys

OTHER_COMPARES = 3
"""Whoever writes `state/round` compares the term, `state/round` and `state/closed` anyway."""


class Deposed(Exception):
    """Another term has begun, or none: this coordinator must not write any more."""


class LookAgain(Exception):
    """The view was old: scan and decide again."""


@dataclass(slots=True)
class Writes:
    """Writes in the order in which they must happen; `marker` is the index of that of `state/round` among them."""

    ops: list[Put | DeleteRange] = field(default_factory=list)
    marker: int = 0
    compares: list[Compare] = field(default_factory=list)
    """What the marker's transaction compares beside that which all do."""


class FencedWriter:
    """Writes for one term. Every method raises `Deposed` or `LookAgain` instead of committing on an old view."""

    def __init__(self, backend: Backend, keys: RunKeys, term: int) -> None:
        self._backend = backend
        self._keys = keys
        self._term = term

    async def write(self, round_revision: int, ops: Sequence[BranchOp], compares: Sequence[Compare] = ()) -> TxnResult:
        """One transaction on top of the `state/round` of that revision."""
        fence = (
            CreateRevisionIs(self._keys.coordinator, self._term),
            ModRevisionIs(self._keys.round, round_revision),
        )
        try:
            result = await self._backend.txn((*fence, *compares), ops)
        except LeaseGone as error:
            mark("fenced_writer.lease_gone")
            raise LookAgain from error  # a node, or the whole run, has just gone
        if result.committed:
            return result
        holder = result.results[0]
        assert isinstance(holder, GotItem)
        if holder.item is None or holder.item.create_revision != self._term:
            mark("fenced_writer.refused_by_term")
            raise Deposed("a write was refused by the fence: its session had ended")
        mark("fenced_writer.refused_by_view")
        raise LookAgain

    async def write_round(
        self,
        round_revision: int,
        closed_revision: int,
        writes: Writes,
        on_marker: Callable[[int], None],
    ) -> None:
        """All writes in order, in as few transactions as the backend's limits allow.

        Up to the marker they compare the `state/round` that was decided on, after it the one that the marker wrote;
        the marker's transaction also compares `state/closed` and what the writes name. `on_marker` is called when it is
        committed, with its revision. If an outcome is unknown the error goes to the caller, who scans again: an attempt
        that turns out to be there is then nobody's plan, and the next one takes a new number.
        """
        closed = ModRevisionIs(self._keys.closed, closed_revision)
        for start, end in self._packed(writes):
            has_marker = start <= writes.marker < end
            extra = (closed, *writes.compares) if has_marker else ()
            result = await self.write(round_revision, writes.ops[start:end], extra)
            if has_marker:
                round_revision = result.revision
                on_marker(round_revision)

    def _packed(self, writes: Writes) -> list[tuple[int, int]]:
        """Consecutive slices that fit into one transaction each; what follows the marker directly stays with it."""
        limits = self._backend.limits
        whole = sum([len(op.value) for op in writes.ops if type(op) is Put])
        if whole <= limits.max_txn_bytes and len(writes.ops) < limits.max_txn_ops:
            return [(0, len(writes.ops))]
        slices: list[tuple[int, int]] = []
        start = size = 0
        for index, op in enumerate(writes.ops):
            op_size = len(op.value) if isinstance(op, Put) else 0
            too_big = size + op_size > limits.max_txn_bytes or index - start >= limits.max_txn_ops - 1
            if index > start and too_big and index != writes.marker + 1:
                slices.append((start, index))
                start, size = index, 0
            size += op_size
        slices.append((start, len(writes.ops)))
        if len(slices) > 1:
            mark("fenced_writer.split")
        return slices
