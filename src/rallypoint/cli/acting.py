"""The commands that change a run: `close`, `reopen`, `drain`. Who did it (user@host:pid) and why is recorded in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rallypoint._plain import one_line
from rallypoint.cli.common import backend_of, common, confirm, operator_name, print_json, run, target_of, within

if TYPE_CHECKING:
    from rallypoint.observe.operator_actions import Operator
    from rallypoint.observe.target import Target

T = TypeVar("T")

URL = click.argument("url", metavar="URL")
REASON = click.option("--reason", default="", metavar="TEXT", help="Why; everybody it concerns is told.")
YES = click.option("--yes", "-y", "is_sure", is_flag=True, help="Do not ask, also on a terminal.")


@click.command(epilog="Example: rallypoint close tcp://head:29400/my-run --reason 'wrong dataset'")
@URL
@REASON
@YES
@common
def close(url: str, reason: str, is_sure: bool, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Close a run: nobody can join any more, whoever waits is told, a current round goes on until it is left.

    Closing what is closed is fine. `rallypoint reopen` takes it back.
    """
    target = target_of(url, timeout_s, **how)
    confirm(f"Close run {target.settings.run_id!r} on {target.where}?", is_sure)
    done = _operate(target, timeout_s, lambda operator: operator.close(reason))
    _tell_closing(target, done, as_json, "closed", "was closed already")


@click.command(epilog="Example: rallypoint reopen tcp://head:29400/my-run --reason 'dataset mended'")
@URL
@REASON
@YES
@common
def reopen(url: str, reason: str, is_sure: bool, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Reopen a closed run: nodes can join again. Reopening what is open is fine."""
    target = target_of(url, timeout_s, **how)
    confirm(f"Reopen run {target.settings.run_id!r} on {target.where}?", is_sure)
    done = _operate(target, timeout_s, lambda operator: operator.reopen(reason))
    _tell_closing(target, done, as_json, "reopened", "is open")


@click.command(epilog="Example: rallypoint drain tcp://head:29400/my-run node7 --reason 'disk is failing'")
@URL
@click.argument("node", metavar="NODE")
@REASON
@YES
@common
def drain(url: str, node: str, reason: str, is_sure: bool, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Ask a node, by name or id, to go.

    A member is told and leaves when its program re-joins; whoever waits leaves at once, with success. The exit code is
    3 if the run has no such node.
    """
    target = target_of(url, timeout_s, **how)
    confirm(f"Ask {node} to leave run {target.settings.run_id!r} on {target.where}?", is_sure)
    ids = _operate(target, timeout_s, lambda operator: operator.drain(node, reason))
    if as_json:
        print_json({"schema": 1, "run_id": target.settings.run_id, "node": node, "ids": ids, "by": operator_name()})
    else:
        click.echo(one_line(f"asked {node} to go ({', '.join(ids)}): {reason or 'no reason given'}"))


def _operate(target: Target, timeout_s: float, act: Callable[[Operator], Any]) -> Any:
    from rallypoint.cli.show import wall
    from rallypoint.observe.operator_actions import Operator

    async def work() -> Any:
        async with backend_of(target, timeout_s) as backend:
            operator = Operator(backend, target, operator_name(), wall)
            return await within(timeout_s, act(operator), target.where)

    return run(work(), target.where)


def _tell_closing(target: Target, done: Any, as_json: bool, changed: str, unchanged: str) -> None:
    closed = done.door.closed
    if as_json:
        closing = {"is_closed": closed.closed, "by": closed.by, "why": closed.why, "changed_at": closed.at or None}
        print_json({"schema": 1, "run_id": target.settings.run_id, "changed": done.changed, "closing": closing})
        return
    said = f", by {closed.by}: {closed.why or 'no reason given'}" if closed.by else ""
    click.echo(one_line(f"run {target.settings.run_id!r} {changed if done.changed else unchanged}{said}"))
