"""Who serves when nobody was told to: whoever can bind the endpoint. Decided by trying, never by comparing names.

A node connects; if nobody listens there and one of the endpoint's addresses is this machine's, it binds that and serves
(binding is atomic: who loses connects). It tries again whenever the endpoint is unreachable, so that the survivors of a
host that died carry on by themselves where they can. `is_host` forces it either way; forced, a node binds every
address of the machine if the endpoint's own is not its, but only where a token or mutual TLS keeps strangers out, or
where it is told to be `insecure`.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.backends.aside import resolve
from rallypoint.backends.contract import Backend
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.connection import ClientConnection, Connector
from rallypoint.backends.tcp.dial import dial
from rallypoint.backends.tcp.direct import IDLE_S, DirectPool, connect
from rallypoint.backends.tls import TlsFiles
from rallypoint.errors import Rejected
from rallypoint.events import Emitter, Event, Hosting, NobodyServes, SecurityNotice
from rallypoint.server.admission.credentials import Credentials
from rallypoint.settings import Settings
from rallypoint.urls import DEFAULT_PORTS, format_endpoint, parse_endpoint
from rallypoint.wire.messages import Welcome

if TYPE_CHECKING:
    from rallypoint.server.server import Server

NOBODY_S = 10.0
"""After so long without anybody to connect to, a node that cannot serve says what could be done."""
DEDICATED_S = 30.0
"""`rallypoint serve` was started for its own sake: it is given so long to come back before a node takes its place."""
LINGER_LOOK_S = 0.05
ANYBODYS_RUN_ID = "none"
"""What torchrun calls every run that nobody gave an id: on a server of many runs, strangers would meet under it."""
_NOT_OURS = frozenset({errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT, errno.EINVAL})


class NotOurs(Exception):
    """The endpoint is not this machine's to serve; the text says why."""


class Unguarded(NotOurs):
    """Only by binding every address could it be served, and nothing would keep strangers out."""


class Taken(Exception):
    """Somebody on this machine has the port."""


