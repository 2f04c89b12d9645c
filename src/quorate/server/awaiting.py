"""Clients that wait for keys: answered when all of them exist, or when their time is over. One trip for each."""

from __future__ import annotations

import asyncio
from typing import Protocol

from quorate.kv.types import Batch, GotItem, TxnResult, WatchStarted
from quorate.server.hub import Hub
from quorate.wire.messages import Answer, Await

LONGEST_S = 3600.0


class Sender(Protocol):
    """Where the answer goes."""

    def send(self, answer: Answer) -> None: ...


class Awaiting:
    """The requests of one connection that wait. None of them outlives it: see `end`."""

    def __init__(self, hub: Hub, sender: Sender) -> None:
        self._hub = hub
        self._sender = sender
        self._waiting: dict[int, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, request: Await) -> None:
        """Answer it now or later. One under a number that waits already takes the place of that one."""
        earlier = self._waiting.pop(request.seq, None) if self._waiting else None
        if earlier is not None:
            earlier.stop()
        items = self._hub.engine.items
        for at, key in enumerate(request.keys):
            if key not in items:
                # A time that is no number is no time: it must never get into the loop's timers, whose order it breaks.
                if not request.within_s > 0:
                    break
                self._waiting[request.seq] = _Waiting(self, self._hub, request, at)
                return
        self._answer(request)

    def done(self, request: Await) -> None:
        """All are there, or the time is over."""
        self._waiting.pop(request.seq, None)
        self._answer(request)

    def _answer(self, request: Await) -> None:
        engine = self._hub.engine
        found = tuple([GotItem(engine.items.get(key)) for key in request.keys])
        self._sender.send(Answer(request.seq, TxnResult(True, engine.revision, found)))

    def end(self) -> None:
        """Nobody listens any more."""
        for one in list(self._waiting.values()):
            one.stop()
        self._waiting.clear()


class _Waiting:
    """Watches one key after the other, each until it is there, and at the end looks whether all still are."""

    def __init__(self, owner: Awaiting, hub: Hub, request: Await, at: int) -> None:
        """`at` is the first key that is missing."""
        self._owner = owner
        self._hub = hub
        self._request = request
        self._watch = 0
        self._at = at
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(request.within_s, LONGEST_S), self._done)
        self._await(at)

    def push(self, batch: Batch) -> None:
        """Something happened to the key that it waits for, or to one whose name begins like it."""
        keys, items = self._request.keys, self._hub.engine.items
        if keys[self._at] not in items:
            return
        self._hub.unwatch(self._watch)
        # From where it stands, so that many keys that come in their order cost one look each; then all, once.
        for start in (self._at + 1, 0):
            for at in range(start, len(keys)):
                if keys[at] not in items:
                    self._await(at)
                    return
        self._done()

    def _await(self, at: int) -> None:
        self._at = at
        self._watch, started = self._hub.watch(self, self._request.keys[at], self._hub.engine.revision)
        assert isinstance(started, WatchStarted), "it starts now"

    def _done(self) -> None:
        self.stop()
        self._owner.done(self._request)

    def stop(self) -> None:
        self._timer.cancel()
        self._hub.unwatch(self._watch)
