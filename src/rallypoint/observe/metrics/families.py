"""Converts values to the metric families of `prometheus-client`. A value is put by its definition, never by a name."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from rallypoint.observe.metrics.table import Kind, Metric


class Tally:
    """The state of a histogram or a summary, in plain numbers. An observation costs a few additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = ()) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Add an observation. A value equal to a bound belongs to the bucket of that bound."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """The buckets as the exposition format requires them: cumulative."""
        names = [*(repr(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Scrape:
    """The metric families of one scrape, in the order in which they were put."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def put(self, metric: Metric, value: float, *labels: str) -> None:
        """Put a value of a counter or a gauge, with the values of its labels in the order of the definition."""
        family = self._family(metric)
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)

    def put_tally(self, metric: Metric, tally: Tally, *labels: str) -> None:
        """Put a histogram or a summary."""
        family = self._family(metric)
        if isinstance(family, HistogramMetricFamily):
            family.add_metric(labels, tally.buckets(), tally.total)
        else:
            assert isinstance(family, SummaryMetricFamily)
            family.add_metric(labels, tally.count, tally.total)

    def put_sum(self, metric: Metric, count: int, total: float) -> None:
        """Put a summary whose count and total are kept elsewhere."""
        family = self._family(metric)
        assert isinstance(family, SummaryMetricFamily)
        family.add_metric((), count, total)

    def families(self) -> Iterator[Family]:
        return iter(self._families.values())

    def _family(self, metric: Metric) -> Family:
        family = self._families.get(metric.name)
        if family is None:
            family = self._families[metric.name] = _made(metric)
        return family


def _made(metric: Metric) -> Family:
    labels = tuple(metric.labels)
    match metric.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(metric.name, metric.meaning, labels=labels)
        case Kind.GAUGE:
            return GaugeMetricFamily(metric.name, metric.meaning, labels=labels)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(metric.name, metric.meaning, labels=labels)
        case Kind.SUMMARY:
            return SummaryMetricFamily(metric.name, metric.meaning, labels=labels)
