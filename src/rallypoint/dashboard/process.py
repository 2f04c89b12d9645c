"""The process of the page: `rallypoint dashboard URL`, started by a user or by `rallypoint serve --http`."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from rallypoint.backends.tls import TlsFiles
from rallypoint.dashboard.access import Access
from rallypoint.dashboard.address import Address, check_exposure
from rallypoint.dashboard.app import Dashboard, Metrics
from rallypoint.dashboard.feeds import Feeds
from rallypoint.dashboard.http_security import own_names
from rallypoint.dashboard.server_link import ServerLink
from rallypoint.dashboard.source import RunSource
from rallypoint.dashboard.web_server import WebServer
from rallypoint.events import DashboardListens, Emitter, SecurityNotice, ServerTrouble
from rallypoint.server.admission.admission import Admission
from rallypoint.server.admission.credentials import Credentials
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.admission.refusals import Refusal
from rallypoint.server.process import print_event

NAME = "dashboard"


@asynccontextmanager
async def serve_page(
    source: RunSource,
    address: Address,
    admission: Admission,
    emit: Emitter,
    *,
    names: Sequence[str] = (),
    tokens: Callable[[], tuple[str, ...]] = lambda: (),
    tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    may_act_openly: bool,
    metrics: Metrics | None = None,
) -> AsyncIterator[WebServer]:
    """Serve the page on this loop. `tokens` and `tls` are asked for each login and connection.

    `may_act_openly`: without a token, everybody who can connect may change runs.
    """
    access = Access(tokens, admission, asyncio.get_running_loop().time, may_act_openly=may_act_openly)
    allowed = own_names(address.host, names)
    dashboard = Dashboard(Feeds(source), access, names=allowed, port=address.port, metrics=metrics)
    trouble: Callable[[str], None] = lambda why: emit(ServerTrouble(run_id="", by=NAME, reason=why))  # noqa: E731
    web = WebServer(dashboard.app, address.sock, admission, tls, trouble)
    try:
        yield web
    finally:
        await dashboard.close()
        await web.stop()


async def run_page(
    source: RunSource,
    address: Address,
    *,
    names: Sequence[str],
    token_file: str | None,
    tls: TlsFiles | None,
    insecure: bool,
    lends_credentials: bool,
    limits: ServerLimits,
    server: ServerLink | None = None,
) -> None:
    """Serve the page until SIGTERM or SIGINT; SIGHUP reads the token and the certificates again.

    `lends_credentials`: this process has credentials for the runs' backend, so nobody changes runs through it without
    a login. A page that a `server` started ends with its server and on no signal: a service manager that sends SIGTERM
    to all processes of the service stops the server, which stops the page. BindError or Rejected before anything is
    served, as for `rallypoint serve`.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        if server is None:
            loop.add_signal_handler(number, stopped.set)
        else:
            signal.signal(number, signal.SIG_IGN)
    emit = Emitter(print_event)
    async with AsyncExitStack() as stack:
        stack.enter_context(address.sock)
        if server is not None:
            stack.push_async_callback(server.close)
        credentials = Credentials(token_file, tls, is_client=False)
        loop.add_signal_handler(signal.SIGHUP, credentials.reload_now)
        exposure = check_exposure(
            address, authenticates=credentials.authenticates, has_tls=tls is not None, insecure=insecure
        )
        if server is None:  # else the server has said this
            notices = credentials.warnings() + exposure
            if lends_credentials and not credentials.authenticates:
                notices.append("whoever reaches this page sees what this process may see, without logging in")
            for notice in notices:
                emit(SecurityNotice(run_id="", by=NAME, reason=notice))
        current = _CurrentCredentials(credentials, emit)
        refresher = credentials.watch_files(current)
        if refresher is not None:
            stack.callback(refresher.cancel)
        is_mutual = tls is not None and tls.ca is not None
        await stack.enter_async_context(
            serve_page(
                source,
                address,
                Admission(limits, emit, NAME) if server is None else _ReportingAdmission(limits, server),
                emit,
                names=names,
                tokens=lambda: current.tokens,
                tls=lambda: current.tls,
                may_act_openly=is_mutual or (address.is_loopback and not lends_credentials),
                metrics=None if server is None else server.metrics,
            )
        )
        if server is None:
            url = address.url(has_tls=tls is not None)
            emit(DashboardListens(run_id="", by=NAME, url=url, where=source.where))
            await stopped.wait()
        else:
            server.ready()
            await server.wait_closed()


class _ReportingAdmission(Admission):
    """Has the server count and log what it refuses. Blocks sources by itself."""

    def __init__(self, limits: ServerLimits, server: ServerLink) -> None:
        super().__init__(limits, Emitter(), NAME)
        self._server = server

    def refused(self, peer: tuple[str, int], why: str, kind: Refusal) -> None:
        super().refused(peer, why, kind)
        self._server.report_refusal(peer, why, kind)


class _CurrentCredentials:
    """The token and the certificates as they are in their files now."""

    def __init__(self, credentials: Credentials, emit: Emitter) -> None:
        self.name = NAME
        self.token: str | tuple[str, ...] | None = credentials.tokens
        self.tls = credentials.server_context()
        self.emit = emit

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.token,) if isinstance(self.token, str) else self.token or ()
