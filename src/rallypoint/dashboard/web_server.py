"""The web server: uvicorn's HTTP protocol behind a `Admission`, which limits and refuses connections.

A connection is pending until its first request has a head; pending connections are bounded in number and time, as those
of nodes are. TLS uses the current certificates. Nothing here handles signals or writes a log of its own.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rallypoint.backends.forks import fileno_of
from rallypoint.backends.tls import PlainText
from rallypoint.backends.tls_pipe import TlsPipe
from rallypoint.server.acceptor import Acceptor
from rallypoint.server.admission.admission import Admission, TlsAdmission, peer_of
from rallypoint.server.admission.refusals import Refusal
from rallypoint.wire.handshake import is_http

MOST_CONNECTIONS = 512
KEEP_ALIVE_S = 15
MOST_HEAD_BYTES = 32 * 1024
STOP_S = 1.0
"""Responses that are being sent when the server stops have so long to end."""
STALLED_S = 15.0
"""A client that reads nothing of a response for so long is disconnected."""
HTTPS_ONLY = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 29\r\nConnection: close\r\n\r\n"
    b"This page speaks https only.\n"
)


class HttpConnection(H11Protocol):
    """One connection. `Pending` for its admission, until a request has a head."""

    def __init__(self, config: Config, state: ServerState, admission: Admission) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._admission = admission
        self._head_timer: asyncio.TimerHandle | None = None
        self._progress_timer: asyncio.TimerHandle | None = None
        self._peer = ("", 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(high=0)  # so `pause_writing` means that the client does not read
        if transport.get_extra_info("ssl_object") is not None:
            self.scheme = "https"
        self._peer = peer_of(transport)
        self.client = self._peer
        refused = self._admission.add_pending(self, self._peer[0])
        if refused is not None:
            self._refuse(refused.message, Refusal.BLOCKED)
        elif len(self.connections) > MOST_CONNECTIONS:
            self._refuse(f"the page has {MOST_CONNECTIONS} connections, its limit", Refusal.CONNECTIONS)
        else:
            self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:
            self._start_head_timer()
        super().data_received(data)
        if self._is_busy:
            self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        self._stop_progress_check()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_progress_check()

    def resume_writing(self) -> None:
        self._stop_progress_check()
        super().resume_writing()

    def _start_progress_check(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._progress_timer = self.loop.call_later(STALLED_S, self._check_progress, left)

    def _check_progress(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._start_progress_check()
        else:
            self.transport.abort()  # `close` would wait until the client has read everything

    def _stop_progress_check(self) -> None:
        if self._progress_timer is not None:
            self._progress_timer.cancel()
            self._progress_timer = None

    @property
    def _is_busy(self) -> bool:
        """A request is being answered."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            within_s = self._admission.limits.hello_timeout_s
            self._head_timer = self.loop.call_later(within_s, self._too_late, within_s)

    def _too_late(self, within_s: float) -> None:
        self._head_timer = None
        if not self._is_busy:
            self._refuse(f"no request within {within_s:g} s", Refusal.SILENT)

    def _settle(self) -> None:
        """It is pending no more."""
        self._admission.remove_pending(self)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, why: str, kind: Refusal) -> None:
        self._settle()
        self._admission.refused(self._peer, why, kind)
        self.transport.abort()

    # --- `Pending` ----------------------------------------------------------------------------------------------------

    def evict(self) -> None:
        self._refuse("it is silent, and others wait to be let in", Refusal.PENDING)

    def shut_down(self, why: str) -> None:
        self._settle()
        self.transport.abort()

    def filenos(self) -> list[int]:
        return fileno_of(self.transport)


class HttpsAdmission(TlsAdmission):
    """A connection before its TLS handshake is done. Answers plain HTTP with a hint to use HTTPS."""

    def _failed(self, pipe: TlsPipe, error: Exception) -> None:
        if isinstance(error, PlainText) and is_http(error.first):
            self.write_plain(HTTPS_ONLY)
            self._refuse(b"", "it sent HTTP instead of HTTPS", Refusal.TLS)
        else:
            super()._failed(pipe, error)


class WebServer:
    """Serves an application on a bound socket, on this loop, from its creation until `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        admission: Admission,
        tls: Callable[[], ssl.SSLContext | None],
        on_trouble: Callable[[str], None],
    ) -> None:
        self._config = Config(
            cast(Any, app),
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a request cannot choose its source
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        )
        self._config.load()
        self._state = ServerState()
        self._admission = admission
        self._tls = tls
        self._acceptor = Acceptor(sock, self._connect, on_trouble, admission.has_room)

    def _connect(self) -> asyncio.Protocol:
        context = self._tls()
        if context is None:
            return self._make()
        return HttpsAdmission(context, self._admission, self._make)

    def _make(self) -> HttpConnection:
        return HttpConnection(self._config, self._state, self._admission)

    @property
    def connections(self) -> list[HttpConnection]:
        return [cast(HttpConnection, one) for one in self._state.connections]

    async def stop(self) -> None:
        """Accept nothing more, give responses a moment to end, and close all connections."""
        self._acceptor.close()
        for one in list(self._state.connections):
            one.shutdown()
        answering = set(self._state.tasks)
        if answering:
            await asyncio.wait(answering, timeout=STOP_S)
        for one in list(self._state.connections):
            one.transport.abort()
        await asyncio.sleep(0)  # the applications are told of the end, so none waits to send
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
