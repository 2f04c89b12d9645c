"""Constants from measurements: what a quantity costs per node, and what it costs whatever the number. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """`each` x N + `fixed`. `worst` is how far the farthest measured point is from that, as a share of it."""

    each: float
    fixed: float
    worst: float

    def at(self, nodes: float) -> float:
        """What it says for so many nodes."""
        return max(0.0, self.each * nodes + self.fixed)

    def nodes_for(self, amount: float) -> float:
        """How many nodes take that much; infinitely many if it does not grow."""
        return math.inf if self.each <= 0.0 else (amount - self.fixed) / self.each


def fit(points: Sequence[tuple[int, float]]) -> Fit:
    """The line that is closest by its share of every point, so that small numbers count as much as large ones.

    ValueError with fewer than two numbers of nodes.
    """
    if len({nodes for nodes, _ in points}) < 2:
        raise ValueError("a line needs two numbers of nodes")
    line = statistics.linear_regression(
        [1.0 / nodes for nodes, _ in points], [value / nodes for nodes, value in points]
    )
    found = Fit(line.intercept, line.slope, 0.0)
    if found.fixed < 0.0:  # nothing costs less than nothing: what is left is noise
        found = Fit(statistics.fmean(value / nodes for nodes, value in points), 0.0, 0.0)
    off = [abs(value - found.at(nodes)) / value for nodes, value in points if value > 0.0]
    return Fit(found.each, found.fixed, max(off, default=0.0))
