"""From samples to figures: medians, ratios, rows of a table, one JSON document."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rallypoint.bench.plan import MEASURES, MOST_PROCESSES, RATE, SECONDS, TITLES, UNITS, Bench, Sample, Side
from rallypoint.bench.runner import Outcome


@dataclass(frozen=True, slots=True)
class Figure:
    """The samples of one measure of one case."""

    unit: str
    values: tuple[float, ...]
    why_none: str = ""
    """Of the first sample that has no value."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    def in_words(self) -> str:
        """The median, with the least and the most where there are several."""
        if self.median is None:
            return self.why_none or "-"
        text = quantity(self.median, self.unit)
        if len(self.values) > 1:
            text += f" ({quantity(min(self.values), self.unit)} to {quantity(max(self.values), self.unit)})"
        return f"{text}; once {self.why_none}" if self.why_none else text


NOTHING = Figure("", ())


def figure(measure: str, samples: Iterable[Sample]) -> Figure:
    """The samples of that measure."""
    of_it = [sample for sample in samples if sample.measure == measure]
    values = tuple(sample.value for sample in of_it if sample.value is not None)
    return Figure(UNITS.get(measure, SECONDS), values, next((s.why_none for s in of_it if s.value is None), ""))


def ratio(competitor: Figure, ours: Figure) -> float | None:
    """How many times better Rallypoint is: what the competitor needs by what it needs; of rates, the other way round.

    None where one of them has no figure, or it is not above zero.
    """
    if competitor.median is None or ours.median is None or min(competitor.median, ours.median) <= 0.0:
        return None
    return ours.median / competitor.median if ours.unit == RATE else competitor.median / ours.median


def quantity(value: float, unit: str) -> str:
    """A value with its unit, in three digits or so."""
    if unit == SECONDS:
        return f"{_digits(value)} s" if value >= 1.0 else f"{_digits(value * 1e3)} ms"
    if unit == "B/s" and abs(value) >= 1e4:
        return f"{_digits(value / 1e3)} kB/s"
    return f"{_digits(value)} {unit}"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.0995 else f"{value:.3f}"


class Table:
    """The outcomes of one bench, by side and number of nodes. The first side is Rallypoint."""

    def __init__(self, bench: Bench, sides: Sequence[Side], outcomes: Iterable[Outcome]) -> None:
        self._bench = bench
        self._sides = tuple(sides)
        self._outcomes = {(outcome.case.side, outcome.case.nodes): outcome for outcome in outcomes}
        self._nodes = sorted({nodes for _, nodes in self._outcomes})

    def heads(self) -> list[str]:
        """The titles of the columns; those of a comparison only if there is one."""
        figures = ["median (least to most)", "samples"]
        return ["", "N", "", figures[0], "ratio", figures[1]] if len(self._sides) > 1 else ["", "N", *figures]

    def rows(self) -> list[list[str]]:
        """One for each measure, number of nodes and side that was run with that number."""
        return [
            self._row(measure, nodes, side)
            for measure in MEASURES[self._bench]
            for nodes in self._nodes
            for side in self._sides
            if (side, nodes) in self._outcomes
        ]

    def _row(self, measure: str, nodes: int, side: Side) -> list[str]:
        found, ours = self._figure(side, nodes, measure), self._figure(self._sides[0], nodes, measure)
        row = [measure, f"{nodes:,}", found.in_words(), str(len(found.values))]
        if len(self._sides) > 1:
            times = ratio(found, ours) if side is not self._sides[0] else None
            row[3:3] = ["" if times is None else f"{_digits(times)}×"]
            row[2:2] = [TITLES[side]]
        return row

    def _figure(self, side: Side, nodes: int, measure: str) -> Figure:
        outcome = self._outcomes.get((side, nodes))
        return figure(measure, outcome.samples) if outcome is not None else NOTHING

    def remarks(self) -> list[str]:
        """Cases that ended early and why, and what was left out."""
        remarks = [
            f"{TITLES[side]}, {nodes} nodes: {outcome.failed}"
            for (side, nodes), outcome in self._outcomes.items()
            if outcome.failed
        ]
        if len(self._sides) > 1 and any(nodes > MOST_PROCESSES for nodes in self._nodes):
            remarks.append(f"competitors run as one process a node, and so with at most {MOST_PROCESSES} nodes")
        return remarks

    def as_json(self) -> dict[str, Any]:
        """All samples, their medians, and the ratios."""
        return {
            "bench": self._bench.value,
            "cases": [self._case(outcome) for outcome in self._outcomes.values()],
            "ratios": [
                {"measure": measure, "nodes": nodes, "side": side.value, "ratio": times}
                for measure in MEASURES[self._bench]
                for nodes in self._nodes
                for side in self._sides[1:]
                if (times := ratio(self._figure(side, nodes, measure), self._figure(self._sides[0], nodes, measure)))
                is not None
            ],
        }

    def _case(self, outcome: Outcome) -> dict[str, Any]:
        measures = []
        for measure in MEASURES[self._bench]:
            found = figure(measure, outcome.samples)
            measures.append(
                {
                    "measure": measure,
                    "unit": found.unit,
                    "median": found.median,
                    "samples": list(found.values),
                    "none": [s.why_none for s in outcome.samples if s.measure == measure and s.value is None],
                }
            )
        return {
            "side": outcome.case.side.value,
            "nodes": outcome.case.nodes,
            "failed": outcome.failed or None,
            "measures": measures,
        }
