"""The results of `make bench`: JSON lines, appended and never rewritten. Pure, except for the file itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.suite.cells import key_of
from rallypoint.bench.plan import COLD_START, Bench, Case, Sample, Side
from rallypoint.bench.report import Figure, figure


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The start of a run, and what its figures depend on. `skipped`: the sides that are missing, and why."""

    run: str
    is_quick: bool
    commit: str
    machine: str
    cores: int
    memory_gib: float
    versions: dict[str, str]
    skipped: dict[str, str]


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """The result of one cell. `load`: the load average of the machine when it began."""

    run: str
    case: Case
    samples: tuple[Sample, ...]
    failed: str
    took_s: float
    load: float


Entry = Begun | Measured
_decoder = msgspec.json.Decoder(Entry)
_RENAMED = {"all together, connections included": COLD_START}
"""Measures that had another name in older results."""


@dataclass(frozen=True, slots=True)
class Results:
    """The last result of each cell. Quick runs count only if there is no full one."""

    runs: tuple[Begun, ...]
    cells: dict[str, Measured]

    @property
    def is_quick(self) -> bool:
        return all(run.is_quick for run in self.runs)

    @property
    def last(self) -> Begun:
        """The last run that a result is from."""
        return self.runs[-1]

    def nodes(self, bench: Bench, side: Side) -> list[int]:
        """The numbers of nodes that were measured."""
        found = {one.case.nodes for one in self.cells.values() if one.case.bench is bench and one.case.side is side}
        return sorted(found)

    def figure(self, bench: Bench, side: Side, nodes: int, measure: str) -> Figure | None:
        """The samples of a measure; None: it was not tried."""
        found = [
            one
            for one in self.cells.values()
            if (one.case.bench, one.case.side, one.case.nodes) == (bench, side, nodes)
            and (not one.case.only or one.case.only == measure)
        ]
        if not found:
            return None
        taken = figure(measure, (sample for one in found for sample in one.samples))
        failed = next((one.failed for one in found if one.failed), "")
        return Figure(taken.unit, taken.values, taken.why_none or failed) if not taken.values else taken

    @property
    def versions(self) -> dict[str, str]:
        """The versions in all runs; the last one counts."""
        return {name: version for run in self.runs for name, version in run.versions.items()}

    @property
    def skipped(self) -> dict[str, str]:
        """The sides that were missing in all runs, and why."""
        tried = {one.case.side.value for one in self.cells.values()}
        return {side: why for side, why in self.last.skipped.items() if side not in tried}

    @property
    def most_load(self) -> float:
        return max((one.load for one in self.cells.values()), default=0.0)


def collect(entries: Iterable[Entry]) -> Results:
    """The results of a file. ValueError if there are none."""
    runs: dict[str, Begun] = {}
    measured: list[Measured] = []
    for entry in entries:
        match entry:
            case Begun():
                runs[entry.run] = entry
            case Measured():
                measured.append(entry)
    is_quick = all(runs[one.run].is_quick for one in measured)
    cells = {key_of(one.case): one for one in measured if runs[one.run].is_quick == is_quick}
    if not cells:
        raise ValueError("there are no results: run `make bench`")
    used = {one.run for one in cells.values()}
    return Results(tuple(run for run in runs.values() if run.run in used), cells)


def decode(text: str) -> list[Entry]:
    """The entries of a file. ValueError, with its number, for a line that cannot be read."""
    found: list[Entry] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(_with_new_names(_decoder.decode(line)))
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number} of the results cannot be read: {error}") from error
    return found


def _with_new_names(entry: Entry) -> Entry:
    if isinstance(entry, Begun):
        return entry
    samples = tuple(
        msgspec.structs.replace(sample, measure=_RENAMED.get(sample.measure, sample.measure))
        for sample in entry.samples
    )
    return msgspec.structs.replace(entry, samples=samples)


def read(path: Path) -> list[Entry]:
    """The entries of a file; none if it does not exist."""
    return decode(path.read_text(encoding="utf-8")) if path.exists() else []


def append(path: Path, entry: Entry) -> None:
    """Add an entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(msgspec.json.encode(entry).decode() + "\n")


def is_done(entries: Iterable[Entry], case: Case, is_quick: bool) -> bool:
    """Whether a run of the same kind has a result of exactly that case, or failed at it."""
    kinds: dict[str, bool] = {}
    for entry in entries:
        match entry:
            case Begun():
                kinds[entry.run] = entry.is_quick
            case Measured() if entry.case == case and kinds.get(entry.run) is is_quick:
                return True
    return False
