"""The names of metrics follow the conventions of Prometheus, and each is defined once."""

import re

import pytest

from rallypoint.observe.metrics.table import TABLE, Exporter, Kind, Metric

BASE_UNITS = ("seconds", "bytes")
OTHER_UNITS = (
    "milliseconds",
    "ms",
    "minutes",
    "hours",
    "kilobytes",
    "kib",
    "mib",
    "megabytes",
    "percent",
    "microseconds",
)
TAKEN = ("le", "quantile", "job", "instance")
RESERVED_ENDS = ("_count", "_sum", "_bucket", "_created")


def complaints(metric: Metric) -> list[str]:
    """The complaints of `promtool check metrics` about a metric, and a few more."""
    name, found = metric.name, []
    if not re.fullmatch(r"rallypoint_[a-z0-9]+(_[a-z0-9]+)*", name):
        found.append("a name is rallypoint_ and words in lower case with single underscores between")
    if (metric.kind is Kind.COUNTER) != name.endswith("_total"):
        found.append("counters, and only they, end in _total")
    if name.endswith(RESERVED_ENDS):
        found.append("histograms and summaries have such names for their parts")
    words = name.removesuffix("_total").split("_")
    if any(word in OTHER_UNITS for word in words):
        found.append("the unit is not a base unit")
    if [word for word in words if word in BASE_UNITS] != [metric.unit] * bool(metric.unit):
        found.append("the unit of the name is that of the definition")
    if metric.unit and words[-1] != metric.unit:
        found.append("the unit is at the end")
    if metric.kind.value in words or any(kind.value in words for kind in Kind):
        found.append("the type is not part of the name")
    if not all(re.fullmatch(r"[a-z][a-z_]*", label) and label not in TAKEN for label in metric.labels):
        found.append("a label is not a word, or is taken")
    if (metric.kind is Kind.HISTOGRAM) != bool(metric.buckets) or list(metric.buckets) != sorted(set(metric.buckets)):
        found.append("histograms, and only they, have buckets, in order")
    if not metric.meaning.endswith(".") or metric.meaning[0].islower():
        found.append("the meaning is a sentence")
    return found


@pytest.mark.parametrize("metric", TABLE, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric):
    assert complaints(metric) == []


@pytest.mark.parametrize(
    "metric",
    [
        Metric("rallypoint_joins", Kind.COUNTER, Exporter.NODE, "Joins."),
        Metric("joins_total", Kind.COUNTER, Exporter.NODE, "Joins."),
        Metric("rallypoint_nodes_total", Kind.GAUGE, Exporter.NODE, "Nodes."),
        Metric("rallypoint_wait_ms", Kind.GAUGE, Exporter.NODE, "A wait."),
        Metric("rallypoint_wait_seconds", Kind.GAUGE, Exporter.NODE, "A wait."),
        Metric("rallypoint_seconds_waited", Kind.GAUGE, Exporter.NODE, "A wait.", unit="seconds"),
        Metric("rallypoint_wait_count", Kind.GAUGE, Exporter.NODE, "Waits."),
        Metric("rallypoint_gauge", Kind.GAUGE, Exporter.NODE, "A gauge."),
        Metric("rallypoint_waitS", Kind.GAUGE, Exporter.NODE, "Waits."),
        Metric("rallypoint_waits", Kind.GAUGE, Exporter.NODE, "Waits.", {"Node": "a"}),
        Metric("rallypoint_waits", Kind.GAUGE, Exporter.NODE, "Waits.", {"job": "a"}),
        Metric("rallypoint_waits", Kind.HISTOGRAM, Exporter.NODE, "Waits."),
        Metric("rallypoint_waits", Kind.GAUGE, Exporter.NODE, "waits"),
    ],
    ids=lambda metric: metric.name,
)
def test_wrong_name_is_caught(metric):
    assert complaints(metric)


def test_every_name_is_defined_once():
    names = [metric.name for metric in TABLE]
    assert len(names) == len(set(names)) > 50
