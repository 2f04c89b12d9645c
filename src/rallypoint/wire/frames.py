"""Framing: a greeting, then length-prefixed payloads. Bytes in, payloads out; nothing here knows what they mean.

The greeting starts with a byte that no text protocol starts with, and ends what a stranger sends after its first byte:
whoever talks HTTP, TLS or pickle to the port is known as such before anything is parsed or allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

GREETING = b"\xf1RALLYPOINT"
HEADER_BYTES = 4
HELLO_LIMIT = 16 * 1024
"""No first frame is longer, whoever sends it."""
DEFAULT_LIMIT = 32 * 1024 * 1024
MOST_PACKED = 65_535


class FrameError(ValueError):
    """The peer does not keep to the protocol; the connection cannot go on."""


class NotRallypoint(FrameError):
    """The peer speaks something else; `first` are its first bytes."""

    def __init__(self, first: bytes) -> None:
        super().__init__("the other side does not speak Rallypoint's protocol")
        self.first = first


class FrameTooLarge(FrameError):
    """A frame is longer than what was agreed on."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"a frame of {length} bytes is longer than the limit of {limit}")
        self.length = length
        self.limit = limit


def frame(payload: bytes) -> bytes:
    """A payload as it is sent."""
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def packed(messages: Sequence[bytes]) -> bytes:
    """Encoded messages as the payload that has all of them, up to `MOST_PACKED`: they need not be encoded together."""
    return b"\xdc" + len(messages).to_bytes(2, "big") + b"".join(messages)


class Framer:
    """Takes the bytes of one direction of one connection, however they are cut, and gives the payloads."""

    __slots__ = ("_buffer", "_greeted", "limit")

    def __init__(self, limit: int = HELLO_LIMIT) -> None:
        self.limit = limit
        """May be raised between frames, once the peer is known."""
        self._greeted = False
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The payloads that are complete now. Raises NotRallypoint or FrameTooLarge; then nothing more may be fed.

        Lazy, so that whoever takes the first frame can raise the limit before the next one is looked at.
        """
        if self._greeted and not self._buffer:
            length = len(data) - HEADER_BYTES
            if 0 <= length <= self.limit and data.startswith(length.to_bytes(HEADER_BYTES, "big")):
                return (data[HEADER_BYTES:],)  # most often: one frame, whole
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        if not self._greeted and not self._greet():
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

    def _greet(self) -> bool:
        """Take the greeting; whether it is complete."""
        got = bytes(self._buffer[: len(GREETING)])
        if not GREETING.startswith(got):
            raise NotRallypoint(bytes(self._buffer[:200]))
        if len(got) < len(GREETING):
            return False
        del self._buffer[: len(GREETING)]
        self._greeted = True
        return True
