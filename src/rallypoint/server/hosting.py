"""The backend of `tcp://` URLs: a client that serves the endpoint itself if no server does and it can.

Which node serves is decided by binding the endpoint, never by comparing host names: a node connects; if no server
listens there and one of the endpoint's addresses belongs to this machine, it binds that address and serves. Binding is
atomic, so the node that loses connects to the other. This is repeated whenever the endpoint is unreachable, so that the
nodes that survive their host continue without it where they can.

`is_host` overrides the decision. A node with `is_host=true` binds every address of the machine if the endpoint's own
does not belong to it. It must never do so without authentication by token or mutual TLS, unless it is `insecure`.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.backends.contract import Backend
from rallypoint.backends.resolver_threads import resolve
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.connection import ClientConnection, Connector
from rallypoint.backends.tcp.dial import dial
from rallypoint.backends.tcp.direct import IDLE_S, DirectPool, connect
from rallypoint.backends.tls import TlsFiles
from rallypoint.errors import Rejected, Unavailable
from rallypoint.events import Emitter, Event, Hosting, NobodyServes, SecurityNotice
from rallypoint.server.admission.credentials import Credentials
from rallypoint.settings import Settings
from rallypoint.urls import DEFAULT_PORTS, format_endpoint, parse_endpoint
from rallypoint.wire.messages import Welcome

if TYPE_CHECKING:
    from rallypoint.server.server import Server

NO_SERVER_S = 10.0
"""A node that cannot serve reports after this time without a server what could be done."""
DEDICATED_S = 30.0
"""How long a `rallypoint serve` that has ended may take to come back, before a node serves instead of it."""
LINGER_POLL_S = 0.05
LAST_CALLS_S = 1.0
"""How long the host of a closed run serves those that have not left. Members that end together with it, after a barrier
of the round's store, ask once more whether all have arrived."""
TORCHRUN_DEFAULT_RUN_ID = "none"
"""The run id that torchrun gives to every run without one. On a shared server unrelated jobs would become one run."""
_NOT_LOCAL = frozenset({errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT, errno.EINVAL})


class NotLocal(Exception):
    """The endpoint cannot be served by this machine; the text says why."""


class NeedsAuthentication(NotLocal):
    """The endpoint could be served only by binding every address, which needs authentication."""


class PortInUse(Exception):
    """Another process on this machine has the port."""


async def bind_endpoint(host: str, port: int, *, forced: bool, everywhere: bool) -> socket.socket:
    """A listening socket on the first address of `host`. NotLocal or PortInUse if it cannot be bound.

    The order of addresses is the same for every process: if each could take any, several machines would serve a name
    that has addresses of several machines. A `forced` node tries all addresses but loopback, then every address of
    this machine if that is allowed (`everywhere`), or raises NeedsAuthentication.
    """
    try:
        found = await resolve(host, port, socket.AI_PASSIVE)
    except OSError:
        found = []
    addresses = sorted({(family, str(address[0])) for family, _, _, _, address in found}, key=_order)
    several, addresses = addresses[1:], addresses[:1]
    if forced:
        addresses += several
        if not _means_loopback(host):
            addresses = [pair for pair in addresses if not _is_loopback(pair[1])]
        if everywhere:
            addresses += [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    for family, address in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address, port))
            sock.listen()  # two processes can bind a port without listening, so only this decides
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUse from error
            if error.errno in _NOT_LOCAL:
                continue
            raise
        sock.setblocking(False)
        return sock
    if forced and found and not everywhere:
        raise NeedsAuthentication(
            "has no address by which others reach this machine, and binding every address instead would let in "
            "anybody who reaches the port: give all nodes a token_file, or tls_ca and tls_cert; or give this one "
            "insecure=true"
        )
    if several:
        raise NotLocal(f"has several addresses, of which the first, {addresses[0][1]}, is not this machine's")
    raise NotLocal("is not an address of this machine")


