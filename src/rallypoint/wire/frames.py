"""Framing: a greeting, then length-prefixed payloads. Bytes in, payloads out; payloads are not interpreted here.

The greeting starts with a byte that no text protocol starts with. So HTTP, TLS, pickle and other protocols are detected
by their first bytes; nothing may be parsed or allocated for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

GREETING = b"\xf1RALLYPOINT"
HEADER_BYTES = 4
HELLO_LIMIT = 16 * 1024
"""The limit of the first frame in either direction."""
DEFAULT_LIMIT = 32 * 1024 * 1024
MOST_PACKED = 65_535
"""The most messages of a payload: the length of a msgpack `array 16`."""


class FrameError(ValueError):
    """The peer violates the protocol; the connection must be closed."""


class NotRallypoint(FrameError):
    """The peer speaks another protocol; `first` contains its first bytes."""

    def __init__(self, first: bytes) -> None:
        super().__init__("the peer does not speak Rallypoint's protocol")
        self.first = first


class FrameTooLarge(FrameError):
    """A frame exceeds the limit."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"a frame of {length} bytes is longer than the limit of {limit}")
        self.length = length
        self.limit = limit


def frame(payload: bytes) -> bytes:
    """A payload with its length prefix."""
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def packed(messages: Sequence[bytes]) -> bytes:
    """The payload of up to `MOST_PACKED` messages that were encoded separately."""
    return b"\xdc" + len(messages).to_bytes(2, "big") + b"".join(messages)


class Framer:
    """Splits the bytes of one direction of a connection into payloads."""

    __slots__ = ("_buffer", "_greeted", "limit")

    def __init__(self, limit: int = HELLO_LIMIT) -> None:
        self.limit = limit
        """May be raised between frames, after authentication."""
        self._greeted = False
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The payloads that are complete now. Raises NotRallypoint or FrameTooLarge; do not feed more after that.

        Lazy: the caller can raise the limit after the first frame, before the next one is checked.
        """
        if self._greeted and not self._buffer:
            length = len(data) - HEADER_BYTES
            if 0 <= length <= self.limit and data.startswith(length.to_bytes(HEADER_BYTES, "big")):
                return (data[HEADER_BYTES:],)  # the usual case: exactly one frame
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        if not self._greeted and not self._take_greeting():
            return
        start = 0
        try:
            while len(buffer) - start >= HEADER_BYTES:
                end = start + HEADER_BYTES
                length = int.from_bytes(buffer[start:end], "big")
                if length > self.limit:
                    raise FrameTooLarge(length, self.limit)
                if len(buffer) < end + length:
                    return
                start = end + length
                yield bytes(buffer[end:start])
        finally:
            del buffer[:start]

    def _take_greeting(self) -> bool:
        """Remove the greeting from the buffer; False: it is incomplete."""
        got = bytes(self._buffer[: len(GREETING)])
        if not GREETING.startswith(got):
            raise NotRallypoint(bytes(self._buffer[:200]))
        if len(got) < len(GREETING):
            return False
        del self._buffer[: len(GREETING)]
        self._greeted = True
        return True
