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

    def take(self, request: Await) -> None:
        """Answer it now or later."""
        items = self._hub.engine.items
        if request.within_s <= 0 or all(key in items for key in request.keys):
            self._answer(request)
            return
        self._waiting[request.seq] = _Waiting(self, self._hub, request)

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
    """Watches one key after the other, each until it is there."""

    def __init__(self, owner: Awaiting, hub: Hub, request: Await) -> None:
        self._owner = owner
        self._hub = hub
        self._request = request
        self._watch = 0
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(request.within_s, LONGEST_S), self._done)
        self._look()

    def push(self, batch: Batch) -> None:
        """Something happened to the key that it waits for, or to one whose name begins like it."""
        self._look()

    def _look(self) -> None:
        hub = self._hub
        hub.unwatch(self._watch)
        missing = next((key for key in self._request.keys if key not in hub.engine.items), None)
        if missing is None:
            self._done()
            return
        self._watch, started = hub.watch(self, missing, hub.engine.revision)
        assert isinstance(started, WatchStarted), "it starts now"

    def _done(self) -> None:
        self.stop()
        self._owner.done(self._request)

    def stop(self) -> None:
        self._timer.cancel()
        self._hub.unwatch(self._watch)
