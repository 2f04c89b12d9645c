"""Runs cells one after the other, each in processes of its own, and notes what came of each at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.suite import rivals
from bench.suite.cells import Cell
from bench.suite.results import Begun, Measured, append, is_done, read
from rallypoint.bench.plan import OURS
from rallypoint.bench.report import figure
from rallypoint.bench.runner import Outcome, run_case


def run_cells(
    cells: Sequence[Cell],
    results: Path,
    pythons: dict[str, str],
    *,
    is_quick: bool,
    again: bool,
    budget_s: float,
    say: Callable[[str], None],
    measure: Callable[[Cell, str], Outcome] | None = None,
) -> bool:
    """Measure what is not measured yet; whether all of our own could be.

    No cell is begun that would probably end after the budget; one that hangs is ended. `measure` gets a cell and the
    Python that runs it.
    """
    measure = measure or _measure
    present = rivals.look(pythons)
    before = read(results)
    wanted = [cell for cell in cells if again or not is_done(before, cell.case, is_quick)]
    if len(wanted) < len(cells):
        say(f"{len(cells) - len(wanted)} of {len(cells)} cells are done; --again measures them again")
    for side, why in present.skipped.items():
        if any(cell.case.side is side for cell in wanted):
            say(f"{side.value} is skipped: {why}")
    runnable = [cell for cell in wanted if cell.case.side in present.pythons]
    if not runnable:
        return True
    begun = _begin(results, is_quick, present)
    started_at = time.monotonic()
    is_whole = True
    for number, cell in enumerate(runnable, 1):
        spent_s = time.monotonic() - started_at
        head = f"[{number}/{len(runnable)}, {spent_s / 60:.1f} of {budget_s / 60:g} min] {cell.key}"
        if spent_s + cell.about_s > budget_s:
            say(f"{head}: left out, about {cell.about_s:g} s would not fit into the budget")
            continue
        load, begun_at = os.getloadavg()[0], time.monotonic()
        outcome = measure(cell, present.pythons[cell.case.side])
        took_s = round(time.monotonic() - begun_at, 1)
        append(results, Measured(begun.run, cell.case, outcome.samples, outcome.failed, took_s, round(load, 2)))
        say(f"{head}: {summary(cell, outcome)}")
        is_whole &= not (outcome.failed and cell.case.side in OURS)
    return is_whole


def _begin(results: Path, is_quick: bool, present: rivals.Present) -> Begun:
    begun = Begun(
        run=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        is_quick=is_quick,
        commit=rivals.commit(),
        machine=rivals.machine(),
        cores=os.cpu_count() or 1,
        memory_gib=round(rivals.memory_gib(), 1),
        versions=present.versions,
        skipped={side.value: why for side, why in present.skipped.items()},
    )
    append(results, begun)
    return begun


def _measure(cell: Cell, python: str) -> Outcome:
    return run_case(cell.case, lambda _: None, python, cell.patience_s)


def summary(cell: Cell, outcome: Outcome) -> str:
    """The first figures of a cell in one line."""
    if outcome.failed:
        return f"failed: {outcome.failed}"
    names = list(dict.fromkeys(sample.measure for sample in outcome.samples))
    return "; ".join(f"{name} {figure(name, outcome.samples).in_words()}" for name in names[:2])
