"""`rallypoint run`: start the workers of this node, and look after them as nodes come and go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from rallypoint.cli.common import Failed
from rallypoint.cli.run_settings import FLAGS, Found, Values, collect, job_of, settings_of, wants_a_host
from rallypoint.cli.serve_watching import metrics_address

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
    """Remembers whether `--` stood before the program."""

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
@click.option("--show-config", is_flag=True, help="Show every setting and where it came from, and do nothing else.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGS]...")
@click.pass_context
def run(context: click.Context, /, show_config: bool, program: tuple[str, ...], **given: Any) -> None:
    """Run a program on this node as part of an elastic run, with torchrun's flags.

    Joins the run, starts --nproc-per-node workers with RANK, WORLD_SIZE, MASTER_ADDR and the like, and watches them.
    When a node is lost or added, or a worker fails, all nodes stop their workers, re-form, and start them again.
    PROGRAM is a Python script, or after -- any program. Every flag can also be given as RALLYPOINT_FLAG or, as for
    torchrun, PET_FLAG.

    The exit code is 0 when all nodes have finished, the worker's own when one failed and there are no restarts, 80 when
    the restarts are used up, 81 when the run was closed, 82 when time was over, 83 when the preflight failed.
    """
    from rallypoint.errors import SettingsError

    flags = {flag.name: _as_text(given[flag.key]) for flag in FLAGS}
    try:
        values = collect(flags, os.environ, {})
        if wants_a_host(values):
            values = collect(flags, os.environ, _detected(os.environ))
        settings = settings_of(values)
        job = job_of(values, _argv(values, program, context.meta[SEPARATED], show_config))
    except SettingsError as error:
        raise Failed(str(error), 2) from None
    if show_config:
        _show(values, settings, job)
        return
    sys.exit(_launch(values, settings, job))


def _as_text(value: str | bool | None) -> str | None:
    return {True: "true", False: "false"}.get(value) if isinstance(value, bool) else value


def _detected(environ: Mapping[str, str]) -> dict[str, Found]:
    """What the host says of itself (Slurm, Kubernetes, MPI)."""
    from rallypoint.integrations.here import detect_here

    host = detect_here(environ)
    if host is None:
        return {}
    sizes = None if host.nodes is None else f"{host.nodes}:{host.nodes}"
    rank = None if host.node_rank is None else str(host.node_rank)
    said = {"rdzv-endpoint": host.endpoint, "nnodes": sizes, "node-rank": rank, "rdzv-id": host.run_id}
    source = f"detected: {host.source}"
    return {name: Found(value, source) for name, value in said.items() if value is not None}


def _argv(values: Values, program: tuple[str, ...], is_separated: bool, may_be_missing: bool) -> tuple[str, ...]:
    """The command of a worker, as torchrun would run it; after `--`, what is no Python script is run as it is."""
    if not program:
        if may_be_missing:
            return ()
        raise click.UsageError(
            "the program is missing: rallypoint run [FLAGS] script.py, or rallypoint run [FLAGS] -- CMD"
        )
    if values.is_on("no-python"):
        if values.is_on("module"):
            raise click.UsageError("--module is a Python module, and --no-python says that it is not Python")
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
        with _heard(values) as heard:
            return asyncio.run(_run(settings, job, console, heard))
    except RallypointError as error:
        raise Failed(str(error), 2) from None
    finally:
        console.close()


async def _run(settings: Settings, job: Job, console: Console, heard: Heard) -> int:
    from rallypoint.launcher.supervisor import Supervisor

    supervisor = Supervisor(settings, job, console, heard.sinks)
    heard.attend(supervisor.handler)
    return await supervisor.run()


@dataclass(slots=True)
class Heard:
    """Who hears the events of this node beside the launcher, and is shown its handler."""

    sinks: list[Sink] = field(default_factory=list)
    attend: Callable[[AsyncHandler], None] = field(default=lambda _: None)


@contextmanager
def _heard(values: Values) -> Iterator[Heard]:
    """`--metrics` and `--events`. RallypointError if an address or a file cannot be used."""
    metrics, file = values.found["metrics"].value, values.found["events"].value
    heard = Heard()
    with ExitStack() as stack:
        if file is not None:
            from rallypoint.observe.sinks import JsonLines

            lines = JsonLines(file)
            stack.callback(lines.close)
            heard.sinks.append(lines)
        if metrics is not None:
            try:
                from rallypoint.observe.metrics import NodeMetrics, serve_metrics
            except ImportError as error:
                raise click.ClickException(f"--metrics cannot be served: {error}") from None
            counted = NodeMetrics()
            listener = serve_metrics(counted.registry, *metrics_address(metrics))
            stack.callback(listener.close)
            click.echo(f"shows metrics at http://{listener.address}/metrics", err=True)
            heard.sinks.append(counted)
            heard.attend = counted.attend
        yield heard
