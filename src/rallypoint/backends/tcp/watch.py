"""A watch on the embedded server. It survives reconnects, and restarts after its last batch if its buffer overflows.

It must never skip a batch or deliver one twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rallypoint.backends.contract import Watch
from rallypoint.errors import Rejected
from rallypoint.kv.types import Batch
from rallypoint.wire.messages import NOW

WATCH_BUFFER = 4_096


class WatchClient(Protocol):
    """The client that a watch sends its requests through."""

    def start_watch(self, watch: TcpWatch) -> int:
        """Request the watch from `watch.after` on. Returns the number of its pushes, a new one for each call."""

    def stop_watch(self, number: int) -> None:
        """Cancel the watch on the server."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call once, after all messages that arrived together have been processed."""


class TcpWatch(Watch):
    """Requested from the server at the first iteration, or by `begin` or `follow`."""

    def __init__(self, client: WatchClient, prefix: str, after_revision: int = NOW) -> None:
        self.prefix = prefix
        self._client = client
        self._seen = after_revision
        self._number: int | None = None
        self._buffer: deque[Batch] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._on_ready: Callable[[], None] | None = None
        self._gone: Rejected | None = None

    @property
    def after(self) -> int:
        """The revision up to which all batches have arrived."""
        return self._buffer[-1].revision if self._buffer else self._seen

    def push(self, batch: Batch) -> None:
        """Take a batch that has arrived."""
        if len(self._buffer) >= WATCH_BUFFER:
            self._stop()  # `ready` starts it again when the buffer has been read
            return
        self._buffer.append(batch)
        self.is_idle = False
        if self._on_ready is not None:  # the usual case
            self._client.call_soon(self._on_ready)
        else:
            self._notify()

    def gone(self, error: Rejected) -> None:
        """End the stream with an error: its next revisions are no longer kept, or the server refused it."""
        self._stop()
        self._gone = error
        self._notify()

    def begin(self) -> None:
        """Request the watch from the server, unless it is running."""
        if self._number is None:
            self._number = self._client.start_watch(self)

    def since(self, revision: int) -> None:
        """For a watch from `NOW`: drop batches up to this revision, because the caller has read that state."""
        while self._buffer and self._buffer[0].revision <= revision:
            self._buffer.popleft()
        if self._seen == NOW:
            self._seen = revision

    def follow(self, on_ready: Callable[[], None]) -> bool:
        self._on_ready = on_ready
        self.begin()
        if self._buffer or self._gone is not None:
            self._client.call_soon(on_ready)
        return True

    def ready(self) -> Batch | None:
        if self._buffer and not self.is_over:
            batch = self._buffer.popleft()
            self._seen = batch.revision
            return batch
        if self.is_over:
            return None
        if self._gone is not None:
            gone, self._gone = self._gone, None
            raise gone
        if self._number is None and self._on_ready is not None:
            self.begin()  # restart after an overflow of the buffer
        self.is_idle = True
        return None

    async def __anext__(self) -> Batch:
        while not self.is_over:
            batch = self.ready()
            if batch is not None:
                return batch
            self.begin()
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_over = True
        self._stop()
        self._notify()

    def _stop(self) -> None:
        if self._number is not None:
            self._client.stop_watch(self._number)
            self._number = None

    def _notify(self) -> None:
        self.is_idle = False
        if self._on_ready is not None:
            self._client.call_soon(self._on_ready)
        elif self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
