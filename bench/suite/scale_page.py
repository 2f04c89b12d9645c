"""docs/scale.md: what a round and an idle node cost as functions of N, from measured constants. Pure."""

from __future__ import annotations

import math

from bench.suite.fit import Fit, fit
from bench.suite.page import marks, table
from bench.suite.results import Results
from rallypoint.bench.plan import (
    KEPT_BYTES,
    KEPT_CPU,
    KEPT_RATE,
    MEMORY,
    ROUND_BYTES,
    ROUND_CPU,
    ROUND_FRAMES_IN,
    ROUND_FRAMES_OUT,
    ROUND_NODES_CPU,
    TRIPS_COLD,
    TRIPS_LAST,
    TRIPS_LATE,
    TRIPS_OF,
    UNITS,
    Bench,
    Side,
)
from rallypoint.bench.report import quantity

MEASURED = (
    *(ROUND_FRAMES_IN, ROUND_FRAMES_OUT, ROUND_BYTES, ROUND_CPU, ROUND_NODES_CPU),
    *(KEPT_RATE, KEPT_BYTES, KEPT_CPU, MEMORY),
)
SIZES = (10, 100, 1_000, 10_000, 50_000, 100_000)
TRIP_MS = (0.1, 1.0, 10.0, 100.0)
CONFIRM_S = 10.0
"""The default of `confirm_timeout`."""
ROUND_SHARE = 0.5
IDLE_SHARE = 50.0
MEMORY_MIB = 4_096.0


def scale_page(results: Results) -> str:
    """The whole page."""
    fits = constants(results)
    if fits is None:
        return f"{HEAD}\nNot measured: `make bench` measures `scale/rallypoint/*` with at least two numbers of nodes.\n"
    nodes = results.nodes(Bench.SCALE, Side.RALLYPOINT)
    parts = [
        HEAD,
        marks(results),
        _constants(results, fits, nodes),
        _functions(fits, nodes[-1]),
        _limits(fits, nodes[-1]),
    ]
    return "\n".join([*parts, _trips(results, fits, nodes[-1]), FOOT])


def constants(results: Results) -> dict[str, Fit] | None:
    """A line for every quantity; None if too little was measured."""
    found: dict[str, Fit] = {}
    for measure in MEASURED:
        points = []
        for nodes in results.nodes(Bench.SCALE, Side.RALLYPOINT):
            figure = results.figure(Bench.SCALE, Side.RALLYPOINT, nodes, measure)
            if figure is not None and figure.median is not None:
                points.append((nodes, figure.median))
        try:
            found[measure] = fit(points)
        except ValueError:
            return None
    return found


def _constants(results: Results, fits: dict[str, Fit], nodes: list[int]) -> str:
    rows = [["quantity", *(f"{count:,} nodes" for count in nodes), "by node", "fixed", "worst residual"]]
    for measure in MEASURED:
        unit, one = UNITS.get(measure, "s"), fits[measure]
        cells = []
        for count in nodes:
            figure = results.figure(Bench.SCALE, Side.RALLYPOINT, count, measure)
            cells.append("-" if figure is None or figure.median is None else quantity(figure.median, unit))
        fixed = quantity(one.fixed, unit) if one.fixed else "0"
        rows.append([measure, *cells, _small(one.each, unit), fixed, f"{100 * one.worst:.0f} %"])
    return (
        "## The constants\n\nMeasured on this machine by `rallypoint bench scale`: nodes idle in a round, then all "
        "of them join again, which is a whole round (join, assignment, confirmation, release) without connecting. "
        "Frames and bytes are counted by the server and its keep-alives taken off; a frame is what is written at "
        "once. The line through the points, `by node` x N + `fixed`, is the closest one by share of each "
        "point.\n\n" + table(rows)
    )


def _small(value: float, unit: str) -> str:
    """Of one node: in millionths where that is what it takes."""
    if unit == "s":
        return f"{value * 1e6:.3g} µs"
    if unit == "MiB":
        return f"{value * 1024:.3g} KiB"
    return f"{value:,.0f} {unit}" if value >= 100.0 else f"{value:.3g} {unit}"


def _functions(fits: dict[str, Fit], most: int) -> str:
    rows = [["N", "messages of a round", "bytes of a round", "server CPU of a round", "idle: messages a second"]]
    rows[0] += ["idle: bytes a second", "idle: server CPU", "server memory"]
    for count in SIZES:
        messages = fits[ROUND_FRAMES_IN].at(count) + fits[ROUND_FRAMES_OUT].at(count)
        rows.append(
            [
                f"{count:,}{'' if count <= most else ' *'}",
                f"{messages:,.0f}",
                f"{fits[ROUND_BYTES].at(count) / 1e6:.3g} MB",
                quantity(fits[ROUND_CPU].at(count), "s"),
                f"{2 * fits[KEPT_RATE].at(count):,.0f}",
                quantity(fits[KEPT_BYTES].at(count), "B/s"),
                f"{fits[KEPT_CPU].at(count):.3g} % of a core",
                quantity(fits[MEMORY].at(count), "MiB"),
            ]
        )
    return (
        "## As functions of N\n\nComputed from the constants. An idle node sends a keep-alive and is answered: "
        "two messages every `keep_alive_interval` (5 s); a longer interval makes idling cheaper and a loss "
        "without a closed connection later to be seen. Memory is what the nodes add. `*`: beyond what was "
        f"measured here, {most:,} nodes.\n\n" + table(rows)
    )


