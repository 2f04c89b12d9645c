"""Batched sending: the connections with unsent messages, and a cache of encoded batches.

All connections with unsent messages are flushed by one callback, after the event loop has run all ready callbacks: each
connection writes at most once per iteration of the loop. An error in one flush must never prevent the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from rallypoint.kv.types import Batch
from rallypoint.wire.messages import encoder

MOST_KNOWN = 8
"""Number of batches in the cache, so that a batch for many watches is encoded once."""


class Sender(Protocol):
    """A connection."""

    def flush(self) -> None:
        """Send all buffered messages, if there are any."""


class Outbox:
    """The connections with unsent messages. Must be created and used on one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[Sender] = []

    def add(self, sender: Sender) -> None:
        """Flush it in this iteration of the event loop or the next one."""
        if not self._due:
            self._loop.call_soon(self.flush)
        self._due.append(sender)

    def flush(self) -> None:
        """Flush all connections that were added."""
        due, self._due = self._due, []
        for sender in due:
            guarded(self._loop, sender.flush)


def guarded(loop: asyncio.AbstractEventLoop, flush: Callable[[], None]) -> None:
    """Flush one connection. An error is reported to the event loop and does not affect other connections."""
    try:
        flush()
    except Exception as error:
        loop.call_exception_handler({"message": "a connection could not be flushed", "exception": error})


_known: dict[int, tuple[Batch, msgspec.Raw]] = {}


def raw_of(batch: Batch) -> msgspec.Raw:
    """The encoded form of a batch, from the cache if possible."""
    known = _known.get(id(batch))
    if known is not None:
        return known[1]
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    raw = msgspec.Raw(encoder.encode(batch))
    _known[id(batch)] = (batch, raw)  # keeps the batch alive, so that its id is not reused
    return raw
