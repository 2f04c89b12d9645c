"""The commands that change a run: `close`, `reopen`, `drain`. The run records the operator (user@host:pid) and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rallypoint._plain import one_line
from rallypoint.cli.common import (
    backend_of,
    common_options,
    confirm,
    operator_name,
    print_json,
    run_command,
    target_of,
    within,
)

if TYPE_CHECKING:
    from rallypoint.observe.operator_actions import Operator
    from rallypoint.observe.target import Target

T = TypeVar("T")

URL = click.argument("url", metavar="URL")
REASON = click.option("--reason", default="", metavar="TEXT", help="The reason; all nodes concerned are told.")
YES = click.option("--yes", "-y", "is_sure", is_flag=True, help="Do not ask for confirmation.")


@click.command(epilog="Example: rallypoint close tcp://head:29400/my-run --reason 'wrong dataset'")
@URL
@REASON
@YES
@common_options
def close(url: str, reason: str, is_sure: bool, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Close a run: no node can join it any more, and nodes that wait are told. A current round goes on.

    Closing a closed run has no effect. `rallypoint reopen` undoes it.
    """
    target = target_of(url, timeout_s, **how)
    confirm(f"Close run {target.settings.run_id!r} on {target.where}?", is_sure)
    done = _operate(target, timeout_s, lambda operator: operator.close(reason))
    _print_closing(target, done, as_json, "closed", "was closed already")


@click.command(epilog="Example: rallypoint reopen tcp://head:29400/my-run --reason 'dataset fixed'")
@URL
@REASON
@YES
@common_options
def reopen(url: str, reason: str, is_sure: bool, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Reopen a closed run: nodes can join again. Reopening an open run has no effect."""
    target = target_of(url, timeout_s, **how)
    confirm(f"Reopen run {target.settings.run_id!r} on {target.where}?", is_sure)
    done = _operate(target, timeout_s, lambda operator: operator.reopen(reason))
    _print_closing(target, done, as_json, "reopened", "is open")


@click.command(epilog="Example: rallypoint drain tcp://head:29400/my-run node7 --reason 'disk is failing'")
@URL
@click.argument("node", metavar="NODE")
@REASON
@YES
@common_options
def drain(url: str, node: str, reason: str, is_sure: bool, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Ask a node, by name or id, to leave the run.

    A member is notified and leaves when its program re-joins. A node that waits leaves at once, and its program ends
    with success. The exit code is 3 if the run has no such node.
    """
    target = target_of(url, timeout_s, **how)
    confirm(f"Ask {node} to leave run {target.settings.run_id!r} on {target.where}?", is_sure)
    ids = _operate(target, timeout_s, lambda operator: operator.drain(node, reason))
    if as_json:
        print_json({"schema": 1, "run_id": target.settings.run_id, "node": node, "ids": ids, "by": operator_name()})
    else:
        click.echo(one_line(f"asked {node} to go ({', '.join(ids)}): {reason or 'no reason given'}"))


def _operate(target: Target, timeout_s: float, act: Callable[[Operator], Any]) -> Any:
    from rallypoint.cli.render import wall_clock
    from rallypoint.observe.operator_actions import Operator

    async def work() -> Any:
        async with backend_of(target, timeout_s) as backend:
            operator = Operator(backend, target, operator_name(), wall_clock)
            return await within(timeout_s, act(operator), target.where)

    return run_command(work(), target.where)


def _print_closing(target: Target, done: Any, as_json: bool, changed: str, unchanged: str) -> None:
    closed = done.run.closed
    if as_json:
        closing = {"is_closed": closed.closed, "by": closed.by, "why": closed.why, "changed_at": closed.at or None}
        print_json({"schema": 1, "run_id": target.settings.run_id, "changed": done.changed, "closing": closing})
        return
    by = f", by {closed.by}: {closed.why or 'no reason given'}" if closed.by else ""
    click.echo(one_line(f"run {target.settings.run_id!r} {changed if done.changed else unchanged}{by}"))
