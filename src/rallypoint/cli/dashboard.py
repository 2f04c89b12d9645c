"""`rallypoint dashboard`: the web page for the runs behind a URL."""

from __future__ import annotations

import socket
from typing import Any

import click

from rallypoint.cli.common import REFUSED, Failed, OptionValue
from rallypoint.cli.environment import TOKEN_FILE_VARIABLE, UrlCommand, token_file_of
from rallypoint.cli.serve_limits import limit_options, limits_of

_FILE = click.Path(exists=True, dir_okay=False)


@click.command(
    cls=UrlCommand,
    epilog="""\b
Examples:
  rallypoint dashboard tcp://head:29400 --token-file /etc/rallypoint/token
  rallypoint dashboard etcd://a,b,c/my-run --http 127.0.0.1:8080""",
)
@click.argument("url", metavar="URL")
@click.option(
    "--http",
    metavar="ADDR:PORT",
    default="127.0.0.1:29480",
    show_default=True,
    help="Where to serve the page; port 0: a free one. Without a token and --tls-ca: loopback only, or --insecure.",
)
@click.option(
    "--http-name",
    "http_names",
    multiple=True,
    metavar="NAME",
    help="A host name that the page is served under, besides addresses and this machine's. May be repeated.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    help="The file with the server's token, as token_file=FILE. Users log in to the page with it, too. Default: "
    f"{TOKEN_FILE_VARIABLE}.",
)
@click.option(
    "--http-token-file", type=_FILE, help="A file with the token that users log in with, instead of the server's."
)
@click.option("--tls-cert", type=_FILE, help="A PEM file with the page's certificate: HTTPS only.")
@click.option("--tls-key", type=_FILE, help="A PEM file with the key of --tls-cert, if it is not in the same file.")
@click.option(
    "--tls-ca", type=_FILE, help="A PEM file: browsers must show a certificate of these authorities (mutual TLS)."
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Serve it without a login on an address that other machines can reach; nobody can act then.",
)
@click.option(
    "--from-server",
    hidden=True,
    metavar="ADDRESS,LINK",
    help="The file descriptors that `rallypoint serve --http` gives its page: the bound address, and the link to it.",
)
@limit_options("max_pending", "hello_timeout", "max_failed_logins", "login_block", "log_interval", hidden=True)
@click.option(
    "-o",
    "--option",
    "options",
    type=OptionValue(),
    multiple=True,
    help="An option of the URL, for example tls_ca=FILE; wins over the URL. May be repeated.",
)
def dashboard(url: str, http: str, **how: Any) -> None:
    """Serve a web page that shows runs live: nodes and their states, waiting reasons, a time line, rounds.

    With a run id in the URL, that run only; otherwise all runs of the server or cluster. Works on every backend. Users
    who have logged in can close and reopen runs and drain nodes. It stops on SIGTERM and Ctrl-C.
    """
    from rallypoint.errors import RallypointError, Rejected, SettingsError

    try:
        _show(url, http, **how)
    except SettingsError as error:
        raise Failed(str(error), 2) from None
    except Rejected as error:
        raise Failed(str(error), REFUSED) from None
    except RallypointError as error:
        raise click.ClickException(str(error)) from None


def _show(
    url: str,
    http: str,
    *,
    http_names: tuple[str, ...],
    token_file: str | None,
    http_token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca: str | None,
    insecure: bool,
    from_server: str | None,
    options: tuple[tuple[str, str], ...],
    **limits: float,
) -> None:
    from rallypoint.backends.tls import TlsFiles
    from rallypoint.server.process import run_loop

    if tls_cert is None and (tls_key is not None or tls_ca is not None):
        raise click.UsageError("--tls-key and --tls-ca need --tls-cert, the certificate of the page")
    check_installed()
    from rallypoint.dashboard.address import bind_page
    from rallypoint.dashboard.process import run_page
    from rallypoint.dashboard.server_link import ServerLink
    from rallypoint.dashboard.source import behind

    given: dict[str, object] = dict(options)
    if from_server is None:  # else the server has given the page what it needs
        token_file = token_file_of(url, token_file, options)
    if token_file is not None:
        given["token_file"] = token_file
    source = behind(url, **given)
    settings = source.any_target().settings
    inherited, server = None, None
    if from_server is not None:
        inherited, link = (socket.socket(fileno=int(number)) for number in from_server.split(","))
        server = ServerLink(link)
        source = source.opened_by(server.open)
    run_loop(
        run_page(
            source,
            bind_page(http, inherited),
            names=http_names,
            token_file=http_token_file or settings.token_file,
            tls=TlsFiles.given(tls_ca, tls_cert, tls_key),
            insecure=insecure,
            lends_credentials=any(
                (settings.token_file, settings.tls_cert, settings.cert, settings.user, settings.password_file)
            ),
            limits=limits_of(limits),
            server=server,
        )
    )


def check_installed() -> None:
    """End the command if a package that the page needs is not installed."""
    from rallypoint.dashboard.child import missing_package

    if (name := missing_package()) is not None:
        raise Failed(f"the page needs {name}: pip install 'rallypoint[dashboard]'", 2)
