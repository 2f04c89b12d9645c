"""The read-only commands: `status`, `why`, `watch`, `ls`, `history`, `events`. They never change a run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from rallypoint._plain import one_line, plainly
from rallypoint.cli.common import (
    NO_SUCH,
    Duration,
    Failed,
    backend_of,
    backend_target_of,
    common_options,
    print_json,
    run_command,
    target_of,
    within,
)
from rallypoint.cli.environment import UrlCommand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rich.console import Console

    from rallypoint.events import Event
    from rallypoint.observe.follower import Follower
    from rallypoint.observe.report import Report
    from rallypoint.observe.target import Target

URL = click.argument("url", metavar="URL")
REDRAW_S = 2.0
"""`watch` redraws at least this often, because the ages that it shows grow."""
PAUSE_S = 0.1


@click.command(cls=UrlCommand, epilog="Example: rallypoint status tcp://head:29400/my-run")
@URL
@common_options
def status(url: str, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Show a run: its round, its members with ranks and labels, nodes that wait or are held back.

    The exit code is 3 if there is no such run.
    """
    target, report = _read(url, timeout_s, how)
    _fail_if_absent(target, report)
    if as_json:
        print_json(report)
        return
    from rallypoint.cli.render import console, status_view

    out = console()
    out.print(status_view(plainly(report), out), markup=False)


