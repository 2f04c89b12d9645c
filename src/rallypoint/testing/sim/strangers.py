"""Foreign clients of the server's port, which send something else or nothing."""

from __future__ import annotations

import asyncio
from typing import cast

from rallypoint.wire.frames import GREETING, frame
from rallypoint.wire.messages import Hello, encoder

STRANGERS = (
    b"GET / HTTP/1.1\r\n\r\n",
    GREETING + frame(b"\xc1 no hello"),
    GREETING + frame(encoder.encode(Hello(1, 1, "stranger"))) + frame(b"\xc1 no message"),
    b"",
)
"""What they send."""


class Garbage(asyncio.Protocol):
    """A foreign client: sends some bytes, and reads until the server closes the connection."""

    def __init__(self, says: bytes) -> None:
        self._says = says
        self.heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._says)

    def data_received(self, data: bytes) -> None:
        self.heard += data
