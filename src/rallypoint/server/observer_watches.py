"""Watches of read-only clients, which have no run of their own: one watch of the engine for each prefix, shared.

A node is notified of each change at once. Read-only clients are notified in batches: of the first change at once, then
of all that followed, a few times a second, in a frame that is encoded once for all of them. So ten of them cost hardly
more than one. Each must still get what any watch gets: every batch after the revision it asked for, in order, once, and
before any answer that reflects it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from rallypoint.kv.types import Batch, WatchStarted, WatchTooOld
from rallypoint.server.engine_host import EngineHost
from rallypoint.wire.frames import frame
from rallypoint.wire.messages import Push, encoder

GATHER_S = 0.05
"""How long batches are collected after some were sent, ..."""
GATHER_BYTES = 256 * 1024
"""... unless they reach this size: then they are sent at once, so that a slow reader is noticed as usual."""


class Observer(Protocol):
    """The connection of a read-only client."""

    @property
    def keeps_up(self) -> bool:
        """Its buffer is empty, so that `push_frame` keeps the order of messages."""

    def push(self, number: int, batch: Batch) -> None:
        """Send a batch for its watch with this number."""

    def push_frame(self, data: bytes) -> None:
        """Send an encoded frame, which several connections share. Only if it `keeps_up`."""


class ClientWatch:
    """A watch of a connection. `id`: of its watch in the engine; 0 if it shares one in `ObserverWatches`."""

    __slots__ = ("connection", "id", "number", "prefix")

    def __init__(self, connection: Observer, number: int, prefix: str) -> None:
        self.connection = connection
        self.number = number
        self.prefix = prefix
        self.id = 0

    def push(self, batch: Batch) -> None:
        self.connection.push(self.number, batch)


class ObserverWatches:
    """The watches of all read-only clients. Must be created and used on one event loop."""

    def __init__(self, engine_host: EngineHost, max_frame: int) -> None:
        self._host = engine_host
        self._max_frame = max_frame
        self._shared: dict[str, _SharedWatch] = {}

    def __len__(self) -> int:
        """Number of client watches."""
        return sum(len(shared.observers) for shared in self._shared.values())

    def add(self, observer: Observer, number: int, prefix: str, after: int) -> WatchStarted | WatchTooOld:
        """Add a watch. Changes after revision `after`, which is not in the future, until now are in the result."""
        shared = self._shared.get(prefix)
        if shared is None:
            shared = _SharedWatch(self._host, prefix, self._max_frame)
        shared.flush()  # the collected batches are in the result, too
        watch, started = self._host.watch(shared, prefix, after)
        self._host.unwatch(watch)  # only for its result: the shared watch has one of its own
        if isinstance(started, WatchStarted):
            self._shared[prefix] = shared
            shared.open()
            shared.observers[observer, number] = None
        return started

    def flush(self) -> None:
        """Send all collected batches. Before each answer to a read-only client, because it may reflect them."""
        for shared in list(self._shared.values()):
            shared.flush()

    def remove(self, observer: Observer, number: int, prefix: str) -> None:
        """Remove a watch; unknown ones are ignored."""
        shared = self._shared.get(prefix)
        if shared is not None:
            shared.observers.pop((observer, number), None)
            if not shared.observers:
                shared.close()
                del self._shared[prefix]


class _SharedWatch:
    """One prefix with the watches of all read-only clients on it."""

    def __init__(self, engine_host: EngineHost, prefix: str, max_frame: int) -> None:
        self.observers: dict[tuple[Observer, int], None] = {}
        self._host = engine_host
        self._prefix = prefix
        self._max_frame = max_frame
        self._loop = asyncio.get_running_loop()
        self._watch: int | None = None
        self._batches: list[Batch] = []
        self._size = 0
        self._flushed_at = float("-inf")
        self._timer: asyncio.Handle | None = None
        self._is_due_now = False

    def open(self) -> None:
        """Watch from the current revision, unless it is watching already."""
        if self._watch is None:
            self._watch, _ = self._host.watch(self, self._prefix, self._host.engine.revision)

    def close(self) -> None:
        if self._watch is not None:
            self._host.unwatch(self._watch)
        if self._timer is not None:
            self._timer.cancel()

    def push(self, batch: Batch) -> None:
        """Called by the engine host with each batch."""
        self._batches.append(batch)
        if self._is_due_now:
            return
        for change in batch.changes:
            if change.item is not None:
                self._size += len(change.item.value)
        if self._timer is None:
            pause_s = self._flushed_at + GATHER_S - self._loop.time()
            if pause_s > 0 and self._size < GATHER_BYTES:
                self._timer = self._loop.call_later(pause_s, self.flush)
                return
        elif self._size < GATHER_BYTES:
            return
        else:
            self._timer.cancel()
        self._timer, self._is_due_now = self._loop.call_soon(self.flush), True

    def flush(self) -> None:
        """Send the collected batches to all observers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._is_due_now = None, False
        batches, self._batches, self._size = self._batches, [], 0
        if not batches:
            return
        self._flushed_at = self._loop.time()
        frames: dict[int, bytes] = {}
        behind: list[tuple[Observer, int]] = []
        for observer, number in list(self.observers):
            if not observer.keeps_up:
                behind.append((observer, number))
                continue
            if number not in frames:
                frames[number] = encoder.encode([Push(number, batch) for batch in batches])
            if len(frames[number]) <= self._max_frame:
                observer.push_frame(frame(frames[number]))
            else:
                behind.append((observer, number))
        for batch in batches:  # the outer loop, so that each batch is encoded once for all of them
            for observer, number in behind:
                observer.push(number, batch)
