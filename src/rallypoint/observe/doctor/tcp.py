"""Checks of an embedded server: who listens, protocol version, TLS, token."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

from rallypoint._version import SOFTWARE, __version__
from rallypoint.errors import BackendError
from rallypoint.observe.doctor.checks import Check, failed, ok, register_checks, skipped, warning
from rallypoint.observe.doctor.network import Reached, check_network
from rallypoint.observe.doctor.probe import HungUp, Silent, Stranger, greet, who_listens
from rallypoint.observe.opening import Target, opened
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.settings import Settings
from rallypoint.urls import DEFAULT_PORTS, format_endpoint, parse_endpoint
from rallypoint.wire.messages import RefusalCode, Refused, Welcome

PAUSED = (
    "its process is paused (SIGSTOP, a debugger, a frozen container: `kill -CONT` its pid), starved of processor time, "
    "or a load balancer with nobody behind it: look with `ss -ltnp` on its machine who has the port"
)


TOKEN = "give ?token_file=... with the file that the server was started with"


async def check_tcp(settings: Settings, limit_s: float) -> AsyncIterator[Check]:
    """From the name to the token."""
    host, port = parse_endpoint(settings.endpoints[0], DEFAULT_PORTS[settings.scheme])
    try:
        tls = tls_context(settings)
    except OSError as error:
        yield failed("files", f"a certificate cannot be read: {error}", "mend tls_ca, tls_cert or tls_key in the URL")
        return
    reached = Reached()
    serve = f"`rallypoint serve --bind {format_endpoint(host, port)}`"
    start = f"start {serve} there or the node that serves it, or mend the port"
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
        yield failed("protocol", f"the connection broke: {error}", "try again; see the server's log if it stays")
        return
    where = format_endpoint(reached.address, port)
    if isinstance(answer, (Silent, HungUp, Stranger)):
        yield await _stranger(reached.address, port, where, answer, limit_s)
        return
    async for check in _rallypoint(where, answer, tls is not None):
        yield check
    if isinstance(answer, Refused) and answer.code is RefusalCode.TOKEN:
        yield await _check_token(settings, limit_s)


async def _stranger(address: str, port: int, where: str, answer: Silent | HungUp | Stranger, limit_s: float) -> Check:
    """Something else than a server of ours, or one that does not answer."""
    known = answer if isinstance(answer, Stranger) and answer.is_tls else await who_listens(address, port, limit_s)
    if known is not None and known.is_etcd:
        return failed(
            "protocol", f"{where} is {known.what}", "use an etcd:// URL, or the port of the Rallypoint server"
        )
    if known is not None and known.is_tls:
        return failed(
            "tls", f"{where} speaks TLS and this URL does not", "give tls_ca (and tls_cert if it asks for one)"
        )
    if known is not None or isinstance(answer, Stranger):
        what = known.what if known is not None else f"something that answers with {answer.what}"  # type: ignore[union-attr]
        return failed("protocol", f"{where} is not a Rallypoint server: it is {what}", "mend the port in the URL")
    if isinstance(answer, HungUp):
        return failed(
            "protocol",
            f"{where} accepts connections and closes them without a word ({answer.why})",
            "it is a load balancer with nobody behind it, or no Rallypoint server: start the server, or mend the port",
        )
    return failed("protocol", f"{where} accepts connections and says nothing within {limit_s:g} s", PAUSED)


async def _rallypoint(where: str, answer: Welcome | Refused, is_tls: bool) -> AsyncIterator[Check]:
    """A server of ours: version, TLS, and whether it asks for a token."""
    if isinstance(answer, Welcome):
        kind = "run for its own sake" if answer.is_dedicated else "hosted by a node"
        yield ok(
            "protocol", f"{where} is {answer.software or 'a Rallypoint server'}, protocol {answer.version}, {kind}"
        )
        if answer.software and answer.software != SOFTWARE:
            yield warning(
                "version", f"it is {answer.software}, and here is {__version__}", "run one version everywhere"
            )
        else:
            yield ok("version", f"the same here and there: {__version__}")
        yield _tls(is_tls)
        yield skipped("token", "the server asks for none: anybody who reaches the port can join")
        return
    if answer.code is RefusalCode.TOKEN:
        yield ok("protocol", f"{where} is a Rallypoint server")
        yield _tls(is_tls)
    elif answer.code is RefusalCode.VERSION:
        yield failed("version", answer.message, "run versions of Rallypoint that understand each other")
    elif answer.code is RefusalCode.BUSY:
        yield warning(
            "protocol", f"{where} is a Rallypoint server and is busy: {answer.message}", "try again in a moment"
        )
    else:
        yield failed("protocol", f"{where} refused: {answer.message}", "do what it says; its log may say more")


async def _check_token(settings: Settings, limit_s: float) -> Check:
    """The server asks for a token: is the one of the URL accepted? Tried as a node tries it."""
    if settings.token_file is None:
        return failed("token", "the server asks for a token, and the URL names none", TOKEN)
    target = Target(settings, RunKeys(settings.etcd_prefix, settings.run_id), {})
    try:
        async with asyncio.timeout(limit_s), opened(target, limit_s) as backend:
            await backend.status()
    except (BackendError, TimeoutError) as error:
        return failed("token", str(error) or f"no answer within {limit_s:g} s", TOKEN)
    return ok("token", "accepted")


def _tls(is_tls: bool) -> Check:
    return ok("tls", "encrypted") if is_tls else skipped("tls", "not used: the URL has no tls_ options")


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """What the URL says of TLS; None: nothing. OSError if a file cannot be read."""
    if settings.tls_ca is None and settings.tls_cert is None:
        return None
    context = ssl.create_default_context(cafile=settings.tls_ca)
    if settings.tls_cert is not None:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


def register() -> None:
    """For URLs that mean an embedded server."""
    for scheme in ("tcp", "static"):
        register_checks(scheme, check_tcp)
