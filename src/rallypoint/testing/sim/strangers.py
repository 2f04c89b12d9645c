"""Whoever comes to the server's port and speaks something else, or nothing at all."""

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
"""What they say."""


class Garbage(asyncio.Protocol):
    """A stranger at the server's port: says something, and listens until it is sent away."""

    def __init__(self, says: bytes) -> None:
        self._says = says
        self.heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._says)

    def data_received(self, data: bytes) -> None:
        self.heard += data
