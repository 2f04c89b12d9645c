"""Those who only look on: clients that have come for no run. However many watch a prefix, it is watched once for them.

A node is told of a change at once, and of few. Whoever looks on is told of all changes of a run: of the first at once,
then of what has gathered since, a few times a second. What is sent is put together once for all of them, so that ten
cost hardly more than one. Each gets what any watch gets: every batch after the revision it asked for, in order, once,
and before any answer that knows of it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from rallypoint.kv.types import Batch, WatchStarted, WatchTooOld
from rallypoint.server.engine_host import EngineHost
from rallypoint.wire.frames import frame
from rallypoint.wire.messages import Push, encoder

GATHER_S = 0.05
"""So long changes gather after something was told, ..."""
GATHER_BYTES = 256 * 1024
"""... unless they are so large: then who does not read them is noticed, as everywhere."""


class Reader(Protocol):
    """A connection that looks on."""

    @property
    def keeps_up(self) -> bool:
        """Nothing waits for it: it may be given a frame as it is."""

    def push(self, number: int, batch: Batch) -> None:
        """A batch for one of its watches."""

    def push_frame(self, data: bytes) -> None:
        """A frame that was put together for several."""


class ClientWatch:
    """A watch of a client; 0 is the id of one that is in the observer_watches."""

    __slots__ = ("connection", "id", "number", "prefix")

    def __init__(self, connection: Reader, number: int, prefix: str) -> None:
        self.connection = connection
        self.number = number
        self.prefix = prefix
        self.id = 0

    def push(self, batch: Batch) -> None:
        self.connection.push(self.number, batch)


class ObserverWatches:
    """All who look on. Belongs to the loop it is made on."""

    def __init__(self, engine_host: EngineHost, max_frame: int) -> None:
        self._host = engine_host
        self._max_frame = max_frame
        self._lanes: dict[str, _Lane] = {}

    def __len__(self) -> int:
        """How many watches there are."""
        return sum(len(lane.readers) for lane in self._lanes.values())

    def add(self, reader: Reader, number: int, prefix: str, after: int) -> WatchStarted | WatchTooOld:
        """Tell this reader of what changes; what it missed is in the answer. `after` is not in the future."""
        lane = self._lanes.get(prefix)
        if lane is None:
            lane = _Lane(self._host, prefix, self._max_frame)
        lane.flush()  # what has gathered is in the answer, too
        watch, started = self._host.watch(lane, prefix, after)
        self._host.unwatch(watch)  # the lane has one of its own
        if isinstance(started, WatchStarted):
            self._lanes[prefix] = lane
            lane.open()
            lane.readers[reader, number] = None
        return started

    def flush(self) -> None:
        """Tell everybody what has gathered: whoever is answered has been told of all that the answer speaks of."""
        for lane in list(self._lanes.values()):
            lane.flush()

    def remove(self, reader: Reader, number: int, prefix: str) -> None:
        """Tell it no more. One that is not there is ignored."""
        lane = self._lanes.get(prefix)
        if lane is not None:
            lane.readers.pop((reader, number), None)
            if not lane.readers:
                lane.close()
                del self._lanes[prefix]


class _Lane:
    """One prefix, and who looks at it."""

    def __init__(self, engine_host: EngineHost, prefix: str, max_frame: int) -> None:
        self.readers: dict[tuple[Reader, int], None] = {}
        self._host = engine_host
        self._prefix = prefix
        self._max_frame = max_frame
        self._loop = asyncio.get_running_loop()
        self._watch: int | None = None
        self._batches: list[Batch] = []
        self._size = 0
        self._told_at = float("-inf")
        self._due: asyncio.Handle | None = None
        self._is_due_now = False

    def open(self) -> None:
        """Watch from now on, unless it does."""
        if self._watch is None:
            self._watch, _ = self._host.watch(self, self._prefix, self._host.engine.revision)

    def close(self) -> None:
        if self._watch is not None:
            self._host.unwatch(self._watch)
        if self._due is not None:
            self._due.cancel()

    def push(self, batch: Batch) -> None:
        """The engine_host's."""
        self._batches.append(batch)
        if self._is_due_now:
            return
        for change in batch.changes:
            if change.item is not None:
                self._size += len(change.item.value)
        if self._due is None:
            pause_s = self._told_at + GATHER_S - self._loop.time()
            if pause_s > 0 and self._size < GATHER_BYTES:
                self._due = self._loop.call_later(pause_s, self.flush)
                return
        elif self._size < GATHER_BYTES:
            return
        else:
            self._due.cancel()
        self._due, self._is_due_now = self._loop.call_soon(self.flush), True

    def flush(self) -> None:
        """Tell everybody what has gathered."""
        if self._due is not None:
            self._due.cancel()
            self._due, self._is_due_now = None, False
        batches, self._batches, self._size = self._batches, [], 0
        if not batches:
            return
        self._told_at = self._loop.time()
        frames: dict[int, bytes] = {}
        behind: list[tuple[Reader, int]] = []
        for reader, number in list(self.readers):
            if not reader.keeps_up:
                behind.append((reader, number))
                continue
            if number not in frames:
                frames[number] = encoder.encode([Push(number, batch) for batch in batches])
            if len(frames[number]) <= self._max_frame:
                reader.push_frame(frame(frames[number]))
            else:
                behind.append((reader, number))
        for batch in batches:  # one after the other for all of them: each is encoded once
            for reader, number in behind:
                reader.push(number, batch)
