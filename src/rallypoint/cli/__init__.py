"""The `rallypoint` command.

Shell completion and `--help` import this module, so the import must stay fast: what only one command needs (rich, a
backend, the server) is imported inside that command.
"""

import difflib

import click

from rallypoint._version import __version__
from rallypoint.cli.bench import bench
from rallypoint.cli.dashboard import dashboard
from rallypoint.cli.doctor import doctor
from rallypoint.cli.inspect_commands import events, history, ls, status, watch, why
from rallypoint.cli.operator_commands import close, drain, free, reopen
from rallypoint.cli.run import run
from rallypoint.cli.serve import serve
from rallypoint.cli.sim import sim
from rallypoint.cli.store import store


class SuggestingGroup(click.Group):
    """A group whose error about an unknown command suggests the most similar one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        wanted = args[0]
        is_option = not wanted[:1].isalnum()
        if not is_option and not ctx.resilient_parsing and self.get_command(ctx, wanted) is None:
            near = difflib.get_close_matches(wanted, self.list_commands(ctx), n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{wanted}'.{hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=SuggestingGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="rallypoint", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Rendezvous for elastic distributed jobs.

    Rallypoint gathers the nodes of a distributed job, agrees on the members and their ranks, and notices when a member
    is lost or a new node waits.

    Commands about a run take its URL, or RALLYPOINT_URL if that is missing, and the file with the server's token from
    --token-file, or else from RALLYPOINT_TOKEN_FILE.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (
    run,
    status,
    why,
    watch,
    ls,
    history,
    events,
    close,
    reopen,
    drain,
    free,
    store,
    doctor,
    serve,
    dashboard,
    bench,
    sim,
):
    main.add_command(_command)
