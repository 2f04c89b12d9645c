"""Lists the runs of a backend, from the index key that every run has while it lives and a few keys of each run.

Costs one scan of the index and five small reads for each run, whatever the size of the runs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from rallypoint.backends.contract import Backend
from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import BranchOp, BranchResult, Get, GotItem, GotRange, Range
from rallypoint.rendezvous.keys import RunKeys, run_of_entry, runs_index
from rallypoint.rendezvous.records import (
    ClosedRecord,
    ConfigRecord,
    Record,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
)

READS = 5
"""The number of reads for one run."""

R = TypeVar("R", bound=Record)


class RunState(enum.Enum):
    """The state of a listed run."""

    GATHERING = "gathering"
    FORMING = "forming"
    ACTIVE = "active"
    CLOSED = "closed"
    UNREADABLE = "unreadable"


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `round` is the number of the current attempt or round, or 0; `nodes` counts the nodes in any role."""

    run_id: str
    phase: RunState
    nodes: int
    round: int
    size: int
    min_nodes: int
    max_nodes: int
    is_closed: bool
    started_by: str
    reason: str


async def list_runs(backend: Backend, prefix: str) -> list[RunSummary]:
    """All runs of the backend, sorted by id. Raises the backend's errors."""
    entries = (await backend.scan(runs_index(prefix))).items
    runs = [RunKeys(prefix, run_of_entry(prefix, item.key)) for item in entries]
    at_once = max(1, backend.limits.max_txn_ops // READS)
    found = []
    for start in range(0, len(runs), at_once):
        part = runs[start : start + at_once]
        reads: list[BranchOp] = []
        for keys in part:
            reads += [Get(keys.config), Get(keys.round), Get(keys.waiting), Get(keys.closed)]
            reads.append(Range(keys.nodes, count_only=True))
        results = (await backend.txn((), reads)).results
        for index, keys in enumerate(part):
            summary = _summary(keys, results[index * READS : (index + 1) * READS])
            if summary is not None:
                found.append(summary)
    return sorted(found, key=lambda run: run.run_id)


def _summary(keys: RunKeys, results: Sequence[BranchResult]) -> RunSummary | None:
    """A run from the results of its reads. None if it has ended since the scan."""
    counted = results[4]
    assert isinstance(counted, GotRange)
    try:
        config = _read(ConfigRecord, results[0])
        record, told = _read(RoundRecord, results[1]), _read(WaitingRecord, results[2])
        closed = _read(ClosedRecord, results[3])
    except RendezvousStateError as error:
        return RunSummary(
            run_id=keys.run_id, phase=RunState.UNREADABLE, nodes=counted.count, round=0, size=0, min_nodes=0,
            max_nodes=0, is_closed=False, started_by="", reason=str(error),
        )  # fmt: skip
    if config is None:
        return None
    is_closed = closed is not None and closed.closed
    reason = told.reason if told is not None and told.number == (record.number if record else 0) else ""
    return RunSummary(
        run_id=keys.run_id,
        phase=_phase(record, is_closed, counted.count),
        nodes=counted.count,
        round=record.number if record else 0,
        size=record.size if record else 0,
        min_nodes=int(config.shared.get("min_nodes", 0)),
        max_nodes=int(config.shared.get("max_nodes", 0)),
        is_closed=is_closed,
        started_by=config.by,
        reason=reason,
    )


def _phase(record: RoundRecord | None, is_closed: bool, nodes: int) -> RunState:
    """The state, as far as it follows without reading the nodes; `reason` has the rest."""
    if is_closed and not nodes:
        return RunState.CLOSED
    if record is None or not nodes:
        return RunState.GATHERING
    if record.phase is RoundPhase.FORMING:
        return RunState.FORMING
    return RunState.ACTIVE


def _read(kind: type[R], result: BranchResult) -> R | None:
    assert isinstance(result, GotItem)
    return None if result.item is None else decode(kind, result.item)
