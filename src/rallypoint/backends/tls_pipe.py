"""One end of a TLS connection: a protocol for the transport below it, a transport for the protocol above it.

All cryptography is OpenSSL's, through `ssl.SSLObject`; this module only moves bytes. asyncio's own TLS is not used
because it drops the alert that says why a handshake failed: the peer would only see a closed connection, not that a
certificate is missing or has expired. This module also sees the first bytes before OpenSSL, so that it recognises plain
text.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from rallypoint.backends.tls import PlainText

READ_BYTES = 16 * 1024
"""The largest TLS record."""
LINGER_S = 2.0
"""How long the peer has to read the last bytes: closing a connection with unread bytes resets it."""
_HANDSHAKE, _ALERT = 0x16, 0x15


class TlsPipe(asyncio.Protocol):
    """`above` gets `connection_made` after the handshake; on a client it gets `connection_lost` in any case.

    On a server `on_failed` is called after a failed handshake, and `above` is not called at all. On a client
    `on_opening` is called with the transport below, so that `above` can abort during the handshake.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        above: asyncio.Protocol,
        *,
        host: str | None = None,
        on_opening: Callable[[asyncio.Transport], None] | None = None,
        on_failed: Callable[[TlsPipe, Exception], None] | None = None,
    ) -> None:
        self.above = above
        self.below: asyncio.Transport | None = None
        self.is_open = False
        """The handshake is complete, and the connection is not over."""
        self.is_over = False
        self._is_server = on_failed is not None
        self._on_opening = on_opening
        self._on_failed = on_failed
        self._has_received = False
        self._has_reported = False
        """`above` has got `connection_lost` with the cause."""
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=self._is_server, server_hostname=host)
        self._linger: asyncio.TimerHandle | None = None

    # --- calls of the transport below ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.below = cast(asyncio.Transport, transport)
        if self._on_opening is not None:
            self._on_opening(self.below)
        if not self._is_server and not self.below.is_closing():
            self.continue_handshake()  # the client starts

    def data_received(self, data: bytes) -> None:
        if self.is_over:
            return
        if not self._has_received:
            self._has_received = True
            if data[0] != _HANDSHAKE and (self._is_server or data[0] != _ALERT):
                self.fail(PlainText(data))
                return
        self._in.write(data)
        if self.is_open or self.continue_handshake():
            self._read()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self.is_open:
            self.above.pause_writing()

    def resume_writing(self) -> None:
        if self.is_open:
            self.above.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_over = True
        if self._linger is not None:
            self._linger.cancel()
        if self.is_open:
            self.is_open = False
            self.above.connection_lost(error)
        elif not self._is_server and not self._has_reported:
            self.above.connection_lost(error or ConnectionError("the connection was closed during the TLS handshake"))

    # --- encryption ---------------------------------------------------------------------------------------------------

    def continue_handshake(self) -> bool:
        """Continue the handshake; True if it is complete and the connection is still open."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self.fail(error)
            return False
        self._flush()
        self.is_open = True
        self.above.connection_made(TlsTransport(self))
        return not self.is_over

    def _read(self) -> None:
        chunks: list[bytes] = []
        trouble: Exception | None = None
        at_end = False
        try:
            while chunk := self._tls.read(READ_BYTES):
                chunks.append(chunk)
            at_end = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            at_end = True
        except ssl.SSLError as error:
            trouble = error
        self._flush()
        if chunks:
            self.above.data_received(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        if trouble is not None and not self.is_over:
            self.fail(trouble)
        elif at_end and self.below is not None and not self.is_over:
            self.below.close()

    def fail(self, error: Exception) -> None:
        """End the connection with an error; the alert with the cause is sent first."""
        if self.is_over:
            return
        self._flush()
        self.is_over = True
        was_open, self.is_open = self.is_open, False
        assert self.below is not None
        if was_open or not self._is_server:
            self._has_reported = True
            self.above.connection_lost(error)
        else:
            assert self._on_failed is not None
            self._on_failed(self, error)
        self.close_below()

    def write_plain(self, data: bytes) -> None:
        """Send plain text to a peer that does not speak TLS, before closing."""
        if self.below is not None and not self.below.is_closing():
            self.below.write(data)

    def close_below(self) -> None:
        """Close the transport after the peer has had the time to read the last bytes."""
        below = self.below
        if below is None or below.is_closing() or self._linger is not None:
            return
        self._linger = asyncio.get_running_loop().call_later(LINGER_S, below.abort)
        if below.can_write_eof():
            below.write_eof()
        else:
            below.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_open:
            return
        written = self._tls.write(data)
        if written < len(data):
            left = memoryview(data)[written:]
            while left:
                left = left[self._tls.write(left) :]
        self._flush()

    def close(self) -> None:
        """Orderly close: deliver what was written, and send `close_notify`."""
        if self.is_open and not self.is_over:
            self.is_over = True
            with suppress(ssl.SSLError):  # does not wait for the peer's close_notify
                self._tls.unwrap()
            self._flush()
        if self.below is not None:
            self.below.close()

    def _flush(self) -> None:
        if self._out.pending and self.below is not None and not self.below.is_closing():
            self.below.write(self._out.read())

    def extra(self, name: str, default: Any) -> Any:
        if name == "ssl_object":
            return self._tls
        return default if self.below is None else self.below.get_extra_info(name, default)


class TlsTransport(asyncio.Transport):
    """The transport for the protocol above."""

    def __init__(self, pipe: TlsPipe) -> None:
        super().__init__()
        self._pipe = pipe

    @property
    def _below(self) -> asyncio.Transport:
        assert self._pipe.below is not None
        return self._pipe.below

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._pipe.write(data)

    def close(self) -> None:
        self._pipe.close()

    def abort(self) -> None:
        self._pipe.is_over = True
        self._below.abort()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._pipe.extra(name, default)

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def is_reading(self) -> bool:
        return self._below.is_reading()

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()
