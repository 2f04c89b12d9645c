"""`quorate serve`: the embedded server as a process of its own."""

from __future__ import annotations

import click

from quorate.cli.serve_limits import limit_options
from quorate.settings import DEFAULT_PORTS

_FILE = click.Path(exists=True, dir_okay=False)


@click.command()
@click.option(
    "--bind",
    default=f"127.0.0.1:{DEFAULT_PORTS['tcp']}",
    show_default=True,
    metavar="ADDR:PORT",
    help="Where to listen; port 0 takes a free one. Without --token-file and --tls-ca: loopback only, or --insecure.",
)
@click.option(
    "--token-file",
    type=_FILE,
    help="A file with the token that every client must give; of several, one a line, any. Read again when it changes.",
)
@click.option("--tls-cert", type=_FILE, help="A PEM file with this server's certificate: speak TLS only.")
@click.option("--tls-key", type=_FILE, help="A PEM file with the key of --tls-cert, if it is not in the same file.")
@click.option(
    "--tls-ca", type=_FILE, help="A PEM file: every client must show a certificate of these authorities (mutual TLS)."
)
@click.option(
    "--data",
    type=click.Path(),
    metavar="DIR",
    help="Keep everything in this directory, and go on from it. Without it, a restart ends all rounds.",
)
@click.option(
    "--sync",
    type=click.Choice(["always", "os"]),
    help="With --data: what must have survived before anything is acknowledged. always (the default): a loss of power; "
    "os: the end of the process, but not of the machine.",
)
@click.option("--insecure", is_flag=True, help="Serve an address that others can reach without asking who they are.")
@limit_options
def serve(
    bind: str,
    token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca: str | None,
    data: str | None,
    sync: str | None,
    insecure: bool,
    **limits: float,
) -> None:
    """Serve any number of runs from this machine.

    Nodes reach it with tcp://ADDR:PORT/run-id?min_nodes=...; it stops in good order on SIGTERM and Ctrl-C. Everything
    it knows is in memory, and with --data also on disk: started again, it goes on where it was.

    Example: quorate serve --bind 0.0.0.0:29400 --token-file /etc/quorate/token --data /var/lib/quorate
    """
    from quorate.backends.tls import TlsFiles
    from quorate.cli.serve_limits import limits_of
    from quorate.errors import QuorateError
    from quorate.server.process import run_loop, serve_until_told

    if tls_cert is None and (tls_key is not None or tls_ca is not None):
        raise click.UsageError("--tls-key and --tls-ca need --tls-cert, the certificate of this server")
    if sync is not None and data is None:
        raise click.UsageError("--sync says how data are kept: give the directory with --data, too")
    tls = TlsFiles.given(tls_ca, tls_cert, tls_key)
    try:
        run_loop(
            serve_until_told(
                bind, token_file, tls=tls, limits=limits_of(limits), insecure=insecure, data=data, sync=sync or "always"
            )
        )
    except QuorateError as error:
        raise click.ClickException(str(error)) from None
