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
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from rallypoint.errors import RendezvousError

T = TypeVar("T")

INTERRUPTED_S = 6.0
"""How long an interrupted call may take to clean up before the interruption goes on."""
EXIT_S = 2.0
"""How long all users together may take to clean up when the process ends."""
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
        self._ended = False
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="rallypoint", daemon=True)
        self._thread.start()

    def call(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and block for its result. RendezvousError if the loop ends meanwhile.

        If the caller is interrupted (Ctrl-C), the coroutine is cancelled and given a few seconds to clean up.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("a blocking call was made on the background loop itself (from an event sink?)")
        call = _Call(coro)
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

    def _submit(self, call: _Call[Any]) -> None:
        with self._lock:
            if not self._ended:
                self._calls.add(call)
                self._loop.call_soon_threadsafe(self._start, call)
                return
        call.fail(RendezvousError(ENDED))
        raise RendezvousError(ENDED)

    def _start(self, call: _Call[T]) -> None:
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

    def __init__(self, coro: Coroutine[Any, Any, T], then: Callable[[], None] | None = None) -> None:
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
            return cast(T, self._outcome)
        finally:
            del error  # the error's frames must not refer to it


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
