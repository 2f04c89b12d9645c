"""Clients that wait for keys: answered when all of them exist, or when their time is over. One trip for each."""

from __future__ import annotations

import asyncio
from typing import Protocol

from rallypoint.kv.types import Batch, Failure, FailureCode, GotItem, TxnResult, WatchStarted
from rallypoint.server.admission.admission import Admission
from rallypoint.server.admission.refusals import Refusal
from rallypoint.server.engine_host import EngineHost
from rallypoint.wire.messages import Answer, Await

LONGEST_S = 3600.0


class Sender(Protocol):
    """Where the answer goes."""

    def send(self, answer: Answer) -> None: ...


class KeyWaits:
    """The requests of one connection that wait. None of them outlives it: see `end`."""

    def __init__(self, engine_host: EngineHost, sender: Sender, admission: Admission, peer: tuple[str, int]) -> None:
        self._host = engine_host
        self._sender = sender
        self._admission = admission
        self._peer = peer
        self._waiting: dict[int, _Waiting] = {}
        self._keys = 0
        """Of all requests that wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, request: Await) -> None:
        """Answer it now or later. One under a number that waits already takes the place of that one.

        One that would wait beyond the limit is refused.
        """
        if self._waiting:
            self._forget(request.seq)
        items = self._host.engine.items
        for at, key in enumerate(request.keys):
            if key not in items:
                # A time that is no number is no time: it must never get into the loop's timers, whose order it breaks.
                if not request.within_s > 0:
                    break
                if self._has_room(request):
                    self._keys += len(request.keys)
                    self._waiting[request.seq] = _Waiting(self, self._host, request, at)
                return
        self._answer(request)

    def _has_room(self, request: Await) -> bool:
        """Whether it may wait; if not, that was its answer."""
        limits, wanted = self._admission.limits, self._keys + len(request.keys)
        if wanted > limits.max_waits:
            most, would, option = f"wait for {limits.max_waits} keys", wanted, "--max-waits"
        elif len(self._waiting) >= limits.max_watches:  # each of them watches
            most, would, option = f"have {limits.max_watches} requests wait", len(self._waiting) + 1, "--max-watches"
        else:
            return True
        why = f"a connection may {most} at most at a time, and this would be {would}: ask for fewer, or raise {option}"
        self._admission.refused(self._peer, why, Refusal.WAITS)
        self._sender.send(Answer(request.seq, Failure(FailureCode.INVALID, why)))
        return False

    def _forget(self, seq: int) -> None:
        one = self._waiting.pop(seq, None)
        if one is not None:
            self._keys -= len(one.request.keys)
            one.stop()

    def done(self, request: Await) -> None:
        """All are there, or the time is over."""
        self._forget(request.seq)
        self._answer(request)

    def _answer(self, request: Await) -> None:
        engine = self._host.engine
        found = tuple([GotItem(engine.items.get(key)) for key in request.keys])
        self._sender.send(Answer(request.seq, TxnResult(True, engine.revision, found)))

    def end(self) -> None:
        """Nobody listens any more."""
        for one in list(self._waiting.values()):
            one.stop()
        self._waiting.clear()
        self._keys = 0


class _Waiting:
    """Watches one key after the other, each until it is there, and at the end looks whether all still are."""

    def __init__(self, owner: KeyWaits, engine_host: EngineHost, request: Await, at: int) -> None:
        """`at` is the first key that is missing."""
        self._owner = owner
        self._host = engine_host
        self.request = request
        self._watch = 0
        self._at = at
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(request.within_s, LONGEST_S), self._done)
        self._await(at)

    def push(self, batch: Batch) -> None:
        """Something happened to the key that it waits for, or to one whose name begins like it."""
        keys, items = self.request.keys, self._host.engine.items
        if keys[self._at] not in items:
            return
        self._host.unwatch(self._watch)
        # From where it stands, so that many keys that come in their order cost one look each; then all, once.
        for start in (self._at + 1, 0):
            for at in range(start, len(keys)):
                if keys[at] not in items:
                    self._await(at)
                    return
        self._done()

    def _await(self, at: int) -> None:
        self._at = at
        self._watch, started = self._host.watch(self, self.request.keys[at], self._host.engine.revision)
        assert isinstance(started, WatchStarted), "it starts now"

    def _done(self) -> None:
        self._owner.done(self.request)

    def stop(self) -> None:
        self._timer.cancel()
        self._host.unwatch(self._watch)
