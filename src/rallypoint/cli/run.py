"""`rallypoint run`: starts the workers of this node, and restarts them as nodes come and go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from rallypoint.cli.common import Failed
from rallypoint.cli.run_settings import (
    FLAGS,
    SettingValue,
    Values,
    collect,
    job_of,
    needs_detection,
    settings_of,
    with_logs_label,
)
from rallypoint.cli.serve_observing import metrics_address

if TYPE_CHECKING:
    from rallypoint.aio import AsyncHandler
    from rallypoint.events import Sink
    from rallypoint.launcher.console import Console
    from rallypoint.launcher.supervisor import Job
    from rallypoint.settings import Settings

SEPARATED = "rallypoint.run.separated"
EPILOG = """\b
Examples:
  rallypoint run --standalone --nproc-per-node 2 train.py --epochs 3
  rallypoint run --nnodes 2:4 --rdzv-endpoint head:29400 --rdzv-id my-run --max-restarts 3 train.py
  rallypoint run --url 'tcp://head:29400/my-run?min_nodes=2&max_nodes=4' -- ./simulate --grid 7
"""


class RunCommand(click.Command):
    """A command that records whether `--` was given before the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = list(args)
        rest = super().parse_args(ctx, args)
        program = ctx.params.get("program") or ()
        at = len(before) - len(program) - 1
        ctx.meta[SEPARATED] = 0 <= at < len(before) and before[at] == "--"
        return rest


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    for flag in reversed(FLAGS):
        names = [f"-{flag.short}"] if flag.short else []
        text = flag.help + (f"  [default: {flag.default}]" if flag.default else "")
        more: dict[str, Any] = {"is_flag": True, "default": None} if flag.is_switch else {"metavar": flag.metavar}
        command = click.option(*names, f"--{flag.name}", flag.key, help=text, **more)(command)
    return command


@click.command(
    cls=RunCommand,
    epilog=EPILOG,
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),  # as torchrun
    },
)
@_flags
@click.option("--show-config", is_flag=True, help="Only print every setting and where it comes from.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]...")
@click.pass_context
def run(context: click.Context, /, show_config: bool, program: tuple[str, ...], **given: Any) -> None:
    """Run a program on this node as part of an elastic run, with torchrun's flags.

    Joins the run, starts --nproc-per-node workers with RANK, WORLD_SIZE, MASTER_ADDR and so on, and supervises them.
    When a node is lost or added, or a worker fails, all nodes stop their workers, form a new round, and start them
    again. PROGRAM is a Python script, or after -- any program. Every flag can also be set by the environment variable
    RALLYPOINT_FLAG or, as for torchrun, PET_FLAG.

    The exit code is 0 if all nodes have finished, the worker's own if one failed and the run has no restarts, 80 if the
    restarts are used up, 81 if the run was closed, 82 after a time-out, 83 if the preflight check failed.
    """
    from rallypoint.errors import SettingsError

    flags = {flag.name: _as_text(given[flag.key]) for flag in FLAGS}
    try:
        values = collect(flags, os.environ, {})
        if needs_detection(values):
            values = collect(flags, os.environ, _detected(os.environ))
        settings = settings_of(values)
        job = job_of(values, _argv(values, program, context.meta[SEPARATED], show_config))
        settings = with_logs_label(settings, job)
    except SettingsError as error:
        raise Failed(str(error), 2) from None
    if show_config:
        _show(values, settings, job)
        return
    sys.exit(_launch(values, settings, job))


def _as_text(value: str | bool | None) -> str | None:
    return {True: "true", False: "false"}.get(value) if isinstance(value, bool) else value


