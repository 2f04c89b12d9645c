"""A backend that injects random faults into another one, within the contract.

It wraps any backend. Calls are late, fail without being executed, or end with `OutcomeUnknown`: executed, not executed,
or executed later (a ghost, which may even outlive its connection).
Each watch has delays of its own, is interrupted and resumed without gap or repetition, and sometimes loses its
history. Renewals are missed, leases are revoked. Requests and answers can be cut separately.

It never does what the contract forbids: a call is executed at most once, a watch has no gap, an answer is correct.
All randomness comes from `rng`, all waiting uses the running loop's clock.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from rallypoint.backends.contract import Backend, BackendStatus, Got, Scanned, Session, Watch
from rallypoint.backends.session import LeaseSession
from rallypoint.errors import BackendError, HistoryGone, OutcomeUnknown, Unavailable
from rallypoint.kv.types import AddResult, Batch, BranchOp, Compare, TxnResult

_T = TypeVar("_T")

Between: TypeAlias = tuple[float, float]
"""Seconds, drawn uniformly between the two."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities (0 to 1) and durations of faults."""

    delay_s: Between = (0.0, 0.0)
    """Before a call is executed, and again before its answer arrives."""
    unavailable: float = 0.0
    """A call raises `Unavailable` and is not executed."""
    unknown_done: float = 0.0
    """A writing call is executed and raises `OutcomeUnknown`."""
    unknown_not_done: float = 0.0
    """A writing call raises `OutcomeUnknown` and is never executed."""
    unknown_late: float = 0.0
    """A writing call raises `OutcomeUnknown` (or is cancelled by its caller) and is executed `ghost_delay_s` later."""
    ghost_delay_s: Between = (0.0, 5.0)
    keep_alive_missed: float = 0.0
    """A renewal raises `Unavailable`, in addition to the faults of every call."""
    lease_ended: float = 0.0
    """The lease is revoked before a renewal."""
    watch_delay_s: Between = (0.0, 0.0)
    """Before a batch is delivered, separately for each watch."""
    watch_interrupted: float = 0.0
    """Instead of delivering a batch, a watch is interrupted and resumed `watch_down_s` later."""
    watch_down_s: Between = (0.0, 1.0)
    history_gone: float = 0.0
    """Instead of delivering a batch, a watch ends with `HistoryGone`."""
    call_timeout_s: float = 5.0
    """How long a call waits for a direction that is cut."""

    @classmethod
    def none(cls) -> Faults:
        """No faults."""
        return cls()

    @classmethod
    def cruel(cls) -> Faults:
        """Some of everything."""
        return cls(
            delay_s=(0.0, 0.2),
            unavailable=0.05,
            unknown_done=0.03,
            unknown_not_done=0.03,
            unknown_late=0.03,
            keep_alive_missed=0.1,
            lease_ended=0.002,
            watch_delay_s=(0.0, 1.0),
            watch_interrupted=0.05,
            history_gone=0.02,
        )


class _Fate(enum.Enum):
    """The fault of one call."""

    FINE = enum.auto()
    UNAVAILABLE = enum.auto()
    UNKNOWN_DONE = enum.auto()
    UNKNOWN_NOT_DONE = enum.auto()
    UNKNOWN_LATE = enum.auto()


class _Direction:
    """One direction of the connection: open or cut."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    @property
    def is_cut(self) -> bool:
        return not self._open.is_set()

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    async def wait_open(self, until: float | None = None) -> bool:
        """Wait until it is open, or until this time of the loop; whether it is open."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._open.wait()
        return not self.is_cut


