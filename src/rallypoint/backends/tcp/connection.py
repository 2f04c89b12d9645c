"""One connection of a client: greeting and hello, the welcome, then frames in both directions.

Every attempt to connect has an object of its own. It never reconnects; that is the task of `client`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, cast

import msgspec

from rallypoint.backends.forks import fileno_of, guard
from rallypoint.backends.tls import trouble_with_server
from rallypoint.errors import BackendError, Rejected, Unavailable
from rallypoint.urls import format_endpoint
from rallypoint.wire.frames import DEFAULT_LIMIT, GREETING, FrameError, Framer, NotRallypoint, frame
from rallypoint.wire.handshake import describe
from rallypoint.wire.messages import (
    Hello,
    RefusalCode,
    Refused,
    ServerMessage,
    Welcome,
    encoder,
    server_decoder,
    welcome_decoder,
)


class ClientConnection(asyncio.Protocol):
    """`welcome` is the server's first frame; `on_closed` is called once, with the reason, when the connection ends."""

    def __init__(
        self,
        hello: Callable[[], Hello],
        on_messages: Callable[[Sequence[ServerMessage]], None],
        on_closed: Callable[[ClientConnection, str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.welcome: asyncio.Future[Welcome | Refused] = loop.create_future()
        self.received_at = loop.time()
        """When data was last received."""
        self.not_rallypoint: str | None = None
        """The protocol of the peer, if it is another one."""
        self.error: Exception | None = None
        """The error that ended the connection, if there was one."""
        self._hello = hello
        self._on_messages = on_messages
        self._on_closed = on_closed
        self._loop = loop
        self._framer = Framer(DEFAULT_LIMIT)
        self._transport: asyncio.Transport | None = None
        self._why = ""
        self._is_welcome = False
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    def opening(self, transport: asyncio.Transport) -> None:
        """A TCP connection exists and the TLS handshake begins; `abort` closes it from now on."""
        self._transport = transport
        guard(self)
        if self._is_over:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        guard(self)
        if self._is_over:
            self._transport.abort()
            return
        self._transport.write(GREETING + frame(encoder.encode(self._hello())))

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self.received_at = self._loop.time()
        try:
            for payload in self._framer.feed(data):
                if self._is_welcome:
                    self._on_messages(server_decoder.decode(payload))
                elif not self.welcome.done():  # else the attempt was just cancelled
                    self.welcome.set_result(welcome_decoder.decode(payload))
                    self._is_welcome = True
                if self.is_over:
                    return
        except NotRallypoint as error:
            self.not_rallypoint = describe(error.first)
            self.abort(f"it answered with {self.not_rallypoint}")
        except (FrameError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.abort(f"it sent malformed data: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error
        self._end(str(error) if error is not None else "the connection was closed")

    def send(self, payload: bytes) -> None:
        """Send one frame; does nothing if the connection has ended."""
        if not self._is_over and self._transport is not None:
            self._transport.write(frame(payload))

    def close(self) -> None:
        """Close after sending what is buffered."""
        self._end("closed by this side")
        if self._transport is not None:
            self._transport.close()

    def abort(self, why: str) -> None:
        """Close at once; buffered data is dropped."""
        self._end(why)
        if self._transport is not None:
            self._transport.abort()

    @property
    def has_arrived(self) -> bool:
        """Whether the peer's system has acknowledged all data that was sent. Its process may not have read it."""
        try:
            import fcntl  # not on every platform
            import termios

            waiting = array("i", [0])
            for number in self.filenos():
                fcntl.ioctl(number, termios.TIOCOUTQ, waiting)
                return waiting[0] == 0 and self._transport is not None and not self._transport.get_write_buffer_size()
        except (ImportError, OSError):
            pass
        return False

    def filenos(self) -> list[int]:
        return fileno_of(self._transport)

    @property
    def goes_to(self) -> str:
        """The address of the peer, or an empty string."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        return format_endpoint(*peer[:2]) if isinstance(peer, tuple) else ""

    def note(self, why: str) -> None:
        """Record the reason that the server gave before it closes the connection."""
        self._why = why

    def _end(self, why: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        if not self.welcome.done():
            self.welcome.set_exception(ConnectionError(self._why or why))
            self.welcome.exception()  # mark as retrieved: perhaps no caller waits
        self._on_closed(self, self._why or why)


Connector: TypeAlias = Callable[[Callable[[], ClientConnection]], Awaitable[None]]
"""Opens a TCP (and TLS) connection for the `ClientConnection` that the argument creates."""


def trouble_of(link: ClientConnection, endpoint: str, error: BaseException, limit_s: float) -> Exception | None:
    """A clearer error for a failed attempt to connect; None: raise the original one."""
    if link.not_rallypoint is not None:
        return not_rallypoint(endpoint, link.not_rallypoint)
    if (trouble := trouble_with_server(endpoint, link.error)) is not None:
        return trouble
    return TimeoutError(f"no answer within {limit_s:g} s") if isinstance(error, TimeoutError) else None


def not_rallypoint(endpoint: str, answer: str) -> Rejected:
    """The error for an endpoint that speaks another protocol."""
    return Rejected(f"{endpoint} is not a Rallypoint server: it answered with {answer}. Is the port right?")


def refusal_of(endpoint: str, refused: Refused) -> BackendError:
    """The error for a refused hello: Unavailable if the server is busy, so that a retry may succeed, else Rejected."""
    if refused.code is RefusalCode.BUSY:
        return Unavailable(refused.message)
    return Rejected(f"{endpoint} refused: {refused.message}")


def cause_of(error: Exception) -> str:
    """A short description of a connect error."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
