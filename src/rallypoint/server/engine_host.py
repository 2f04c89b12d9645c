"""The engine on the event loop's monotonic clock, and who is told of what changes.

Everything is executed by the one thread of the loop, in the order it arrives. Leases end on time by a single timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from rallypoint.kv.engine import DEFAULT_HISTORY, Engine
from rallypoint.kv.types import (
    Add,
    Batch,
    Grant,
    KeepAlive,
    Op,
    Origin,
    Result,
    Revoke,
    Shorten,
    Tick,
    Txn,
    WatchEvent,
    WatchStarted,
    WatchTooOld,
)
from rallypoint.server.outbox import Outbox

OPERATIONS: tuple[type[Op], ...] = (Txn, Add, Grant, KeepAlive, Revoke, Shorten, Tick)


class Listener(Protocol):
    """Whoever is told of the changes under a watch."""

    def push(self, batch: Batch) -> None:
        """One revision. Must not execute anything."""


class EngineHost:
    """One engine and its watches. Belongs to the loop it is made on."""

    def __init__(self, engine: Engine | None = None, history: int = DEFAULT_HISTORY) -> None:
        self.engine = engine or Engine(history)
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[int, Listener] = {}
        self._watch_ids = count(1)
        self.outbox = Outbox()
        """Who has something to send because of what was told."""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """When the timer is due. Not every loop's timers can be asked."""
        self.executed: dict[type[Op], int] = dict.fromkeys(OPERATIONS, 0)
        """How many operations of each kind."""
        self.on_revoked: Callable[[int], None] = lambda _: None
        """Called with each lease that is ended by whoever holds it."""
        self.arm()

    def execute(self, op: Op, origin: Origin | None = None) -> Result:
        """Execute now; whoever watches what changed is told before this returns."""
        outcome = self.engine.apply(op, self._loop.time(), origin)
        kind = type(op)
        self.executed[kind] += 1
        if outcome.events:
            self._tell(outcome.events)
        if kind is Txn or kind is Add:  # most often
            return outcome.result
        if isinstance(op, (Grant, Shorten)):
            self.arm()
        elif isinstance(op, Revoke):
            self.on_revoked(op.lease)
        return outcome.result

    def watch(self, listener: Listener, prefix: str, after: int) -> tuple[int, WatchStarted | WatchTooOld]:
        """Register a listener; what it missed is in the answer and is not pushed."""
        watch = next(self._watch_ids)
        started = self.engine.watch(watch, prefix, after)
        if isinstance(started, WatchStarted):
            self._listeners[watch] = listener
        return watch, started

    def unwatch(self, watch: int) -> None:
        """Tell no more; unknown watches are ignored."""
        if self._listeners.pop(watch, None) is not None:
            self.engine.unwatch(watch)

    @property
    def is_able(self) -> bool:
        """What is executed now can be kept."""
        return True

    @property
    def watch_count(self) -> int:
        return len(self._listeners)

    def stop(self) -> None:
        """No more leases end here."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def arm(self) -> None:
        """See to it that the next lease ends on time."""
        deadline = self.engine.next_deadline()
        if deadline is None or (self._timer is not None and self._due <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = deadline
        self._timer = self._loop.call_at(deadline, self._tick)

    def _tell(self, events: Sequence[WatchEvent]) -> None:
        listeners = self._listeners
        for event in events:
            listener = listeners.get(event.watch)
            if listener is not None:
                listener.push(event.batch)

    def _tick(self) -> None:
        self._timer = None
        self.execute(Tick())
        self.arm()
