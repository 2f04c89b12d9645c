"""The page as part of a process: beside a server (`rallypoint serve --http`), or alone (`rallypoint dashboard URL`)."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from rallypoint.backends.tls import TlsFiles
from rallypoint.dashboard.access import Access
from rallypoint.dashboard.app import Dashboard, Metrics
from rallypoint.dashboard.guard import own_names
from rallypoint.dashboard.places import Place, inside
from rallypoint.dashboard.serving import WebServer
from rallypoint.dashboard.studio import Studio
from rallypoint.dashboard.watching import Watching
from rallypoint.events import DashboardListens, Emitter, SecurityNotice, ServerTrouble
from rallypoint.server.admission.admission import Admission
from rallypoint.server.admission.credentials import Credentials
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.process import BindError, bind_to, print_event
from rallypoint.server.server import Server
from rallypoint.urls import format_endpoint, parse_endpoint

HTTP_PORT = 29480
NAME = "dashboard"


@dataclass(frozen=True, slots=True)
class Address:
    """Where the page is served: a bound socket, and the names that it may be asked for by."""

    sock: socket.socket
    names: frozenset[str]
    is_loopback: bool

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    @property
    def shown(self) -> str:
        return format_endpoint(*self.sock.getsockname()[:2])


def bind_page(http: str, names: Sequence[str] = ()) -> Address:
    """BindError, SettingsError."""
    host, port = parse_endpoint(http, HTTP_PORT, lowest_port=0)
    sock = bind_to(format_endpoint(host, port))
    address = str(sock.getsockname()[0]).partition("%")[0]
    return Address(sock, own_names(host, names), ipaddress.ip_address(address).is_loopback)


def check_exposure(address: Address, *, authenticates: bool, has_tls: bool, insecure: bool) -> list[str]:
    """What to say of a page that others reach. BindError if they would not be asked for anything."""
    if address.is_loopback:
        return []
    if authenticates:
        if has_tls:
            return []
        return [
            "the page's token and cookie cross the network as they are: give --tls-cert too where others can listen"
        ]
    if not insecure:
        shown = address.shown
        address.sock.close()
        raise BindError(
            f"whoever reaches {shown} could see every run there: give --token-file (make one with "
            f"`openssl rand -hex 32`), or --tls-ca for mutual TLS, or --insecure if everybody there may"
        )
    return [f"whoever reaches {address.shown} can see every run there, and act on none (--insecure)"]


@asynccontextmanager
async def _page(
    place: Place,
    address: Address,
    credentials: Credentials,
    tokens: Callable[[], tuple[str, ...]],
    tls: Callable[[], ssl.SSLContext | None],
    admission: Admission,
    emit: Emitter,
    *,
    acts_openly: bool,
    metrics: Metrics | None,
    studio: Studio | None = None,
) -> AsyncIterator[None]:
    is_mutual = credentials.tls is not None and credentials.tls.ca is not None
    access = Access(
        tokens,
        admission,
        asyncio.get_running_loop().time,
        acts_openly=is_mutual or (acts_openly and address.is_loopback),
    )
    watching = Watching(place, elsewhere=studio)
    dashboard = Dashboard(watching, access, names=address.names, port=address.port, metrics=metrics)
    web = WebServer(
        dashboard.app,
        address.sock,
        admission,
        tls,
        _trouble(emit),
    )
    scheme = "http" if credentials.tls is None else "https"
    emit(DashboardListens(run_id="", by=NAME, url=f"{scheme}://{address.shown}/", where=place.where))
    try:
        yield
    finally:
        await dashboard.close()
        await web.stop()


def _trouble(emit: Emitter) -> Callable[[str], None]:
    return lambda why: emit(ServerTrouble(run_id="", by=NAME, reason=why))


def prepare_beside(
    http: str,
    *,
    names: Sequence[str],
    token_file: str | None,
    tls: TlsFiles | None,
    insecure: bool,
    metrics: Callable[[Server], Metrics | None] | None = None,
    draws_apart: bool = False,
) -> Callable[[Server, Credentials], AbstractAsyncContextManager[None]]:
    """The page of a server in this process, with the server's token, certificates and admission. BindError: it cannot
    be.

    `draws_apart`: runs are drawn in a process of its own, so that looking at large ones costs the server little.
    """
    address = bind_page(http, names)
    authenticates = token_file is not None or (tls is not None and tls.ca is not None)
    notices = check_exposure(address, authenticates=authenticates, has_tls=tls is not None, insecure=insecure)

    @asynccontextmanager
    async def beside(server: Server, credentials: Credentials) -> AsyncIterator[None]:
        for notice in notices:
            server.emit(SecurityNotice(run_id="", by=NAME, reason=notice))
        place = inside(server)
        async with _page(
            place,
            address,
            credentials,
            lambda: server.tokens,
            lambda: server.tls,
            server.admission,
            server.emit,
            acts_openly=True,
            metrics=None if metrics is None else metrics(server),
            studio=Studio(place.where, server.admit, _trouble(server.emit)) if draws_apart else None,
        ):
            yield

    return beside


async def show_until_told(
    place: Place,
    http: str,
    *,
    names: Sequence[str],
    token_file: str | None,
    tls: TlsFiles | None,
    insecure: bool,
    lends: bool,
    metrics: Metrics | None = None,
) -> None:
    """Serve the page of a place until SIGTERM or SIGINT; SIGHUP reads the token and the certificates again.

    `lends`: this process has credentials for the place, so nobody acts through it without logging in. BindError or
    Rejected before anything is served, as for `rallypoint serve`.
    """
    credentials = Credentials(token_file, tls, is_client=False)
    address = bind_page(http, names)
    emit = Emitter(print_event)
    notices = credentials.warnings() + check_exposure(
        address, authenticates=credentials.authenticates, has_tls=tls is not None, insecure=insecure
    )
    if lends and not credentials.authenticates:
        notices.append("whoever reaches this page sees what this process may see, without logging in")
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    loop.add_signal_handler(signal.SIGHUP, credentials.read_soon)
    for notice in notices:
        emit(SecurityNotice(run_id="", by=NAME, reason=notice))
    fresh = _Fresh(credentials, emit)
    keeps_fresh = credentials.keep_fresh(fresh)
    try:
        async with _page(
            place,
            address,
            credentials,
            lambda: fresh.tokens,
            lambda: fresh.tls,
            Admission(ServerLimits(), emit, NAME),
            emit,
            acts_openly=not lends,
            metrics=metrics,
        ):
            await told.wait()
    finally:
        if keeps_fresh is not None:
            keeps_fresh.cancel()


class _Fresh:
    """What a page without a server has of one: the token and the certificates as they are in their files."""

    def __init__(self, credentials: Credentials, emit: Emitter) -> None:
        self.name = NAME
        self.token: str | tuple[str, ...] | None = credentials.tokens
        self.tls = credentials.server_context()
        self.emit = emit

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.token,) if isinstance(self.token, str) else self.token or ()
