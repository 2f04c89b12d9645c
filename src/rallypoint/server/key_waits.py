"""Requests that wait until keys exist: answered when all of them do, or when the time of the request is over.

A request must cost one answer and about one look at each key, however many keys it names and in whatever order they
are written. No request outlives its connection.
"""

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
    """The waiting requests of one connection."""

    def __init__(self, engine_host: EngineHost, sender: Sender, admission: Admission, peer: tuple[str, int]) -> None:
        self._host = engine_host
        self._sender = sender
        self._admission = admission
        self._peer = peer
        self._waiting: dict[int, _Waiting] = {}
        self._keys = 0
        """Number of keys of all waiting requests."""

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, request: Await) -> None:
        """Answer a request now or later. Replaces a waiting request with the same number.

        A request that would exceed a limit by waiting is refused.
        """
        if self._waiting:
            self._remove(request.seq)
        items = self._host.engine.items
        for index, key in enumerate(request.keys):
            if key not in items:
                # Also true for NaN, which must never become the time of a timer: it breaks the order of all timers.
                if not request.within_s > 0:
                    break
                if self._has_room(request):
                    self._keys += len(request.keys)
                    self._waiting[request.seq] = _Waiting(self, self._host, request, index)
                return
        self._answer(request)

    def _has_room(self, request: Await) -> bool:
        """Whether a request may wait within the limits; if not, it is answered with the failure."""
        limits, wanted = self._admission.limits, self._keys + len(request.keys)
        if wanted > limits.max_waits:
            most, would, option = f"wait for {limits.max_waits} keys", wanted, "--max-waits"
        elif len(self._waiting) >= limits.max_watches:  # each has a watch
            most, would, option = f"have {limits.max_watches} requests wait", len(self._waiting) + 1, "--max-watches"
        else:
            return True
        why = f"a connection may {most} at most at a time, and this would be {would}: ask for fewer, or raise {option}"
        self._admission.refused(self._peer, why, Refusal.WAITS)
        self._sender.send(Answer(request.seq, Failure(FailureCode.INVALID, why)))
        return False

    def _remove(self, seq: int) -> None:
        waiting = self._waiting.pop(seq, None)
        if waiting is not None:
            self._keys -= len(waiting.request.keys)
            waiting.stop()

    def done(self, request: Await) -> None:
        """All keys of a waiting request exist, or its time is over."""
        self._remove(request.seq)
        self._answer(request)

    def _answer(self, request: Await) -> None:
        engine = self._host.engine
        found = tuple([GotItem(engine.items.get(key)) for key in request.keys])
        self._sender.send(Answer(request.seq, TxnResult(True, engine.revision, found)))

    def end(self) -> None:
        """Stop all waiting requests without an answer: the connection is closed."""
        for waiting in list(self._waiting.values()):
            waiting.stop()
        self._waiting.clear()
        self._keys = 0


class _Waiting:
    """One waiting request. Watches one missing key at a time, and finally checks that all keys still exist."""

    def __init__(self, owner: KeyWaits, engine_host: EngineHost, request: Await, index: int) -> None:
        """`index`: of the first missing key."""
        self._owner = owner
        self._host = engine_host
        self.request = request
        self._watch = 0
        self._index = index
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(min(request.within_s, LONGEST_S), self._done)
        self._watch_key(index)

    def push(self, batch: Batch) -> None:
        """The watched key changed, or another one that starts with its name."""
        keys, items = self.request.keys, self._host.engine.items
        if keys[self._index] not in items:
            return
        self._host.unwatch(self._watch)
        # First the keys behind this one, so that keys written in order cost one look each; then all, once.
        for start in (self._index + 1, 0):
            for index in range(start, len(keys)):
                if keys[index] not in items:
                    self._watch_key(index)
                    return
        self._done()

    def _watch_key(self, index: int) -> None:
        self._index = index
        self._watch, started = self._host.watch(self, self.request.keys[index], self._host.engine.revision)
        assert isinstance(started, WatchStarted), "a watch from the current revision always starts"

    def _done(self) -> None:
        self._owner.done(self.request)

    def stop(self) -> None:
        self._timer.cancel()
        self._host.unwatch(self._watch)