class ChaosBackend(Backend):
    """See the module. `faults` may be replaced at any time."""

    def __init__(self, inner: Backend, rng: random.Random, faults: Faults) -> None:
        self.name = inner.name
        self.limits = inner.limits
        self.has_coordinator = inner.has_coordinator
        self.faults = faults
        self._inner = inner
        self._rng = rng
        self._requests = _Direction()
        self._answers = _Direction()
        self._closed = False
        self._ghosts: dict[asyncio.Task[None], None] = {}
        self._watches: dict[ChaosWatch, None] = {}
        self._sessions: list[Session] = []

    # --- switches -----------------------------------------------------------------------------------------------------

    def cut(self, *, requests: bool = True, answers: bool = True) -> None:
        """Cut requests, answers, or both: calls hang until they time out, watches stall."""
        if requests:
            self._requests.cut()
        if answers:
            self._answers.cut()

    def heal(self) -> None:
        """Open both directions. Pending calls and watches continue."""
        self._requests.heal()
        self._answers.heal()
        for watch in self._watches:
            watch.poke()

    @property
    def is_cut(self) -> bool:
        return self._requests.is_cut or self._answers.is_cut

    async def settled(self) -> None:
        """Wait until no ghost is pending and, after `close`, the inner connection is closed."""
        while self._ghosts:
            await asyncio.wait(list(self._ghosts))

    # --- the contract -------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> Got:
        return await self._call("get", lambda: self._inner.get(key), writes=False)

    async def scan(self, prefix: str) -> Scanned:
        return await self._call("scan", lambda: self._inner.scan(prefix), writes=False)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        return await self._call("txn", lambda: self._inner.txn(compares, then, otherwise), writes=True)

    async def add(self, key: str, amount: int, *, compares: Sequence[Compare] = (), lease: int = 0) -> AddResult:
        return await self._call(
            "add", lambda: self._inner.add(key, amount, compares=compares, lease=lease), writes=True
        )

    def watch(self, prefix: str, after_revision: int) -> Watch:
        if self._closed:
            raise Unavailable("this connection is closed")
        watch = ChaosWatch(self, prefix, after_revision)
        self._watches[watch] = None
        return watch

    async def grant(self, ttl_s: float) -> int:
        return await self._call("grant", lambda: self._inner.grant(ttl_s), writes=True)

    async def keep_alive(self, lease: int) -> bool:
        if self.happens(self.faults.keep_alive_missed):
            raise Unavailable("chaos: this renewal was not sent")
        if self.happens(self.faults.lease_ended):
            with suppress(BackendError):
                await self._inner.revoke(lease)
        return await self._call("keep_alive", lambda: self._inner.keep_alive(lease), writes=True)

    async def revoke(self, lease: int) -> None:
        await self._call("revoke", lambda: self._inner.revoke(lease), writes=True)

    async def open_session(
        self,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
    ) -> Session:
        session = await LeaseSession.open(
            self, ttl_s, interval_s=interval_s, renew_timeout_s=renew_timeout_s, on_missed=on_missed
        )
        self._sessions.append(session)
        return session

    async def status(self) -> BackendStatus:
        return await self._call("status", self._inner.status, writes=False)

    async def close(self) -> None:
        """End sessions and watches at once; the inner connection is closed after the last ghost was executed."""
        self._closed = True
        for watch in list(self._watches):
            watch.cancel()
        for session in self._sessions:
            session.abandon()
        if self._ghosts:
            self._start_ghost("close", self._close_after(list(self._ghosts)))
        else:
            await self._inner.close()

    # --- faults of a call ---------------------------------------------------------------------------------------------

    async def _call(self, name: str, execute: Callable[[], Awaitable[_T]], *, writes: bool) -> _T:
        if self._closed:
            raise Unavailable("this connection is closed")
        until = asyncio.get_running_loop().time() + self.faults.call_timeout_s
        fate = self._draw_fate(writes)
        try:
            await self._sleep(self.faults.delay_s)
            sent = not self._requests.is_cut or await self._requests.wait_open(until)
        except asyncio.CancelledError:
            if fate is _Fate.UNKNOWN_LATE:
                self._schedule_ghost(name, execute)
            raise
        if fate is _Fate.UNKNOWN_LATE:
            self._schedule_ghost(name, execute)
            raise OutcomeUnknown(f"chaos: no answer to {name}; it will be executed later")
        if not sent and fate is _Fate.FINE and writes and self._rng.random() < 0.5:
            fate = _Fate.UNKNOWN_NOT_DONE
        if fate is _Fate.UNKNOWN_NOT_DONE:
            raise OutcomeUnknown(f"chaos: no answer to {name}; it was not executed")
        if fate is _Fate.UNAVAILABLE or not sent:
            raise Unavailable(f"chaos: {name} was not executed")
        return await self._execute(name, execute, fate, until, writes)

    async def _execute(
        self, name: str, execute: Callable[[], Awaitable[_T]], fate: _Fate, until: float, writes: bool
    ) -> _T:
        answer: _T | BackendError
        try:
            answer = await execute()
        except BackendError as error:
            answer = error
        await self._sleep(self.faults.delay_s)
        if fate is _Fate.UNKNOWN_DONE or (self._answers.is_cut and not await self._answers.wait_open(until)):
            if not writes:
                raise Unavailable(f"chaos: no answer to {name}, which only reads")
            raise OutcomeUnknown(f"chaos: no answer to {name}; it was executed")
        if isinstance(answer, BackendError):
            raise answer
        return answer

    def _draw_fate(self, writes: bool) -> _Fate:
        faults = self.faults
        fates = [(_Fate.UNAVAILABLE, faults.unavailable)]
        if writes:
            fates += [
                (_Fate.UNKNOWN_DONE, faults.unknown_done),
                (_Fate.UNKNOWN_NOT_DONE, faults.unknown_not_done),
                (_Fate.UNKNOWN_LATE, faults.unknown_late),
            ]
        drawn = self._rng.random()
        for fate, probability in fates:
            if drawn < probability:
                return fate
            drawn -= probability
        return _Fate.FINE

    def _schedule_ghost(self, name: str, execute: Callable[[], Awaitable[object]]) -> None:
        """Execute a call later, in the background."""

        async def ghost(after_s: float) -> None:
            await asyncio.sleep(after_s)
            await self._requests.wait_open()
            with suppress(BackendError):
                await execute()

        self._start_ghost(name, ghost(self._rng.uniform(*self.faults.ghost_delay_s)))

    def _start_ghost(self, name: str, ghost: Awaitable[None]) -> None:
        task = asyncio.ensure_future(ghost)
        assert isinstance(task, asyncio.Task)
        task.set_name(f"chaos: late {name}")
        self._ghosts[task] = None
        task.add_done_callback(lambda done: self._ghosts.pop(done, None))

    async def _close_after(self, ghosts: list[asyncio.Task[None]]) -> None:
        await asyncio.wait(ghosts)
        await self._inner.close()

    def happens(self, probability: float) -> bool:
        """Draw whether an event with this probability happens."""
        return self._rng.random() < probability

    async def _sleep(self, between: Between) -> None:
        if (delay_s := self.draw(between)) > 0:
            await asyncio.sleep(delay_s)

    def draw(self, between: Between) -> float:
        """Draw a duration."""
        return self._rng.uniform(*between) if between[1] > 0 else 0.0

    def inner_watch(self, prefix: str, after_revision: int) -> Watch:
        """A watch of the inner backend."""
        return self._inner.watch(prefix, after_revision)

    def forget(self, watch: ChaosWatch) -> None:
        """Drop an ended watch."""
        self._watches.pop(watch, None)


