"""Reads a watch for the coordinator: `ready()` returns the next batch without waiting, `wait()` waits for one.

It never drops a batch, and applies none by itself: the coordinator changes its view only at a point of its choice.
"""

from __future__ import annotations

import asyncio

from rallypoint.backends.contract import Watch
from rallypoint.errors import Unavailable
from rallypoint.kv.types import Batch

CLOSED = "the watch on the run was closed"


class WatchReader:
    """Reader of one watch. Where the watch calls back (`Watch.follow`), no task is needed to wait for it."""

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch = watch
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._next: asyncio.Task[Batch] | None = None
        """Waits for the next batch of a watch that does not call back."""
        self._has_news = True
        self._is_called = watch.follow(self._called)

    def ready(self) -> Batch | None:
        """The next batch if it has arrived, else None. Raises the error that the watch ended with."""
        if self._next is not None:
            if not self._next.done():
                return None
            finished, self._next = self._next, None
            return finished.result()
        batch = self._watch.ready()
        self._has_news = batch is not None
        if batch is None and self._watch.is_over:
            raise Unavailable(CLOSED)
        return batch

    async def wait(self, until: float | None) -> None:
        """Wait until there may be a batch, or until the instant `until` of the loop's clock."""
        if self._is_called:
            if self._has_news:
                return
        elif self._next is None:
            self._next = asyncio.create_task(self._take_next(), name=self._name)
            self._next.add_done_callback(lambda _: self._called())
        elif self._next.done():
            return
        waiter = self._waiter = self._loop.create_future()
        timer = None if until is None else self._loop.call_at(until, self._wake)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def stop(self) -> None:
        """Stop reading and cancel the watch."""
        if self._next is not None:
            if not self._next.cancel() and not self._next.cancelled():
                self._next.exception()  # retrieved, so that asyncio does not log it
            self._next = None
        self._watch.cancel()

    def _called(self) -> None:
        self._has_news = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _take_next(self) -> Batch:
        try:
            return await anext(self._watch)
        except StopAsyncIteration:
            raise Unavailable(CLOSED) from None
