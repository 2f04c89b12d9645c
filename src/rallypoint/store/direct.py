"""The calls of `AsyncStore` on blocking connections, on the caller's thread, without an event loop.

The coroutines of `AsyncStore` must never suspend here: the backend under them blocks until it has the answer, so `run`
executes one step and has the result. Only waiting differs: a time limit is a deadline of the connection, and waiting
for keys is one request that the server answers when they exist.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

from rallypoint.backends.contract import BackendStatus, DeadlineExceeded, Direct, Limits, Watch
from rallypoint.backends.ops import OpBackend
from rallypoint.errors import OutcomeUnknown, Rejected, StoreError, StoreTimeoutError, Unavailable
from rallypoint.kv.types import GotItem, Item, Op, Result, TxnResult
from rallypoint.store.arguments import listed
from rallypoint.store.async_store import CHECK_S, AsyncStore

T = TypeVar("T")


class _Call(threading.local):
    """The time limits of this thread's current call."""

    default_s = 0.0
    limit_s = 0.0
    deadline = 0.0


class DirectStore(AsyncStore):
    """The same store as `store`, for the same member."""

    def __init__(self, store: AsyncStore, connections: Direct) -> None:
        self._call = _Call()
        super().__init__(_BlockingBackend(connections, self._call), store.keys, store.node_id, store.joined, store)
        self.connections = connections

    def run(self, request: Callable[[AsyncStore], Coroutine[Any, Any, T]], limit_s: float | None = None) -> T:
        """Make a call. `limit_s` replaces the default time-out for a call without a time-out parameter."""
        self._call.default_s = self.timeout_s if limit_s is None else limit_s
        coro = request(self)
        try:
            coro.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        coro.close()
        raise RuntimeError("a call on a blocking connection must not suspend")

    def _limit(
        self, what: str, timeout_s: float | None = None, awaited: Sequence[str] = ()
    ) -> AbstractAsyncContextManager[None]:
        call = self._call
        call.limit_s = call.default_s if timeout_s is None else timeout_s
        call.deadline = time.monotonic() + call.limit_s
        return _Limit(self, what, call.limit_s, awaited)

    async def _reach(self, what: str, request: Callable[[], Awaitable[T]], *, idempotent: bool = False) -> T:
        """The connection retries until the deadline."""
        self._check_open(what)
        try:
            return await request()
        except OutcomeUnknown:
            if idempotent:
                return await request()
            raise

    async def _await_items(self, what: str, paths: Sequence[str]) -> list[Item]:
        most = self.connections.limits.max_txn_ops
        items: list[Item] = []
        for start in range(0, len(paths), most):
            items += self._await_part(what, paths[start : start + most])
        return items

    def _await_part(self, what: str, paths: Sequence[str]) -> list[Item]:
        call = self._call
        latest = call.deadline + min(CHECK_S, call.limit_s)
        while True:
            self._check_open(what)
            left = self.left
            try:
                if left is None:
                    result = self.connections.await_keys(paths, call.deadline, latest, self._ended_or_left)
                else:
                    result = self.connections.await_keys(paths, 0.0, latest)
            except Unavailable:
                if left is None and self.left is not None and self.ended is None:
                    continue  # the node has just left the round: read once more, without waiting
                raise
            result = OpBackend.checked(result)
            assert isinstance(result, TxnResult)
            items = [got.item for got in result.results if isinstance(got, GotItem) and got.item is not None]
            if len(items) == len(paths):
                return items
            found = {item.key for item in items}
            missing = [self.key_of(path) for path in paths if path not in found]
            if left is not None:
                raise self._will_not_come(what, missing)
            if time.monotonic() >= call.deadline:
                where = f"{what} in the store of round {self.round}"
                text = f"{where}: missing after {call.limit_s:g} s: {listed(missing)}"
                raise StoreTimeoutError(text, missing=missing)

    def _ended_or_left(self) -> str | None:
        return self.ended or self.left


class _BlockingBackend(OpBackend):
    """A backend whose coroutines never suspend."""

    name = "direct"

    def __init__(self, connections: Direct, call: _Call) -> None:
        self._connections = connections
        self._call = call
        self.limits: Limits = connections.limits

    async def execute(self, op: Op) -> Result:
        return self._connections.execute(op, self._call.deadline)

    def watch(self, prefix: str, after_revision: int) -> Watch:
        raise TypeError("a watch needs the event loop")

    async def status(self) -> BackendStatus:
        raise TypeError("ask the backend itself")

    async def close(self) -> None:
        """The connections belong to the backend that made them."""


class _Limit:
    """Converts the errors of a connection into errors of the store."""

    def __init__(self, store: DirectStore, what: str, limit_s: float, awaited: Sequence[str]) -> None:
        self._store = store
        self._what = what
        self._limit_s = limit_s
        self._awaited = awaited

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        where = f"{self._what} in the store of round {self._store.round}"
        match error:
            case DeadlineExceeded():
                text = f"{where}: no answer within {self._limit_s:g} s"
                raise StoreTimeoutError(text, missing=self._awaited) from error
            case Unavailable():  # the connections were closed
                why = self._store.ended or error
                raise StoreError(
                    f"{self._what}: the store of round {self._store.round} can no longer be used: {why}"
                ) from error
            case Rejected():
                raise StoreError(f"{where}: {error}") from error
