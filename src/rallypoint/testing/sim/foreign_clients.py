"""Clients of other protocols at the server's port, and silent ones."""

from __future__ import annotations

import asyncio
from typing import cast

from rallypoint.wire.frames import GREETING, frame
from rallypoint.wire.messages import Hello, encoder

FOREIGN_BYTES = (
    b"GET / HTTP/1.1\r\n\r\n",
    GREETING + frame(b"\xc1 no hello"),
    GREETING + frame(encoder.encode(Hello(1, 1, "stranger"))) + frame(b"\xc1 no message"),
    b"",
)


class ForeignClient(asyncio.Protocol):
    """Sends some bytes, then reads until the server closes the connection."""

    def __init__(self, sends: bytes) -> None:
        self._sends = sends

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._sends)
