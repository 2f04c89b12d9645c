"""A watch over the wire: survives its connection, and starts again where it was when it falls behind."""

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


class Post(Protocol):
    """Where a watch is asked for."""

    def start_watch(self, watch: TcpWatch) -> int:
        """Ask for it, after `watch.after`; the number under which it will be pushed. A new one every time."""

    def stop_watch(self, number: int) -> None:
        """Ask no more."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call once, when all that has arrived together is in place."""


class TcpWatch(Watch):
    """Asked for when it is first iterated."""

    def __init__(self, post: Post, prefix: str, after_revision: int = NOW) -> None:
        self.prefix = prefix
        self._post = post
        self._seen = after_revision
        self._number: int | None = None
        self._buffer: deque[Batch] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._on_ready: Callable[[], None] | None = None
        self._gone: Rejected | None = None

    @property
    def after(self) -> int:
        """Everything up to here has arrived."""
        return self._buffer[-1].revision if self._buffer else self._seen

    def push(self, batch: Batch) -> None:
        """A batch has arrived."""
        if len(self._buffer) >= WATCH_BUFFER:
            self._stop()  # and start again when what is here has been taken
            return
        self._buffer.append(batch)
        self.is_idle = False
        if self._on_ready is not None:  # most often
            self._post.call_soon(self._on_ready)
        else:
            self._tell()

    def gone(self, error: Rejected) -> None:
        """What it would have to go on from is not kept, or it may not go on."""
        self._stop()
        self._gone = error
        self._tell()

    def begin(self) -> None:
        """Ask for it now."""
        if self._number is None:
            self._number = self._post.start_watch(self)

    def since(self, revision: int) -> None:
        """It was asked for from `NOW` on, and what is there up to this revision is known already."""
        while self._buffer and self._buffer[0].revision <= revision:
            self._buffer.popleft()
        if self._seen == NOW:
            self._seen = revision

    def follow(self, on_ready: Callable[[], None]) -> bool:
        self._on_ready = on_ready
        self.begin()
        if self._buffer or self._gone is not None:
            self._post.call_soon(on_ready)
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
            self.begin()  # again, if it had fallen behind
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
        self._tell()

    def _stop(self) -> None:
        if self._number is not None:
            self._post.stop_watch(self._number)
            self._number = None

    def _tell(self) -> None:
        self.is_idle = False
        if self._on_ready is not None:
            self._post.call_soon(self._on_ready)
        elif self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
