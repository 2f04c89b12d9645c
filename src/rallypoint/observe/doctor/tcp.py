"""Checks of an embedded server: what listens on the port, protocol version, TLS, token."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

from rallypoint._version import SOFTWARE, __version__
from rallypoint.errors import BackendError
from rallypoint.observe.doctor.checks import Check, failed, ok, register_checks, skipped, warning
from rallypoint.observe.doctor.network import Reached, check_network
from rallypoint.observe.doctor.probe import HungUp, NoAnswer, OtherServer, greet, identify
from rallypoint.observe.target import Target, open_backend
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.settings import Settings
from rallypoint.urls import DEFAULT_PORTS, format_endpoint, parse_endpoint
from rallypoint.wire.messages import RefusalCode, Refused, Welcome

PAUSED = (
    "its process is paused (SIGSTOP, a debugger, a frozen container: `kill -CONT` its pid) or starved of processor "
    "time, or it is a load balancer without a server behind it: on its machine, `ss -ltnp` shows which process has the "
    "port"
)
TOKEN = "give ?token_file=... with the file that the server was started with"


async def check_tcp(settings: Settings, limit_s: float) -> AsyncIterator[Check]:
    """Check the name, the connection, the protocol, TLS and the token."""
    host, port = parse_endpoint(settings.endpoints[0], DEFAULT_PORTS[settings.scheme])
    try:
        tls = tls_context(settings)
    except OSError as error:
        fix = "correct tls_ca, tls_cert or tls_key in the URL"
        yield failed("files", f"a certificate cannot be read: {error}", fix)
        return
    reached = Reached()
    serve = f"`rallypoint serve --bind {format_endpoint(host, port)}`"
    start = f"start {serve} there, or the node that hosts the server, or correct the port"
    async for check in check_network(host, port, limit_s, reached, start):
        yield check
    if reached.address is None:
        return
    try:
        answer = await greet(reached.address, port, host, tls, limit_s)
    except (ssl.SSLError, ssl.CertificateError) as error:
        yield failed(
            "tls",
            f"the TLS handshake failed: {error}",
            "check tls_ca against the server's certificate; a server without TLS is reached without the tls_ options",
        )
        return
    except OSError as error:
        yield failed("protocol", f"the connection broke: {error}", "try again; if it persists, see the server's log")
        return
    where = format_endpoint(reached.address, port)
    if isinstance(answer, (NoAnswer, HungUp, OtherServer)):
        yield await _check_unknown(reached.address, port, where, answer, limit_s)
        return
    async for check in _check_server(where, answer, tls is not None):
        yield check
    if isinstance(answer, Refused) and answer.code is RefusalCode.TOKEN:
        yield await _check_token(settings, limit_s)


async def _check_unknown(
    address: str, port: int, where: str, answer: NoAnswer | HungUp | OtherServer, limit_s: float
) -> Check:
    """The result for an address whose server did not answer in Rallypoint's protocol."""
    found = answer if isinstance(answer, OtherServer) and answer.is_tls else await identify(address, port, limit_s)
    if found is not None and found.is_etcd:
        return failed(
            "protocol", f"{where} is {found.what}", "use an etcd:// URL, or the port of the Rallypoint server"
        )
    if found is not None and found.is_tls:
        return failed(
            "tls",
            f"{where} speaks TLS, but the URL does not ask for TLS",
            "give tls_ca (and tls_cert if the server asks for a certificate)",
        )
    if found is not None or isinstance(answer, OtherServer):
        what = found.what if found is not None else f"something that answers with {answer.what}"  # type: ignore[union-attr]
        return failed("protocol", f"{where} is not a Rallypoint server: it is {what}", "correct the port in the URL")
    if isinstance(answer, HungUp):
        return failed(
            "protocol",
            f"{where} accepts connections and closes them without an answer ({answer.why})",
            "it is a load balancer without a server behind it, or not a Rallypoint server: start the server, or "
            "correct the port",
        )
    return failed("protocol", f"{where} accepts connections but does not answer within {limit_s:g} s", PAUSED)


async def _check_server(where: str, answer: Welcome | Refused, is_tls: bool) -> AsyncIterator[Check]:
    """Check a Rallypoint server: version, TLS, and whether it asks for a token."""
    if isinstance(answer, Welcome):
        kind = "a dedicated server" if answer.is_dedicated else "hosted by a node"
        yield ok(
            "protocol", f"{where} is {answer.software or 'a Rallypoint server'}, protocol {answer.version}, {kind}"
        )
        if answer.software and answer.software != SOFTWARE:
            yield warning(
                "version", f"the server is {answer.software}, this is {__version__}", "run one version everywhere"
            )
        else:
            yield ok("version", f"the server has the same version: {__version__}")
        yield _tls(is_tls)
        yield skipped("token", "the server asks for none: every client that reaches the port can join")
        return
    if answer.code is RefusalCode.TOKEN:
        yield ok("protocol", f"{where} is a Rallypoint server")
        yield _tls(is_tls)
    elif answer.code is RefusalCode.VERSION:
        yield failed("version", answer.message, "run compatible versions of Rallypoint")
    elif answer.code is RefusalCode.BUSY:
        yield warning(
            "protocol", f"{where} is a Rallypoint server and is busy: {answer.message}", "try again in a moment"
        )
    else:
        yield failed("protocol", f"{where} refused: {answer.message}", "follow its message; its log may have more")


async def _check_token(settings: Settings, limit_s: float) -> Check:
    """The server asks for a token: try the one in the URL, as a node does."""
    if settings.token_file is None:
        return failed("token", "the server asks for a token, but the URL has none", TOKEN)
    target = Target(settings, RunKeys(settings.etcd_prefix, settings.run_id), {})
    try:
        async with asyncio.timeout(limit_s), open_backend(target, limit_s) as backend:
            await backend.status()
    except (BackendError, TimeoutError) as error:
        return failed("token", str(error) or f"no answer within {limit_s:g} s", TOKEN)
    return ok("token", "accepted")


def _tls(is_tls: bool) -> Check:
    return ok("tls", "encrypted") if is_tls else skipped("tls", "not in use: the URL has no tls_ options")


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The TLS settings of the URL, or None. OSError if a file cannot be read."""
    if settings.tls_ca is None and settings.tls_cert is None:
        return None
    context = ssl.create_default_context(cafile=settings.tls_ca)
    if settings.tls_cert is not None:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


def register() -> None:
    """Register the checks for URLs of an embedded server."""
    for scheme in ("tcp", "static"):
        register_checks(scheme, check_tcp)
