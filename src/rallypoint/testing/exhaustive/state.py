"""The values of a tiny world: the budget of faults, the setup, the state."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

from rallypoint.kv.types import Batch, Op
from rallypoint.testing.exhaustive import checker_state as checker_states
from rallypoint.testing.exhaustive.checker_state import CheckerState
from rallypoint.testing.exhaustive.store_model import StoreState
from rallypoint.testing.exhaustive.symbolic import (
    rename_answer,
    rename_item,
    rename_op,
    revisions_compared,
    revisions_in,
)

Choice: TypeAlias = tuple[Any, ...]
"""One possible next event: (kind, process, …)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each fault may happen."""

    crash: int = 0
    """A node dies."""
    expire: int = 0
    """A living node's session ends, and it is told later."""
    cut: int = 0
    """A living node counts its session as lost before the store does."""
    take_over: int = 0
    """A coordinator dies, or its session ends while it lives."""
    leave: int = 0
    """A member re-joins without being told of a change."""
    depart: int = 0
    """A node leaves for good."""
    close: int = 0
    reopen: int = 0
    slow: int = 0
    """Time passes for a process while messages are pending."""
    late: int = 0
    """A write is executed and its answer arrives later."""
    unknown: int = 0
    """A write's answer is lost, whether it was executed or not."""
    ghost: int = 0
    """A write whose answer was lost, or whose sender died, is executed later."""

    def spend(self, name: str) -> Budget:
        """The budget with one less of this fault."""
        return replace(self, **{name: getattr(self, name) - 1})


@dataclass(frozen=True, slots=True)
class Setup:
    """One world to explore."""

    name: str
    nodes: int = 2
    min_nodes: int = 2
    max_nodes: int = 2
    joins: int = 2
    """How often a node may call `next_round`."""
    budget: Budget = Budget()
    elected: bool = False
    """The nodes elect the coordinator among themselves; else coordinators are separate processes."""
    creates_run: bool = False
    """The nodes create the run; else it exists at the start."""
    max_txn_ops: int = 128
    begin: str = "nothing"
    """Where the choices start: at `nothing`, or in the fault-free state in which all nodes have `joined`, a round is
    `forming`, or all nodes are in an `active` round."""

    def description(self) -> str:
        """Nodes, sizes and faults."""
        same = self.min_nodes == self.max_nodes
        sizes = f"min=max={self.min_nodes}" if same else f"min {self.min_nodes} / max {self.max_nodes}"
        parts = [f"{self.nodes} nodes", sizes]
        for field in fields(Budget):
            count = getattr(self.budget, field.name)
            if count:
                parts.append(f"{count} {field.name.replace('_', '-')}")
        if self.elected:
            parts.append("elected coordinator")
        if self.creates_run:
            parts.append("run not created")
        if self.max_txn_ops != Setup.__dataclass_fields__["max_txn_ops"].default:
            parts.append(f"{self.max_txn_ops} operations a transaction")
        if self.begin != "nothing":
            parts.append(f"from {self.begin} on")
        return ", ".join(parts)


class Proc(NamedTuple):
    """A process in the world. `local` is its state; -1: it is dead."""

    local: int
    binding: tuple[int, ...] = ()
    queues: tuple[tuple[Batch, ...], ...] = ()
    """For each watch its undelivered batches."""
    answers: tuple[tuple[int, Any], ...] = ()
    """Requests that were executed but not answered yet: index and answer."""
    grants: tuple[int, int] = (0, 0)
    """The number of sessions and of other leases that it has requested."""
    joins: int = 0


class State(NamedTuple):
    """The whole world."""

    store: StoreState
    procs: tuple[Proc, ...]
    ghosts: tuple[tuple[int, Op], ...]
    """Pending writes of dead or impatient senders: sender and operation."""
    budget: Budget
    checker_state: CheckerState
    revision: int = 1
    """The current revision of the store."""

    def with_proc(self, index: int, proc: Proc) -> State:
        procs = (*self.procs[:index], proc, *self.procs[index + 1 :])
        return State(self.store, procs, self.ghosts, self.budget, self.checker_state, self.revision)

    def with_changes(self, index: int, **changes: Any) -> State:
        return self.with_proc(index, self.procs[index]._replace(**changes))

    def spend(self, name: str) -> State:
        return self._replace(budget=self.budget.spend(name))

    def compressed(self) -> State:
        """The same state with its revisions renumbered from 1: only their order matters."""
        used = sorted(self._revisions())
        revision = max(1, len(used))
        if revision == self.revision and (not used or used[-1] == revision):
            return self
        to = dict(zip(used, range(1, len(used) + 1), strict=True)).__getitem__
        items = tuple([rename_item(item, to) for item in self.store.items])
        procs = tuple(
            [
                Proc(
                    proc.local,
                    tuple([to(at) for at in proc.binding]),
                    rename_answer(proc.queues, to) if any(proc.queues) else proc.queues,
                    tuple([(place, rename_answer(answer, to)) for place, answer in proc.answers]),
                    proc.grants,
                    proc.joins,
                )
                for proc in self.procs
            ]
        )
        ghosts = tuple([(index, rename_op(op, to)) for index, op in self.ghosts])
        checker_state = checker_states.renamed(self.checker_state, to)
        return State(StoreState(items, self.store.leases), procs, ghosts, self.budget, checker_state, revision)

    def _revisions(self) -> set[int]:
        used: set[int] = set()
        for item in self.store.items:
            used.add(item.create_revision)
            used.add(item.mod_revision)
        for proc in self.procs:
            used.update(proc.binding)
            for queue in proc.queues:
                for batch in queue:
                    revisions_in(batch, used)
            if proc.answers:
                revisions_in(proc.answers, used)
        for _, op in self.ghosts:
            revisions_compared(op, used)
        used.update(checker_states.revisions(self.checker_state))
        used.discard(0)
        return used
