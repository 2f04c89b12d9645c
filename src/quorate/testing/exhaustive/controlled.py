"""A backend and a loop in the hands of the explorer: nothing happens by itself.

A request is parked until somebody answers it, a watch delivers what it is given, time passes when it is told to. What
runs in between is the real code, on one loop of its own for each process, until nothing is left to run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quorate.backends.contract import Backend, BackendStatus, Got, Limits, Scanned, Session, Watch
from quorate.backends.session import LeaseSession
from quorate.errors import BackendError, LeaseGone, OutcomeUnknown, Rejected, Unavailable
from quorate.kv.types import (
    Add,
    AddResult,
    Batch,
    BranchOp,
    Compare,
    Failure,
    FailureCode,
    Get,
    GotItem,
    GotRange,
    Grant,
    KeepAlive,
    LeaseResult,
    Op,
    Range,
    Revoke,
    Txn,
    TxnResult,
)
from quorate.testing.exhaustive.symbols import FAR_S, Moment
from quorate.testing.exhaustive.words import wordless_op
from quorate.testing.loop import VirtualTimeLoop

MOST_TURNS = 10_000


class Strand(VirtualTimeLoop):
    """A loop that runs only until it is idle; its time is made of symbols."""

    def __init__(self) -> None:
        super().__init__(max_iterations=MOST_TURNS)

    def time(self) -> Moment:
        return Moment(self._now)

    def settle(self, first: Callable[[], object] | None = None) -> None:
        """Run `first` inside the loop, then whatever is ready at this instant."""
        self._iterations = 0
        asyncio._set_running_loop(self)
        try:
            if first is not None:
                first()
            while not self.is_idle:
                self._run_once()
        finally:
            asyncio._set_running_loop(None)

    def timers(self) -> list[asyncio.TimerHandle]:
        """What will be due, in order."""
        due = [entry for entry in self._timers if entry[0] - self._now <= FAR_S and not entry[-1].cancelled()]
        return [entry[-1] for entry in sorted(due, key=lambda entry: entry[:3])]

    def next_timer_s(self) -> float | None:
        """How far away the next timer is; None if it will never be due here."""
        self._sweep()
        if not self._timers:
            return None
        away_s = round(float(self._timers[0][0]) - self._now, 6)
        return away_s if away_s <= FAR_S else None

    def tick(self) -> None:
        """Let time pass until the next timer, and run."""
        self._sweep()
        self._now = max(self._now, float(self._timers[0][0]))
        self.settle()


@dataclass(slots=True, eq=False)
class Request:
    """One parked request."""

    op: Op
    answer: asyncio.Future[Any]


class ControlledBackend(Backend):
    """Parks every request in `requests` and keeps the open watches in `watches`, both in order."""

    name = "controlled"

    def __init__(self, *, has_coordinator: bool, limits: Limits) -> None:
        self.has_coordinator = has_coordinator
        self.limits = limits
        self.requests: list[Request] = []
        self.watches: list[ControlledWatch] = []
        self.is_dead = False
        """Refuse everything at once: the process is being thrown away."""

    def answer(self, request: Request, answer: Any) -> None:
        """The backend's answer arrives, or an error of the contract."""
        self.requests.remove(request)
        if isinstance(answer, BackendError):
            request.answer.set_exception(answer)
        elif isinstance(answer, Failure):
            is_lease = answer.code is FailureCode.LEASE_GONE
            error = LeaseGone(answer.message, lease=answer.lease) if is_lease else Rejected(answer.message)
            request.answer.set_exception(error)
        else:
            request.answer.set_result(answer)

    # --- the contract -------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> Got:
        result: TxnResult = await self._call(Txn((), (Get(key),)))
        (got,) = result.results
        assert isinstance(got, GotItem)
        return Got(got.item, result.revision)

    async def scan(self, prefix: str) -> Scanned:
        result: TxnResult = await self._call(Txn((), (Range(prefix),)))
        (got,) = result.results
        assert isinstance(got, GotRange)
        return Scanned(got.items, result.revision)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        result: TxnResult = await self._call(Txn(tuple(compares), tuple(then), tuple(otherwise)))
        return result

    async def add(self, key: str, amount: int, *, compares: Sequence[Compare] = (), lease: int = 0) -> AddResult:
        result: AddResult = await self._call(Add(key, amount, lease, tuple(compares)))
        return result

    def watch(self, prefix: str, after_revision: int) -> Watch:
        watch = ControlledWatch(self, prefix)
        self.watches.append(watch)  # here and not when it is read: what happens from here on is for it
        return watch

    async def grant(self, ttl_s: float) -> int:
        result: LeaseResult = await self._call(Grant(ttl_s))
        return result.lease

    async def keep_alive(self, lease: int) -> bool:
        result: LeaseResult = await self._call(KeepAlive(lease))
        return result.alive

    async def revoke(self, lease: int) -> None:
        await self._call(Revoke(lease))

    async def open_session(
        self,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
    ) -> Session:
        return await LeaseSession.open(
            self, ttl_s, interval_s=interval_s, renew_timeout_s=renew_timeout_s, on_missed=on_missed
        )

    async def status(self) -> BackendStatus:
        return BackendStatus(self.name, "", 0, {})

    async def close(self) -> None:
        self.is_dead = True

    async def _call(self, op: Op) -> Any:
        if self.is_dead:
            raise Unavailable("this process is no more")
        request = Request(wordless_op(op), asyncio.get_running_loop().create_future())
        self.requests.append(request)
        try:
            return await request.answer
        finally:
            if request in self.requests:
                self.requests.remove(request)


class ControlledWatch(Watch):
    """Delivers what it is given."""

    def __init__(self, backend: ControlledBackend, prefix: str) -> None:
        self.prefix = prefix
        self._backend = backend
        self._buffer: deque[Batch] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._is_cancelled = False

    @property
    def is_read(self) -> bool:
        """Somebody waits for the next batch."""
        return self._reader is not None and not self._reader.done()

    def deliver(self, batches: Sequence[Batch]) -> None:
        """These have arrived."""
        self._buffer.extend(batches)
        self._wake()

    def ready(self) -> Batch | None:
        return self._buffer.popleft() if self._buffer and not self._is_cancelled else None

    async def __anext__(self) -> Batch:
        while not self._is_cancelled:
            batch = self.ready()
            if batch is not None:
                return batch
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        raise StopAsyncIteration

    def cancel(self) -> None:
        self._is_cancelled = True
        if self in self._backend.watches:
            self._backend.watches.remove(self)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def unknown() -> OutcomeUnknown:
    """What a caller gets that cannot know."""
    return OutcomeUnknown("the answer was lost")
