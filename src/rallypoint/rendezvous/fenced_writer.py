"""The coordinator's writes. Each compares its term and the `state/round` that it was decided on (rule 3).

So a coordinator whose session has ended (Fencing), or whose view is out of date, cannot commit anything. Nothing that a
coordinator writes may go past this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint._marks import mark
from rallypoint.backends.contract import Backend
from rallypoint.errors import LeaseGone
from rallypoint.kv.types import BranchOp, Compare, CreateRevisionIs, GotItem, ModRevisionIs, Put, TxnResult
from rallypoint.rendezvous.attempt import Writes
from rallypoint.rendezvous.keys import RunKeys

OTHER_COMPARES = 3
"""Every write of `state/round` compares the term, `state/round` and `state/closed`; the rest of the limit is free."""


class Deposed(Exception):
    """The `coordinator` key is gone or of another term: this coordinator must stop."""


class LookAgain(Exception):
    """The view was out of date: scan and decide again."""


class FencedWriter:
    """Writes for one term. Every method raises `Deposed` or `LookAgain` instead of committing an outdated decision."""

    def __init__(self, backend: Backend, keys: RunKeys, term: int) -> None:
        self._backend = backend
        self._keys = keys
        self._term = term

    async def write(self, round_revision: int, ops: Sequence[BranchOp], compares: Sequence[Compare] = ()) -> TxnResult:
        """One transaction, refused unless `state/round` has the revision `round_revision` and the term is current."""
        fence = (
            CreateRevisionIs(self._keys.coordinator, self._term),
            ModRevisionIs(self._keys.round, round_revision),
        )
        try:
            result = await self._backend.txn((*fence, *compares), ops)
        except LeaseGone as error:
            mark("fenced_writer.lease_gone")
            raise LookAgain from error  # a node's session, or the lease of the whole run, has just ended
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
        """All writes in order, in as few transactions as the backend's limits allow (rule 10).

        Transactions up to the marker compare the `state/round` that was decided on, later ones the `state/round` that
        the marker wrote. The marker's transaction also compares `state/closed` (rule 7) and `writes.compares`.
        `on_marker` is called with its revision when it is committed. An unknown outcome is raised to the caller, which
        scans again: if the attempt was committed after all, it belongs to no plan, and the next one takes a new number.
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
        """Slices (start, end) that fit into one transaction each. The op right after the marker stays with it."""
        limits = self._backend.limits
        total_bytes = sum([len(op.value) for op in writes.ops if type(op) is Put])
        if total_bytes <= limits.max_txn_bytes and len(writes.ops) < limits.max_txn_ops:
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
