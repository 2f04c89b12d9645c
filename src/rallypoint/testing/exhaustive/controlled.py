"""A backend and an event loop that the explorer controls: nothing happens without an input.

A request is parked until it is answered, a watch delivers what it is given, and time passes only on command. In between
the real code runs, with one loop per process, until it waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rallypoint.backends.contract import BackendStatus, Limits, Watch
from rallypoint.backends.ops import OpBackend
from rallypoint.errors import BackendError, OutcomeUnknown, Unavailable
from rallypoint.kv.types import (
    Batch,
    Op,
    Result,
)
from rallypoint.testing.exhaustive.blanking import blank_op
from rallypoint.testing.exhaustive.symbolic import FAR_S, Moment
from rallypoint.testing.loop import VirtualTimeLoop

MOST_TURNS = 10_000


class StepLoop(VirtualTimeLoop):
    """A loop that runs only until it is idle; its times are symbolic (`Moment`)."""

    def __init__(self) -> None:
        super().__init__(max_iterations=MOST_TURNS)

    def time(self) -> Moment:
        return Moment(self.now)

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
        """The timers in order of their time."""
        due = [entry for entry in self._timers if entry[0] - self.now <= FAR_S and not entry[-1].cancelled()]
        return [entry[-1] for entry in sorted(due, key=lambda entry: entry[:3])]

    def next_timer_s(self) -> float | None:
        """The time until the next timer; None if there is none within FAR_S."""
        self._sweep()
        if not self._timers:
            return None
        away_s = round(float(self._timers[0][0]) - self.now, 6)
        return away_s if away_s <= FAR_S else None

    def tick(self) -> None:
        """Let time pass until the next timer, and run."""
        self._sweep()
        self.now = max(self.now, float(self._timers[0][0]))
        self.settle()


@dataclass(slots=True, eq=False)
class Request:
    """One parked request."""

    op: Op
    answer: asyncio.Future[Any]


class ControlledBackend(OpBackend):
    """Parks every request in `requests` and keeps the open watches in `watches`, both in order."""

    name = "controlled"

    def __init__(self, *, has_coordinator: bool, limits: Limits) -> None:
        self.has_coordinator = has_coordinator
        self.limits = limits
        self.requests: list[Request] = []
        self.watches: list[ControlledWatch] = []
        self.is_dead = False
        """Refuse all requests: the process is being discarded."""

    def answer(self, request: Request, answer: Any) -> None:
        """Deliver an answer, or an error of the contract."""
        self.requests.remove(request)
        if isinstance(answer, BackendError):
            request.answer.set_exception(answer)
        else:
            request.answer.set_result(answer)

    # --- the contract -------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, after_revision: int) -> Watch:
        watch = ControlledWatch(self, prefix)
        self.watches.append(watch)  # now and not at the first read: it gets all changes from now on
        return watch

    async def status(self) -> BackendStatus:
        return BackendStatus(self.name, "", 0, {})

    async def close(self) -> None:
        self.is_dead = True

    async def execute(self, op: Op) -> Result:
        if self.is_dead:
            raise Unavailable("this process has ended")
        request = Request(blank_op(op), asyncio.get_running_loop().create_future())
        self.requests.append(request)
        try:
            result: Result = await request.answer
            return result
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
        """A reader waits for the next batch."""
        return self._reader is not None and not self._reader.done()

    def deliver(self, batches: Sequence[Batch]) -> None:
        """Deliver these batches."""
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
    """The error for a lost answer."""
    return OutcomeUnknown("the answer was lost")
