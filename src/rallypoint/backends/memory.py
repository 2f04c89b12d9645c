"""Backend `memory`: the engine in this process. For threads, tests and simulation.

A `MemoryServer` is the engine with its watches, shared by any number of `MemoryBackend` connections on different event
loops and threads: a lock guards the engine, and a watch is woken on its own loop. Nothing here may block while it holds
the lock. Time is the monotonic time of the calling loop. Every loop with watches has a timer for the next lease to
expire, so that its watches get the deletions even if the loop that granted the lease is gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from weakref import WeakKeyDictionary

from rallypoint.backends.contract import BackendStatus, Limits, Session, Watch
from rallypoint.backends.ops import OpBackend
from rallypoint.errors import HistoryGone, Unavailable
from rallypoint.kv.engine import DEFAULT_HISTORY, Engine
from rallypoint.kv.types import (
    Batch,
    Grant,
    Op,
    Result,
    Tick,
    WatchEvent,
    WatchTooOld,
)

WATCH_BUFFER = 4_096


class MemoryServer:
    """An engine that several backends of this process share."""

    def __init__(self, history: int = DEFAULT_HISTORY) -> None:
        self.engine = Engine(history)
        self._lock = threading.Lock()
        self._watches: dict[int, MemoryWatch] = {}
        self._watch_ids = count(1)
        self._timers: dict[asyncio.AbstractEventLoop, tuple[float, asyncio.TimerHandle] | None] = {}
        """By loop: when the timer is due, and the timer. Not every event loop supports `TimerHandle.when`."""

    def apply(self, op: Op) -> Result:
        """Execute at the calling loop's time, notify the watches, and set the timers for leases."""
        loop = asyncio.get_running_loop()
        with self._lock:
            outcome = self.engine.apply(op, loop.time())
            self._notify(outcome.events)
        if isinstance(op, Grant):
            self._arm_all()
        return outcome.result

    def start(self, watch: MemoryWatch, after_revision: int) -> None:
        """Register a watch and deliver its backlog. HistoryGone if the history does not reach back that far."""
        with self._lock:
            watch_id = next(self._watch_ids)
            started = self.engine.watch(watch_id, watch.prefix, after_revision)
            if isinstance(started, WatchTooOld):
                raise HistoryGone(
                    f"changes under {watch.prefix!r} after revision {after_revision} are no longer kept: scan again",
                    oldest=started.oldest,
                )
            self._watches[watch_id] = watch
            watch.registered(watch_id, started.backlog)
        self._arm(asyncio.get_running_loop())

    def drop(self, watch_id: int) -> None:
        """Unregister a watch. The caller holds the lock."""
        self._watches.pop(watch_id, None)
        self.engine.unwatch(watch_id)

    def cancel(self, watch_id: int) -> None:
        """Unregister a watch. The caller does not hold the lock."""
        with self._lock:
            self.drop(watch_id)

    def _notify(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            watch = self._watches.get(event.watch)
            if watch is not None and not watch.push(event.batch):
                self.drop(event.watch)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the timer of `loop`, the running one, for the next lease to expire."""
        with self._lock:
            deadline = self.engine.next_deadline()
            timer = self._timers.setdefault(loop, None)
            if deadline is None or (timer is not None and timer[0] <= deadline):
                return
            if timer is not None:
                timer[1].cancel()
            self._timers[loop] = deadline, loop.call_at(deadline, self._tick)

    def _arm_all(self) -> None:
        """After a grant: every loop with watches whose timer is too late sets it again."""
        with self._lock:
            deadline = self.engine.next_deadline()
            for loop, timer in list(self._timers.items()):
                if loop.is_closed():
                    del self._timers[loop]
                elif deadline is not None and (timer is None or timer[0] > deadline):
                    _post(loop, self._arm, loop)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            self._timers[loop] = None  # it has fired, perhaps slightly early
        self.apply(Tick())
        self._arm(loop)


class MemoryWatch(Watch):
    """Buffers a bounded number of batches. On overflow it is unregistered, and registers again after its last batch."""

    def __init__(self, server: MemoryServer, prefix: str, after_revision: int) -> None:
        self.prefix = prefix
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._seen = after_revision
        self._id: int | None = None
        self._buffer: deque[Batch] = deque()
        self._wake = asyncio.Event()

    def registered(self, watch_id: int, backlog: Sequence[Batch]) -> None:
        """Store the registration and the whole backlog. The caller holds the server's lock."""
        self._id = watch_id
        self._buffer.extend(backlog)

    def push(self, batch: Batch) -> bool:
        """Take a batch; False: the buffer is full. The caller holds the server's lock."""
        if len(self._buffer) >= WATCH_BUFFER:
            self._id = None
            return False
        self._buffer.append(batch)
        if not self._wake.is_set():
            try:
                running = asyncio.get_running_loop()
            except RuntimeError:
                running = None
            if running is self._loop:
                self._wake.set()
            else:
                _post(self._loop, self._wake.set)
        return True

    def ready(self) -> Batch | None:
        if not self._buffer or self.is_over:
            return None
        batch = self._buffer.popleft()
        self._seen = batch.revision
        return batch

    async def __anext__(self) -> Batch:
        while not self.is_over:
            if self._id is None and not self._buffer:
                self._server.start(self, self._seen)
            batch = self.ready()
            if batch is not None:
                return batch
            self._wake.clear()
            if not self._buffer:
                await self._wake.wait()
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.is_over = True
        if self._id is not None:
            self._server.cancel(self._id)
            self._id = None
        self._wake.set()


class MemoryBackend(OpBackend):
    """A connection to a `MemoryServer`."""

    name = "memory"
    limits = Limits(max_txn_ops=1_000_000, max_txn_bytes=1 << 30)

    def __init__(self, server: MemoryServer, endpoint: str = "") -> None:
        self._server = server
        self._endpoint = endpoint
        # Weak references, in order: closing is deterministic in the simulator.
        self._watches: WeakKeyDictionary[MemoryWatch, None] = WeakKeyDictionary()
        self._sessions: WeakKeyDictionary[Session, None] = WeakKeyDictionary()
        self._closed = False

    def watch(self, prefix: str, after_revision: int) -> Watch:
        self._check_open()
        watch = MemoryWatch(self._server, prefix, after_revision)
        self._watches[watch] = None
        return watch

    async def open_session(
        self,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
    ) -> Session:
        session = await super().open_session(
            ttl_s, interval_s=interval_s, renew_timeout_s=renew_timeout_s, on_missed=on_missed
        )
        self._sessions[session] = None
        return session

    async def status(self) -> BackendStatus:
        await self.execute(Tick())
        engine = self._server.engine
        details = {"keys": str(len(engine.items)), "leases": str(len(engine.leases))}
        return BackendStatus(self.name, self._endpoint, engine.revision, details)

    async def close(self) -> None:
        self._closed = True
        for watch in list(self._watches):
            watch.cancel()
        for session in list(self._sessions):
            session.abandon()

    async def execute(self, op: Op) -> Result:
        self._check_open()
        result = self._server.apply(op)
        await asyncio.sleep(0)  # a caller in a loop must not starve other tasks
        return result

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this connection to the memory backend is closed")


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Run a callback on another thread's loop, unless it is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
