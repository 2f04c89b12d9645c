"""One background event loop per process, for the blocking API. Starts with its first user and ends with its last.

After a fork the child has none of it: the parent's loop is left alone (touching it would disturb the parent), and the
child's first user starts a new one.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

INTERRUPTED_S = 6.0
"""How long an interrupted call may take to clean up before the interruption goes on."""
EXIT_S = 2.0
"""How long all users together may take to clean up when the process ends."""


class BackgroundLoop:
    """An event loop in a daemon thread. Use `acquire` and `release`; the loop stops when nobody holds it."""

    def __init__(self) -> None:
        self._users = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="quorate", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            if pending:
                self._loop.run_until_complete(asyncio.wait(pending))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    def call(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and block for its result.

        If the caller is interrupted (Ctrl-C), the coroutine is cancelled and given a few seconds to clean up.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("a blocking call was made on the background loop itself (from an event sink?)")
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        started: list[asyncio.Task[T]] = []
        self._loop.call_soon_threadsafe(_start, self._loop, coro, done, started)
        try:
            return done.result()
        except BaseException:
            if not done.done():
                self._loop.call_soon_threadsafe(_cancel, started)
                concurrent.futures.wait([done], timeout=INTERRUPTED_S)
            raise
        finally:
            started.clear()
            del done  # or an error would refer to itself through this frame, and keep the caller's objects alive

    def spawn(self, coro: Coroutine[Any, Any, None], then: Callable[[], None]) -> None:
        """Run a coroutine on the loop without waiting for it; call `then` on the loop when it has ended."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.add_done_callback(lambda _: then())
        self._loop.call_soon_threadsafe(_start, self._loop, coro, done, [])

    def stop(self) -> None:
        """End the loop and its thread (does not wait for it when called on it)."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(EXIT_S)


def _cancel(tasks: list[asyncio.Task[T]]) -> None:
    for task in tasks:
        task.cancel()


def _start(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, T],
    done: concurrent.futures.Future[T],
    started: list[asyncio.Task[T]],
) -> None:
    """Run `coro` as a task (noted in `started`) and hand its outcome to `done`."""
    task = loop.create_task(coro)
    started.append(task)

    def finished(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            done.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            done.set_exception(error)
        else:
            done.set_result(task.result())

    task.add_done_callback(finished)


class _Shared:
    """The process's background loop and what to do for its users at exit."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: BackgroundLoop | None = None
        self.users: dict[int, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.next_user = 0
        self.left_behind: list[BackgroundLoop] = []


_shared = _Shared()


def acquire(close: Callable[[], Coroutine[Any, Any, None]]) -> tuple[BackgroundLoop, int]:
    """The loop, held until `release` with the number that comes with it. `close` is what to do if that never comes."""
    with _shared.lock:
        if _shared.loop is None:
            _shared.loop = BackgroundLoop()
        _shared.next_user += 1
        _shared.users[_shared.next_user] = close
        return _shared.loop, _shared.next_user


def release(user: int) -> None:
    """One user less; the last one stops the loop. Idempotent."""
    with _shared.lock:
        if _shared.users.pop(user, None) is None or _shared.users:
            return
        loop, _shared.loop = _shared.loop, None
    if loop is not None:
        loop.stop()


def _at_exit() -> None:
    with _shared.lock:
        loop, users = _shared.loop, list(_shared.users.values())
        _shared.users.clear()
        _shared.loop = None
    if loop is None:
        return
    try:
        loop.call(_close_all(users))
    finally:
        loop.stop()


async def _close_all(users: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    tasks = [asyncio.create_task(close()) for close in users]
    if tasks:
        await asyncio.wait(tasks, timeout=EXIT_S)


def _after_fork_in_child() -> None:
    global _shared
    parent, _shared = _shared, _Shared()
    if parent.loop is not None:
        _shared.left_behind = [*parent.left_behind, parent.loop]  # never collected: closing it would hurt the parent


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
