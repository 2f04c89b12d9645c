"""An asyncio event loop on virtual time: when nothing is ready, it jumps to the next timer instead of waiting.

Everything runs in one thread and in one order, so the same program gives the same trace every time. With a `seed`, the
order is drawn where asyncio promises none, and again the same seed gives the same trace:

- timers that are due at the same instant run in drawn order (without a seed: in the order in which they were armed);
- steps of different tasks that are ready one right after the other run in drawn order. A callback that is no step of
  a task keeps its place, so that what asyncio does promise (callbacks of one future, `call_soon`) still holds.

A machine (whatever runs with `MACHINE` set to its name, and whatever that starts) can be frozen: it stands still while
time and everybody else go on.

There is nothing outside to wait for, hence no sockets and no threads: what would run in an executor runs at once, and
a loop that has nothing to run and no timer to wait for is a `Deadlock`.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextvars import Context, ContextVar
from itertools import count
from os.path import dirname
from types import CodeType, FrameType
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

MAX_ITERATIONS = 10_000_000
CLEANUP_LIMIT_S = 3_600.0
FEWEST_CANCELLED_TO_SWEEP = 1_000

MACHINE: ContextVar[str] = ContextVar("MACHINE", default="")
"""The machine that the running code belongs to; empty: none that could be frozen."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_ASYNCIO_DIR = dirname(asyncio.__file__)


class Stuck(Exception):
    """The loop cannot or must not go on. `pending` says of each unfinished task where it stands."""

    def __init__(self, message: str, pending: tuple[str, ...]) -> None:
        listed = "\n".join(f"  {line}" for line in pending) or "  none"
        super().__init__(f"{message}; pending tasks:\n{listed}")
        self.pending = pending


class Deadlock(Stuck):
    """Nothing is ready, no timer is armed, and yet something is waited for."""


class OutOfTime(Stuck):
    """The next timer is due after the limit of virtual time."""


