"""What a server and the process that draws its runs say to each other. Pure but for `receive`, which reads.

A message is its length in four bytes and itself as MessagePack. The server speaks of a run by a number that it chose.
"""

from __future__ import annotations

import asyncio
from typing import TypeAlias, TypeVar

import msgspec

LENGTH = 4
BEAT_S = 3.0
"""The process that draws says something at least so often, so that one that stands still is noticed."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """First of all: where the runs are, for people."""

    where: str


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Draw this run, and say whenever there is news."""

    number: int
    run_id: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Nobody looks at it any more."""

    number: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Tell the difference to this version of it."""

    number: int
    version: int


class News(msgspec.Struct, frozen=True, tag="news"):
    """The latest version of a run's picture."""

    number: int
    version: int


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer to `Ask` with that `since`: the version that it leads to, and the difference as JSON."""

    number: int
    since: int
    version: int
    data: bytes


class Over(msgspec.Struct, frozen=True, tag="over"):
    """A run is not drawn any more, because that failed."""

    number: int


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Nothing happens."""


ToStudio: TypeAlias = Begin | Look | Leave | Ask
FromStudio: TypeAlias = News | Told | Over | Beat
T = TypeVar("T")

to_studio = msgspec.msgpack.Decoder(ToStudio)
from_studio = msgspec.msgpack.Decoder(FromStudio)
_encoder = msgspec.msgpack.Encoder()


def packed(message: ToStudio | FromStudio) -> bytes:
    """To be sent."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH, "big") + body


async def receive(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """The next message; None: the other side has gone."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH), "big")
        return decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None