def _detected(environ: Mapping[str, str]) -> dict[str, SettingValue]:
    """The settings that the scheduler of this process provides (Slurm, Kubernetes, MPI)."""
    from rallypoint.integrations.detect_scheduler import detect_scheduler

    host = detect_scheduler(environ)
    if host is None:
        return {}
    sizes = None if host.nodes is None else f"{host.nodes}:{host.nodes}"
    rank = None if host.node_rank is None else str(host.node_rank)
    detected = {"rdzv-endpoint": host.endpoint, "nnodes": sizes, "node-rank": rank, "rdzv-id": host.run_id}
    source = f"detected: {host.source}"
    return {name: SettingValue(value, source) for name, value in detected.items() if value is not None}


def _argv(values: Values, program: tuple[str, ...], is_separated: bool, is_optional: bool) -> tuple[str, ...]:
    """The command of a worker, as torchrun would run it.

    After `--`, a program that is not a Python script is run as it is.
    """
    if not program:
        if is_optional:
            return ()
        raise click.UsageError(
            "the program is missing: rallypoint run [FLAGS] script.py, or rallypoint run [FLAGS] -- CMD"
        )
    if values.is_on("no-python"):
        if values.is_on("module"):
            raise click.UsageError("--module and --no-python exclude each other: a module is Python")
        return program
    if values.is_on("module"):
        return (sys.executable, "-u", "-m", *program)
    if is_separated and not program[0].endswith(".py"):
        return program
    return (sys.executable, "-u", *program)


def _show(values: Values, settings: Settings, job: Job) -> None:
    rows = [(f"--{flag.name}", values.found[flag.name]) for flag in FLAGS]
    width = max(len(name) for name, _ in rows)
    shown = [(name, "-" if found.value is None else found.value or '""', found.source) for name, found in rows]
    value_width = min(48, max(len(value) for _, value, _ in shown))
    for name, value, source in shown:
        click.echo(f"{name:{width}}  {value:{value_width}}  {source}")
    sizes = f"{settings.min_nodes} to {settings.max_nodes} nodes"
    click.echo(f"\nrun {settings.run_id!r} on {settings.where}, {sizes}, {job.workers} workers on this node")


def _launch(values: Values, settings: Settings, job: Job) -> int:
    import asyncio

    from rallypoint.errors import RallypointError
    from rallypoint.launcher.console import Console, fill_standard_streams

    fill_standard_streams()
    console = Console()
    try:
        with _observers(values) as observers:
            return asyncio.run(_run(settings, job, console, observers))
    except RallypointError as error:
        raise Failed(str(error), 2) from None
    finally:
        console.close()


async def _run(settings: Settings, job: Job, console: Console, observers: Observers) -> int:
    from rallypoint.launcher.supervisor import Supervisor

    supervisor = Supervisor(settings, job, console, observers.sinks)
    observers.attend(supervisor.handler)
    return await supervisor.run()


@dataclass(slots=True)
class Observers:
    """Further sinks for the events of this node, and a function that is called with its handler."""

    sinks: list[Sink] = field(default_factory=list)
    attend: Callable[[AsyncHandler], None] = field(default=lambda _: None)


@contextmanager
def _observers(values: Values) -> Iterator[Observers]:
    """Set up `--metrics` and `--events`. RallypointError if an address or a file cannot be used."""
    metrics, file = values.found["metrics"].value, values.found["events"].value
    observers = Observers()
    with ExitStack() as stack:
        if file is not None:
            from rallypoint.observe.sinks import JsonLines

            lines = JsonLines(file)
            stack.callback(lines.close)
            observers.sinks.append(lines)
        if metrics is not None:
            try:
                from rallypoint.observe.metrics import NodeMetrics, serve_metrics
            except ImportError as error:
                raise click.ClickException(f"--metrics cannot be served: {error}") from None
            node_metrics = NodeMetrics()
            listener = serve_metrics(node_metrics.registry, *metrics_address(metrics))
            stack.callback(listener.close)
            click.echo(f"shows metrics at http://{listener.address}/metrics", err=True)
            observers.sinks.append(node_metrics)
            observers.attend = node_metrics.attend
        yield observers
