"""An asyncio event loop on virtual time: when no callback is ready, it jumps to the next timer instead of waiting.

Everything runs in one thread and in one order, so the same program gives the same trace every time. With a `seed`, the
order is random where asyncio promises none, and again the same seed gives the same trace:

- timers that are due at the same instant run in random order (without a seed: in the order in which they were armed);
- steps of different tasks that are adjacent in the ready queue run in random order. A callback that is not a step of
  a task keeps its position, so that asyncio's promises (callbacks of one future, `call_soon`) still hold.

A machine (all code that runs with `MACHINE` set to its name, and everything started by it) can be frozen: it is paused
while time and other machines go on.

There are no sockets and no threads, because there is nothing outside to wait for: executor calls run at once, and a
loop without ready callbacks and timers raises `Deadlock`.
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
"""The machine that the running code belongs to; empty: none, so it cannot be frozen."""

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_ASYNCIO_DIR = dirname(asyncio.__file__)


class Stuck(Exception):
    """The loop cannot or must not continue. `pending` gives the position of each unfinished task."""

    def __init__(self, message: str, pending: tuple[str, ...]) -> None:
        listed = "\n".join(f"  {line}" for line in pending) or "  none"
        super().__init__(f"{message}; pending tasks:\n{listed}")
        self.pending = pending


class Deadlock(Stuck):
    """No callback is ready and no timer is armed, but the main task waits."""


class OutOfTime(Stuck):
    """The next timer is due after the limit of virtual time."""


class BusyLoop(Stuck):
    """Callbacks run on and on without any virtual time passing."""


class _Soon(asyncio.Handle):
    """asyncio's handle, but created without its constructor for speed: campaigns run hundreds of thousands of worlds
    with thousands of handles each."""

    __slots__ = ()
    _loop: VirtualTimeLoop
    _callback: Callable[..., object]
    _context: Context
    _repr = _source_traceback = None


class _Timer(asyncio.TimerHandle):
    """The same for timers."""

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
    """The callback of a cancelled timer."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """See the module. `limit_s` bounds virtual time, `max_iterations` the iterations of the loop at one instant."""

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
        """The virtual time; the same as `time()` without a call."""
        self._timers: list[tuple[float, float, int, _Timer]] = []
        self._cancelled_timers = 0
        self._order = count(1)
        self._tasks: list[ref[asyncio.Task[Any]]] = []
        self._tidy_tasks_at = FEWEST_TASKS_TO_TIDY
        self._parked: dict[str, list[_Soon | _Timer]] = {}

    def time(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        """Let time pass while nothing runs, as for a stopped process. Timers fire late, all at once."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a loop cannot pause for {seconds} s")
        self.now += seconds

    def freeze(self, machine: str) -> None:
        """Run nothing of this machine until `thaw`, like a process with SIGSTOP."""
        self._parked.setdefault(machine, [])

    def thaw(self, machine: str) -> None:
        """Continue the machine: callbacks that became due run late, all at once. No effect if it is not frozen."""
        self._ready.extend(self._parked.pop(machine, ()))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to run at this instant except the caller."""
        self._sweep()
        return not self._ready and not (self._timers and self._timers[0][0] <= self.now)

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """The unfinished tasks, in order of creation."""
        return [task for one in self._tasks if (task := one()) is not None and not task.done()]

    def cancel_pending(self) -> None:
        """Cancel unfinished tasks, oldest first, and run until they have ended. Raises Stuck if they do not end."""
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
        """A plain future, not a coroutine: it leaves no task behind if the loop gets stuck."""
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

    # --- asyncio's interface ------------------------------------------------------------------------------------------

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
        """The same as `call_soon`: there is only one thread."""
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
        """There are no threads: the function runs at once."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """The loop never sleeps, so it need not be woken."""

    # --- one iteration of the loop ------------------------------------------------------------------------------------

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
        """Raise: nothing is ready, and there is no timer within the limit."""
        if not self._timers:
            raise Deadlock(f"deadlock at {self.now:g} s of virtual time: nothing is ready, no timer", self._where())
        self.now = max(self.now, self.limit_at)
        raise OutOfTime(f"not done at the limit, {self.now:g} s of virtual time", self._where())

    def _sweep(self) -> None:
        """Drop cancelled timers: those at the front, and all of them when they are the majority."""
        timers = self._timers
        if self._cancelled_timers > max(FEWEST_CANCELLED_TO_SWEEP, len(timers) // 2):
            timers[:] = [entry for entry in timers if not entry[3]._cancelled]
            heapify(timers)
            self._cancelled_timers = 0
        while timers and timers[0][3]._cancelled:
            heappop(timers)

    def _shuffle(self, rng: random.Random) -> None:
        """Shuffle adjacent steps of tasks in the ready queue."""
        ready = self._ready
        was_step = False
        for handle in ready:
            is_step = _is_step(handle)
            if is_step and was_step:
                break
            was_step = is_step
        else:
            return  # no two steps are adjacent
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
    """Like `asyncio.run`, on a new `VirtualTimeLoop`. Remaining tasks are cancelled, generators closed.

    Raises `Deadlock`, `OutOfTime` (not done after `limit_s` of virtual time) or `BusyLoop`, with the pending tasks.
    """
    loop = VirtualTimeLoop(seed=seed, limit_s=limit_s, max_iterations=max_iterations)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            return runner.run(main)
        finally:
            loop.cancel_pending()


def _is_step(handle: _Soon | _Timer) -> bool:
    """Whether a handle is a step of a task: asyncio's callbacks for that are methods of the task."""
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


def _standing(task: asyncio.Task[Any]) -> str:
    """The innermost frame of a task that is not in asyncio."""
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
