"""The connections that have something to send, and the encoded form of what goes to many of them.

All of them are flushed by one callback, when the loop has run everything that is due: a connection writes once a turn,
however much it has to send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from rallypoint.kv.types import Batch
from rallypoint.wire.messages import encoder

MOST_KNOWN = 8
"""Of so many batches it is remembered how they are encoded: one that goes to many is encoded once."""


class Sender(Protocol):
    """A connection."""

    def flush(self) -> None:
        """Send what is to be sent, if anything still is."""


class Outbox:
    """Those who have something to send. Belongs to the loop it is made on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[Sender] = []

    def add(self, one: Sender) -> None:
        """Have it flushed, in this turn of the loop or the next one."""
        if not self._due:
            self._loop.call_soon(self.flush)
        self._due.append(one)

    def flush(self) -> None:
        """Everybody sends what is to be sent."""
        due, self._due = self._due, []
        for one in due:
            guarded(self._loop, one.flush)


def guarded(loop: asyncio.AbstractEventLoop, flush: Callable[[], None]) -> None:
    """Have a connection send what it has. A defect costs the connection that met it, not those behind it."""
    try:
        flush()
    except Exception as error:
        loop.call_exception_handler({"message": "a connection could not be flushed", "exception": error})


_known: dict[int, tuple[Batch, msgspec.Raw]] = {}


def raw_of(batch: Batch) -> msgspec.Raw:
    """A batch as it is sent."""
    known = _known.get(id(batch))
    if known is not None:
        return known[1]
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    raw = msgspec.Raw(encoder.encode(batch))
    _known[id(batch)] = (batch, raw)  # which is kept, so that no other one can have its id
    return raw
