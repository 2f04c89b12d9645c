"""One background event loop per process, for the blocking API. Starts with its first user and ends with its last.

Whoever blocks on a call is always released: by its outcome, or by an error if the loop ends first. Handlers are dropped
by the garbage collector at any moment and on any thread, so nothing here waits for a lock that its own thread holds.

After a fork the child has none of it: the parent's loop is left alone (touching it would disturb the parent), and the
child's first user starts a new one.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import select
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from rallypoint._bell import Bell
from rallypoint.backends.contract import Lane
from rallypoint.errors import RendezvousError

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
Settle: TypeAlias = Callable[[], None]


class Release(Protocol[T_contra]):
    """How a call that is still busy lets go of its caller. `settle` is what gets it done in the next turn."""

    def __call__(self, outcome: T_contra, settle: Settle, /) -> None:
        """Here is the outcome."""

    def lend(self, lane: Lane, settle: Settle, /) -> None:
        """The caller may come to the outcome by itself, on this; `settle` does nothing before that."""


class Begins(Protocol[T]):
    """What a caller may begin a call with, on its own thread."""

    call: LentCall[T] | None
    """What it waits with (`BackgroundLoop.lend`)."""

    @property
    def shown(self) -> T:
        """What it goes on with, if it `begin`s and has come to the end."""

    def begin(self) -> bool:
        """Whether it has come to the end."""

    def give_up(self) -> bool:
        """It was interrupted: what was begun is to be taken back; whether anything was."""

    @property
    def is_given_up_unseen(self) -> bool:
        """Whether something is to be taken back that nobody has gone on with: whoever comes to it does that."""


INTERRUPTED_S = 6.0
"""How long an interrupted call may take to clean up before the interruption goes on."""
EXIT_S = 2.0
"""How long all users together may take to clean up when the process ends."""
LANE_AFTER_S = 0.05
"""Whoever waits longer than this goes on by itself: to make that possible takes time when all begin together."""
LATER_S = 0.01
"""When the rest of a call is done whose caller has come to its end by itself."""
WARM_S, WARM_FOR_S = 0.05, 60.0
"""How often one who waits does for practice what it waits for, and for how long: see `Lane.keep_warm`."""
LONG_S, PUT_OFF_S = 0.001, 0.4
"""Practice that takes longer is in the way; it comes so much later then: what was confirmed must be said again."""
LISTEN_S = 1.0
"""How long a thread blocks at most before it looks for signals."""
ENDED = "the handler was shut down, or the process is ending: the call did not finish"


def block(wait: Callable[[float], bool], timeout_s: float | None) -> bool:
    """Wait piece by piece, for so long or without limit; whether what was waited for came.

    A signal that arrives after Python last looked for one and before the thread sleeps, or on another thread, does not
    wake it: in one piece, Ctrl-C could go unheard for good.
    """
    if timeout_s is None:
        while not wait(LISTEN_S):
            pass
        return True
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        if wait(max(0.0, min(LISTEN_S, left_s))):
            return True
        if left_s <= LISTEN_S:
            return False


def _new_loop() -> asyncio.AbstractEventLoop:
    """On uvloop where it is installed: of a node's part in a round, the loop's own steps are the larger half."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class BackgroundLoop:
    """An event loop in a daemon thread. Use `acquire` and `release`; the loop stops when nobody holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calls: set[_Call[Any]] = set()
        self._unsettled: dict[_Call[Any], Settle] = {}
        """Calls whose callers have gone on, and what gets them done."""
        self._ended = False
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="rallypoint", daemon=True)
        self._thread.start()

    def call(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and block for its result. RendezvousError if the loop ends meanwhile.

        If the caller is interrupted (Ctrl-C), the coroutine is cancelled and given a few seconds to clean up.
        """
        return self._wait(_Call(coro))

    def call_released(self, make: Callable[[Release[T]], Coroutine[Any, Any, T]]) -> T:
        """As `call`, with a coroutine that may release the caller before it has ended.

        What is left of it is done before the next call begins, or soon after.
        """
        call: LentCall[T] = LentCall(self._unsettled)
        call.start(make(call))
        return self._wait(call)

    def lend(self, lane: Lane) -> LentCall[Any]:
        """What a call can be waited for with, whose caller begins on that lane. OSError: no file is left for it."""
        return LentCall(self._unsettled, lane)

    def call_begun(self, ready: Begins[T], make: Callable[[Release[T]], Coroutine[Any, Any, T]]) -> T:
        """As `call_released`, for a call that its caller begins by itself, and perhaps comes to the end of."""
        call = ready.call  # made before: if that cannot be, nothing is begun
        if call is None or threading.get_ident() == self._thread.ident:
            return self.call_released(make)
        try:
            is_in = ready.begin()
            call.start(make(call))
            self._submit(call, self._start_later if is_in else None)
            return ready.shown if is_in else call.wait_result()
        except BaseException:
            if not call.is_over:
                self._take_back(ready, call, make)
                call.wait(INTERRUPTED_S)
            raise
        finally:
            del call  # as in `_wait`

    def _take_back(
        self, ready: Begins[T], call: LentCall[T], make: Callable[[Release[T]], Coroutine[Any, Any, T]]
    ) -> None:
        """The caller of a call that it began by itself was interrupted, wherever that was."""
        was_begun = ready.give_up()
        if was_begun and not call.is_started:
            call.start(make(call))
        if not call.is_started:
            call.fail(RendezvousError(ENDED))
            return
        with suppress(RendezvousError, RuntimeError):  # the loop ends, and with it the call
            if was_begun:
                self._submit(call)  # it may be on its way already: who comes first sees to it
            self._loop.call_soon_threadsafe(self._cancel_unless, call, ready)

    def _cancel_unless(self, call: _Call[Any], ready: Begins[Any]) -> None:
        """End a call that was begun by its caller, unless it is about to find out by itself that nobody wants it."""
        if not ready.is_given_up_unseen:
            self._cancel(call)

    def _wait(self, call: _Call[T]) -> T:
        if threading.current_thread() is self._thread:
            call.fail(RuntimeError())
            raise RuntimeError("a blocking call was made on the background loop itself (from an event sink?)")
        try:
            self._submit(call)
            return call.wait_result()
        except BaseException:
            if not call.is_over:
                with suppress(RuntimeError):  # the loop has just been closed
                    self._loop.call_soon_threadsafe(self._cancel, call)
                call.wait(INTERRUPTED_S)
            raise
        finally:
            del call  # or an error would refer to itself through this frame, and keep the caller's objects alive

    def spawn(self, coro: Coroutine[Any, Any, None], then: Callable[[], None]) -> None:
        """Run a coroutine on the loop without waiting for it; call `then` when it has ended, however it did."""
        call = _Call(coro, then)
        with suppress(RendezvousError):
            self._submit(call)

    def stop(self) -> None:
        """End the loop and its thread (does not wait for it when called on it)."""
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()

    def join(self) -> None:
        """Wait a moment for the thread to end, unless this is it."""
        if threading.current_thread() is not self._thread:
            self._thread.join(EXIT_S)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def leave_to_the_parent(self) -> None:
        """This process is a fork: see to it that nothing is said about tasks that will never run here."""
        for task in asyncio.all_tasks(self._loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    def _submit(self, call: _Call[Any], start: Callable[[_Call[Any]], None] | None = None) -> None:
        with self._lock:
            if not self._ended:
                self._calls.add(call)
                self._loop.call_soon_threadsafe(start or self._start, call)
                return
        call.fail(RendezvousError(ENDED))
        raise RendezvousError(ENDED)

    def _start_later(self, call: _Call[Any]) -> None:
        """Its caller is in a round: others need the cores now, to get there. Before anything else that is asked."""
        self._unsettled[call] = lambda: self._start_now(call)
        self._loop.call_later(LATER_S, self._start_now, call)

    def _start_now(self, call: _Call[Any]) -> None:
        if self._unsettled.pop(call, None) is not None:
            self._start(call)

    def _start(self, call: _Call[T]) -> None:
        try:
            for settle in list(self._unsettled.values()):
                settle()
        finally:
            coro = call.take()
            if coro is not None:  # else it was cancelled on its way here
                call.task = self._loop.create_task(coro)
                call.task.add_done_callback(lambda task: self._finished(call, task))

    def _cancel(self, call: _Call[Any]) -> None:
        if call.task is not None:
            call.task.cancel()
        else:
            self._calls.discard(call)
            call.fail(concurrent.futures.CancelledError())

    def _finished(self, call: _Call[T], task: asyncio.Task[T]) -> None:
        self._calls.discard(call)
        self._unsettled.pop(call, None)
        call.task = None
        if task.cancelled():
            call.fail(RendezvousError(ENDED))
        elif (error := task.exception()) is not None:
            call.fail(error)
        else:
            call.end(task.result())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with self._lock:
                self._ended = True
            try:
                self._wind_up()
            finally:
                self._loop.close()
                for call in list(self._calls):
                    call.fail(RendezvousError(ENDED))

    def _wind_up(self) -> None:
        loop = self._loop
        loop.run_until_complete(asyncio.sleep(0))  # what was submitted before the end is started, then cancelled
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending, timeout=INTERRUPTED_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())


