"""`rallypoint doctor`: finds out what is wrong between this machine and a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rallypoint.cli.common import WRONG, backend_options, overrides, print_json, run_command
from rallypoint.cli.environment import UrlCommand

if TYPE_CHECKING:
    from rallypoint.observe.doctor import Check

STEP_S = 3.0


@click.command(
    cls=UrlCommand,
    epilog="Example: rallypoint doctor 'tcp://head:29400/my-run?min_nodes=2&token_file=/etc/rallypoint/token'",
)
@click.argument("url", metavar="URL")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=STEP_S,
    show_default=True,
    metavar="SECONDS",
    help="The time limit of one step.",
)
@backend_options
def doctor(
    url: str, as_json: bool, timeout_s: float, token_file: str | None, options: tuple[tuple[str, str], ...]
) -> None:
    """Find out why a node cannot join. Run it on the node's machine, with the node's whole URL.

    Checks the URL, the host name, the connection, the server, versions, TLS, the token, the run and its settings, the
    limit on open files, and what Slurm, Kubernetes or MPI tell this process. Each check has a verdict and advice. No
    clocks are compared. The exit code is 1 if a check failed.
    """
    checks = run_command(_diagnose(url, timeout_s, overrides(url, timeout_s, token_file, options), as_json), url)
    all_passed = not any(check.is_bad for check in checks)
    if as_json:
        print_json({"schema": 1, "url": url, "ok": all_passed, "checks": checks})
    if not all_passed:
        raise SystemExit(WRONG)


async def _diagnose(url: str, timeout_s: float, options: dict[str, object], as_json: bool) -> list[Check]:
    from rallypoint.cli.render import check_line, console
    from rallypoint.observe.doctor import diagnose

    out, checks = console(), []
    async for check in diagnose(url, timeout_s, options):
        checks.append(check)
        if not as_json:
            out.print(check_line(check), soft_wrap=not out.is_terminal)
    return checks
