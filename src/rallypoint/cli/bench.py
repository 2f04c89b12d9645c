"""`rallypoint bench`: measure Rallypoint on this machine, beside competitors if they are installed."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from rallypoint.bench.competitors import Found
    from rallypoint.bench.plan import Bench, Case, Competitor
    from rallypoint.bench.report import Table
    from rallypoint.bench.runner import Outcome

EXAMPLES = """\b
Examples:
  rallypoint bench rendezvous                                  Rallypoint alone
  rallypoint bench rendezvous --against all --nodes 2,8,32,128,1000,10000
  rallypoint bench rendezvous --against torchft --against jax  beside these two
  rallypoint bench rendezvous --against torch-etcd --nodes 32  on etcd, beside torch's two rendezvous on etcd
  rallypoint bench recovery --against torch --nodes 4 --repeat 5
  rallypoint bench idle --nodes 128,10000 --seconds 60 --json
  rallypoint bench store --against torch
  rallypoint bench restart --sessions 10000 --keys 100000      what keeping data costs
"""
COMPETITORS = ("torch", "torchft", "torch-etcd", "jax")
ALL = "all"
FEWEST_NODES = 2
MOST_NODES = 16_000

Command = Callable[..., None]


class NodeCounts(click.ParamType):  # type: ignore[type-arg]
    """Numbers of nodes, separated by commas."""

    name = "N,N,..."

    def __init__(self, fewest: int) -> None:
        self._fewest = fewest

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.isascii() and part.isdecimal() for part in parts):
            self.fail(f"{value!r} is no list of numbers of nodes: give it like 2,8,32", param, ctx)
        counts = sorted({int(part) for part in parts})
        if not self._fewest <= counts[0] <= counts[-1] <= MOST_NODES:
            self.fail(f"{value!r} is out of range: {self._fewest} to {MOST_NODES} nodes can be measured", param, ctx)
        return tuple(counts)


def python_options(command: Command) -> Command:
    """Options for competitors that are installed for another Python."""
    for name in ("jax", "torchft", "torch"):
        command = click.option(
            f"--{name}-python",
            envvar=f"{name.upper()}_PYTHON",
            metavar="PATH",
            help=f"A Python with {name}, if it is not this one.",
        )(command)
    return command


def pythons_of(**options: str | None) -> dict[str, str]:
    """The values of `python_options` by the names of the competitors."""
    return {name.removesuffix("_python"): path for name, path in options.items() if path}


def _compared(repeat: int, nodes: str = "2,8,32,128", fewest: int = FEWEST_NODES) -> Callable[[Command], Command]:
    """The options of a measurement that can be compared."""
    against = click.option(
        "--against",
        type=click.Choice([*COMPETITORS, ALL]),
        multiple=True,
        help="Measure this one too; may be repeated. torch-etcd: both sides on a real etcd. all: those that are "
        "installed.",
    )
    alone = _alone(repeat, nodes, fewest)
    return lambda command: against(alone(python_options(command)))


def _alone(repeat: int, nodes: str, fewest: int = FEWEST_NODES) -> Callable[[Command], Command]:
    """The options of a measurement of Rallypoint alone."""
    options = (
        click.option("--nodes", type=NodeCounts(fewest), default=nodes, show_default=True, help="Numbers of nodes."),
        click.option(
            "--repeat", type=click.IntRange(min=1), default=repeat, show_default=True, help="Samples of each."
        ),
        click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table."),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(epilog=EXAMPLES)
def bench() -> None:
    """Measure Rallypoint on this machine.

    Nodes are processes of this machine, above 128 connections of four processes; the server is a process of its own.
    With --against, all sides do the same work and take turns, sample by sample; the ratio is competitor / Rallypoint.
    """


@bench.command()
@_compared(repeat=3)
@click.option(
    "--backend", type=click.Choice(["tcp", "etcd"]), default="tcp", show_default=True, help="What Rallypoint runs on."
)
def rendezvous(
    against: tuple[str, ...], nodes: tuple[int, ...], repeat: int, as_json: bool, backend: str, **pythons: str | None
) -> None:
    """How long it takes until all N of N nodes are released."""
    _run("rendezvous", nodes, repeat, 0.0, as_json, against, backend, pythons)


@bench.command()
@_compared(repeat=3)
def recovery(
    against: tuple[str, ...], nodes: tuple[int, ...], repeat: int, as_json: bool, **pythons: str | None
) -> None:
    """How long it takes until there is a new round after a node was killed, or has come late."""
    _run("recovery", nodes, repeat, 0.0, as_json, against, pythons=pythons)


@bench.command()
@_compared(repeat=1)
@click.option("--seconds", type=click.FloatRange(min=1.0), default=30.0, show_default=True, help="How long to measure.")
def idle(
    against: tuple[str, ...],
    nodes: tuple[int, ...],
    repeat: int,
    as_json: bool,
    seconds: float,
    **pythons: str | None,
) -> None:
    """What the server of an idle round costs: processor time, memory, bytes on the wire."""
    if sys.platform != "linux":
        raise click.ClickException("bench idle reads /proc, which only Linux has")
    _run("idle", nodes, repeat, seconds, as_json, against, pythons=pythons)


@bench.command()
@_compared(repeat=3, nodes="1,16", fewest=1)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="For each kind of call."
)
def store(
    against: tuple[str, ...],
    nodes: tuple[int, ...],
    repeat: int,
    as_json: bool,
    seconds: float,
    **pythons: str | None,
) -> None:
    """How fast the store is, with one process and with many. Values have 64 bytes."""
    _run("store", nodes, repeat, seconds, as_json, against, pythons=pythons)


@bench.command()
@_alone(repeat=1, nodes="250,500,1000,2000")
@click.option("--seconds", type=click.FloatRange(min=1.0), default=10.0, show_default=True, help="How long to idle.")
def scale(nodes: tuple[int, ...], repeat: int, as_json: bool, seconds: float) -> None:
    """What a round, and nodes that idle, cost the server: frames, bytes, processor time, memory."""
    if sys.platform != "linux":
        raise click.ClickException("bench scale reads /proc, which only Linux has")
    _run("scale", nodes, repeat, seconds, as_json)


@bench.command()
@_alone(repeat=1, nodes="4")
def trips(nodes: tuple[int, ...], repeat: int, as_json: bool) -> None:
    """How many round trips a rendezvous takes, found by delaying everything on the wire."""
    _run("trips", nodes, repeat, 0.0, as_json)


@bench.command()
@click.option("--sessions", type=click.IntRange(min=1), default=10_000, show_default=True, help="Leases in the data.")
@click.option("--keys", type=click.IntRange(min=1), default=100_000, show_default=True, help="Keys in the data.")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Samples of each.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="How long to write.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def restart(sessions: int, keys: int, repeat: int, seconds: float, as_json: bool) -> None:
    """How long a server with --data takes to go on from it, and what keeping data costs a write."""
    from rallypoint.bench.competitors import find
    from rallypoint.bench.plan import Bench, Case, Side

    case = Case(Bench.RESTART, Side.RALLYPOINT, sessions, repeat, seconds, keys=keys)
    _run_and_show(Bench.RESTART, find([Side.RALLYPOINT], {}), ((case,),), repeat, seconds, as_json)


def _run(
    name: str,
    nodes: tuple[int, ...],
    repeat: int,
    seconds: float,
    as_json: bool,
    against: tuple[str, ...] = (),
    backend: str = "tcp",
    pythons: dict[str, str | None] | None = None,
) -> None:
    from rallypoint.bench.competitors import find
    from rallypoint.bench.plan import Bench, columns, comparisons

    wanted = Bench(name)
    sides = columns(wanted, _competitors(wanted, against, backend), backend)
    found = find(sides, pythons_of(**(pythons or {})))
    for side, why in found.missing.items():
        if ALL not in against or side is sides[0]:
            raise click.ClickException(f"{why}, or leave out --against")
    present = [side for side in sides if side in found.pythons]
    _run_and_show(wanted, found, comparisons(wanted, present, nodes, repeat, seconds), repeat, seconds, as_json)


def _competitors(bench: Bench, against: tuple[str, ...], backend: str) -> list[Competitor]:
    """Those of `--against`. UsageError if they cannot be compared with what Rallypoint does here."""
    from rallypoint.bench.plan import Competitor, comparable

    on_etcd = backend == "etcd" or Competitor.TORCH_ETCD.value in against
    if ALL in against:
        return [one for one in Competitor if comparable(bench, one) and (one is Competitor.TORCH_ETCD) is on_etcd]
    chosen = [Competitor(name) for name in dict.fromkeys(against)]
    for one in chosen:
        if not comparable(bench, one):
            raise click.UsageError(
                f"--against {one.value} is not for `bench {bench.value}`: {one.value} has only a first round "
                f"to compare; use it with `bench rendezvous`"
            )
        if on_etcd and one is not Competitor.TORCH_ETCD:
            raise click.UsageError(f"--against {one.value} is not measured on etcd: use --against torch-etcd alone")
    return chosen


def _run_and_show(
    wanted: Bench,
    found: Found,
    groups: tuple[tuple[Case, ...], ...],
    repeat: int,
    seconds: float,
    as_json: bool,
) -> None:
    from rallypoint.bench.plan import OURS
    from rallypoint.bench.report import Table

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: leave no processes
    try:
        outcomes = _run_groups(groups, found)
    finally:
        signal.signal(signal.SIGTERM, before)
    table = Table(wanted, tuple(found.pythons), outcomes)
    if as_json:
        missing = {side.value: why for side, why in found.missing.items()}
        document = {**_circumstances(found, repeat, seconds), "missing": missing, **table.as_json()}
        click.echo(json.dumps(document, indent=2))
    else:
        _show(wanted, table, found, [group[0].nodes for group in groups], seconds)
    if any(outcome.failed for outcome in outcomes if outcome.case.side in OURS):
        raise SystemExit(1)


def _run_groups(groups: Sequence[Sequence[Case]], found: Found) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rallypoint.bench.runner import Job, run_cases

    console = Console(stderr=True)
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    outcomes: list[Outcome] = []
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(groups))
        for group in groups:
            jobs = [Job(case, found.pythons[case.side]) for case in group]
            outcomes += run_cases(jobs, partial(_show_progress, progress, task))
            progress.advance(task)
    return outcomes


def _show_progress(progress: Progress, task: TaskID, case: Case, text: str) -> None:
    from rallypoint.bench.plan import TITLES

    unit = "sessions" if case.keys else "nodes"
    progress.update(task, description=f"{TITLES[case.side]}, {case.nodes:,} {unit}: {text}")


def _show(bench: Bench, table: Table, found: Found, nodes: Sequence[int], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=bench.value, title_justify="left")
    for head in table.heads():
        shown.add_column(head, justify="right" if head in ("N", "ratio", "samples") else "left")
    before: list[str] = []
    for row in table.rows():
        if before and row[:2] != before[:2] and (len(found.pythons) > 1 or (row[0] != before[0] and len(nodes) > 1)):
            shown.add_section()
        is_same = [row[0] == before[0], row[:2] == before[:2]] if before else [False, False]
        shown.add_row(*("" if same else cell for same, cell in zip(is_same, row, strict=False)), *row[2:])
        before = row
    console = Console(width=None if Console().is_terminal else 200)
    console.print(shown, markup=False)
    for line in (*_explained(bench, nodes, seconds), *table.remarks(), *dict.fromkeys(found.missing.values())):
        click.echo(line)
    machine = _circumstances(found, 0, 0.0)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    click.echo(f"{machine['machine']['cores']} cores; {versions}")


def _explained(bench: Bench, nodes: Sequence[int], seconds: float) -> list[str]:
    from rallypoint.bench.plan import (
        IDLE_AFTER_S,
        LAST_CALL_S,
        LIMIT_S,
        MAX_PHASE_S,
        SETTLED_CORES,
        Bench,
        least_settle_s,
    )

    settle = ", ".join(f"{least_settle_s(count):g} s" for count in nodes)
    settled = (
        f"settle time {settle}, then until nodes and server use less than {SETTLED_CORES:g} of a core, "
        f"then up to {MAX_PHASE_S:g} s at random, the same for all sides"
    )
    match bench:
        case Bench.RENDEZVOUS:
            return [f"min_nodes = max_nodes = N; {settled}; at most {LIMIT_S:g} s a sample"]
        case Bench.RECOVERY:
            return [f"last call {LAST_CALL_S} s, keep-alives by default; {settled}; at most {LIMIT_S:g} s a sample"]
        case Bench.IDLE:
            return [
                f"{seconds:g} s, beginning {IDLE_AFTER_S:g} s after all were in a round; payload without TCP headers"
            ]
        case Bench.STORE:
            return [
                f"N processes repeat the same call for {seconds:g} s, values of 64 bytes; the time of one call, and "
                f"the calls of all in a second (ratio: Rallypoint / competitor). torch's `set` is not acknowledged"
            ]
        case Bench.SCALE:
            return [f"a further round of N nodes, after {seconds:g} s of idling; without the server's keep-alives"]
        case Bench.TRIPS:
            return ["additional time of a delayed sample / additional time of a round trip; without TCP connects"]
        case Bench.RESTART:
            return [f"N sessions; from the start of the process; writes of 64 bytes by one process for {seconds:g} s"]


def _circumstances(found: Found, repeat: int, seconds: float) -> dict[str, Any]:
    """What the figures depend on."""
    import os
    import platform

    from rallypoint.bench.plan import IDLE_AFTER_S, LAST_CALL_S, LIMIT_S, MAX_PHASE_S, SETTLED_CORES

    return {
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "processor": platform.machine()},
        "versions": {name.lower(): version for name, version in found.versions.items()},
        "settings": {
            "repeat": repeat,
            "seconds": seconds,
            "limit_s": LIMIT_S,
            "settle_s": f"0.5 + 0.01 a node, until below {SETTLED_CORES:g} cores, + up to {MAX_PHASE_S:g} at random",
            "idle_after_s": IDLE_AFTER_S,
            "last_call_s": LAST_CALL_S,
        },
    }