def limits(fits: dict[str, Fit]) -> list[tuple[str, float]]:
    """What ends first, with the number of nodes at which it does."""
    found = [
        (
            f"a round takes the server {ROUND_SHARE * CONFIRM_S:g} s of processor time, half of `confirm_timeout` "
            f"({CONFIRM_S:g} s)",
            fits[ROUND_CPU].nodes_for(ROUND_SHARE * CONFIRM_S),
        ),
        (f"keep-alives take {IDLE_SHARE:g} % of its core", fits[KEPT_CPU].nodes_for(IDLE_SHARE)),
        (f"nodes take {MEMORY_MIB / 1024:g} GiB of memory", fits[MEMORY].nodes_for(MEMORY_MIB)),
    ]
    return sorted(found, key=lambda one: one[1])


def _limits(fits: dict[str, Fit], most: int) -> str:
    rows = [["what ends", "at about"]]
    for what, nodes in limits(fits):
        rows.append([what, "never" if math.isinf(nodes) else f"{_rounded(nodes):,} nodes"])
    first, nodes = limits(fits)[0]
    beyond = "" if nodes <= most else f" That is beyond the {most:,} nodes that were measured: it is a computed figure."
    return (
        "## Where the embedded server stops being enough\n\nThe server is one process with one event loop, so one "
        "core, whatever the number of cores.\n\n"
        + table(rows)
        + f"\nThe first is: {first}, at about {_rounded(nodes):,} nodes on one server, in one run or in several "
        f"together." + beyond + WHAT_THEN
    )


def _rounded(nodes: float) -> int:
    """Two digits: more would pretend."""
    if nodes <= 0 or math.isinf(nodes):
        return 0
    step = 10 ** max(0, math.floor(math.log10(nodes)) - 1)
    return int(nodes // step * step)


def _trips(results: Results, fits: dict[str, Fit], most: int) -> str:
    counts = results.nodes(Bench.TRIPS, Side.RALLYPOINT)
    found = {}
    for measure in TRIPS_OF:
        figure = results.figure(Bench.TRIPS, Side.RALLYPOINT, counts[0], measure) if counts else None
        if figure is not None and figure.median is not None:
            found[measure] = figure.median
    if len(found) < len(TRIPS_OF):
        return "## With real round trips\n\nNot measured.\n"
    rows = [["", "round trips"], *([measure, f"{trips:.1f}"] for measure, trips in found.items())]
    times = [["round trip", "last call until all are released", "from nothing, with a new run", "a late node"]]
    busy_s = fits[ROUND_CPU].at(10_000)
    for trip_ms in TRIP_MS:
        last, cold, late = (found[one] * trip_ms / 1e3 for one in (TRIPS_LAST, TRIPS_COLD, TRIPS_LATE))
        opened = trip_ms / 1e3
        row = (last + busy_s, cold + opened + busy_s, late + busy_s)
        times.append([f"{trip_ms:g} ms", *(quantity(value, "s") for value in row)])
    return (
        "## With real round trips\n\nHow often somebody has to wait for the other side, measured by keeping "
        f"everything on the wire back for 100 ms in each direction ({counts[0]} nodes; opening a TCP connection is "
        "one more). It does not depend on the number of nodes: all of them wait at the same time.\n\n"
        + table(rows)
        + "\nFor 10,000 nodes on machines of their own, then, at most: trips x round trip + the server's processor "
        f"time for a round ({quantity(busy_s, 's')}{'' if most >= 10_000 else ', computed'}; the nodes' own is "
        "spent at the same time, on their machines). A late node, and whoever waits for others, adds what it "
        "waits for.\n\n" + table(times)
    )


HEAD = """# Beyond one machine

<!-- Made by `make bench` from bench/results.jsonl: change bench/suite/scale_page.py, not this page. -->

[benchmarks.md](benchmarks.md) has all nodes on one machine, where they compete with the server for its cores. Counts
and bytes carry
over to a cluster as they are; processor time and memory of the server do, up to the speed of its core; seconds do
not. This
page says what a job of N nodes costs its server, from constants that are measured and fitted.
"""
WHAT_THEN = """

What to use then:

- **Several servers, by run.** Runs share nothing. A server for each team, or for each large job, is a `rallypoint
  serve` more;
  the URL of the job names it. This helps with many jobs, not with a single one that is too large.
- **A longer `keep_alive_interval`**, if idling is what ends first: twice the interval, half of that.
- **Patience**, if a round is: an attempt lives while confirmations come, however many. It is given up when none came
  for `confirm_timeout`; give a machine that is busy with something else a longer one.
- **etcd** (`etcd://`), for high availability: the coordinator is then one of the nodes, and the cluster keeps the
  leases.
  It is not the answer to size: every key costs a write to disk on a majority, and what was measured on it here is in
  [benchmarks.md](benchmarks.md) and [etcd.md](etcd.md), with far fewer nodes than this page speaks of.
- **File descriptors**: each node is one connection. `ulimit -n` of the server has to be above the number of nodes, and
  `--max-connections` too.
"""
FOOT = """## What this does not say

The constants are of one processor and one version, in the table above. A network that loses packets, a slow name
server, TLS
(what that costs is in [security.md](security.md)) and `--data` (see [durability.md](durability.md)) come on top. The
computed rows
assume that cost stays proportional, which was seen only as far as it was measured.
"""
