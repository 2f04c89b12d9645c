"""The backend contract on the server's own engine: the backend of the coordinators that run inside the server.

It must never block the event loop for long: every operation yields once to the connections.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rallypoint.backends.contract import BackendStatus, Limits, Watch
from rallypoint.backends.ops import OpBackend
from rallypoint.errors import HistoryGone, Unavailable
from rallypoint.kv.types import Batch, Op, Result, WatchTooOld
from rallypoint.server.engine_host import EngineHost

WATCH_BUFFER = 1_000_000
"""Unread batches of one watch; a watch that exceeds it is restarted at the last revision it has read."""


class LocalWatch(Watch):
    """A watch that receives batches directly from the engine."""

    def __init__(self, engine_host: EngineHost, prefix: str, after_revision: int) -> None:
        self._host = engine_host
        self._prefix = prefix
        self._seen = after_revision
        self._id: int | None = None
        self._buffer: deque[Batch] = deque()
        self._wake = asyncio.Event()
        self._on_ready: Callable[[], None] | None = None

    def push(self, batch: Batch) -> None:
        """Called by the engine host with each batch."""
        if len(self._buffer) >= WATCH_BUFFER:
            if self._id is not None:
                self._host.unwatch(self._id)
            self._id = None
            return
        self._buffer.append(batch)
        self._notify()

    def _notify(self) -> None:
        if self._on_ready is not None:
            self._on_ready()
        else:
            self._wake.set()

    def follow(self, on_ready: Callable[[], None]) -> bool:
        """As in the contract. `on_ready` is called while an operation is executed, and must not execute another."""
        self._on_ready = on_ready
        with suppress(HistoryGone):  # raised by `ready()` instead
            self._start()
        if self._buffer or self._id is None:
            asyncio.get_running_loop().call_soon(on_ready)
        return True

    def ready(self) -> Batch | None:
        if self.is_over:
            return None
        if self._on_ready is not None and self._id is None and not self._buffer:
            self._start()
        if not self._buffer:
            return None
        batch = self._buffer.popleft()
        self._seen = batch.revision
        return batch

    async def __anext__(self) -> Batch:
        while not self.is_over:
            if self._id is None and not self._buffer:
                self._start()
            batch = self.ready()
            if batch is not None:
                return batch
            self._wake.clear()
            await self._wake.wait()
        raise StopAsyncIteration

    def _start(self) -> None:
        watch, started = self._host.watch(self, self._prefix, self._seen)
        if isinstance(started, WatchTooOld):
            raise HistoryGone(f"changes under {self._prefix!r} are no longer kept", oldest=started.oldest)
        self._id = watch
        self._take(started.backlog)

    def _take(self, backlog: tuple[Batch, ...]) -> None:
        self._buffer.extend(backlog)

    def cancel(self) -> None:
        self.is_over = True
        if self._id is not None:
            self._host.unwatch(self._id)
            self._id = None
        self._notify()


class LocalBackend(OpBackend):
    """Executes operations at once. After `close` every call raises Unavailable."""

    name = "local"
    limits = Limits(max_txn_ops=1_000_000, max_txn_bytes=1 << 30)
    has_coordinator = True

    def __init__(self, engine_host: EngineHost) -> None:
        self._host = engine_host
        self._is_closed = False

    async def execute(self, op: Op) -> Result:
        if self._is_closed:
            raise Unavailable("the server is stopping")
        result = self._host.execute(op)
        await asyncio.sleep(0)  # let the connections run between operations of a coordinator
        return result

    def watch(self, prefix: str, after_revision: int) -> Watch:
        return LocalWatch(self._host, prefix, after_revision)

    async def status(self) -> BackendStatus:
        return BackendStatus(self.name, "", self._host.engine.revision, {})

    async def close(self) -> None:
        self._is_closed = True
