"""The blocking face of a round's store, for any thread.

Where the backend can be asked without an event loop (`Backend.direct`), requests go straight from the caller's thread
to the server and back. The calls that programs make all the time are written out for that (`DirectStore`); the others
are those of `AsyncStore`, whose coroutines never have to wait for a loop there, because the backend under them has the
answer when it returns. Barriers, gathers and watches, and all calls on other backends, run on the background loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, TypeVar

from rallypoint.backends import forks
from rallypoint.backends.contract import BackendStatus, Direct, Late, Limits, TooOld, Watch
from rallypoint.backends.ops import OpBackend
from rallypoint.errors import OutcomeUnknown, Rejected, RendezvousError, StoreError, StoreTimeoutError, Unavailable
from rallypoint.kv.types import Add, AddResult, Exists, Failure, GotItem, Op, Put, Result, Txn, TxnResult, ValueIs
from rallypoint.store import LOOK_S, AsyncStore
from rallypoint.store_arguments import as_amount, as_bytes, checked_s, listed, several

T = TypeVar("T")


class Caller(Protocol):
    """Runs a coroutine somewhere else and waits for it."""

    def __call__(self, coro: Coroutine[Any, Any, T], /) -> T: ...


class Store:
    """The store of one round, for one member. Values are bytes or str. Time-outs are timedeltas or seconds."""

    def __init__(self, store: AsyncStore, call: Caller, owner: object) -> None:
        self._store = store
        self._call = call
        self._owner = owner  # whoever keeps the session alive lives at least as long as the store
        self._direct: DirectStore | None = None
        self._made_in: int | None = forks.count()
        """Until the direct way is asked for, with the first call: a round is entered without it."""

    @property
    def timeout(self) -> timedelta:
        """How long a call may take that is given no time-out of its own."""
        return timedelta(seconds=self._store.timeout_s)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change it."""
        self._store.timeout_s = checked_s(timeout)

    def do(self, request: Callable[[AsyncStore], Coroutine[Any, Any, T]], limit_s: float | None = None) -> T:
        """Run one of the calls of `AsyncStore` that need no watch, the shortest way there is.

        `limit_s` is for a call that has no time-out of its own; None: that of the store.
        """
        direct = self.shortcut()
        if direct is not None:
            try:
                return direct.run(request, limit_s)
            except TooOld:
                self._direct = None
        if limit_s is None:
            return self._call(request(self._store))
        return self._call(within(limit_s, lambda: request(self._store)))

    def shortcut(self) -> DirectStore | None:
        """The direct way, unless there is none, or it is not for this thread or process (a fork of it)."""
        direct = self._direct
        if direct is None and self._made_in is not None:
            direct = self._look_for_shortcut()
        return direct if direct is not None and direct.way.is_usable else None

    def _look_for_shortcut(self) -> DirectStore | None:
        """Once, and not in a fork, where there is none."""
        if self._made_in == forks.count():
            direct = self._store.direct()
            self._direct = DirectStore(self._store, direct) if direct is not None else None
        self._made_in = None
        return self._direct

    def set(self, key: str, value: bytes | str) -> None:
        direct = self.shortcut()
        if direct is not None:
            direct.put(key, value, self._store.timeout_s)
        else:
            self._call(self._store.set(key, value))

    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        return self._await("get", (key,), timeout)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._await("wait", several(keys), timeout)

    def multi_get(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> list[bytes]:
        return self._await("multi_get", several(keys), timeout)

    def _await(self, verb: str, keys: Sequence[str], timeout: timedelta | float | None) -> list[bytes]:
        limit_s = self._store.timeout_s if timeout is None else checked_s(timeout)
        direct = self.shortcut()
        if direct is not None:
            try:
                return direct.fetch(verb, keys, limit_s)
            except TooOld:
                self._direct = None
        return self._call(self._store.values(verb, keys, limit_s))

    def check(self, keys: Sequence[str]) -> bool:
        direct = self.shortcut()
        if direct is not None:
            try:
                return direct.has_all(several(keys), self._store.timeout_s)
            except TooOld:
                self._direct = None
        return self._call(self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        direct = self.shortcut()
        if direct is not None:
            return direct.increase(key, amount, self._store.timeout_s)
        return self._call(self._store.add(key, amount))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        direct = self.shortcut()
        if direct is not None:
            return direct.exchange(key, expected, desired, self._store.timeout_s)
        return self._call(self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return self.do(lambda store: store.delete_key(key))

    def num_keys(self) -> int:
        return self.do(lambda store: store.num_keys())

    def append(self, key: str, value: bytes | str) -> None:
        self.do(lambda store: store.append(key, value))

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self.do(lambda store: store.multi_set(keys, values))

    def barrier(self, name: str, timeout: timedelta | float | None = None) -> None:
        self._call(self._store.barrier(name, None if timeout is None else checked_s(timeout)))

    def gather(self, name: str, value: bytes | str, timeout: timedelta | float | None = None) -> list[bytes]:
        return self._call(self._store.gather(name, value, None if timeout is None else checked_s(timeout)))

    def watch(self, key: str) -> Iterator[bytes | None]:
        """As `AsyncStore.watch`. Each step blocks until there is something; close the iterator to stop."""
        changes = self._store.watch(key)
        try:
            while True:
                yield self._call(_step(changes))
        finally:
            # Whoever drops the iterator where it cannot be waited for leaves the rest to the loop that owns `changes`.
            with suppress(RendezvousError, RuntimeError):
                self._call(_finish(changes))


# --- without a loop ---------------------------------------------------------------------------------------------------


class _Call(threading.local):
    """What the call that this thread makes may take."""

    default_s = 0.0
    deadline = 0.0


class DirectStore(AsyncStore):
    """The calls of the same member on a connection that blocks. None of them ever waits for an event loop."""

    def __init__(self, store: AsyncStore, direct: Direct) -> None:
        self._of = store
        self.way = direct
        self._call = _Call()
        self.share(store, _DirectBackend(direct, self._call))
        self._place = self._path("")
        self._fences = (self._fence,)

    # --- what is called all the time ----------------------------------------------------------------------------------

    def fetch(self, verb: str, keys: Sequence[str], limit_s: float, deadline: float | None = None) -> list[bytes]:
        """The values of all keys, once all exist. TooOld: not this way."""
        if deadline is None:
            deadline = time.monotonic() + limit_s
        if len(keys) > (most := self.way.limits.max_txn_ops):
            parts = [keys[start : start + most] for start in range(0, len(keys), most)]
            return [value for part in parts for value in self.fetch(verb, part, limit_s, deadline)]
        of, place = self._of, self._place
        paths = (place + keys[0],) if len(keys) == 1 else tuple([place + key for key in keys])
        latest = deadline + (LOOK_S if limit_s > LOOK_S else limit_s)
        while True:
            if of.ended is not None:
                raise self._is_over(_what(verb, keys))
            left = of.left
            try:
                if left is None:
                    found = _items(self.way.await_keys(paths, deadline, latest, self._given_up))
                else:
                    found = _items(self.way.await_keys(paths, 0.0, latest))
            except (Late, Unavailable, Rejected) as error:
                if isinstance(error, Unavailable) and left is None and of.left is not None and of.ended is None:
                    continue  # look once more, without waiting
                raise self._explained(error, _what(verb, keys), limit_s, keys) from error
            values = [got.item.value for got in found if got.item is not None]
            if len(values) == len(keys):
                return values
            missing = [key for key, got in zip(keys, found, strict=True) if got.item is None]
            if left is not None:
                raise of._will_not_come(_what(verb, keys), missing)
            if time.monotonic() >= deadline:
                raise self._not_there(_what(verb, keys), missing, limit_s)

    def _given_up(self) -> str | None:
        return self._of.given_up

    def has_all(self, keys: Sequence[str], limit_s: float) -> bool:
        """`check`."""
        place, deadline, most = self._place, time.monotonic() + limit_s, self.way.limits.max_txn_ops
        self._check_open("check")
        try:
            for start in range(0, len(keys), most):
                paths = [place + key for key in keys[start : start + most]]
                for got in _items(self.way.await_keys(paths, 0.0, deadline)):
                    if got.item is None:
                        return False
            return True
        except (Late, Unavailable, Rejected) as error:
            raise self._explained(error, "check", limit_s) from error

    def increase(self, key: str, amount: int, limit_s: float) -> int:
        """`add`."""
        op = Add(self._place + key, as_amount(amount), self._lease, self._fences)
        result = self._execute("add", key, op, limit_s)
        assert isinstance(result, AddResult)
        if not result.committed:
            raise self._fenced(f"add({key!r})")
        return result.value

    def put(self, key: str, value: bytes | str, limit_s: float) -> None:
        """`set`."""
        op = Txn(self._fences, (Put(self._place + key, as_bytes(value), self._lease),))
        result = self._execute("set", key, op, limit_s)
        assert isinstance(result, TxnResult)
        if not result.committed:
            raise self._fenced(f"set({key!r})")

    def exchange(self, key: str, expected: bytes | str, desired: bytes | str, limit_s: float) -> bytes:
        """`compare_set`."""
        wanted = expected if type(expected) is bytes else as_bytes(expected)
        new = desired if type(desired) is bytes else as_bytes(desired)
        path, absent, deadline = self._place + key, not wanted, time.monotonic() + limit_s
        put = (Put(path, new, self._lease),)
        while True:
            op = Txn((self._fences[0], Exists(path, False) if absent else ValueIs(path, wanted)), put)
            result = self._execute("compare_set", key, op, limit_s, deadline)
            assert isinstance(result, TxnResult)
            if result.committed:
                return new
            self._check_fence(f"compare_set({key!r})", result)
            held, absent = self._refused(result, wanted)
            if held is not None:
                return held

    def _execute(self, verb: str, key: str, op: Op, limit_s: float, deadline: float | None = None) -> Result:
        if self._of.ended is not None:
            raise self._is_over(f"{verb}({key!r})")
        try:
            until = time.monotonic() + limit_s if deadline is None else deadline
            result = self.way.execute(op, until)
            return OpBackend.checked(result) if type(result) is Failure else result
        except (Late, Unavailable, Rejected) as error:
            raise self._explained(error, f"{verb}({key!r})", limit_s) from error

    def _check_open(self, what: str) -> None:
        if self._of.ended is not None:
            raise self._is_over(what)

    def _is_over(self, what: str) -> StoreError:
        return StoreError(f"{what}: the store of round {self.round} can no longer be used: {self._of.ended}")

    def _explained(self, error: Exception, what: str, limit_s: float, awaited: Sequence[str] = ()) -> Exception:
        """The error of the store that one of the connection stands for."""
        if isinstance(error, TooOld):
            return error
        if isinstance(error, Late):
            text = f"{what} in the store of round {self.round}: no answer within {limit_s:g} s"
            return StoreTimeoutError(text, missing=awaited)
        if isinstance(error, Unavailable):  # the connection was closed for good
            why = self._of.ended or error
            return StoreError(f"{what}: the store of round {self.round} can no longer be used: {why}")
        return StoreError(f"{what} in the store of round {self.round}: {error}")

    def _not_there(self, what: str, missing: Sequence[str], limit_s: float) -> StoreTimeoutError:
        where = f"{what} in the store of round {self.round}"
        return StoreTimeoutError(f"{where}: not there within {limit_s:g} s: {listed(missing)}", missing=missing)

    # --- all others ---------------------------------------------------------------------------------------------------

    def run(self, request: Callable[[AsyncStore], Coroutine[Any, Any, T]], limit_s: float | None = None) -> T:
        """Drive a call to its end. TooOld: not this way."""
        self._call.default_s = self._of.timeout_s if limit_s is None else limit_s
        coro = request(self)
        try:
            coro.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        coro.close()
        raise RuntimeError("a direct call has to end by itself")

    def _limit(
        self, what: str, timeout_s: float | None = None, awaited: Sequence[str] = ()
    ) -> AbstractAsyncContextManager[None]:
        limit_s = self._call.default_s if timeout_s is None else timeout_s
        self._call.deadline = time.monotonic() + limit_s
        return _DirectLimit(self, what, limit_s, awaited)

    async def _reach(self, what: str, request: Callable[[], Awaitable[T]], *, harmless: bool = False) -> T:
        """The connection itself tries until the deadline."""
        self._check_open(what)
        try:
            return await request()
        except OutcomeUnknown:
            if harmless:
                return await request()
            raise

    async def check(self, keys: Sequence[str]) -> bool:
        return self.has_all(several(keys), self._call.default_s)

    async def values(self, verb: str, keys: Sequence[str], timeout_s: float | None) -> list[bytes]:
        return self.fetch(verb, keys, self._call.default_s if timeout_s is None else timeout_s)


class _DirectBackend(OpBackend):
    """The contract's requests, executed while the caller waits."""

    name = "direct"

    def __init__(self, direct: Direct, call: _Call) -> None:
        self._direct = direct
        self._call = call
        self.limits: Limits = direct.limits

    async def execute(self, op: Op) -> Result:
        return self._direct.execute(op, self._call.deadline)

    def watch(self, prefix: str, after_revision: int) -> Watch:
        raise NotImplementedError("a watch needs the background loop")

    async def status(self) -> BackendStatus:
        raise NotImplementedError("ask the backend itself")

    async def close(self) -> None:
        """It belongs to the backend."""


class _DirectLimit:
    """Turns what goes wrong on the connection into the store's errors."""

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
        if isinstance(error, Late | Unavailable | Rejected):
            raise self._store._explained(error, self._what, self._limit_s, self._awaited) from error


def _items(result: Result) -> tuple[GotItem, ...]:
    if type(result) is not TxnResult:
        result = OpBackend.checked(result)
        assert isinstance(result, TxnResult)
    return result.results  # type: ignore[return-value]  # so `await_keys` says


def _what(verb: str, keys: Sequence[str]) -> str:
    return f"get({keys[0]!r})" if verb == "get" else verb


async def _step(changes: AsyncGenerator[T, None]) -> T:
    return await anext(changes)


async def _finish(changes: AsyncGenerator[object, None]) -> None:
    await changes.aclose()


async def within(limit_s: float, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """A call of a store, with a limit around it."""
    try:
        async with asyncio.timeout(limit_s):
            return await call()
    except StoreTimeoutError:
        raise
    except TimeoutError:
        raise StoreTimeoutError(f"no answer from the store within {limit_s:g} s") from None
