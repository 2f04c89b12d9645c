"""The words of a tiny world, all of them values: what may happen how often, the setup, the state."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

from rallypoint.kv.types import Batch, Op
from rallypoint.testing.exhaustive import ledger as ledgers
from rallypoint.testing.exhaustive.ledger import Ledger
from rallypoint.testing.exhaustive.server import Server
from rallypoint.testing.exhaustive.symbols import (
    rename_answer,
    rename_item,
    rename_op,
    revisions_compared,
    revisions_in,
)

Choice: TypeAlias = tuple[Any, ...]
"""One thing that may happen next: (kind, process, …)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each of these may happen."""

    crash: int = 0
    """A node dies."""
    expire: int = 0
    """A living node's session ends, and it is told later."""
    cut: int = 0
    """A living node counts its session as lost before the store does."""
    take_over: int = 0
    """A coordinator dies, or its session ends while it lives."""
    leave: int = 0
    """A member re-joins though nobody told it to."""
    depart: int = 0
    """A node leaves for good."""
    close: int = 0
    reopen: int = 0
    slow: int = 0
    """Time passes for a process while something is still under way."""
    late: int = 0
    """A write is executed and its answer comes later."""
    unknown: int = 0
    """A write's answer is lost, whether it was executed or not."""
    ghost: int = 0
    """A write whose answer was lost, or whose sender died, is executed some time later."""

    def spend(self, name: str) -> Budget:
        """One less of it."""
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
    """The nodes elect the coordinator among themselves; else it is a process of its own."""
    door: bool = False
    """Making the run is left to choice as well; else the run exists."""
    max_txn_ops: int = 128
    begin: str = "nothing"
    """Where the choices begin: with nothing, or in a fair world that has come to all nodes having `joined`, to a round
    that is `forming`, or to all being in an `active` one."""

    def sentence(self) -> str:
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
        if self.door:
            parts.append("open door")
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
    """For each watch what it has not been given yet."""
    answers: tuple[tuple[int, Any], ...] = ()
    """Requests that were executed and not yet answered: place and answer."""
    grants: tuple[int, int] = (0, 0)
    """How many sessions and other leases it has asked for."""
    joins: int = 0


class State(NamedTuple):
    """The whole world."""

    server: Server
    procs: tuple[Proc, ...]
    ghosts: tuple[tuple[int, Op], ...]
    """Writes that will be executed some time, and whose they are."""
    budget: Budget
    ledger: Ledger
    revision: int = 1
    """The one that the store is at."""

    def with_proc(self, index: int, proc: Proc) -> State:
        procs = (*self.procs[:index], proc, *self.procs[index + 1 :])
        return State(self.server, procs, self.ghosts, self.budget, self.ledger, self.revision)

    def with_changes(self, index: int, **changes: Any) -> State:
        return self.with_proc(index, self.procs[index]._replace(**changes))

    def spend(self, name: str) -> State:
        return self._replace(budget=self.budget.spend(name))

    def compressed(self) -> State:
        """The same with its revisions numbered from 1: only their order counts."""
        used = sorted(self._revisions())
        revision = max(1, len(used))
        if revision == self.revision and (not used or used[-1] == revision):
            return self
        to = dict(zip(used, range(1, len(used) + 1), strict=True)).__getitem__
        items = tuple([rename_item(item, to) for item in self.server.items])
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
        ledger = ledgers.renamed(self.ledger, to)
        return State(Server(items, self.server.leases), procs, ghosts, self.budget, ledger, revision)

    def _revisions(self) -> set[int]:
        used: set[int] = set()
        for item in self.server.items:
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
        used.update(ledgers.revisions(self.ledger))
        used.discard(0)
        return used
