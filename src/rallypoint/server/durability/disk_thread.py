"""A thread for blocking disk calls, so that a slow disk never blocks the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol, TypeAlias

Done: TypeAlias = Callable[[Exception | None], None]


class Worker(Protocol):
    """Runs blocking calls outside the event loop, one at a time, in the order in which they are submitted."""

    def submit(self, work: Callable[[], None], done: Done) -> None:
        """Run `work`, then call `done` on the event loop, with the exception that it raised, if any."""

    def close(self) -> None:
        """End after the work that was submitted."""


class Thread:
    """A worker on a daemon thread, so that a disk that hangs does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[Callable[[], None], Done] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, work: Callable[[], None], done: Done) -> None:
        self._queue.put((work, done))

    def close(self) -> None:
        self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            work, done = job
            try:
                work()
            except Exception as error:
                self._report(done, error)
            else:
                self._report(done, None)

    def _report(self, done: Done, error: Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(done, error)