def _order(pair: tuple[int, str]) -> tuple[bool, int, int]:
    """Loopback last: a name may have such an address on some machines only, and other machines cannot reach it."""
    address = ipaddress.ip_address(pair[1].partition("%")[0])
    return address.is_loopback, address.version, int(address)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _means_loopback(host: str) -> bool:
    """Whether an endpoint's host is meant for this machine only."""
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class HostingBackend(TcpBackend):
    """A client that serves the endpoint itself if no server does and it can."""

    def __init__(self, settings: Settings, connector: Connector, credentials: Credentials) -> None:
        self._settings = settings
        self._linger_s = settings.close_timeout_s
        self._credentials = credentials
        super().__init__(
            settings.endpoints[0],
            connector,
            run=settings.run_id,
            token=credentials.token,
            grace_s=settings.disconnect_grace_s,
            call_timeout_s=settings.read_timeout_s,
        )
        self._host, self._port = parse_endpoint(self.endpoint, DEFAULT_PORTS[settings.scheme])
        self._server: Server | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._emit: Callable[[Event], None] = Emitter()
        self._unreachable_since: float | None = None
        self._has_reported = False
        self._was_connected = False
        self._host_error: str | None = None
        """Why this node must not serve although it has `is_host=true`."""
        self._pool: DirectPool | None = None
        self._pool_lock = threading.Lock()
        self._loop_thread = threading.get_ident()
        self._idle_timer: asyncio.TimerHandle | None = None

    def direct(self) -> DirectPool | None:
        if self._credentials.tls is not None:
            return None  # direct connections do not support TLS
        with self._pool_lock:
            if self._pool is None and not self._is_closed:
                self._pool = DirectPool(
                    self.endpoint,
                    self._dial_direct,
                    lambda: self._credentials.token,
                    self.limits,
                    loop_thread=self._loop_thread,
                )
                self._loop.call_soon_threadsafe(self._close_idle)
            return self._pool

    def _dial_direct(self, until: float, check: Callable[[], None]) -> socket.socket:
        """To the address of the session's connection, which needs no DNS look-up; else to the endpoint."""
        link = self._link
        goes_to = link.goes_to if link is not None else ""
        host, port = parse_endpoint(goes_to, self._port) if goes_to else (self._host, self._port)
        return connect(host, port, until, check)

    def _close_idle(self) -> None:
        if self._pool is not None and not self._is_closed:
            self._pool.close_idle()
            self._idle_timer = self._loop.call_later(IDLE_S, self._close_idle)

    @property
    def _name(self) -> str:
        return self._settings.name or socket.gethostname()

    def on_event(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        for warning in self._credentials.warnings():
            emit(SecurityNotice(run_id=self._settings.run_id, by=self._name, reason=warning))

    def observe_only(self) -> None:
        """Make it a read-only client: the server starts no coordinator for it. Call this before its first request."""
        self._run = ""

    async def _connect(self) -> asyncio.Future[str]:
        if self._host_error is not None:
            raise Rejected(self._host_error)
        if self._unreachable_since is None:  # the time of the first attempt counts, too
            self._unreachable_since = self._loop.time()
        if await self._credentials.refresh():
            self._token = self._credentials.token
        return await super()._connect()

    def _welcomed(self, link: ClientConnection, welcome: Welcome) -> None:
        if welcome.is_dedicated and self._settings.run_id == TORCHRUN_DEFAULT_RUN_ID:
            link.close()
            raise Rejected(
                f"{self.endpoint} serves many runs, and {TORCHRUN_DEFAULT_RUN_ID!r} is the id of every run that was "
                f"given none: two jobs would become one. Give this run an id of its own (torchrun: --rdzv-id)"
            )
        super()._welcomed(link, welcome)

    async def _unreachable(self, error: Exception) -> bool:
        # Any OSError, because a load balancer without a server behind it may accept a connection, and then close it.
        if self._server is not None or self._settings.is_host is False or not isinstance(error, OSError):
            return False
        if self.is_run_closed:  # a server without the run's data would let it begin again
            if not self._was_dedicated:  # no answer is worth waiting for
                gone = Unavailable(f"{self.endpoint} has gone, and its run is closed")
                self._requests.fail(gone, lambda pending: pending.is_sent)
            return False
        if self._was_dedicated and self._unreachable_s < DEDICATED_S:
            return False
        if not self._credentials.can_serve:
            self._report_no_server(error, "cannot be served by this node, which has tls_ca and no tls_cert of its own")
            return False
        try:
            listening = await bind_endpoint(
                self._host,
                self._port,
                forced=self._settings.is_host is True,
                everywhere=self._credentials.authenticates or self._settings.insecure,
            )
        except NeedsAuthentication as why:
            if self._was_connected:  # its job is running: wait for the earlier server instead of failing
                self._report_no_server(error, str(why))
                return False
            self._host_error = f"{self.endpoint} {why}"
            return True  # the next `_connect` raises it
        except NotLocal as why:
            self._report_no_server(error, str(why))
            return False
        except PortInUse:
            return False  # the other process will listen in a moment, or is not a server, which connecting will show
        except OSError as failure:
            self._report_no_server(failure, "cannot be served from this machine")
            return False
        await self._serve(listening)
        return True

    @property
    def _unreachable_s(self) -> float:
        """How long there has been no server, from the start of the first attempt to connect."""
        return 0.0 if self._unreachable_since is None else self._loop.time() - self._unreachable_since

    async def _serve(self, listening: socket.socket) -> None:
        from rallypoint.server.server import Server  # here, because it is slow and most nodes never serve

        name, credentials = self._name, self._credentials
        emit = self._emit if isinstance(self._emit, Emitter) else Emitter(self._emit)
        self._server = Server(token=credentials.tokens, tls=credentials.server_context(), name=name, emit=emit)
        await self._server.listen([listening])
        self._reloading = credentials.watch_files(self._server)
        others = self._settings.min_nodes - 1
        waits = "it needs no other node"
        if others:
            waits = f"at least {others} more node{'s' * (others != 1)} must reach it there"
            if _is_loopback(listening.getsockname()[0]) and not _means_loopback(self._host):
                waits += (
                    f", and no other machine can: here {self._host} means this machine alone (see /etc/hosts). "
                    f"Give its address instead of its name, or give this node is_host=true and all of them a token_file"
                )
        if not credentials.authenticates:
            waits += "; anybody who reaches the port can join: give a token_file to all nodes, or tls_ca and tls_cert"
        self._emit(
            Hosting(
                run_id=self._settings.run_id,
                by=name,
                address=format_endpoint(*listening.getsockname()[:2]),
                waits_for=waits,
            )
        )

    def _report_no_server(self, error: Exception, why: str) -> None:
        for_s = self._unreachable_s
        if self._has_reported or for_s < NO_SERVER_S:
            return
        self._has_reported = True
        self._emit(
            NobodyServes(
                run_id=self._settings.run_id,
                by=self._name,
                reason=f"there has been no server at {self.endpoint} for {for_s:.0f} s, and it {why} "
                f"({error}). If it is the address of a service or a load balancer, give "
                f"is_host=true to the one node behind it and a token_file to all, or start `rallypoint serve` there; "
                f"otherwise start the node that has the address. Trying until the deadline",
            )
        )

    def _up(self) -> None:
        self._unreachable_since, self._has_reported, self._was_connected = None, False, True
        super()._up()

    def shorten_close(self) -> None:
        self._linger_s = 0.0

    async def close(self) -> None:
        """Close the connection. A host then stops serving (`_stop_serving`)."""
        await super().close()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        with self._pool_lock:
            if self._pool is not None:
                self._pool.close(f"this connection to {self.endpoint} was closed")
        server, self._server = self._server, None
        if server is None:
            return
        if self._reloading is not None:
            self._reloading.cancel()
        await self._stop_serving(server)

    async def _stop_serving(self, server: Server) -> None:
        """Serve until the others have left, at most for `close_timeout`, because they still need the server.

        If the run is closed, no round can follow: `LAST_CALLS_S` is enough for the last calls of members that end now.
        `Server.stop` tells the rest.
        """
        linger_s = min(self._linger_s, LAST_CALLS_S) if self.is_run_closed else self._linger_s
        try:
            async with asyncio.timeout(linger_s):
                while server.connections:  # noqa: ASYNC110 - bounded, and at the end of a process
                    await asyncio.sleep(LINGER_POLL_S)
        except TimeoutError:
            pass
        finally:  # also when this call is cancelled
            await server.stop("the node that hosted it has left")


async def open_tcp(settings: Settings) -> Backend:
    """Open a `tcp://` or `static://` URL."""
    loop = asyncio.get_running_loop()
    tls = TlsFiles.given(settings.tls_ca, settings.tls_cert, settings.tls_key)
    if settings.token_file is None and tls is None:
        credentials = Credentials()
    else:
        credentials = await loop.run_in_executor(None, Credentials, settings.token_file, tls)
    secure = None if tls is None else credentials.secure
    return HostingBackend(settings, dial(settings.endpoints[0], DEFAULT_PORTS[settings.scheme], secure), credentials)