class _Call(Generic[T]):
    """A coroutine on its way to the loop, and its outcome for the one who waits.

    A bare lock, and no `concurrent.futures.Future`: of a node's part in a round, waking its caller is no small share.
    """

    def __init__(self, coro: Coroutine[Any, Any, T] | None, then: Callable[[], None] | None = None) -> None:
        self.task: asyncio.Task[T] | None = None
        self.is_over = False
        self._then = then
        self._coro: Coroutine[Any, Any, T] | None = coro
        self._outcome: T | None = None
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def take(self) -> Coroutine[Any, Any, T] | None:
        """The coroutine, for one who sees to its end; None: somebody has."""
        coro, self._coro = self._coro, None
        return coro

    def end(self, outcome: T | None, error: BaseException | None = None) -> None:
        """This is what it came to; only the first time counts."""
        if not self.is_over:
            self._outcome, self._error = outcome, error
            self.is_over = True
            self._running.release()
            if self._then is not None:
                self._then()

    def fail(self, error: BaseException) -> None:
        """It will not run, or did not to its end."""
        coro = self.take()
        if coro is not None:
            coro.close()
        self.end(None, error)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it is over, or for so long; for one thread."""
        if not self.is_over and block(lambda piece_s: self._running.acquire(timeout=piece_s), timeout_s):
            self._running.release()

    def wait_result(self) -> T:
        """Block for the outcome, or raise what it ended with."""
        self.wait()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._outcome  # type: ignore[return-value]  # it is there: there is no error
        finally:
            del error  # the error's frames must not refer to it


class LentCall(_Call[T]):
    """One whose caller may be released before it has ended, or see to that by itself."""

    def __init__(self, unsettled: dict[_Call[Any], Settle], begun_on: Lane | None = None) -> None:
        """`begun_on`: where the caller stands already."""
        super().__init__(None)
        self.is_started = False
        self._unsettled = unsettled
        self._bell = Bell()
        self._begun_on = begun_on
        self._lane: Lane | None = None

    def start(self, coro: Coroutine[Any, Any, T]) -> None:
        """This is what it is. Once."""
        self.is_started = True
        self._coro = coro

    def __call__(self, outcome: T, settle: Settle) -> None:
        self._unsettled[self] = settle
        self.end(outcome)

    def lend(self, lane: Lane, settle: Settle) -> None:
        self._unsettled[self] = settle
        self._lane = lane
        self._bell.ring()

    def end(self, outcome: T | None, error: BaseException | None = None) -> None:
        super().end(outcome, error)
        self._bell.ring()

    def wait(self, timeout_s: float | None = None) -> None:
        """As for any call; on the lane, while there is one."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        bell = self._bell.fileno
        poll = select.poll()
        poll.register(bell, select.POLLIN)
        used = self._begun_on
        practise_at, warm_until = time.monotonic() + WARM_S, time.monotonic() + WARM_FOR_S
        worth_it_at = time.monotonic() + (0.0 if used is not None and used.is_standing else LANE_AFTER_S)
        try:
            while not self.is_over:
                now = time.monotonic()
                left_s = min(LISTEN_S, deadline - now)
                if left_s <= 0:
                    return
                lane = self._lane
                if lane is None:
                    poll.poll(left_s * 1000)
                elif now < worth_it_at:
                    poll.poll(min(left_s, worth_it_at - now) * 1000)
                else:
                    used = lane
                    is_fresh = practise_at < warm_until
                    outcome = lane.wait(bell, min(left_s, max(0.0, practise_at - now)) if is_fresh else left_s)
                    if outcome is not None:
                        self._outcome = outcome  # type: ignore[assignment]  # as whoever made the lane knows
                        self.is_over = True
                        used = None  # who is in has left it
                        return
                    if is_fresh and time.monotonic() >= practise_at:  # else the bell has rung
                        practise_at = _practised(lane, bell)
                self._bell.hush()
        finally:
            if used is not None:
                used.leave()


