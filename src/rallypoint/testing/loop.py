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
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from os.path import dirname
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar, TypeVarTuple
from weakref import ref

MAX_ITERATIONS = 10_000_000
CLEANUP_LIMIT_S = 3_600.0
FEWEST_CANCELLED_TO_SWEEP = 1_000
FEWEST_TASKS_TO_TIDY = 1_000

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


class _Soon(asyncio.Handle):
    """asyncio's handle, but made without its constructor: worlds are run by the hundred thousand, and each makes
    thousands of these."""

    __slots__ = ()
    _loop: VirtualTimeLoop
    _callback: Callable[..., object]
    _context: Context
    _repr = _source_traceback = None


class _Timer(asyncio.TimerHandle):
    """The same, with a time."""

    __slots__ = ()
    _loop: VirtualTimeLoop
    _callback: Callable[..., object]
    _context: Context
    _when: float
    _repr = _source_traceback = None

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = _nothing
            self._args = ()
            self._loop._cancelled_timers += 1


_new_soon = partial(object.__new__, _Soon)
_new_timer = partial(object.__new__, _Timer)


def _nothing() -> None:
    """What is left of a timer that was cancelled."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """See the module. `limit_s` bounds virtual time, `max_iterations` how often the loop may turn at one instant."""

    _ready: deque[_Soon | _Timer]
    _stopping: bool
    _closed: bool

    def __init__(
        self, *, seed: int | str | None = None, limit_s: float | None = None, max_iterations: int = MAX_ITERATIONS
    ) -> None:
        super().__init__()
        self.limit_at = float("inf") if limit_s is None else limit_s
        self._rng = None if seed is None else random.Random(seed)
        self._draw = float if self._rng is None else self._rng.random
        self._max_iterations = max_iterations
        self._iterations = 0
        self.now = 0.0
        """The virtual time, for whoever has this loop in hand; `time()` for everybody else."""
        self._timers: list[tuple[float, float, int, _Timer]] = []
        self._cancelled_timers = 0
        self._order = count(1)
        self._tasks: list[ref[asyncio.Task[Any]]] = []
        self._tidy_tasks_at = FEWEST_TASKS_TO_TIDY
        self._parked: dict[str, list[_Soon | _Timer]] = {}

    def time(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        """Let time pass while nothing runs: what a stopped process sees. Timers come late, all at once."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a loop cannot pause for {seconds} s")
        self.now += seconds

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
        return not self._ready and not (self._timers and self._timers[0][0] <= self.now)

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """The unfinished tasks, in the order in which they were made."""
        return [task for one in self._tasks if (task := one()) is not None and not task.done()]

    def cancel_pending(self) -> None:
        """Cancel what is unfinished, oldest first, and run until it has ended. Stuck if it does not end."""
        self.limit_at = self.now + CLEANUP_LIMIT_S
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
        self._tasks.append(ref(task))
        if len(self._tasks) > self._tidy_tasks_at:
            self._tasks = [ref(task) for task in self.pending_tasks()]
            self._tidy_tasks_at = 2 * len(self._tasks) + FEWEST_TASKS_TO_TIDY
        return task

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = _new_soon()
        handle._loop = self
        handle._callback = callback
        handle._args = args
        handle._context = copy_context() if context is None else context
        handle._cancelled = False
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._arm(self.time() + delay, callback, args, context)

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._arm(when, callback, args, context)

    def _arm(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> _Timer:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        timer = _new_timer()
        timer._loop = self
        timer._callback = callback
        timer._args = args
        timer._context = copy_context() if context is None else context
        timer._cancelled = False
        timer._when = when
        heappush(self._timers, (when, self._draw(), next(self._order), timer))
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

    # --- one turn of the loop -----------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if self._cancelled_timers > FEWEST_CANCELLED_TO_SWEEP:
            self._sweep()
        while timers and timers[0][3]._cancelled:
            heappop(timers)
        if not ready and not self._stopping:
            if not timers or timers[0][0] > self.limit_at:
                self._get_stuck()
            if timers[0][0] > self.now:
                self.now = timers[0][0]
                self._iterations = 0
        self._iterations += 1
        if self._iterations > self._max_iterations:
            raise BusyLoop(f"{self._max_iterations} turns of the loop at {self.now:g} s of virtual time", self._where())
        while timers and timers[0][0] <= self.now:
            ready.append(heappop(timers)[3])
        count = len(ready)
        if count > 1 and self._rng is not None:
            self._shuffle(self._rng)
        while count:
            count -= 1
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._parked and (parked := self._parked.get(handle._context.get(MACHINE, ""))) is not None:
                parked.append(handle)
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                message = f"Exception in callback {handle!r}"
                self.call_exception_handler({"message": message, "exception": error, "handle": handle})

    def _get_stuck(self) -> NoReturn:
        """Nothing is ready, and there is no timer to jump to, or none within the limit."""
        if not self._timers:
            raise Deadlock(f"deadlock at {self.now:g} s of virtual time: nothing is ready, no timer", self._where())
        self.now = max(self.now, self.limit_at)
        raise OutOfTime(f"not done at the limit, {self.now:g} s of virtual time", self._where())

    def _sweep(self) -> None:
        """Forget cancelled timers: those in front, and all of them when they are the greater part."""
        timers = self._timers
        if self._cancelled_timers > max(FEWEST_CANCELLED_TO_SWEEP, len(timers) // 2):
            timers[:] = [entry for entry in timers if not entry[3]._cancelled]
            heapify(timers)
            self._cancelled_timers = 0
        while timers and timers[0][3]._cancelled:
            heappop(timers)

    def _shuffle(self, rng: random.Random) -> None:
        """Draw the order of the steps of tasks that are ready one right after the other."""
        ready = self._ready
        was_step = False
        for handle in ready:
            is_step = _is_step(handle)
            if is_step and was_step:
                break
            was_step = is_step
        else:
            return  # there is nothing to draw
        ordered: list[_Soon | _Timer] = []
        steps: list[_Soon | _Timer] = []
        for handle in ready:
            if _is_step(handle):
                steps.append(handle)
            else:
                rng.shuffle(steps)
                ordered += [*steps, handle]
                steps = []
        rng.shuffle(steps)
        ready.clear()
        ready.extend(ordered + steps)

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


def _is_step(handle: _Soon | _Timer) -> bool:
    """Whether a handle goes on with a task: asyncio's callbacks for that are methods of the task."""
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


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
