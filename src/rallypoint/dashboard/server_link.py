"""The link between `rallypoint serve --http` and the process of its page: one Unix socket, inherited by the page.

Only the page sends on it. A request for a connection or for metrics carries a socket of its own, on which the server
answers: the server admits it as a client, or writes the metrics to it and closes it. So the page needs no credentials
for the server, whatever those are, and can connect again. The end of the link is the end of the server, however it
ended.

Why not an ordinary connection: the server's certificate need not name a loopback address or be valid for clients, so
with TLS the page could not connect; and metrics and the counters of refused clients are in the server's process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from rallypoint.backends.contract import Backend
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.connection import ClientConnection
from rallypoint.observe.target import Target
from rallypoint.server.admission.refusals import Refusal

if TYPE_CHECKING:
    from rallypoint.server.server import Server

READ_AT_ONCE = 1 << 16
MOST_SOCKETS = 16
METRICS_S = 10.0

Exposition: TypeAlias = Callable[[], tuple[bytes, str]]
"""Makes the text of all metrics, and its content type."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The page is served."""


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Admit the socket that comes with this."""


class GetMetrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Write the content type, a line break and the metrics to the socket that comes with this."""


class ReportRefusal(msgspec.Struct, frozen=True, tag="refused"):
    """The page refused a browser: count it and log it."""

    host: str
    port: int
    why: str
    kind: Refusal


Request: TypeAlias = Ready | Connect | GetMetrics | ReportRefusal
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Request)


class ServerLink:
    """The page's end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._backend: TcpBackend | None = None

    def ready(self) -> None:
        with suppress(OSError):  # the server has ended, as `wait_closed` will say
            self._send(Ready())

    async def wait_closed(self) -> None:
        """Return when the server has closed its end, or its process has ended."""
        with suppress(OSError):
            await asyncio.get_running_loop().sock_recv(self._sock, 1)

    @asynccontextmanager
    async def open(self, target: Target) -> AsyncIterator[Backend]:
        """A backend, shared by all callers: the page is one client of its server."""
        if self._backend is None:
            self._backend = TcpBackend(target.where, self._connect)
        yield self._backend

    async def close(self) -> None:
        if self._backend is not None:
            await self._backend.close()
        self._sock.close()

    async def metrics(self) -> tuple[bytes, str]:
        """OSError, TimeoutError."""
        async with asyncio.timeout(METRICS_S):
            reader, writer = await asyncio.open_unix_connection(sock=self._request(GetMetrics()))
            try:
                kind, _, text = (await reader.read()).partition(b"\n")
            finally:
                writer.close()
        if not kind:
            raise ConnectionError("the server has closed the connection")
        return text, kind.decode()

    def report_refusal(self, peer: tuple[str, int], why: str, kind: Refusal) -> None:
        """Lost if the server does not keep up: an attacker on the page cannot fill its memory."""
        with suppress(OSError):
            self._send(ReportRefusal(*peer, why, kind))

    async def _connect(self, make: Callable[[], ClientConnection]) -> None:
        await asyncio.get_running_loop().create_unix_connection(make, sock=self._request(Connect()))

    def _request(self, request: Request) -> socket.socket:
        """Send a request with one end of a new connection; the other end."""
        mine, its = socket.socketpair()
        try:
            mine.setblocking(False)
            self._send(request, its)
        except BaseException:
            mine.close()
            raise
        finally:
            its.close()
        return mine

    def _send(self, request: Request, *sockets: socket.socket) -> None:
        """A request is far smaller than the socket's buffer, so it is sent as a whole or not at all. OSError."""
        socket.send_fds(self._sock, [_encoder.encode(request) + b"\n"], [one.fileno() for one in sockets])


class PageLink:
    """The server's end."""

    def __init__(
        self, sock: socket.socket, server: Server, exposition: Exposition, on_ready: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._server = server
        self._exposition = exposition
        self._on_ready = on_ready
        self._received = b""
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)

    def close(self) -> None:
        """The page's process ends when it notices."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        for one in self._sockets:
            one.close()
        for task in self._tasks:
            task.cancel()

    def _read(self) -> None:
        try:
            data, numbers, flags, _ = socket.recv_fds(self._sock, READ_AT_ONCE, MOST_SOCKETS)
        except BlockingIOError:
            return
        except OSError:
            data, numbers, flags = b"", [], 0
        self._sockets += [socket.socket(fileno=number) for number in numbers]
        if not data or flags & socket.MSG_CTRUNC:  # the page has ended, or this process has no file descriptor left
            self.close()
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._handle(_decoder.decode(line))

    def _handle(self, request: Request) -> None:
        match request:
            case Ready():
                self._on_ready()
            case Connect():
                self._start(self._admit(self._next_socket()), "admission of the page")
            case GetMetrics():
                self._start(self._send_metrics(self._next_socket()), "metrics for the page")
            case ReportRefusal(host, port, why, kind):
                self._server.admission.refused((host, port), why, kind)

    def _next_socket(self) -> socket.socket:
        one = self._sockets.pop(0)
        one.setblocking(False)
        return one

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, one: socket.socket) -> None:
        try:
            await self._server.admit(one)
        except OSError:
            one.close()  # the page has ended

    async def _send_metrics(self, one: socket.socket) -> None:
        with one, suppress(OSError, TimeoutError):
            text, kind = self._exposition()
            async with asyncio.timeout(METRICS_S):
                await self._loop.sock_sendall(one, kind.encode() + b"\n" + text)
