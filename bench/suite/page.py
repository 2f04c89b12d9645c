"""docs/benchmarks.md and its drawings, made from the results and from nothing else. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from bench.suite import cells
from bench.suite.plot import Series, log_plot
from bench.suite.results import Results
from rallypoint.bench.plan import (
    BYTES,
    COLD_START,
    CPU,
    LAST_ARRIVAL,
    LATE_NODE,
    LOSS_REJOIN,
    LOSS_TOLD,
    OURS,
    RSS_PER_NODE,
    STORE_OPS,
    TITLES,
    Bench,
    Side,
    per_call,
    per_second,
)
from rallypoint.bench.report import Figure, ratio

LINE = 118
QUICK = """> **From a quick run**: one sample of each, fewer sizes. It shows that everything runs; compare figures of a
> full run only (`make bench`).
"""
BUSY = """> **The machine was busy**: load average up to {load:.1f} on {cores} cores. Times are longer than on an idle
> machine, for all sides, but not by the same factor.
"""


@dataclass(frozen=True, slots=True)
class Topic:
    """A measure that has a table: its columns, and a text above it."""

    title: str
    bench: Bench
    measure: str
    sides: tuple[Side, ...]
    text: str
    plot: str = ""


ON_TCP = (Side.RALLYPOINT, Side.TORCH_STOCK, Side.TORCH_LEAN, Side.TORCHFT, Side.TORCHFT_TWICE, Side.JAX)
ON_ETCD = (Side.RALLYPOINT_ETCD, Side.TORCH_ETCD_V2, Side.TORCH_ETCD)
LOSS = (Side.RALLYPOINT, Side.TORCH_STOCK, Side.TORCH_UNSHARED)
IDLE = (Side.RALLYPOINT, Side.TORCH_STOCK, Side.TORCH_POLLING, Side.JAX)

TOPICS = (
    Topic(
        "Last arrival until all are released",
        Bench.RENDEZVOUS,
        LAST_ARRIVAL,
        ON_TCP + ON_ETCD,
        "All nodes are connected and N - 1 wait: from the call of the last node until the slowest call has returned. "
        "All members confirm a round of Rallypoint before any of them is released. A quorum of torchft's lighthouse "
        "is not confirmed; asked twice, it gives the same guarantee. For JAX it is a barrier of processes that know "
        "their numbers: no membership is decided.",
        "last-arrival",
    ),
    Topic(
        "Cold start",
        Bench.RENDEZVOUS,
        COLD_START,
        ON_TCP + ON_ETCD,
        "All nodes make a client, connect and call at the same instant: until the slowest call has returned.",
        "cold-start",
    ),
    Topic(
        "Recovery after kill -9, survivors told by the rendezvous",
        Bench.RECOVERY,
        LOSS_TOLD,
        LOSS,
        "One of N members is killed; each survivor joins again when its rendezvous says so. torch's never does: its "
        "agent learns of a loss from its workers.",
    ),
    Topic(
        "Recovery after kill -9, survivors re-join at once",
        Bench.RECOVERY,
        LOSS_REJOIN,
        LOSS,
        "The survivors call at the moment of the kill, as if their workers had failed.",
        "recovery",
    ),
    Topic(
        "Admission of a late node",
        Bench.RECOVERY,
        LATE_NODE,
        LOSS,
        "From the call of one more node, while N are in a round, until all N + 1 are in one. With torch as installed, "
        "the late node waits for an address that rank 0 does not publish again.",
    ),
    Topic(
        "Idle: payload on the wire",
        Bench.IDLE,
        BYTES,
        IDLE,
        "N nodes are in a round and do nothing: payload at the server in both directions.",
        "idle",
    ),
    Topic("Idle: processor time of the server", Bench.IDLE, CPU, IDLE, "Of the same samples."),
    Topic(
        "Idle: memory of the server by node",
        Bench.IDLE,
        RSS_PER_NODE,
        IDLE,
        "Growth of the server's resident memory since its start, by node; with few nodes, mostly modules loaded at "
        "first use.",
    ),
)


def benchmarks_page(results: Results) -> str:
    """The whole page."""
    parts = [HEAD, marks(results), _circumstances(results), *[_topic(results, topic) for topic in TOPICS]]
    return "\n".join([*parts, _store(results), _losses(results), _missing(results), FOOT])


def drawings(results: Results) -> dict[str, str]:
    """The drawings by their file names."""
    found = {}
    for topic in TOPICS:
        lines = _lines(results, topic)
        if topic.plot and lines:
            unit = next(f.unit for f in _figures(results, topic) if f.values)
            described = "; ".join(
                f"{line.name}: " + ", ".join(f"{y:.3g} at {x:g}" for x, y in line.points) for line in lines
            )
            found[f"{topic.plot}.svg"] = log_plot(
                topic.title, f"{unit} by number of nodes. {described}.", "nodes", _axis(unit), lines
            )
    return found


def _axis(unit: str) -> str:
    return {"s": "seconds, median", "B/s": "bytes a second"}.get(unit, unit)


def _figures(results: Results, topic: Topic) -> list[Figure]:
    return [
        found
        for side in topic.sides
        for nodes in results.nodes(topic.bench, side)
        if (found := results.figure(topic.bench, side, nodes, topic.measure)) is not None
    ]


def _lines(results: Results, topic: Topic) -> list[Series]:
    lines = []
    for side in topic.sides:
        points = []
        for nodes in results.nodes(topic.bench, side):
            found = results.figure(topic.bench, side, nodes, topic.measure)
            if found is not None and found.median is not None and found.median > 0.0:
                points.append((float(nodes), found.median))
        if points:
            lines.append(Series(TITLES[side], tuple(points), side in OURS))
    return lines


def marks(results: Results) -> str:
    """Warnings at the top of a page."""
    marks = [QUICK] if results.is_quick else []
    last = results.last
    if results.most_load > last.cores:
        marks.append(BUSY.format(load=results.most_load, cores=last.cores))
    return "\n".join(marks)


def _circumstances(results: Results) -> str:
    last = results.last
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    first = results.runs[0].run
    period = first if len(results.runs) == 1 else f"{first} to {last.run}"
    commits = ", ".join(dict.fromkeys(run.commit for run in results.runs))
    minutes = sum(one.took_s for one in results.cells.values()) / 60
    lines = [
        f"- Machine: {last.cores} cores, {last.memory_gib:g} GiB, {last.machine}; shared by all nodes and the server.",
        f"- Versions: {versions}.",
        f"- Measured: {period} UTC, commit {commits}; {len(results.cells)} cells, {minutes:.0f} minutes, load "
        f"average up to {results.most_load:.1f}.",
        f"- Command: `make bench{' ARGS=--quick' if results.is_quick else ''}`; one cell: "
        '`make bench ARGS="--only rendezvous/rallypoint/8 --again"`.',
        "- All samples are in `bench/results.jsonl`.",
    ]
    return "## Where and how\n\n" + "\n".join(lines) + "\n"


def _topic(results: Results, topic: Topic) -> str:
    present = [side for side in topic.sides if results.nodes(topic.bench, side)]
    figures = {
        (side, nodes): found
        for side in present
        for nodes in results.nodes(topic.bench, side)
        if (found := results.figure(topic.bench, side, nodes, topic.measure)) is not None
    }
    if not figures:
        return f"## {topic.title}\n\n{topic.text}\n\nNot measured.\n"
    columns = [side for side in present if any(side == one for one, _ in figures)]
    rows = [["N", *(TITLES[side] for side in columns)]]
    rows += [
        [f"{nodes:,}", *(_cell(figures.get((side, nodes))) for side in columns)]
        for nodes in sorted({nodes for _, nodes in figures})
    ]
    drawing = f"\n![{topic.title}: {_axis(_unit(figures))} by number of nodes](benchmarks/{topic.plot}.svg)\n"
    has_drawing = topic.plot and any(found.values for found in figures.values())
    return f"## {topic.title}\n\n{topic.text}\n\n{table(rows)}{drawing if has_drawing else ''}"


def _unit(figures: dict[tuple[Side, int], Figure]) -> str:
    return next((found.unit for found in figures.values() if found.values), "")


def _cell(found: Figure | None) -> str:
    """The figure as text; empty if it was not tried."""
    return "" if found is None else found.in_words().replace("|", "/").replace("\n", " ")


def reflow(page: str) -> str:
    """The same page with paragraphs and list items in lines of the usual length."""
    blocks = []
    for block in page.strip().split("\n\n"):
        lines = [line for line in block.splitlines() if line.strip()]
        if not lines:
            continue
        if lines[0][0] in "|#<!":
            blocks.append("\n".join(lines))
        else:
            mark = "> " if lines[0].startswith("> ") else ""
            points: list[str] = []
            for line in (line.removeprefix(mark).strip() for line in lines):
                if points and not line.startswith("- "):
                    points[-1] += f" {line}"
                else:
                    points.append(line)
            blocks.append("\n".join(_filled(point, mark) for point in points))
    return "\n\n".join(blocks) + "\n"


def _filled(text: str, mark: str) -> str:
    indent = mark + ("  " if text.startswith("- ") else "")
    return textwrap.fill(
        text,
        LINE,
        initial_indent=mark,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the head, the first column is text."""
    head, *rest = rows
    lines = [head, ["--:"] * len(head), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _store(results: Results) -> str:
    sides = [side for side in (Side.RALLYPOINT, Side.TORCH_STOCK, Side.JAX) if results.nodes(Bench.STORE, side)]
    counts = sorted({nodes for side in sides for nodes in results.nodes(Bench.STORE, side)})
    if not sides:
        return "## Store\n\nNot measured.\n"
    text = (
        "## Store\n\nThe same call repeated, values of 64 bytes: the median of one call and, with several processes, "
        "the calls of all in a second. torch's `set` and `multi_set` are not acknowledged by the server.\n"
    )
    for nodes in counts:
        rows = [["call", *(TITLES[side] for side in sides)]]
        for op in STORE_OPS:
            shown = []
            for side in sides:
                one, all_ = (results.figure(Bench.STORE, side, nodes, name(op)) for name in (per_call, per_second))
                rate = f", {_cell(all_)}" if all_ is not None and all_.values else ""
                shown.append(_cell(one) + (rate if nodes > 1 else ""))
            rows.append([f"`{op}`", *shown])
        text += f"\n{nodes} process{'es' if nodes > 1 else ''}:\n\n{table(rows)}"
    return text


def _losses(results: Results) -> str:
    """Where a competitor is better, and by how much: computed, so that nothing is left out."""
    found = []
    compared = [(t.title, t.bench, t.measure, t.sides) for t in TOPICS if t.measure != RSS_PER_NODE]
    compared += [
        (f"store, `{op}`", Bench.STORE, per_call(op), (Side.RALLYPOINT, Side.TORCH_STOCK, Side.JAX)) for op in STORE_OPS
    ]
    for title, bench, measure, sides in compared:
        for side in sides:
            if side in OURS:
                continue
            ours = Side.RALLYPOINT_ETCD if side in ON_ETCD else Side.RALLYPOINT
            shares = []
            for nodes in results.nodes(bench, side):
                theirs, own = (results.figure(bench, one, nodes, measure) for one in (side, ours))
                times = ratio(theirs, own) if theirs is not None and own is not None else None
                if times is not None and times < 1.0:
                    shares.append(f"{times:.2g} (N = {nodes:,})")
            if shares:
                found.append(f"- {title}: {TITLES[side]} {', '.join(shares)}")
    text = "## Where others are better\n\nAll comparisons above in which Rallypoint's median is worse, with the "
    text += "competitor's figure as a share of Rallypoint's:\n\n"
    return text + ("\n".join(found) or "- None.") + "\n"


def _missing(results: Results) -> str:
    lines = [f"- {side}: {why}" for side, why in results.skipped.items()]
    planned = cells.quick() if results.is_quick else cells.full()
    not_run = [
        f"`{cell.key}`"
        for cell in planned
        if cell.key not in results.cells and cell.case.side.value not in results.skipped
    ]
    lines += [f"- Not run yet, or left out for the budget: {', '.join(not_run)}."] if not_run else []
    lines += [f"- `{key}` ended early: {one.failed}" for key, one in results.cells.items() if one.failed]
    return "## Not measured\n\n" + ("\n".join(lines) or "- Everything planned was measured.") + "\n"


HEAD = """# Benchmarks

<!-- Made by `make bench` from bench/results.jsonl: change bench/suite/page.py, not this page. -->

Rallypoint and its competitors at the same work, on one machine. [bench.md](bench.md) explains the figures,
[scale.md](scale.md) what carries over to a cluster.
"""
FOOT = """## How to read it

A figure is the median; least and most are in parentheses. Empty: not tried. "none in 20 s": not all nodes were
released within that time. Above 128 nodes, which only Rallypoint runs, four processes share them. The columns of torch
are explained in [bench.md](bench.md#the-columns-of-torch). All nodes share the machine's cores: with many nodes, a
time says how much processor time all of them need together.
"""