async def bind_endpoint(host: str, port: int, *, forced: bool, everywhere: bool) -> socket.socket:
    """A socket bound to the first address of `host`, if that is this machine's. NotOurs or Taken if it cannot be.

    Which one is the first is the same for every process: a name may have addresses of many machines, and each of them
    would serve. One that is `forced` takes any of them that is this machine's, but loopback; if there is none, every
    address of the machine if it may (`everywhere`), and Unguarded if not.
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
        one = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address, port))
            one.listen()  # two processes may bind a port that is not listened on: only this decides
        except OSError as error:
            one.close()
            if error.errno == errno.EADDRINUSE:
                raise Taken from error
            if error.errno in _NOT_OURS:
                continue
            raise
        one.setblocking(False)
        return one
    if forced and found and not everywhere:
        raise Unguarded(
            "has no address by which others reach this machine, and binding every address instead would let in "
            "anybody who reaches the port: give all nodes a token_file, or tls_ca and tls_cert; or give this one "
            "insecure=true"
        )
    if several:
        raise NotOurs(f"has several addresses, of which the first, {addresses[0][1]}, is not this machine's")
    raise NotOurs("is not an address of this machine")


def _order(pair: tuple[int, str]) -> tuple[bool, int, int]:
    """Loopback comes last: only some machines may give a name such an address, and it is of use to them alone."""
    address = ipaddress.ip_address(pair[1].partition("%")[0])
    return address.is_loopback, address.version, int(address)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _means_loopback(host: str) -> bool:
    """Whether the endpoint is meant for this machine only."""
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class HostingBackend(TcpBackend):
    """A client that serves the endpoint itself when it has to and can."""

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
        self._keeps_fresh: asyncio.Task[None] | None = None
        self._emit: Callable[[Event], None] = Emitter()
        self._unreachable_since: float | None = None
        self._has_said = False
        self._was_up = False
        self._refusal: str | None = None
        """Why this node, which is told to host, must not."""
        self._pool: DirectPool | None = None
        self._pool_lock = threading.Lock()
        self._loop_thread = threading.get_ident()
        self._idle_timer: asyncio.TimerHandle | None = None

    def direct(self) -> DirectPool | None:
        if self._credentials.tls is not None:
            return None  # it has no encryption of its own: the ordinary way has
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
        """To where the session's connection leads, for which nobody has to look up a name; else to the endpoint."""
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

    @property
    def is_hosting(self) -> bool:
        return self._server is not None

    def tell_by(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        for warning in self._credentials.warnings():
            emit(SecurityNotice(run_id=self._settings.run_id, by=self._name, reason=warning))

    def come_for_no_run(self) -> None:
        """Before it is first used: who only looks on is no reason to attend to a run, and is not to make it."""
        self._run = ""

    async def _connect(self) -> asyncio.Future[str]:
        if self._refusal is not None:
            raise Rejected(self._refusal)
        if self._unreachable_since is None:  # an attempt that gets no answer takes its time, and that counts too
            self._unreachable_since = self._loop.time()
        if await self._credentials.refresh():
            self._token = self._credentials.token
        return await super()._connect()

    def _welcomed(self, link: ClientConnection, welcome: Welcome) -> None:
        if welcome.is_dedicated and self._settings.run_id == ANYBODYS_RUN_ID:
            link.close()
            raise Rejected(
                f"{self.endpoint} serves many runs, and {ANYBODYS_RUN_ID!r} is the id of every run that was given "
                f"none: two jobs would become one. Give this run an id of its own (torchrun: --rdzv-id)"
            )
        super()._welcomed(link, welcome)

    async def _unreachable(self, error: Exception) -> bool:
        if self._server is not None or self._settings.is_host is False or not _nobody_listens(error):
            return False
        if self._was_dedicated and self._unreachable_s < DEDICATED_S:
            return False
        if not self._credentials.can_serve:
            self._say_nobody(error, "cannot be served by this node, which has tls_ca and no tls_cert of its own")
            return False
        try:
            one = await bind_endpoint(
                self._host,
                self._port,
                forced=self._settings.is_host is True,
                everywhere=self._credentials.authenticates or self._settings.insecure,
            )
        except Unguarded as why:
            if self._was_up:  # it runs: it goes on, and waits for whoever served before
                self._say_nobody(error, str(why))
                return False
            self._refusal = f"{self.endpoint} {why}"
            return True  # which ends in that
        except NotOurs as why:
            self._say_nobody(error, str(why))
            return False
        except Taken:
            return False  # whoever has it will listen in a moment, or says what it is
        except OSError as failure:
            self._say_nobody(failure, "cannot be served from this machine")
            return False
        await self._serve(one)
        return True

    @property
    def _unreachable_s(self) -> float:
        """For how long nobody has been there, from the beginning of the first attempt."""
        return 0.0 if self._unreachable_since is None else self._loop.time() - self._unreachable_since

    async def _serve(self, one: socket.socket) -> None:
        from rallypoint.server.server import Server  # most nodes never serve, and importing it takes a while

        name, credentials = self._name, self._credentials
        emit = self._emit if isinstance(self._emit, Emitter) else Emitter(self._emit)
        self._server = Server(token=credentials.tokens, tls=credentials.server_context(), name=name, emit=emit)
        await self._server.listen([one])
        self._keeps_fresh = credentials.keep_fresh(self._server)
        others = self._settings.min_nodes - 1
        waits = "it needs no other node"
        if others:
            waits = f"at least {others} more node{'s' * (others != 1)} must reach it there"
            if _is_loopback(one.getsockname()[0]) and not _means_loopback(self._host):
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
                address=format_endpoint(*one.getsockname()[:2]),
                waits_for=waits,
            )
        )

    def _say_nobody(self, error: Exception, why: str) -> None:
        for_s = self._unreachable_s
        if self._has_said or for_s < NOBODY_S:
            return
        self._has_said = True
        settings = self._settings
        self._emit(
            NobodyServes(
                run_id=settings.run_id,
                by=settings.name or socket.gethostname(),
                reason=f"nobody has served {self.endpoint} for {for_s:.0f} s, and it {why} "
                f"({error}). If it is the address of a service or a load balancer, give "
                f"is_host=true to the one node behind it and a token_file to all, or start `rallypoint serve` there; "
                f"otherwise start the node that has the address. Trying until the deadline",
            )
        )

    def _up(self) -> None:
        self._unreachable_since, self._has_said, self._was_up = None, False, True
        super()._up()

    def hurry(self) -> None:
        self._linger_s = 0.0

    async def close(self) -> None:
        """Let go of the connection; a host lingers until the others have left, or for `close_timeout`."""
        await super().close()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        with self._pool_lock:
            if self._pool is not None:
                self._pool.close(f"this connection to {self.endpoint} was closed")
        server, self._server = self._server, None
        if server is None:
            return
        if self._keeps_fresh is not None:
            self._keeps_fresh.cancel()
        try:
            async with asyncio.timeout(self._linger_s):
                while server.connections:  # noqa: ASYNC110 - bounded, and at the end of a process
                    await asyncio.sleep(LINGER_LOOK_S)
        except TimeoutError:
            pass
        finally:  # also for somebody who does not want to wait for it
            await server.stop("the node that hosted it has left")


def _nobody_listens(error: Exception) -> bool:
    """Whether nobody is there, as far as one can see from here.

    A load balancer or a proxy without anybody behind it may accept a connection, only to close it.
    """
    return isinstance(error, OSError)


async def open_tcp(settings: Settings) -> Backend:
    """What `tcp://` and `static://` URLs open with."""
    loop = asyncio.get_running_loop()
    tls = TlsFiles.given(settings.tls_ca, settings.tls_cert, settings.tls_key)
    if settings.token_file is None and tls is None:
        credentials = Credentials()
    else:
        credentials = await loop.run_in_executor(None, Credentials, settings.token_file, tls)
    secure = None if tls is None else credentials.secure
    return HostingBackend(settings, dial(settings.endpoints[0], DEFAULT_PORTS[settings.scheme], secure), credentials)
