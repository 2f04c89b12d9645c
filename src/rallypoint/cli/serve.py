"""`rallypoint serve`: the embedded server, or a real etcd member, as a process."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from rallypoint.cli.environment import TOKEN_FILE_VARIABLE, token_file_of
from rallypoint.cli.serve_limits import limit_options
from rallypoint.cli.serve_observing import observed, observing_options
from rallypoint.settings import DEFAULT_PORTS

_FILE = click.Path(exists=True, dir_okay=False)
_COMMON = frozenset({"engine", "bind", "data", "events_file", "events_size"})
_ETCD = frozenset({"peers", "member", "etcd_binary", "any_version", "etcd_options"})


@click.command()
@click.option(
    "--engine",
    type=click.Choice(["embedded", "etcd"]),
    default="embedded",
    show_default=True,
    help="What holds the runs: the embedded server, or a real etcd member that is started and supervised.",
)
@click.option(
    "--bind",
    metavar="ADDR:PORT",
    help="Where to listen; port 0 takes a free one. Without --token-file and --tls-ca: loopback only, or --insecure.  "
    f"[default: 127.0.0.1:{DEFAULT_PORTS['tcp']}; etcd: 127.0.0.1:{DEFAULT_PORTS['etcd']}]",
)
@click.option(
    "--token-file",
    type=_FILE,
    help="A file with the token that every client must give; with several, one a line, any of them. "
    f"Read again when it changes. Default: {TOKEN_FILE_VARIABLE}.",
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
    help="Keep all state in this directory, and continue from it. Without it, a restart ends all rounds.",
)
@click.option(
    "--sync",
    type=click.Choice(["always", "os"]),
    help="With --data: what acknowledged writes survive. always (the default): a loss of power; os: the end of the "
    "process, but not of the machine.",
)
@click.option(
    "--http",
    metavar="ADDR:PORT",
    help="Serve the web page there, in a child process with the same token and certificates (docs/dashboard.md); port "
    "0 takes a free one. Needs the extra rallypoint[dashboard].",
)
@click.option(
    "--http-name",
    "http_names",
    multiple=True,
    metavar="NAME",
    help="With --http: a host name that the page is served under, besides addresses and this machine's. May be "
    "repeated.",
)
@click.option(
    "--insecure", is_flag=True, help="Serve an address that other machines can reach without a token or mutual TLS."
)
@observing_options
@limit_options()
@click.option("--peers", metavar="A,B,C", help="etcd: the machines of the cluster, the same list on each of them.")
@click.option("--member", metavar="A", help="etcd: which of --peers this one is, if that cannot be seen.")
@click.option("--etcd-binary", metavar="PATH", help="etcd: the program, if it is not in PATH.")
@click.option("--any-version", is_flag=True, help="etcd: run 3.5.0 to 3.5.5 too, which can corrupt their data.")
@click.argument("etcd_options", nargs=-1, metavar="[-- ETCD_OPTIONS...]")
def serve(engine: str, bind: str | None, data: str | None, **options: Any) -> None:
    """Serve any number of runs from this machine.

    Nodes reach it with tcp://ADDR:PORT/run-id?min_nodes=...; it stops in good order on SIGTERM and Ctrl-C. Its state
    is in memory, and with --data also on disk: started again, it continues from there.

    With --engine etcd it is a real etcd member; the same command on three machines is a cluster that survives the loss
    of one, and nodes reach it with etcd://A,B,C/run-id?min_nodes=...

    \b
    Examples:
      rallypoint serve --bind 0.0.0.0:29400 --token-file /etc/rallypoint/token --data /var/lib/rallypoint
      rallypoint serve --http 127.0.0.1:29480
      rallypoint serve --engine etcd --peers a,b,c --data /var/lib/rallypoint
    """
    from rallypoint.errors import RallypointError

    _check_engine_options(click.get_current_context(), engine)
    of_etcd = {name: value for name, value in options.items() if name in _ETCD | _COMMON}
    of_embedded = {name: value for name, value in options.items() if name not in _ETCD}
    try:
        if engine == "etcd":
            _serve_etcd(bind, data, **of_etcd)
        else:
            _serve_embedded(bind or f"127.0.0.1:{DEFAULT_PORTS['tcp']}", data, **of_embedded)
    except RallypointError as error:
        raise click.ClickException(str(error)) from None


def _check_engine_options(context: click.Context, engine: str) -> None:
    for name in context.params:
        if name in _COMMON or (name in _ETCD) == (engine == "etcd"):
            continue
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = "what follows --" if name == "etcd_options" else f"--{name.replace('_', '-')}"
            if engine == "etcd":
                advice = "etcd knows users and certificates of its own: give its options after --"
                if name == "metrics":
                    advice = "etcd has metrics of its own, at /metrics where it listens"
                raise click.UsageError(f"{option} is not for --engine etcd: {advice}, or leave it out")
            raise click.UsageError(f"{option} is for --engine etcd: give that too, or leave it out")


def _serve_embedded(
    bind: str,
    data: str | None,
    *,
    token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca: str | None,
    sync: str | None,
    http: str | None,
    http_names: tuple[str, ...],
    insecure: bool,
    metrics: str | None,
    metrics_runs: int,
    events_file: str | None,
    events_size: int,
    **limits: float,
) -> None:
    from rallypoint.backends.tls import TlsFiles
    from rallypoint.cli.dashboard import check_installed
    from rallypoint.cli.serve_limits import limits_of
    from rallypoint.server.process import run_loop, serve_until_signal

    token_file = token_file_of("tcp://", token_file)
    if tls_cert is None and (tls_key is not None or tls_ca is not None):
        raise click.UsageError("--tls-key and --tls-ca need --tls-cert, the certificate of this server")
    if sync is not None and data is None:
        raise click.UsageError("--sync says how data are kept: give the directory with --data, too")
    if http_names and http is None:
        raise click.UsageError("--http-name is for the page: give its address with --http, too")
    if http is not None:
        check_installed()
    tls = TlsFiles.given(tls_ca, tls_cert, tls_key)
    with observed(metrics, metrics_runs, events_file, events_size, has_page=http is not None) as observers:
        page = None
        if http is not None:
            from rallypoint.dashboard.child import prepare_page

            page = prepare_page(
                http,
                names=http_names,
                token_file=token_file,
                tls=tls,
                insecure=insecure,
                exposition=observers.exposition,
            )
        run_loop(
            serve_until_signal(
                bind,
                token_file,
                tls=tls,
                limits=limits_of(limits),
                insecure=insecure,
                data=data,
                sync=sync or "always",
                sinks=observers.sinks,
                attach=observers.attach,
                page=page,
            )
        )


def _serve_etcd(
    bind: str | None,
    data: str | None,
    *,
    peers: str | None,
    member: str | None,
    etcd_binary: str | None,
    any_version: bool,
    etcd_options: tuple[str, ...],
    events_file: str | None,
    events_size: int,
) -> None:
    import asyncio

    from rallypoint.events import Emitter
    from rallypoint.server.etcd_member import serve_etcd_until_signal
    from rallypoint.server.process import print_event

    with observed(None, 0, events_file, events_size) as observers:
        asyncio.run(
            serve_etcd_until_signal(
                bind=bind,
                peers=peers,
                member=member,
                data=data,
                binary=etcd_binary,
                any_version=any_version,
                more=etcd_options,
                emit=Emitter(print_event, *observers.sinks),
            )
        )
