"""Generates the reference pages of metrics, events and errors from their definitions. One function per page."""

import ast
import inspect
import logging
import re

import msgspec

from rallypoint import errors, events
from rallypoint.events import Event
from rallypoint.observe.event_json import FIELDS
from rallypoint.observe.metrics.table import MAX_RUNS, Exporter, Metric
from tests.tidy.sources import modules

METRICS_HEAD = f"""# Metrics

Prometheus reads them at `/metrics`: those of a server with `rallypoint serve --metrics [ADDR:]PORT` (and where its web
page is served), those of any other process with `rallypoint.observe.metrics`, which needs the extra `dashboard`. What
to alert on, and how to react, is in [operations.md](operations.md); example rules are in
[examples/prometheus](../examples/prometheus/alerts.yml).

Metrics cost a server a few additions for each event. Everything else is computed on a scrape.

**The number of series** does not depend on the number of nodes. Labels have the values listed below, except for `run`:
a process exposes the first {MAX_RUNS} runs by their ids, and adds up all others under the empty run id. So sums over
all runs are right, a server with ten thousand runs exposes about {10 * MAX_RUNS:,} series of runs instead of a hundred
thousand, and a run keeps its series as long as it exists. If every job has a new run id, run ids accumulate in
Prometheus over months: `--metrics-runs 0` adds up all runs.

The usual metrics of a process (`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds` and
so on) are exposed, too.
"""
SECTIONS = {
    Exporter.SERVER: ("The server", "Of an embedded server; for etcd, see its own `/metrics`."),
    Exporter.DATA: ("The data of a server", "Only with `--data`."),
    Exporter.RUN: (
        "Runs",
        "From a server: the runs that it coordinates. From a process that follows runs, on any backend: those runs.",
    ),
    Exporter.DECISIONS: (
        "Decisions",
        "Counted once, by the process that decides: the server, or on other backends the elected node. Sums over all "
        "processes are right.",
    ),
    Exporter.NODE: ("A node", "Of one node: `NodeMetrics`."),
}


def metrics_page(table: tuple[Metric, ...]) -> str:
    """docs/metrics.md."""
    text = METRICS_HEAD
    for exporter, (title, words) in SECTIONS.items():
        text += f"\n## {title}\n\n{words}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
        for one in table:
            if one.exporter is exporter:
                labels = "; ".join(f"`{label}`: {values}" for label, values in one.labels.items())
                text += f"| `{one.name}` | {one.kind.value} | {labels} | {one.meaning} |\n"
    return text


EVENTS_HEAD = """# Events

Every fact is emitted as one event, by the process where it happens. An event is a value with fields; `str()` of it is
the sentence for people. Events go to sinks: the `rallypoint` logger (silent until an application configures logging),
callables (`create_handler(url, sinks=[call])`), and a file of JSON lines (`rallypoint.observe.sinks.JsonLines`,
`rallypoint serve --events FILE`). `rallypoint serve` prints those of level info and above to stderr.

A line of JSON has `at` (seconds since 1970 by the clock of the writing process), `event` (the name below), the fields,
`level` and `text` (the sentence). Fields are added, never renamed. `rallypoint events URL --follow --json` prints the
same. The file is rotated by size, and a bounded number of old ones is kept; emitting an event never waits for the
disk. If the file cannot be written, events are lost, the job continues, and one event reports that.

Every event has `run_id` and `by`. The fields:

| field | meaning |
|---|---|
"""


def event_sections(module_source: str) -> dict[str, list[str]]:
    """Heading -> the names of its events, from the section comments of the module."""
    sections: dict[str, list[str]] = {}
    heading = ""
    for line in module_source.splitlines():
        if found := re.fullmatch(r"# --- (.+?) -+", line):
            heading = found[1]
        elif found := re.match(r"class (\w+)\(Event,", line):
            sections.setdefault(heading, []).append(found[1])
    return sections


def fields_of(kind: type[Event]) -> list[str]:
    """The fields of an event type, without those of all events."""
    return [field.name for field in msgspec.structs.fields(kind) if field.name not in ("run_id", "by")]


def events_page() -> str:
    """docs/events.md."""
    text = EVENTS_HEAD + "".join(f"| `{name}` | {meaning} |\n" for name, meaning in FIELDS.items())
    for heading, names in event_sections(inspect.getsource(events)).items():
        text += f"\n## {heading[0].upper()}{heading[1:]}\n\n| event | level | fields | meaning |\n|---|---|---|---|\n"
        for name in names:
            kind = getattr(events, name)
            level = logging.getLevelName(kind.level).lower()
            fields = ", ".join(f"`{field}`" for field in fields_of(kind))
            text += f"| `{name}` | {level} | {fields} | {_one_line(kind.__doc__)} |\n"
    return text


ERRORS_HEAD = """# Errors

Divided by what the caller should do. All are `rallypoint.RallypointError`. An error carries its data in
attributes and a sentence in `str()`: what was wanted, what was found, what to do next. The text of a raised error is
more precise than this page.

| error | also a | meaning | what to do |
|---|---|---|---|
"""


def advice_of(tree: str) -> dict[str, tuple[int, str]]:
    """Class -> its depth and the advice, from the tree at the top of errors.py."""
    lines = re.findall(r"^([│├└─ ]*)([A-Z]\w+)(?: \(\w+\))?(?: {2,}(.+))?$", tree, flags=re.MULTILINE)
    return {name: (len(stem) // 4, advice) for stem, name, advice in lines}


def errors_page() -> str:
    """docs/errors.md."""
    text = ERRORS_HEAD
    tree = advice_of(errors.__doc__ or "")
    for name, (depth, advice) in tree.items():
        kind = getattr(errors, name)
        parent = next((tree[base.__name__][1] for base in kind.__bases__ if base.__name__ in tree), "")
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not Exception)
        advice = re.sub(r"^\.\.\. because", f"{parent}, because", advice)
        text += f"| {'· ' * depth}`{name}` | {bases} | {_one_line(kind.__doc__)} | {advice or '-'} |\n"
    text += "\n## Errors of commands and internal modules\n\nA command that raises one exits with its text.\n\n"
    text += "| error | where | meaning |\n|---|---|---|\n"
    for module, name, words in sorted(elsewhere(modules(), set(tree))):
        text += f"| `{name}` | `{module}` | {words} |\n"
    return text


def elsewhere(sources: dict[str, str], known: set[str]) -> list[tuple[str, str, str]]:
    """Module, name and meaning of the error classes that are defined outside errors.py."""
    return [
        (module, node.name, _one_line(ast.get_docstring(node)))
        for module, source in sources.items()
        if module != "rallypoint.errors" and not module.startswith("rallypoint.testing")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and known & {base.id for base in node.bases if isinstance(base, ast.Name)}
    ]


def _one_line(text: str | None) -> str:
    """The first paragraph of a docstring, fit for a table."""
    first = inspect.cleandoc(text or "").split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")
