"""The port of the page: HTTP by uvicorn's protocol, behind the same admission as the server's own port.

A connection is pending until its first request has a head, and those are bounded in number and time as those of nodes
are; sources that were refused too often are refused here too. TLS is that of the server, with certificates as they are
at the moment. Nothing here listens to signals or writes to a log of its own.
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
LONGEST_HEAD = 32 * 1024
GOODBYE_S = 1.0
STALLED_S = 15.0
"""Whoever takes nothing of an answer for so long is gone."""
HTTPS_ONLY = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 29\r\nConnection: close\r\n\r\n"
    b"This page speaks https only.\n"
)


class Http(H11Protocol):
    """One connection. Pending until it has asked for something."""

    def __init__(self, config: Config, state: ServerState, admission: Admission) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._admission = admission
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._peer = ("", 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.transport.set_write_buffer_limits(high=0)  # `pause_writing` means: something is not taken
        if transport.get_extra_info("ssl_object") is not None:
            self.scheme = "https"
        self._peer = peer_of(transport)
        self.client = self._peer
        refused = self._admission.accepted(self, self._peer[0])
        if refused is not None:
            self._end(refused.message, Refusal.BLOCKED)
        elif len(self.connections) > MOST_CONNECTIONS:
            self._end(f"the page has {MOST_CONNECTIONS} connections, its limit", Refusal.CONNECTIONS)
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        self._admission.page_asked += 1
        if not self._is_busy:
            self._expect_head()
        super().data_received(data)
        if self._is_busy:
            self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        self._forget_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress()

    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def _expect_progress(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(STALLED_S, self._look_at_progress, left)

    def _look_at_progress(self, before: int) -> None:
        """Closing would wait until everything is taken: for ever, if nobody takes it."""
        if self.transport.get_write_buffer_size() < before:
            self._expect_progress()
        else:
            self.transport.abort()

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    @property
    def _is_busy(self) -> bool:
        """A request is being answered."""
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _expect_head(self) -> None:
        if self._timer is None:
            within_s = self._admission.limits.hello_timeout_s
            self._timer = self.loop.call_later(within_s, self._too_late, within_s)

    def _too_late(self, within_s: float) -> None:
        self._timer = None
        if not self._is_busy:
            self._end(f"no request within {within_s:g} s", Refusal.SILENT)

    def _settle(self) -> None:
        self._admission.settled(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, why: str, kind: Refusal) -> None:
        self._settle()
        self._admission.refused(self._peer, why, kind)
        self.transport.abort()

    # --- as somebody who is pending -----------------------------------------------------------------------------------

    def crowded_out(self) -> None:
        self._end("it is silent, and others wait to be let in", Refusal.PENDING)

    def go(self, why: str) -> None:
        self._settle()
        self.transport.abort()

    def filenos(self) -> list[int]:
        return fileno_of(self.transport)


class HttpsAdmission(TlsAdmission):
    """A connection before its TLS handshake is done. A browser that was told http is told https."""

    def _failed(self, pipe: TlsPipe, error: Exception) -> None:
        if isinstance(error, PlainText) and is_http(error.first):
            self.say(HTTPS_ONLY)
            self._end(b"", "it sent HTTP instead of HTTPS", Refusal.TLS)
        else:
            super()._failed(pipe, error)


class WebServer:
    """Serves an application on a socket that is bound already, on this loop, until `stop`."""

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
            proxy_headers=False,  # what a request says of its source counts for nothing
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=LONGEST_HEAD,
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

    def _make(self) -> Http:
        return Http(self._config, self._state, self._admission)

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._state.connections)

    async def stop(self) -> None:
        """Accept no more; requests that are answered have a moment."""
        self._acceptor.close()
        for one in list(self._state.connections):
            one.shutdown()
        answering = set(self._state.tasks)
        if answering:
            await asyncio.wait(answering, timeout=GOODBYE_S)
        for one in list(self._state.connections):
            one.transport.abort()
        await asyncio.sleep(0)  # they are told that nobody is there any more: none waits to send then
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
