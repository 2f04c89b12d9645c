"""Where a disk is waited for: a thread that does one thing after the other, and tells the loop when it is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol, TypeAlias

Done: TypeAlias = Callable[[Exception | None], None]


class Worker(Protocol):
    """Does work in the order it is given, one piece at a time, and never on the loop's account."""

    def submit(self, work: Callable[[], None], done: Done) -> None:
        """Have it done; then `done` is called on the loop, with what was raised, if anything was."""

    def close(self) -> None:
        """No more work is coming."""


class Thread:
    """A worker. It does not keep the process from ending: a disk that hangs must not either."""

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
                self._tell(done, error)
            else:
                self._tell(done, None)

    def _tell(self, done: Done, error: Exception | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(done, error)
