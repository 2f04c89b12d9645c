"""A watch of a register: it takes the changes since the last revision from each document that is read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rallypoint.backends.contract import Watch
from rallypoint.errors import BackendError, HistoryGone
from rallypoint.kv.document import Document
from rallypoint.kv.types import Batch

WATCH_BUFFER = 4_096


class Source(Protocol):
    """Where a watch gets its documents from."""

    def start_watch(self, watch: RegisterWatch) -> None: ...

    def stop_watch(self, watch: RegisterWatch) -> None: ...

    def document_for(self, watch: RegisterWatch) -> Document | None:
        """The last document that was read, if there is one."""


class RegisterWatch(Watch):
    """Starts when it is first iterated or followed."""

    def __init__(self, source: Source, prefix: str, after_revision: int, generation: int | None) -> None:
        self.prefix = prefix
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._generation = generation
        self._after = after_revision
        """Changes up to this revision were taken."""
        self._buffer: deque[Batch] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._on_ready: Callable[[], None] | None = None
        self._error: BackendError | None = None
        self._has_begun = False
        self._is_behind = False

    def take(self, document: Document) -> None:
        """Take the new changes of a document that was read, or written by this process."""
        if self._error is not None:
            return
        history = document.engine.history
        if self._generation is None:
            self._generation = document.generation
        if self._generation != document.generation or self._after < history.oldest:
            what = "were never made in this store" if self._generation != document.generation else "are no longer kept"
            self.fail(
                HistoryGone(
                    f"changes under {self.prefix!r} after revision {self._after} {what}: scan again",
                    oldest=history.oldest,
                )
            )
            return
        self._is_behind = len(self._buffer) >= WATCH_BUFFER  # takes the rest when the buffer is empty
        if self._is_behind or document.engine.revision <= self._after:
            return
        batches = history.after(self._after, self.prefix)
        self._after = document.engine.revision
        if batches:
            self._buffer.extend(batches)
            self._notify()

    def fail(self, error: BackendError) -> None:
        """End the watch with an error, which is raised after the buffered batches."""
        self._error = error
        self._source.stop_watch(self)
        self._notify()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._source.start_watch(self)
        document = self._source.document_for(self)
        if document is not None:
            self.take(document)

    def follow(self, on_ready: Callable[[], None]) -> bool:
        self._on_ready = on_ready
        self._begin()
        return True

    def ready(self) -> Batch | None:
        if self.is_over:
            return None
        if not self._buffer and self._is_behind:
            self._begin()
        if self._buffer:
            return self._buffer.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    async def __anext__(self) -> Batch:
        while not self.is_over:
            if not self._has_begun:
                self._begin()
            batch = self.ready()
            if batch is not None:
                return batch
            self._wake = self._loop.create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_over = True
        self._source.stop_watch(self)
        self._notify()

    def _notify(self) -> None:
        if self._on_ready is not None:
            self._loop.call_soon(self._on_ready)
        elif self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
