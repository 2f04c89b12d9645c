"""`rallypoint bench`: measure Rallypoint on this machine, beside others if they are installed."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from rallypoint.bench.plan import Against, Bench, Case, Side
    from rallypoint.bench.report import Table
    from rallypoint.bench.runner import Outcome

EXAMPLES = """\b
Examples:
  rallypoint bench rendezvous                                  Rallypoint alone
  rallypoint bench rendezvous --against torch --nodes 2,8,32   beside torch's c10d rendezvous
  rallypoint bench rendezvous --against torch-etcd --nodes 32  on etcd, beside torch's two rendezvous on etcd
  rallypoint bench recovery --against torch --nodes 4 --repeat 5
  rallypoint bench idle --nodes 128,1024 --seconds 60 --json
  rallypoint bench store --against torch
  rallypoint bench restart --sessions 10000 --keys 100000      what keeping data costs
"""
INSTALL = {
    "torch": "pip install torch==2.13.0",
    "torchft": "pip install torchft==0.2.0",
    "torch-etcd": "pip install torch==2.13.0 python-etcd==0.4.5",
    "jax": "pip install jax==0.10.2",
}
MODULES = {"torch-etcd": ("torch", "etcd")}
"""What has to be there, where that is not the name itself."""
FEWEST_NODES = 2
MOST_NODES = 16_000


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


def _common(
    repeat: int, nodes: str = "2,8,32,128", fewest: int = FEWEST_NODES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options that all measurements have."""
    against = click.option(
        "--against",
        type=click.Choice(["torch", "torchft", "torch-etcd", "jax"]),
        help="Measure this one too, if it is installed; torch-etcd: both sides on a real etcd.",
    )
    alone = _alone(repeat, nodes, fewest)
    return lambda command: against(alone(command))