@click.command(cls=UrlCommand, epilog="Example: rallypoint why tcp://head:29400/my-run")
@URL
@common_options
def why(url: str, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Explain in one paragraph what a run waits for, which nodes are missing or were lost and why, and what to do.

    With the whole URL of a node, it also says whether that node would be refused. The exit code is 3 if there is no
    such run.
    """
    from rallypoint.cli.render import console, wall_clock
    from rallypoint.observe.explain import explain

    target, report = _read(url, timeout_s, how)
    found = explain(plainly(report), wall_clock(), target.given)
    if not report.exists:
        raise Failed(found.paragraph, NO_SUCH)
    if as_json:
        state = {"run_id": report.run_id, "where": report.where, "phase": report.phase, "reason": report.reason}
        words = {"advice": found.advice, "facts": found.facts, "hints": found.hints, "text": found.paragraph}
        print_json({"schema": 1, **state, **words})
        return
    console().print(found.paragraph, markup=False, soft_wrap=not sys.stdout.isatty())


@click.command(cls=UrlCommand, epilog="Example: rallypoint watch tcp://head:29400/my-run")
@URL
@common_options
def watch(url: str, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Show a run continuously, until Ctrl-C.

    On a terminal, the screen is redrawn on every change. Without a terminal, one line is printed for each change; with
    --json, one report a line. The run need not exist yet.
    """
    target = target_of(url, timeout_s, **how)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the screen is restored
    try:
        run_command(_watch(target, timeout_s, as_json), target.url)
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command(cls=UrlCommand, name="ls", epilog="Example: rallypoint ls tcp://head:29400")
@URL
@common_options
def ls(url: str, as_json: bool, timeout_s: float, **how: Any) -> None:
    """List the runs of a server or cluster. A run id in the URL is ignored."""
    from rallypoint.observe.listing import list_runs

    target = backend_target_of(url, timeout_s, **how)
    if target.settings.scheme == "file":
        raise click.UsageError("with file:// each run is a separate file: list the directory instead")

    async def ask() -> Any:
        async with backend_of(target, timeout_s) as backend:
            return await within(timeout_s, list_runs(backend, target.settings.etcd_prefix), target.where)

    runs = run_command(ask(), target.url)
    if as_json:
        print_json({"schema": 1, "where": target.where, "runs": runs})
        return
    from rallypoint.cli.render import console, runs_table

    out = console()
    if runs:
        out.print(runs_table([plainly(listed) for listed in runs], out))
    else:
        click.echo(f"there are no runs on {target.where}")


@click.command(cls=UrlCommand, epilog="Example: rallypoint history tcp://head:29400/my-run")
@URL
@common_options
def history(url: str, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Show the last rounds of a run: when each began, how long its phases took, which node arrived last, why it ended.

    Durations are measured by the coordinator's monotonic clock. Times of day are for people only.
    """
    target, report = _read(url, timeout_s, how)
    _fail_if_absent(target, report)
    if as_json:
        print_json({"schema": 1, "run_id": report.run_id, "where": report.where, "rounds": report.rounds})
        return
    from rallypoint.cli.render import console, history_table

    out = console()
    if report.rounds:
        out.print(history_table(plainly(report).rounds, out))
    else:
        click.echo(f"run {report.run_id!r} has had no round yet: {one_line(report.reason) or 'no reason was given'}")


@click.command(cls=UrlCommand, epilog="Example: rallypoint events tcp://head:29400/my-run --follow --json | jq .text")
@URL
@click.option("--follow", is_flag=True, help="Go on with new events, until Ctrl-C.")
@click.option(
    "--since",
    type=Duration(),
    metavar="TIME",
    help="Only past events of the last so many seconds, or 10m, 2h, 1d; by the clocks of the machines. [default: all]",
)
@common_options
def events(url: str, follow: bool, since: float | None, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Show the events of a run, as its own processes write them to their logs.

    First come the past events that the run keeps, about the last 200 from its first node on: joins, rounds and why they
    ended, nodes that were lost, left, were refused or held back, closing. With --follow, new events come after them,
    and waiting reasons. With --json, one object a line.
    """
    target = target_of(url, timeout_s, **how)
    run_command(_events(target, timeout_s, follow, since, as_json), target.url)


# --- reading a run once -----------------------------------------------------------------------------------------------


def _read(url: str, timeout_s: float, how: dict[str, Any]) -> tuple[Target, Report]:
    from rallypoint.observe.follower import read_report

    target = target_of(url, timeout_s, **how)

    async def ask() -> Report:
        async with backend_of(target, timeout_s) as backend:
            return await within(timeout_s, read_report(backend, target.keys, target.where), target.where)

    return target, run_command(ask(), target.url)


def _fail_if_absent(target: Target, report: Report) -> None:
    if not report.exists:
        from rallypoint.observe.operator_actions import no_such_run

        raise Failed(str(no_such_run(target)), NO_SUCH)


# --- following a run --------------------------------------------------------------------------------------------------


async def _reports(follower: Follower, timeout_s: float, where: str) -> AsyncIterator[Report]:
    """The follower's reports. Only the first one has to come within the time limit."""
    reports = aiter(follower)
    yield await within(timeout_s, anext(reports), where)  # type: ignore[arg-type]
    async for report in reports:
        yield report


async def _watch(target: Target, timeout_s: float, as_json: bool) -> None:
    from rallypoint.cli.render import console
    from rallypoint.observe.follower import Follower

    out = console()
    async with backend_of(target, timeout_s) as backend:
        follower = Follower(backend, target.keys, target.where, pause_s=PAUSE_S)
        reports = _reports(follower, timeout_s, target.where)
        if as_json:
            import msgspec

            async for report in reports:
                click.echo(msgspec.json.encode(report).decode())
        elif out.is_terminal:
            await _draw(reports, follower, out)
        else:
            await _print_changes(reports, follower)


async def _print_changes(reports: AsyncIterator[Report], follower: Follower) -> None:
    """Print one line for each change of the phase, the counts or the reason."""
    from rallypoint.cli.render import counts_sentence, moment, wall_clock

    last = ""
    async for report in reports:
        reason = report.reason if report.exists else "there is no such run"
        line = one_line(f"{report.phase.value}: {counts_sentence(report)}; {follower.trouble or reason}")
        if line != last:
            last = line
            click.echo(f"{moment(wall_clock())} {line}")


async def _draw(reports: AsyncIterator[Report], follower: Follower, out: Console) -> None:
    """Redraw on every change, on a change of the window size, and every REDRAW_S."""
    from rich.live import Live

    from rallypoint.cli.render import screen

    latest: list[Report] = []
    due = asyncio.Event()

    async def take() -> None:
        async for report in reports:
            latest[:] = [plainly(report)]
            due.set()

    taking = asyncio.create_task(take(), name="watch")
    taking.add_done_callback(lambda _: due.set())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, due.set)
    try:
        while not latest and not taking.done():
            await due.wait()
            due.clear()
        if latest:
            with Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
                while not taking.done():
                    live.update(screen(latest[0], follower.trouble, out), refresh=True)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(REDRAW_S):
                            await due.wait()
                    due.clear()
        await taking
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def _events(target: Target, timeout_s: float, follow: bool, since: float | None, as_json: bool) -> None:
    from rallypoint.cli.render import wall_clock
    from rallypoint.observe.follower import Follower
    from rallypoint.observe.operator_actions import no_such_run
    from rallypoint.observe.run_events import RunEvents

    run_events = RunEvents()
    async with backend_of(target, timeout_s) as backend:
        follower = Follower(backend, target.keys, target.where, on_changes=run_events.take)
        is_first = True
        async for report in _reports(follower, timeout_s, target.where):
            if is_first:
                is_first = False
                if not report.exists and not follow:
                    raise no_such_run(target)
                earliest = float("-inf") if since is None else wall_clock() - since
                for past in run_events.events:
                    if past.at is None or past.at >= earliest:
                        _print_event(past.at, past.event, as_json)
                if not follow:
                    return
                run_events.events.clear()
            new, run_events.events = run_events.events, []
            for seen in new:
                _print_event(wall_clock() if seen.at is None else seen.at, seen.event, as_json)


def _print_event(at: float | None, event: Event, as_json: bool) -> None:
    if as_json:
        from rallypoint.observe.event_json import event_line

        click.echo(event_line(at, event).decode())
        return
    from rallypoint.cli.render import moment

    click.echo(one_line(f"{moment(at):>8}  {event.by}: {event.text()}"))