class ChaosWatch(Watch):
    """A watch of a `ChaosBackend`: delayed and interrupted, but without gap or repetition."""

    def __init__(self, chaos: ChaosBackend, prefix: str, after_revision: int) -> None:
        self._chaos = chaos
        self._prefix = prefix
        self._seen = after_revision
        self._inner: Watch | None = None
        self._held: Batch | None = None
        """Delayed; it is not lost if the reader is cancelled while it waits."""
        self._due_at = 0.0
        self._gone: HistoryGone | None = None
        self._cancelled = False
        self._poke = asyncio.Event()

    async def __anext__(self) -> Batch:
        loop, chaos = asyncio.get_running_loop(), self._chaos
        while not self._cancelled:
            if self._gone is not None:
                raise self._gone
            if not await self._wait_until(self._due_at):
                break
            if self._held is not None:
                return self._deliver(self._held)
            if self._inner is None:
                self._inner = chaos.inner_watch(self._prefix, self._seen)
            self._held = await anext(self._inner)
            self._due_at = loop.time() + chaos.draw(chaos.faults.watch_delay_s)
            self._maybe_break(self._held)
        raise StopAsyncIteration

    def ready(self) -> Batch | None:
        late = self._chaos.faults.watch_delay_s[1] > 0 and self._chaos.happens(0.5)
        if late or self._inner is None or self._held is not None or self._cancelled or self._chaos.is_cut:
            return None
        batch = self._inner.ready()
        return None if batch is None else self._deliver(batch)

    def cancel(self) -> None:
        self._cancelled = True
        self._drop_inner()
        self._chaos.forget(self)
        self.poke()

    def poke(self) -> None:
        """Check again whether to wait."""
        self._poke.set()

    def _deliver(self, batch: Batch) -> Batch:
        self._held = None
        self._seen = batch.revision
        return batch

    def _maybe_break(self, batch: Batch) -> None:
        faults = self._chaos.faults
        if self._chaos.happens(faults.watch_interrupted):
            self._drop_inner()
            self._due_at = asyncio.get_running_loop().time() + self._chaos.draw(faults.watch_down_s)
        elif self._chaos.happens(faults.history_gone):
            self._drop_inner()
            self._gone = HistoryGone(
                f"chaos: changes under {self._prefix!r} after revision {self._seen} are no longer kept: scan again",
                oldest=batch.revision,
            )

    def _drop_inner(self) -> None:
        """Drop the delayed batch; the next inner watch delivers it again."""
        self._held = None
        if self._inner is not None:
            self._inner.cancel()
            self._inner = None

    async def _wait_until(self, due_at: float) -> bool:
        """Wait; False if the watch was cancelled."""
        loop = asyncio.get_running_loop()
        while not self._cancelled and (self._chaos.is_cut or loop.time() < due_at):
            self._poke.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if self._chaos.is_cut else due_at):
                    await self._poke.wait()
        return not self._cancelled
