"""Lists the runs of a backend, from the index key that every run has while it lives and a few keys of each run.

Costs one scan of the index and five small reads for each run, whatever the size of the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from rallypoint.backends.contract import Backend
from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import BranchOp, BranchResult, Get, GotItem, GotRange, Range
from rallypoint.observe.phase import Phase, Tone, phase_of, reason_of
from rallypoint.rendezvous.keys import RunKeys, run_of_entry, runs_index
from rallypoint.rendezvous.records import (
    ClosedRecord,
    ConfigRecord,
    Record,
    RoundRecord,
    WaitingRecord,
    decode,
)

READS = 5
"""The number of reads for one run."""

R = TypeVar("R", bound=Record)


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `round` is the number of the current attempt or round, or 0; `nodes` counts the nodes in any role."""

    run_id: str
    phase: Phase
    tone: Tone
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
        phase = Phase.UNREADABLE
        return RunSummary(
            run_id=keys.run_id, phase=phase, tone=phase.tone, nodes=counted.count, round=0, size=0, min_nodes=0,
            max_nodes=0, is_closed=False, started_by="", reason=str(error),
        )  # fmt: skip
    if config is None:
        return None
    nodes, is_closed = counted.count, closed is not None and closed.closed
    min_nodes = int(config.shared.get("min_nodes", 0))
    members, candidates = _told(record, told, nodes)
    phase = phase_of(
        nodes=nodes,
        is_closed=is_closed,
        round_phase=record.phase if record is not None else None,
        size=record.size if record is not None else 0,
        members=members,
        candidates=candidates,
        min_nodes=min_nodes,
    )
    return RunSummary(
        run_id=keys.run_id,
        phase=phase,
        tone=phase.tone,
        nodes=nodes,
        round=record.number if record else 0,
        size=record.size if record else 0,
        min_nodes=min_nodes,
        max_nodes=int(config.shared.get("max_nodes", 0)),
        is_closed=is_closed,
        started_by=config.by,
        reason=reason_of(nodes, record, told, _revision(results[2]), closed, _revision(results[3])),
    )


def _told(record: RoundRecord | None, told: WaitingRecord | None, nodes: int) -> tuple[int, int]:
    """(members, candidates) as the coordinator has written them; until it has, all nodes of a new round are there."""
    if told is not None and told.number == (record.number if record is not None else 0):
        members = min(told.members, nodes)  # nodes may have gone since, and no coordinator be there to say so
        return members, min(told.candidates, nodes - members)
    return (0, nodes) if record is None else (record.size, 0)


def _revision(result: BranchResult) -> int:
    assert isinstance(result, GotItem)
    return 0 if result.item is None else result.item.mod_revision


def _read(kind: type[R], result: BranchResult) -> R | None:
    assert isinstance(result, GotItem)
    return None if result.item is None else decode(kind, result.item)
