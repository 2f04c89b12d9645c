"""The commands that change a run: `close`, `reopen`, `drain`, `free`.

The run records the operator (user@host:pid) and why, except for `free`, which removes a record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rallypoint._plain import one_line
from rallypoint.cli.common import (
    WRONG,
    Failed,
    backend_of,
    can_ask,
    common_options,
    confirm,
    operator_name,
    print_json,
    run_command,
    target_of,
    within,
)
from rallypoint.cli.environment import UrlCommand

if TYPE_CHECKING:
    from rallypoint.observe.operator_actions import Operator
    from rallypoint.observe.target import Target

T = TypeVar("T")

URL = click.argument("url", metavar="URL")
REASON = click.option("--reason", default="", metavar="TEXT", help="The reason; all nodes concerned are told.")
YES = click.option("--yes", "-y", "is_sure", is_flag=True, help="Do not ask for confirmation.")


@click.command(cls=UrlCommand, epilog="Example: rallypoint close tcp://head:29400/my-run --reason 'wrong dataset'")
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


@click.command(cls=UrlCommand, epilog="Example: rallypoint reopen tcp://head:29400/my-run --reason 'dataset fixed'")
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


@click.command(
    cls=UrlCommand, epilog="Example: rallypoint drain tcp://head:29400/my-run node7 --reason 'disk is failing'"
)
@URL
@click.argument("node", metavar="NODE")
@REASON
@YES
@click.option("--force", is_flag=True, help="Also if fewer than min_nodes nodes are left, without asking.")
@common_options
def drain(
    url: str, node: str, reason: str, is_sure: bool, force: bool, as_json: bool, timeout_s: float, **how: Any
) -> None:
    """Ask a node, by name or id, to leave the run.

    A member is notified and leaves when its program re-joins. A node that waits leaves at once, and its program ends
    with success. The exit code is 3 if the run has no such node.

    If fewer than min_nodes nodes are left without it, the job stands still until another node is started: then the
    command says so and asks, and without a terminal it does nothing and exits with 1, unless --force is given.
    """
    target = target_of(url, timeout_s, **how)
    warning = "" if force else _drain_warning(target, timeout_s, node)
    if warning and not can_ask():
        raise Failed(f"{warning}. Nothing was changed: start another node first, or give --force", WRONG)
    if warning:
        click.echo(one_line(f"Warning: {warning}."), err=True)
    confirm(
        f"Ask {node} to leave run {target.settings.run_id!r} on {target.where}?", (is_sure or force) and not warning
    )
    ids = _operate(target, timeout_s, lambda operator: operator.drain(node, reason))
    if as_json:
        print_json({"schema": 1, "run_id": target.settings.run_id, "node": node, "ids": ids, "by": operator_name()})
    else:
        click.echo(one_line(f"asked {node} to go ({', '.join(ids)}): {reason or 'no reason given'}"))


@click.command(cls=UrlCommand, epilog="Example: rallypoint free tcp://head:29400/my-run node7")
@URL
@click.argument("node", metavar="NODE")
@YES
@common_options
def free(url: str, node: str, is_sure: bool, as_json: bool, timeout_s: float, **how: Any) -> None:
    """Free a node that is held back, by name: it may join at once, and its losses are forgotten.

    The exit code is 3 if the run holds no such node back.
    """
    target = target_of(url, timeout_s, **how)
    confirm(f"Free {node}, which run {target.settings.run_id!r} on {target.where} holds back?", is_sure)
    _operate(target, timeout_s, lambda operator: operator.free(node))
    if as_json:
        print_json({"schema": 1, "run_id": target.settings.run_id, "node": node, "by": operator_name()})
    else:
        click.echo(one_line(f"freed {node}: it may join again"))


def _drain_warning(target: Target, timeout_s: float, node: str) -> str:
    from rallypoint.observe.follower import read_report
    from rallypoint.observe.operator_actions import drain_warning

    async def ask() -> str:
        async with backend_of(target, timeout_s) as backend:
            report = await within(timeout_s, read_report(backend, target.keys, target.where), target.where)
            return drain_warning(report, node)

    return run_command(ask(), target.url)


def _operate(target: Target, timeout_s: float, act: Callable[[Operator], Any]) -> Any:
    from rallypoint.cli.render import wall_clock
    from rallypoint.observe.operator_actions import Operator

    async def work() -> Any:
        async with backend_of(target, timeout_s) as backend:
            operator = Operator(backend, target, operator_name(), wall_clock)
            return await within(timeout_s, act(operator), target.where)

    return run_command(work(), target.url)


def _print_closing(target: Target, done: Any, as_json: bool, changed: str, unchanged: str) -> None:
    closed = done.run.closed
    if as_json:
        closing = {"is_closed": closed.closed, "by": closed.by, "why": closed.why, "changed_at": closed.at or None}
        print_json({"schema": 1, "run_id": target.settings.run_id, "changed": done.changed, "closing": closing})
        return
    by = f", by {closed.by}: {closed.why or 'no reason given'}" if closed.by else ""
    click.echo(one_line(f"run {target.settings.run_id!r} {changed if done.changed else unchanged}{by}"))
