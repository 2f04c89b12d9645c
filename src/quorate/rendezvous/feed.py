"""What a coordinator takes in of a watch: the batches that are here, one by one, and word that there may be more."""

from __future__ import annotations

import asyncio

from quorate.backends.contract import Watch
from quorate.errors import Unavailable
from quorate.kv.types import Batch

MOMENT_S = 0.005
"""How long a batch waits for others that are expected."""
CLOSED = "the watch on the run was closed"


class Feed:
    """Of one watch, for one reader. Where the watch calls (`Watch.follow`), nothing else runs to wait for it."""

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch = watch
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._next: asyncio.Task[Batch] | None = None
        """Who waits for a watch that does not call."""
        self._has_news = True
        self._wanted = 1
        """How many batches are worth a look."""
        self._is_called = watch.follow(self._called)

    def ready(self) -> Batch | None:
        """The next batch, if it is here. Raises what the watch ended with."""
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

    async def wait(self, until: float | None, several: int = 1) -> None:
        """Until there may be a batch, or an instant.

        Where the watch calls, for `several` batches, if they come within a moment of the first one: one look at all of
        them costs what one look at one of them does.
        """
        if self._is_called:
            if self._has_news:
                return
            self._wanted = several
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
        """Take in nothing more."""
        if self._next is not None:
            if not self._next.cancel() and not self._next.cancelled():
                self._next.exception()  # it does not matter any more
            self._next = None
        self._watch.cancel()

    def _called(self) -> None:
        if self._wanted > 1 and self._waiter is not None:
            self._wanted -= 1
            if not self._has_news:
                self._loop.call_later(MOMENT_S, self._wake)
        else:
            self._wake()
        self._has_news = True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _take_next(self) -> Batch:
        try:
            return await anext(self._watch)
        except StopAsyncIteration:
            raise Unavailable(CLOSED) from None