def _practised(lane: Lane, bell: int) -> float:
    """Have whoever waits on a lane do so, if somebody tells it anything there; when it is time for it again."""
    began_at = time.monotonic()
    lane.keep_warm(bell)
    now = time.monotonic()
    if not lane.is_standing:
        return now + LISTEN_S
    return now + (WARM_S if now - began_at <= LONG_S else PUT_OFF_S)


class _Shared:
    """The process's background loop and what to do for its users at exit."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.loop: BackgroundLoop | None = None
        self.users: dict[int, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.next_user = 0
        self.stopped: list[BackgroundLoop] = []
        """Told to stop; their threads may still run."""
        self.of_the_parent: _Shared | None = None
        """Never collected: closing any of it would hurt the parent."""


_shared = _Shared()


def acquire(close: Callable[[], Coroutine[Any, Any, None]]) -> tuple[BackgroundLoop, int]:
    """The loop, held until `release` with the number that comes with it. `close` is what to do if that never comes."""
    with _shared.lock:
        loop = _shared.loop
        if loop is None or not loop.is_alive:  # something can have ended it by force
            loop = BackgroundLoop()
        _shared.loop = loop
        _shared.next_user += 1
        _shared.users[_shared.next_user] = close
        return loop, _shared.next_user


def release(user: int) -> None:
    """One user less; the last one stops the loop. Idempotent."""
    with _shared.lock:
        if _shared.users.pop(user, None) is None or _shared.users:
            return
        loop, _shared.loop = _shared.loop, None
        _shared.stopped = [stopped for stopped in _shared.stopped if stopped.is_alive]
        if loop is not None:
            _shared.stopped.append(loop)
    if loop is not None:
        loop.stop()


def _at_exit() -> None:
    with _shared.lock:
        loop, users = _shared.loop, list(_shared.users.values())
        _shared.users.clear()
        _shared.loop = None
        stopped = list(_shared.stopped)
    if loop is not None:
        finished = threading.Event()
        loop.spawn(_close_all(users), finished.set)
        finished.wait(EXIT_S + 1.0)
        loop.stop()
    for other in stopped:
        other.join()


async def _close_all(users: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    tasks = [asyncio.create_task(close()) for close in users]
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=EXIT_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # nobody is left to be told


def _after_fork_in_child() -> None:
    global _shared
    parent, _shared = _shared, _Shared()
    _shared.of_the_parent = parent
    if parent.loop is not None:
        parent.loop.leave_to_the_parent()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