def _alone(repeat: int, nodes: str, fewest: int = FEWEST_NODES) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of what is measured without anybody else."""
    options = (
        click.option("--nodes", type=NodeCounts(fewest), default=nodes, show_default=True, help="Numbers of nodes."),
        click.option(
            "--repeat", type=click.IntRange(min=1), default=repeat, show_default=True, help="Samples of each."
        ),
        click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table."),
    )

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.group(epilog=EXAMPLES)
def bench() -> None:
    """Measure Rallypoint on this machine.

    Nodes are processes of this machine, above 128 connections of four processes; the server is a process of its own.
    With --against, the same work is done by both, one after the other, and the ratio is competitor / Rallypoint.
    """


@bench.command()
@_common(repeat=3)
@click.option(
    "--backend", type=click.Choice(["tcp", "etcd"]), default="tcp", show_default=True, help="What Rallypoint runs on."
)
def rendezvous(against: str | None, nodes: tuple[int, ...], repeat: int, as_json: bool, backend: str) -> None:
    """How long it takes until all N of N nodes are released."""
    if backend == "etcd" and against not in (None, "torch-etcd"):
        raise click.UsageError(f"--against {against} is not measured on etcd: use --against torch-etcd")
    _run("rendezvous", against, nodes, repeat, 0.0, as_json, backend)


@bench.command()
@_common(repeat=3)
def recovery(against: str | None, nodes: tuple[int, ...], repeat: int, as_json: bool) -> None:
    """How long it takes until there is a new round after a node was killed, or has come late."""
    _run("recovery", against, nodes, repeat, 0.0, as_json)


@bench.command()
@_common(repeat=1)
@click.option("--seconds", type=click.FloatRange(min=1.0), default=30.0, show_default=True, help="How long to look.")
def idle(against: str | None, nodes: tuple[int, ...], repeat: int, as_json: bool, seconds: float) -> None:
    """What the server of an idle round costs: processor time, memory, bytes on the wire."""
    if sys.platform != "linux":
        raise click.ClickException("bench idle reads /proc, which only Linux has")
    _run("idle", against, nodes, repeat, seconds, as_json)


@bench.command()
@_common(repeat=3, nodes="1,16", fewest=1)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="For each kind of call."
)
def store(against: str | None, nodes: tuple[int, ...], repeat: int, as_json: bool, seconds: float) -> None:
    """How fast the store is, with one process and with many. Values have 64 bytes."""
    _run("store", against, nodes, repeat, seconds, as_json)


@bench.command()
@_alone(repeat=1, nodes="250,500,1000,2000")
@click.option("--seconds", type=click.FloatRange(min=1.0), default=10.0, show_default=True, help="How long to idle.")
def scale(nodes: tuple[int, ...], repeat: int, as_json: bool, seconds: float) -> None:
    """What a round, and nodes that idle, cost the server: frames, bytes, processor time, memory."""
    if sys.platform != "linux":
        raise click.ClickException("bench scale reads /proc, which only Linux has")
    _run("scale", None, nodes, repeat, seconds, as_json)


@bench.command()
@_alone(repeat=1, nodes="4")
def trips(nodes: tuple[int, ...], repeat: int, as_json: bool) -> None:
    """How many round trips a rendezvous takes, found by delaying everything on the wire."""
    _run("trips", None, nodes, repeat, 0.0, as_json)


@bench.command()
@click.option("--sessions", type=click.IntRange(min=1), default=10_000, show_default=True, help="Leases in the data.")
@click.option("--keys", type=click.IntRange(min=1), default=100_000, show_default=True, help="Keys in the data.")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Samples of each.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="How long to write.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def restart(sessions: int, keys: int, repeat: int, seconds: float, as_json: bool) -> None:
    """How long a server with --data takes to go on from it, and what keeping data costs a write."""
    from rallypoint.bench.plan import Bench, Case, Side

    case = Case(Bench.RESTART, Side.RALLYPOINT, sessions, repeat, seconds, keys=keys)
    _run_and_show(Bench.RESTART, (Side.RALLYPOINT,), (case,), (sessions,), repeat, seconds, as_json)


def _run(
    name: str,
    against: str | None,
    nodes: tuple[int, ...],
    repeat: int,
    seconds: float,
    as_json: bool,
    backend: str = "tcp",
) -> None:
    from rallypoint.bench.plan import Against, Bench, cases, columns

    wanted = Bench(name)
    rival = Against(against) if against is not None else None
    if rival is not None:
        _check_rival(wanted, rival)
    sides = columns(wanted, rival, backend)
    to_run = cases(wanted, rival, nodes, repeat, seconds, backend)
    _run_and_show(wanted, sides, to_run, nodes, repeat, seconds, as_json)


def _run_and_show(
    wanted: Bench,
    sides: tuple[Side, ...],
    to_run: tuple[Case, ...],
    nodes: tuple[int, ...],
    repeat: int,
    seconds: float,
    as_json: bool,
) -> None:
    from rallypoint.bench.plan import OURS
    from rallypoint.bench.report import Table

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: leave no processes
    try:
        outcomes = _run_cases(to_run)
    finally:
        signal.signal(signal.SIGTERM, before)
    table = Table(wanted, sides, outcomes)
    if as_json:
        click.echo(json.dumps({**_circumstances(sides, repeat, seconds), **table.as_json()}, indent=2))
    else:
        _show(wanted, table, sides, nodes, seconds)
    if any(outcome.failed for outcome in outcomes if outcome.case.side in OURS):
        raise SystemExit(1)


def _check_rival(bench: Bench, rival: Against) -> None:
    from importlib.util import find_spec

    from rallypoint.bench.plan import comparable

    if not comparable(bench, rival):
        raise click.UsageError(
            f"--against {rival.value} is not for `bench {bench.value}`: {rival.value} has only a first round "
            f"to compare; use it with `bench rendezvous`"
        )
    for module in MODULES.get(rival.value, (rival.value,)):
        if find_spec(module) is None:
            raise click.ClickException(
                f"{module} is not installed for {sys.executable}: {INSTALL[rival.value]}, or leave out --against"
            )


def _run_cases(wanted: tuple[Case, ...]) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from rallypoint.bench.plan import TITLES
    from rallypoint.bench.runner import run_case

    console = Console(stderr=True)
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    outcomes = []
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(wanted))
        for case in wanted:
            title = f"{TITLES[case.side]}, {case.nodes} {'sessions' if case.keys else 'nodes'}"
            progress.update(task, description=title)
            outcomes.append(run_case(case, partial(_tell, progress, task, title)))
            progress.advance(task)
    return outcomes


def _tell(progress: Progress, task: TaskID, title: str, text: str) -> None:
    progress.update(task, description=f"{title}: {text}")


def _show(bench: Bench, table: Table, sides: tuple[Side, ...], nodes: tuple[int, ...], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    heads = table.heads()
    shown = RichTable(title=f"{bench.value}: medians (least to most)", title_justify="left")
    for head in heads:
        shown.add_column(head, justify="left" if not head else "right")
    last = None
    for row in table.rows():
        if last is not None and row[0] != last:
            shown.add_section()
        shown.add_row(*(row if row[0] != last else ["", *row[1:]]))
        last = row[0]
    console = Console(width=None if Console().is_terminal else 200)
    console.print(shown, markup=False)
    for line in (*_explained(bench, nodes, seconds), *table.remarks()):
        click.echo(line)
    machine = _circumstances(sides, 0, 0.0)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    click.echo(f"{machine['machine']['cores']} cores; {versions}")


def _explained(bench: Bench, nodes: tuple[int, ...], seconds: float) -> list[str]:
    from rallypoint.bench.plan import (
        CALM_CORES,
        IDLE_AFTER_S,
        LAST_CALL_S,
        LIMIT_S,
        MOST_PHASE_S,
        Bench,
        least_settle_s,
    )

    settle = ", ".join(f"{least_settle_s(count):g} s" for count in nodes)
    settled = (
        f"settle time {settle}, then until nodes and server use less than {CALM_CORES:g} of a core, "
        f"then up to {MOST_PHASE_S:g} s at random, the same for all"
    )
    match bench:
        case Bench.RENDEZVOUS:
            return [f"min_nodes = max_nodes = N; {settled}; at most {LIMIT_S:g} s a sample"]
        case Bench.RECOVERY:
            return [f"last call {LAST_CALL_S} s, keep-alive as it comes; {settled}; at most {LIMIT_S:g} s a sample"]
        case Bench.IDLE:
            return [
                f"{seconds:g} s, beginning {IDLE_AFTER_S:g} s after all were in a round; payload without headers of TCP"
            ]
        case Bench.STORE:
            return [
                f"N processes make the same call again and again for {seconds:g} s, values of 64 bytes; what one call "
                f"takes, and how many all make in a second (ratio: Rallypoint / competitor). torch answers no `set`"
            ]
        case Bench.SCALE:
            return [f"a further round of N nodes, after {seconds:g} s of idling; of the server, less its keep-alives"]
        case Bench.TRIPS:
            return ["what a sample takes longer by what a round trip takes longer; without opening TCP connections"]
        case Bench.RESTART:
            return [f"N sessions; from the start of the process; writes of 64 bytes by one process for {seconds:g} s"]


def _circumstances(sides: tuple[Side, ...], repeat: int, seconds: float) -> dict[str, Any]:
    """What the figures depend on."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from rallypoint.bench.plan import CALM_CORES, IDLE_AFTER_S, LAST_CALL_S, LIMIT_S, MOST_PHASE_S

    versions = {"python": platform.python_version()}
    for name in dict.fromkeys(["rallypoint", *(side.value.partition("-")[0] for side in sides)]):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    return {
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "processor": platform.machine()},
        "versions": versions,
        "settings": {
            "repeat": repeat,
            "seconds": seconds,
            "limit_s": LIMIT_S,
            "settle_s": f"0.5 + 0.01 a node, until below {CALM_CORES:g} cores, + up to {MOST_PHASE_S:g} at random",
            "idle_after_s": IDLE_AFTER_S,
            "last_call_s": LAST_CALL_S,
        },
    }
