"""The rules in examples/prometheus use metrics, labels and label values that exist."""

import re

import pytest

from rallypoint.observe.metrics.table import TABLE, Kind
from tests.tidy.sources import ROOT

RULES = (ROOT / "examples" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
PARTS = {Kind.HISTOGRAM: ("_bucket", "_sum", "_count"), Kind.SUMMARY: ("_sum", "_count")}


def rules(text):
    """The name of each rule -> its text on one line."""
    found = {}
    for part in text.split("- alert: ")[1:]:
        name, _, body = part.partition("\n")
        found[name] = " ".join(body.split())
    return found


def field(rule, name):
    return re.search(rf"\b{name}: (?:>- )?(.*?)(?= \w+:(?: |$)|$)", rule)[1]


def series():
    """The name of each series -> its labels."""
    names = {}
    for metric in TABLE:
        for name in [metric.name + part for part in PARTS.get(metric.kind, ("",))]:
            names[name] = metric.labels
    return names


def complaints(expression):
    """The metrics, labels and values in an expression that do not exist."""
    known = series()
    found = []
    for name, selector in re.findall(r"\b(rallypoint_\w+|up)\b(?:\{(.*?)\})?", expression):
        if name == "up":
            continue
        if name not in known:
            found.append(f"there is no metric {name}")
            continue
        for label, values in re.findall(r'(\w+)=~?"(.*?)"', selector):
            if label not in known[name]:
                found.append(f"{name} has no label {label}")
            else:
                missing = [value for value in values.split("|") if f"`{value}`" not in known[name][label]]
                found += [f"{label} of {name} is never {value}" for value in missing]
    return found


@pytest.mark.parametrize("name", rules(RULES))
def test_rule_uses_existing_metrics(name):
    rule = rules(RULES)[name]
    expression = field(rule, "expr")
    assert "rallypoint_" in expression or "up{" in expression
    assert complaints(expression) == []
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("name", rules(RULES))
def test_rule_has_a_summary_and_a_runbook(name):
    rule = rules(RULES)[name]
    assert name.startswith("Rallypoint")
    assert field(rule, "severity") in ("warning", "critical")
    assert re.fullmatch(r"\d+[sm]", field(rule, "for"))
    summary = re.search(r"summary: >- (.*?) runbook:", rule)[1]
    assert summary.endswith(".")
    anchor = rule.rpartition("operations.md#")[2]
    headings = [line.lstrip("# ") for line in OPERATIONS.splitlines() if line.startswith("#")]
    assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert f"`{name}`" in OPERATIONS


def test_rules_are_found():
    assert len(rules(RULES)) > 10


@pytest.mark.parametrize(
    "expression",
    [
        "rallypoint_run_membres > 0",
        'rallypoint_rounds_total{result="active"}',
        'rallypoint_rounds_total{outcome="actve"} > 0',
    ],
)
def test_rule_about_an_unknown_metric_label_or_value_is_caught(expression):
    assert complaints(expression)
