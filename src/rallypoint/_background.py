"""One background event loop per process, for the blocking API. It starts with its first user and ends with its last.

A blocked caller is always released: by the result, or by an error if the loop ends first. The garbage collector can end
handlers at any time and on any thread, so nothing here may wait for a lock that its own thread may hold.

A forked child must not touch the parent's loop, which would disturb the parent. Its first user starts a new loop.
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
SIGNAL_CHECK_S = 1.0
"""The longest time that a thread blocks before Python can run signal handlers."""
ENDED = "the handler was shut down, or the process is ending: the call did not finish"


def block(wait: Callable[[float], bool], timeout_s: float | None) -> bool:
    """Wait in intervals of `SIGNAL_CHECK_S`, up to `timeout_s` or without limit. Returns the last result of `wait`.

    A signal does not wake the thread if it arrives on another thread, or after Python's last check and before the
    thread sleeps. One long wait could then ignore Ctrl-C for ever.
    """
    if timeout_s is None:
        while not wait(SIGNAL_CHECK_S):
            pass
        return True
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        if wait(max(0.0, min(SIGNAL_CHECK_S, left_s))):
            return True
        if left_s <= SIGNAL_CHECK_S:
            return False


def _new_loop() -> asyncio.AbstractEventLoop:
    """On uvloop if it is installed: more than half of a node's time in a round is spent in the loop itself."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class BackgroundLoop:
    """An event loop in a daemon thread. Use `acquire` and `release`; it stops after the last `release`."""

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
            del call  # an error's traceback contains this frame: a reference cycle would keep the caller's objects

    def spawn(self, coro: Coroutine[Any, Any, None], then: Callable[[], None]) -> None:
        """Run a coroutine on the loop without waiting; call `then` when it has ended, also with an error."""
        call = _Call(coro, then)
        with suppress(RendezvousError):
            self._submit(call)

    def stop(self) -> None:
        """End the loop and its thread. On the loop's own thread it returns without waiting."""
        with suppress(RuntimeError):  # already closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()

    def join(self) -> None:
        """Wait up to `EXIT_S` for the thread to end, unless this is the thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(EXIT_S)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def silence_in_child(self) -> None:
        """In a forked child: suppress the warnings about pending tasks, which never run here."""
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
        if coro is not None:  # else it was cancelled before it started
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
                self._cancel_all()
            finally:
                self._loop.close()
                for call in list(self._calls):
                    call.fail(RendezvousError(ENDED))

    def _cancel_all(self) -> None:
        loop = self._loop
        loop.run_until_complete(asyncio.sleep(0))  # start submitted calls, so that they are cancelled below
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending, timeout=INTERRUPTED_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())


class _Call(Generic[T]):
    """A coroutine submitted to the loop, and its outcome for the blocked caller.

    A plain lock wakes the caller faster than `concurrent.futures.Future`, which is measurable in the time of a round.
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
        """Take over the coroutine; None: it was taken before. The taker has to run or close it."""
        coro, self._coro = self._coro, None
        return coro

    def end(self, outcome: T | None, error: BaseException | None = None) -> None:
        """Set the outcome and wake the caller. Only the first call counts."""
        if not self.is_over:
            self._outcome, self._error = outcome, error
            self.is_over = True
            self._running.release()
            if self._then is not None:
                self._then()

    def fail(self, error: BaseException) -> None:
        """End the call with an error; the coroutine is closed if it has not started."""
        coro = self.take()
        if coro is not None:
            coro.close()
        self.end(None, error)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the call is over, or for `timeout_s`. For one thread only."""
        if not self.is_over and block(lambda piece_s: self._running.acquire(timeout=piece_s), timeout_s):
            self._running.release()

    def wait_result(self) -> T:
        """Block for the result, or raise the error."""
        self.wait()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return cast(T, self._outcome)
        finally:
            del error  # its traceback contains this frame: a reference cycle


class _Shared:
    """The background loop of the process, and how to close its users at exit."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.loop: BackgroundLoop | None = None
        self.users: dict[int, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.next_user = 0
        self.stopped: list[BackgroundLoop] = []
        """Stopped loops, whose threads may still run."""
        self.of_parent: _Shared | None = None
        """Kept alive: closing the inherited loop would disturb the parent."""


_shared = _Shared()


def acquire(close: Callable[[], Coroutine[Any, Any, None]]) -> tuple[BackgroundLoop, int]:
    """The loop and a user number for `release`. `close` is called at exit if the user was not released."""
    with _shared.lock:
        loop = _shared.loop
        if loop is None or not loop.is_alive:  # other code may have stopped it
            loop = BackgroundLoop()
        _shared.loop = loop
        _shared.next_user += 1
        _shared.users[_shared.next_user] = close
        return loop, _shared.next_user


def release(user: int) -> None:
    """Remove a user; after the last one the loop is stopped. Idempotent."""
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
                task.exception()  # mark as retrieved


def _after_fork_in_child() -> None:
    global _shared
    parent, _shared = _shared, _Shared()
    _shared.of_parent = parent
    if parent.loop is not None:
        parent.loop.silence_in_child()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
