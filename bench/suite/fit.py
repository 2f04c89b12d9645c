"""A line through measurements: what a quantity costs per node, and its fixed part. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """`each` x N + `fixed`. `worst`: the distance of the farthest measured point, as a share of that point."""

    each: float
    fixed: float
    worst: float

    def at(self, nodes: float) -> float:
        """The value for a number of nodes."""
        return max(0.0, self.each * nodes + self.fixed)

    def nodes_for(self, amount: float) -> float:
        """The number of nodes with that value; infinite if it does not grow."""
        return math.inf if self.each <= 0.0 else (amount - self.fixed) / self.each


def fit(points: Sequence[tuple[int, float]]) -> Fit:
    """The line with the least relative error, so that small numbers of nodes count as much as large ones.

    ValueError with fewer than two numbers of nodes.
    """
    if len({nodes for nodes, _ in points}) < 2:
        raise ValueError("a line needs two numbers of nodes")
    line = statistics.linear_regression(
        [1.0 / nodes for nodes, _ in points], [value / nodes for nodes, value in points]
    )
    found = Fit(line.intercept, line.slope, 0.0)
    if found.fixed < 0.0:  # a negative cost can only be noise
        found = Fit(statistics.fmean(value / nodes for nodes, value in points), 0.0, 0.0)
    off = [abs(value - found.at(nodes)) / value for nodes, value in points if value > 0.0]
    return Fit(found.each, found.fixed, max(off, default=0.0))