class BusyLoop(Stuck):
    """Callbacks go on and on without any virtual time passing."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """See the module. `limit_s` bounds virtual time, `max_iterations` how often the loop may turn at one instant."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(
        self, *, seed: int | str | None = None, limit_s: float | None = None, max_iterations: int = MAX_ITERATIONS
    ) -> None:
        super().__init__()
        self.limit_at = float("inf") if limit_s is None else limit_s
        self._rng = None if seed is None else random.Random(seed)
        self._max_iterations = max_iterations
        self._iterations = 0
        self._now = 0.0
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._cancelled_timers = 0
        self._order = count(1)
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._parked: dict[str, list[asyncio.Handle]] = {}

    def time(self) -> float:
        return self._now

    def pause(self, seconds: float) -> None:
        """Let time pass while nothing runs: what a stopped process sees. Timers come late, all at once."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a loop cannot pause for {seconds} s")
        self._now += seconds

    def freeze(self, machine: str) -> None:
        """Nothing of this machine runs until it is thawed: what a stopped process is to the others."""
        self._parked.setdefault(machine, [])

    def thaw(self, machine: str) -> None:
        """The machine goes on: what became due meanwhile comes late, all at once. Fine if it was not frozen."""
        self._ready.extend(self._parked.pop(machine, ()))

    @property
    def is_idle(self) -> bool:
        """Whether nothing but the code that asks is left to run at this instant."""
        self._sweep()
        return not self._ready and not (self._timers and self._timers[0][0] <= self._now)

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """The unfinished tasks, in the order in which they were made."""
        return [task for task, _ in sorted(self._tasks.items(), key=lambda pair: pair[1]) if not task.done()]

    def cancel_pending(self) -> None:
        """Cancel what is unfinished, oldest first, and run until it has ended. Stuck if it does not end."""
        self.limit_at = self._now + CLEANUP_LIMIT_S
        self._iterations = 0
        for machine in list(self._parked):
            self.thaw(machine)
        pending = self.pending_tasks()
        for task in pending:
            task.cancel()
        self.run_until_complete(self._all_done(pending))
        for task in pending:
            if not task.cancelled() and (error := task.exception()) is not None:
                context = {"message": "a left-over task failed when it was cancelled", "exception": error, "task": task}
                self.call_exception_handler(context)

    def _all_done(self, tasks: list[asyncio.Task[Any]]) -> asyncio.Future[None]:
        """A bare future, not a coroutine: nothing of it is left over if the loop gets stuck."""
        done = self.create_future()
        left = set(tasks)

        def one_done(task: asyncio.Task[Any]) -> None:
            left.remove(task)
            if not left and not done.done():
                done.set_result(None)

        for task in tasks:
            task.add_done_callback(one_done)
        if not tasks:
            done.set_result(None)
        return done

    # --- asyncio's face -----------------------------------------------------------------------------------------------

    def create_task(  # type: ignore[override]  # the stub's type of coroutines is private to it
        self, coro: Coroutine[Any, Any, _T], *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[_T]:
        number = next(self._order)
        task = super().create_task(coro, name=f"task {number}" if name is None else name, context=context)
        self._tasks[task] = number
        return task

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        drawn = 0.0 if self._rng is None else self._rng.random()
        heapq.heappush(self._timers, (when, drawn, next(self._order), timer))
        return timer

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """There are no threads here: the function runs at once."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """Nobody sleeps that would have to be woken."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1

    # --- one turn of the loop -----------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        self._sweep()
        if not self._ready and not self._stopping:
            self._jump()
        self._iterations += 1
        if self._iterations > self._max_iterations:
            raise BusyLoop(
                f"{self._max_iterations} turns of the loop at {self._now:g} s of virtual time", self._where()
            )
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[-1])
        if self._rng is not None and len(self._ready) > 1:
            self._shuffle(self._rng)
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle.cancelled():
                continue
            if self._parked and (parked := self._parked.get(_machine(handle))) is not None:
                parked.append(handle)
            else:
                handle._run()

    def _jump(self) -> None:
        """Go to the next timer."""
        if not self._timers:
            raise Deadlock(f"deadlock at {self._now:g} s of virtual time: nothing is ready, no timer", self._where())
        when = self._timers[0][0]
        if when > self.limit_at:
            self._now = max(self._now, self.limit_at)
            raise OutOfTime(f"not done at the limit, {self._now:g} s of virtual time", self._where())
        if when > self._now:
            self._now = when
            self._iterations = 0

    def _sweep(self) -> None:
        """Forget cancelled timers: those in front, and all of them when they are the greater part."""
        if self._cancelled_timers > max(FEWEST_CANCELLED_TO_SWEEP, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if not entry[-1].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0
        while self._timers and self._timers[0][-1].cancelled():
            heapq.heappop(self._timers)

    def _shuffle(self, rng: random.Random) -> None:
        """Draw the order of the steps of tasks that are ready one right after the other."""
        ordered: list[asyncio.Handle] = []
        steps: list[asyncio.Handle] = []
        for handle in self._ready:
            if _is_step(handle):
                steps.append(handle)
            else:
                rng.shuffle(steps)
                ordered += [*steps, handle]
                steps = []
        rng.shuffle(steps)
        self._ready.clear()
        self._ready.extend(ordered + steps)

    def _where(self) -> tuple[str, ...]:
        return tuple(f"{task.get_name()}: {_standing(task)}" for task in self.pending_tasks())


def run(
    main: Coroutine[Any, Any, _T],
    *,
    seed: int | str | None = None,
    limit_s: float | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> _T:
    """Like `asyncio.run`, on a `VirtualTimeLoop` of its own. Left-over tasks are cancelled, generators closed.

    Raises `Deadlock`, `OutOfTime` (not done after `limit_s` of virtual time) or `BusyLoop`, with the pending tasks.
    """
    loop = VirtualTimeLoop(seed=seed, limit_s=limit_s, max_iterations=max_iterations)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            return runner.run(main)
        finally:
            loop.cancel_pending()


def _is_step(handle: asyncio.Handle) -> bool:
    """Whether a handle goes on with a task: asyncio's callbacks for that are methods of the task."""
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # type: ignore[attr-defined]


def _machine(handle: asyncio.Handle) -> str:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context.get(MACHINE, "")


def _standing(task: asyncio.Task[Any]) -> str:
    """The innermost place of a task that is not asyncio's own."""
    places = [
        f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        for frame in _frames(task.get_coro())
        if not _of_asyncio(frame.f_code)
    ]
    return places[-1] if places else "not started"


def _frames(awaited: object) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, outermost first."""
    while awaited is not None:
        for frame_name, next_name in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
            frame = getattr(awaited, frame_name, None)
            if isinstance(frame, FrameType):
                yield frame
                awaited = getattr(awaited, next_name)
                break
        else:
            return


def _of_asyncio(code: CodeType) -> bool:
    return code.co_filename.startswith(_ASYNCIO_DIR)
