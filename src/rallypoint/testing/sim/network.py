"""The simulated control plane: one server with the real engine, and a backend for each process that reaches it by
messages which may be late, lost, repeated or out of order.

A request carries its client and number, so that a repeated one is executed once (this tests the engine's own
deduplication). A client that gets no answer does not know the outcome. After a reset a connection sends unanswered
requests again and resumes its watches. The server may restart, with or without its data.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from itertools import count

from rallypoint.backends.contract import BackendStatus, Limits, Watch
from rallypoint.backends.ops import OpBackend, changes_something
from rallypoint.errors import HistoryGone, OutcomeUnknown, Unavailable
from rallypoint.kv.engine import Engine
from rallypoint.kv.snapshot import restore, snapshot
from rallypoint.kv.types import (
    Batch,
    Grant,
    Op,
    Origin,
    Result,
    Tick,
    WatchStarted,
    WatchTooOld,
)
from rallypoint.testing.loop import VirtualTimeLoop

EVERYTHING = 0
"""The watch of the checkers: it covers all keys and gets changes at once."""
_WIRE = Context()
"""The context of messages, which belong to no machine: they arrive even if their sender is paused or dead."""
GENERATION = 1_000_000
"""A server without its data numbers revisions and leases from a new million after each restart."""


@dataclass(slots=True)
class LinkConditions:
    """The current conditions of one network link. Probabilities are per message."""

    delay_s: tuple[float, float] = (0.0005, 0.005)
    lose: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    """A request arrives at a random time within `late_s`, perhaps after its caller has given up."""
    late_s: float = 0.0
    to_server: bool = True
    from_server: bool = True
    watches: bool = True


class SimServer:
    """The engine behind the network. `on_commit(revision, changes, writer)` sees every revision."""

    def __init__(self, on_commit: Callable[[Batch, str], None], history: int) -> None:
        self.is_up = True
        self.engine = Engine(history)
        self._observe()
        self._on_commit = on_commit
        self._history = history
        self._generation = 0
        self._watches: dict[int, SimWatch] = {}
        self._watch_ids = count(1)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._saved = b""

    def execute(self, op: Op, writer: str, origin: Origin | None) -> Result:
        """Execute now; commits are reported, watches get events."""
        deadline = self.engine.next_deadline()
        if deadline is not None and deadline <= self._loop.now:
            self._apply(Tick(), "", None)
        result = self._apply(op, writer, origin)
        if isinstance(op, Grant):
            self._arm()
        return result

    def _apply(self, op: Op, writer: str, origin: Origin | None) -> Result:
        outcome = self.engine.apply(op, self._loop.now, origin)
        if outcome.events:
            for event in outcome.events:
                if event.watch == EVERYTHING:
                    self._on_commit(event.batch, writer)
            for event in outcome.events:
                watch = self._watches.get(event.watch)
                if watch is not None:
                    watch.send(event.batch)
        return outcome.result

    def _observe(self) -> None:
        """Watch all commits, independently of the history."""
        self.engine.watch(EVERYTHING, "", self.engine.revision)

    def start_watch(self, watch: SimWatch, after_revision: int) -> tuple[int, WatchStarted | WatchTooOld]:
        """Register a watch; the caller sends its backlog."""
        watch_id = next(self._watch_ids)
        started = self.engine.watch(watch_id, watch.prefix, after_revision)
        if isinstance(started, WatchStarted):
            self._watches[watch_id] = watch
        return watch_id, started

    def stop_watch(self, watch_id: int) -> None:
        self._watches.pop(watch_id, None)
        self.engine.unwatch(watch_id)

    def crash(self) -> None:
        """Stop at once. The caller resets connections."""
        self.is_up = False
        self._saved = snapshot(self.engine)
        for watch_id in list(self._watches):
            self.stop_watch(watch_id)
        if self._timer is not None:
            self._timer.cancel()

    def restart(self, with_data: bool) -> None:
        """Restart, from the saved data (all leases renewed) or empty."""
        if with_data:
            self.engine = restore(self._saved, self._loop.time(), self._history)
        else:
            self._generation += 1
            self.engine = Engine(self._history, first=1 + self._generation * GENERATION)
        self._observe()
        self.is_up = True
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = self.engine.next_deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._tick, context=_WIRE)

    def _tick(self) -> None:
        self._apply(Tick(), "", None)
        self._arm()


class SimWatch(Watch):
    """A watch whose batches arrive in order, with delays of their own."""

    def __init__(self, backend: SimBackend, prefix: str, after_revision: int) -> None:
        self.prefix = prefix
        self._backend = backend
        self._seen = after_revision
        self._id: int | None = None
        self._starting = False
        self._too_old: int | None = None
        self._buffer: deque[Batch] = deque()
        self._wake = asyncio.Event()
        self._last_arrival = 0.0
        self._is_cancelled = False

    def send(self, batch: Batch) -> None:
        """On the server: send a batch. A stream that loses a batch is torn: nothing may follow on it."""
        if not (self._backend.conditions.from_server and self._backend.conditions.watches):
            self.tear()
            return
        self._last_arrival = self._backend.send_down(
            self._last_arrival, self._arrive, batch, self._backend.connection, reliable=True
        )

    def _arrive(self, batch: Batch, connection: int) -> None:
        if connection != self._backend.connection or self._is_cancelled or batch.revision <= self._seen:
            return
        if self._buffer and batch.revision <= self._buffer[-1].revision:
            return
        self._buffer.append(batch)
        self._wake.set()

    def tear(self) -> None:
        """The connection is broken: the server stops sending until the process resumes on a new connection."""
        if self._id is not None:
            self._backend.server.stop_watch(self._id)
        self._id = None
        self._starting = True

    def resume(self) -> None:
        """On a new connection: request the watch again, after the last batch that arrived."""
        self.tear()
        self._starting = False
        self._wake.set()

    def ready(self) -> Batch | None:
        if not self._buffer or self._is_cancelled:
            return None
        batch = self._buffer.popleft()
        self._seen = batch.revision
        return batch

    async def __anext__(self) -> Batch:
        while not self._is_cancelled:
            if self._too_old is not None:
                raise HistoryGone(f"changes under {self.prefix!r} are no longer kept", oldest=self._too_old)
            if self._id is None and not self._starting:
                self._ask()
            batch = self.ready()
            if batch is not None:
                return batch
            self._wake.clear()
            await self._wake.wait()
        raise StopAsyncIteration

    def _ask(self) -> None:
        self._starting = True
        after = self._buffer[-1].revision if self._buffer else self._seen
        self._backend.send_up(self._begin, after, self._backend.connection)

    def _begin(self, after: int, connection: int) -> None:
        """On the server."""
        backend = self._backend
        if connection != backend.connection or self._is_cancelled or not backend.server.is_up:
            return
        if self._id is not None or not backend.conditions.from_server:
            return  # a repeated request, or the answer cannot arrive
        self._last_arrival = 0.0
        watch_id, started = backend.server.start_watch(self, after)
        if isinstance(started, WatchTooOld):
            backend.send_down(0.0, self._refuse, started.oldest, connection, reliable=True)
            return
        self._id = watch_id
        for batch in started.backlog:
            if self._id is not None:  # a lost batch tears the stream: nothing may follow
                self.send(batch)

    def _refuse(self, oldest: int, connection: int) -> None:
        if connection == self._backend.connection:
            self._too_old = oldest
            self._wake.set()

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._id is not None:
            self._backend.server.stop_watch(self._id)
            self._id = None
        self._backend.watches.pop(self, None)
        self._wake.set()


def _give_up(answer: asyncio.Future[Result], writes: bool) -> None:
    if answer.done():
        return
    if writes:
        answer.set_exception(OutcomeUnknown("no answer from the server: it may have happened"))
    else:
        answer.set_exception(Unavailable("no answer from the server"))


class SimBackend(OpBackend):
    """One process's connection. All randomness comes from `rng`; `note` is called for every message."""

    name = "sim"

    def __init__(
        self,
        server: SimServer,
        process: str,
        writer: str,
        rng: random.Random,
        conditions: LinkConditions,
        note: Callable[[str, str, object], None],
        call_timeout_s: float,
        max_txn_ops: int,
    ) -> None:
        self.server = server
        self.conditions = conditions
        self.connection = 0
        self.watches: dict[SimWatch, None] = {}
        self.is_dead = False
        self.limits = Limits(max_txn_ops=max_txn_ops, max_txn_bytes=1 << 20)
        self.swallow: Callable[[Op], bool] | None = None
        """Requests that match are never sent."""
        self.left_to_send: int | None = None
        self.has_sent = asyncio.Event()
        """Set when `left_to_send` more requests have been sent."""
        self._process = process
        self._writer = writer
        self._rng = rng
        self._note = note
        self._call_timeout_s = call_timeout_s
        self._loop = server._loop
        self._seq = 0
        self._open: dict[int, tuple[Op, asyncio.Future[Result]]] = {}

    # --- the network --------------------------------------------------------------------------------------------------

    def send_up(self, action: Callable[..., None], *args: object) -> None:
        """Send a message to the server, which may be lost."""
        conditions, rng = self.conditions, self._rng
        if not conditions.to_server or (conditions.lose and rng.random() < conditions.lose):
            return
        is_late = conditions.late and rng.random() < conditions.late
        fastest_s, slowest_s = (0.0, conditions.late_s) if is_late else conditions.delay_s
        self._loop.call_later(fastest_s + (slowest_s - fastest_s) * rng.random(), action, *args, context=_WIRE)
        if conditions.repeat and rng.random() < conditions.repeat:
            self._loop.call_later(rng.uniform(*conditions.delay_s) * 10, action, *args, context=_WIRE)

    def send_down(self, not_before: float, action: Callable[..., None], *args: object, reliable: bool) -> float:
        """Send a message to the process, which may be lost; its arrival time. A stream's messages stay in order."""
        conditions, rng = self.conditions, self._rng
        if not conditions.from_server or (not reliable and conditions.lose and rng.random() < conditions.lose):
            return not_before
        fastest_s, slowest_s = conditions.delay_s
        at = self._loop.now + (fastest_s + (slowest_s - fastest_s) * rng.random())
        if at < not_before + 1e-6:
            at = not_before + 1e-6
        self._loop.call_at(at, action, *args, context=_WIRE)
        return at

    def reset(self) -> None:
        """Break the connection and reconnect: pending messages may be lost, then unanswered requests are sent again."""
        self.connection += 1
        for watch in self.watches:
            watch.tear()
        self._loop.call_later(self._rng.uniform(0.001, 0.05), self._reconnected, self.connection, context=_WIRE)

    def _reconnected(self, connection: int) -> None:
        if connection != self.connection or self.is_dead:
            return
        for watch in list(self.watches):
            watch.resume()
        for seq, (op, _) in list(self._open.items()):
            self.send_up(self._execute, seq, op)

    def _execute(self, seq: int, op: Op) -> None:
        """On the server: a request arrives, perhaps repeated, late, or after the death of its sender."""
        if not self.server.is_up:
            return
        self._note("executes", self._process, op)
        result = self.server.execute(op, self._writer, Origin(self._process, seq))
        self.send_down(0.0, self._answered, seq, result, reliable=False)

    def _answered(self, seq: int, result: Result) -> None:
        pending = self._open.pop(seq, None)
        if pending is not None and not pending[1].done():
            pending[1].set_result(result)

    # --- the contract -------------------------------------------------------------------------------------------------

    async def execute(self, op: Op) -> Result:
        if self.is_dead:
            raise Unavailable("this process is dead")
        self._seq += 1
        seq = self._seq
        future: asyncio.Future[Result] = self._loop.create_future()
        self._open[seq] = (op, future)
        if self.swallow is None or not self.swallow(op):
            self.send_up(self._execute, seq, op)
        if self.left_to_send is not None:
            self.left_to_send -= 1
            if self.left_to_send <= 0:
                self.has_sent.set()
        patience = self._loop.call_later(self._call_timeout_s, _give_up, future, changes_something(op))
        try:
            result = await future
        finally:
            patience.cancel()
            self._open.pop(seq, None)
        return result

    def watch(self, prefix: str, after_revision: int) -> Watch:
        watch = SimWatch(self, prefix, after_revision)
        self.watches[watch] = None
        return watch

    async def status(self) -> BackendStatus:
        raise Unavailable("a simulated server has no status")

    async def close(self) -> None:
        self.is_dead = True
        for watch in list(self.watches):
            watch.cancel()
