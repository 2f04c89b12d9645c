"""`quorate serve`: the embedded server as a process of its own."""

from __future__ import annotations

import click

from quorate.settings import DEFAULT_PORTS


@click.command()
@click.option(
    "--bind",
    default=f"127.0.0.1:{DEFAULT_PORTS['tcp']}",
    show_default=True,
    metavar="ADDR:PORT",
    help="Where to listen; port 0 takes a free one. Without a token, an address that others can reach must be given.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    help="A file with the token that every client must give.",
)
def serve(bind: str, token_file: str | None) -> None:
    """Serve any number of runs from this machine.

    Nodes reach it with tcp://ADDR:PORT/run-id?min_nodes=...; it stops in good order on SIGTERM and Ctrl-C. Everything
    it knows is in memory.

    Example: quorate serve --bind 0.0.0.0:29400 --token-file /etc/quorate/token
    """
    from quorate.errors import QuorateError
    from quorate.server.process import run_loop, serve_until_told

    try:
        run_loop(serve_until_told(bind, token_file))
    except QuorateError as error:
        raise click.ClickException(str(error)) from None
