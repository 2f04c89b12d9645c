"""Measures cells, those of a comparison in turns, and appends their results when the comparison is done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.suite.cells import Cell, grouped
from bench.suite.machine import commit, machine, memory_gib
from bench.suite.results import Begun, Measured, append, is_done, read
from rallypoint.bench.competitors import REQUIREMENTS, Found, find
from rallypoint.bench.plan import OURS, Side
from rallypoint.bench.report import figure
from rallypoint.bench.runner import Job, Outcome, run_cases

Measure = Callable[[Sequence[Job]], list[Outcome]]


def run_cells(
    cells: Sequence[Cell],
    results: Path,
    pythons: dict[str, str],
    *,
    is_quick: bool,
    again: bool,
    budget_s: float,
    say: Callable[[str], None],
    measure: Measure = lambda jobs: run_cases(jobs, lambda case, text: None),
) -> bool:
    """Measure the cells that have no result yet; whether no cell of Rallypoint failed.

    A cell that would probably end after the budget is left out; one that hangs is killed.
    """
    found = find([Side.RALLYPOINT, *REQUIREMENTS], pythons)
    before = read(results)
    wanted = [cell for cell in cells if again or not is_done(before, cell.case, is_quick)]
    if len(wanted) < len(cells):
        say(f"{len(cells) - len(wanted)} of {len(cells)} cells are done; --again measures them again")
    for side, why in found.missing.items():
        if any(cell.case.side is side for cell in wanted):
            say(f"{side.value} is skipped: {why}")
    groups = grouped(cell for cell in wanted if cell.case.side in found.pythons)
    if not groups:
        return True
    begun = _begin(results, is_quick, found)
    started_at = time.monotonic()
    no_failure = True
    for number, group in enumerate(groups, 1):
        spent_s = time.monotonic() - started_at
        head = f"[{number}/{len(groups)}, {spent_s / 60:.1f} of {budget_s / 60:g} min]"
        fitting: list[Cell] = []
        for cell in group:
            if spent_s + cell.about_s <= budget_s:
                fitting.append(cell)
                spent_s += cell.about_s
            else:
                say(f"{head} {cell.key}: left out, about {cell.about_s:g} s would not fit into the budget")
        if not fitting:
            continue
        load = round(os.getloadavg()[0], 2)
        outcomes = measure([Job(cell.case, found.pythons[cell.case.side], cell.timeout_s) for cell in fitting])
        for cell, outcome in zip(fitting, outcomes, strict=True):
            took_s = round(outcome.took_s, 1)
            append(results, Measured(begun.run, cell.case, outcome.samples, outcome.failed, took_s, load))
            say(f"{head} {cell.key}: {summary(outcome)}")
            no_failure &= not (outcome.failed and cell.case.side in OURS)
    return no_failure


def _begin(results: Path, is_quick: bool, found: Found) -> Begun:
    begun = Begun(
        run=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        is_quick=is_quick,
        commit=commit(),
        machine=machine(),
        cores=os.cpu_count() or 1,
        memory_gib=round(memory_gib(), 1),
        versions=found.versions,
        skipped={side.value: why for side, why in found.missing.items()},
    )
    append(results, begun)
    return begun


def summary(outcome: Outcome) -> str:
    """The first figures of a cell in one line."""
    if outcome.failed:
        return f"failed: {outcome.failed}"
    names = list(dict.fromkeys(sample.measure for sample in outcome.samples))
    return "; ".join(f"{name} {figure(name, outcome.samples).in_words()}" for name in names[:2])
