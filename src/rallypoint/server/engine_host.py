"""The engine on the event loop's monotonic clock, with its watches and the timer that ends leases.

Operations are executed on the event loop's thread only, in the order they arrive. A listener must never execute an
operation while it is notified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from rallypoint.kv.engine import Engine
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
    """Receives the changes under a watch."""

    def push(self, batch: Batch) -> None:
        """The changes of one revision. Must not execute an operation."""


class EngineHost:
    """One engine and its watches. Must be created and used on one event loop."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Engine()
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[int, Listener] = {}
        self._watch_ids = count(1)
        self.outbox = Outbox()
        """The connections with unsent messages."""
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        """When the timer is due. Kept here because `TimerHandle.when` is not available on every event loop."""
        self.executed: dict[type[Op], int] = dict.fromkeys(OPERATIONS, 0)
        """Number of executed operations of each kind."""
        self.on_revoked: Callable[[int], None] = lambda _: None
        """Called with each lease that is revoked, as opposed to one that expires."""
        self.arm()

    def execute(self, op: Op, origin: Origin | None = None) -> Result:
        """Execute an operation and notify the listeners of its changes."""
        outcome = self.engine.apply(op, self._loop.time(), origin)
        kind = type(op)
        self.executed[kind] += 1
        if outcome.events:
            self._notify(outcome.events)
        if kind is Txn or kind is Add:  # first, because they are the most frequent
            return outcome.result
        if isinstance(op, (Grant, Shorten)):
            self.arm()
        elif isinstance(op, Revoke):
            self.on_revoked(op.lease)
        return outcome.result

    def watch(self, listener: Listener, prefix: str, after: int) -> tuple[int, WatchStarted | WatchTooOld]:
        """Register a listener. Changes after revision `after` until now are in the result and are not pushed."""
        watch = next(self._watch_ids)
        started = self.engine.watch(watch, prefix, after)
        if isinstance(started, WatchStarted):
            self._listeners[watch] = listener
        return watch, started

    def unwatch(self, watch: int) -> None:
        """Remove a listener; unknown watches are ignored."""
        if self._listeners.pop(watch, None) is not None:
            self.engine.unwatch(watch)

    @property
    def watch_count(self) -> int:
        return len(self._listeners)

    def stop(self) -> None:
        """Stop ending leases."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def arm(self) -> None:
        """Set the timer to the next deadline of a lease, unless it is due earlier."""
        deadline = self.engine.next_deadline()
        if deadline is None or (self._timer is not None and self._due_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_at = deadline
        self._timer = self._loop.call_at(deadline, self._tick)

    def _notify(self, events: Sequence[WatchEvent]) -> None:
        listeners = self._listeners
        for event in events:
            listener = listeners.get(event.watch)
            if listener is not None:
                listener.push(event.batch)

    def _tick(self) -> None:
        self._timer = None
        self.execute(Tick())
        self.arm()
