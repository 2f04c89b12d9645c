"""docs/scale.md: what a round and an idle node cost as functions of N, fitted to measurements. Pure."""

from __future__ import annotations

import math

from bench.suite.fit import Fit, fit
from bench.suite.page import marks, table
from bench.suite.results import Results
from rallypoint.bench.plan import (
    IDLE_BYTES,
    IDLE_CPU,
    KEEP_ALIVE_RATE,
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
    *(KEEP_ALIVE_RATE, IDLE_BYTES, IDLE_CPU, MEMORY),
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
    """The fitted line of every quantity; None if too little was measured."""
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
        "## Measured costs\n\nBy `rallypoint bench scale`: connected nodes idle in a round, then all join again. The "
        "server counts frames (what is written at once) and bytes; keep-alives are subtracted from the round. "
        "`by node` x N + `fixed` is the line with the least relative error.\n\n" + table(rows)
    )


def _small(value: float, unit: str) -> str:
    """A cost per node, in small units."""
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
                f"{2 * fits[KEEP_ALIVE_RATE].at(count):,.0f}",
                quantity(fits[IDLE_BYTES].at(count), "B/s"),
                f"{fits[IDLE_CPU].at(count):.3g} % of a core",
                quantity(fits[MEMORY].at(count), "MiB"),
            ]
        )
    return (
        "## By number of nodes\n\nComputed from these lines. An idle node exchanges two messages every "
        "`keep_alive_interval` (5 s): a longer interval costs less, and detects a loss without a closed connection "
        f"later. `*`: more than the {most:,} nodes that were measured.\n\n" + table(rows)
    )


def limits(fits: dict[str, Fit]) -> list[tuple[str, float]]:
    """The limits, with the number of nodes at which each is reached; the lowest first."""
    found = [
        (
            f"a round takes {ROUND_SHARE * CONFIRM_S:g} s of the server's processor time, half of `confirm_timeout` "
            f"({CONFIRM_S:g} s)",
            fits[ROUND_CPU].nodes_for(ROUND_SHARE * CONFIRM_S),
        ),
        (f"keep-alives take {IDLE_SHARE:g} % of its core", fits[IDLE_CPU].nodes_for(IDLE_SHARE)),
        (f"nodes take {MEMORY_MIB / 1024:g} GiB of memory", fits[MEMORY].nodes_for(MEMORY_MIB)),
    ]
    return sorted(found, key=lambda one: one[1])


def _limits(fits: dict[str, Fit], most: int) -> str:
    rows = [["limit", "at about"]]
    for what, nodes in limits(fits):
        rows.append([what, "never" if math.isinf(nodes) else f"{_rounded(nodes):,} nodes"])
    computed = "" if limits(fits)[0][1] <= most else f" More than {most:,} nodes were not measured: this is computed."
    return (
        "## Limits of the embedded server\n\nThe server is one process with one event loop: it uses one core, for the "
        f"nodes of all its runs.{computed}\n\n" + table(rows) + BEYOND_THE_LIMITS
    )


def _rounded(nodes: float) -> int:
    """Two digits: the fit has no more."""
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
        return "## Round trips\n\nNot measured.\n"
    rows = [["", "round trips"], *([measure, f"{trips:.1f}"] for measure, trips in found.items())]
    times = [["round trip", "last call until all are released", "from nothing, with a new run", "a late node"]]
    busy_s = fits[ROUND_CPU].at(10_000)
    for trip_ms in TRIP_MS:
        last, cold, late = (found[one] * trip_ms / 1e3 for one in (TRIPS_LAST, TRIPS_COLD, TRIPS_LATE))
        opened = trip_ms / 1e3
        row = (last + busy_s, cold + opened + busy_s, late + busy_s)
        times.append([f"{trip_ms:g} ms", *(quantity(value, "s") for value in row)])
    return (
        f"## Round trips\n\nMeasured with a delay of 100 ms in each direction and {counts[0]} nodes; all nodes wait at "
        "the same time, so their number does not matter. Opening a TCP connection is one more.\n\n"
        + table(rows)
        + "\n10,000 nodes on machines of their own then take at most: round trips x round trip time + the server's "
        f"processor time for a round ({quantity(busy_s, 's')}{'' if most >= 10_000 else ', computed'}).\n\n"
        + table(times)
    )


HEAD = """# Beyond one machine

<!-- Made by `make bench` from bench/results.jsonl: change bench/suite/scale_page.py, not this page. -->

What a job of N nodes costs its server, from measurements on one machine. Messages and bytes carry over to a cluster as
they are, processor time and memory of the server up to the speed of its core. The times of
[benchmarks.md](benchmarks.md) do not: there, all nodes compete with the server for the same cores.
"""
BEYOND_THE_LIMITS = """
Beyond them:

- **Several servers.** Runs share nothing: start one `rallypoint serve` for each team or large job. This does not help a
  single job that is too large.
- **A longer `keep_alive_interval`** if idling is the limit: twice the interval costs half.
- **A longer `confirm_timeout`** if a round is: an attempt is given up when no confirmation came for that time, however
  long it takes in all.
- **File descriptors**: a node is one connection; raise `ulimit -n` and `--max-connections` of the server.
- **etcd** is for high availability, not for size: every key costs a disk write on a majority of its members
  ([etcd.md](etcd.md)).
"""
FOOT = """## Not included

A lossy network, slow name servers, TLS ([security.md](security.md)) and `--data` ([durability.md](durability.md)) cost
more. Computed rows assume that costs stay proportional.
"""
