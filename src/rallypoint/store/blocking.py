"""The blocking API of a round's store, for any thread. `async_store` implements the calls; nothing is repeated here.

If the backend has blocking connections (`Backend.direct`), requests are made on the caller's thread (`direct`).
Barriers, gathers and watches, and all calls on other backends, run on the background loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from rallypoint.backends import forks
from rallypoint.errors import RendezvousError, StoreTimeoutError
from rallypoint.store.arguments import checked_s, several
from rallypoint.store.async_store import AsyncStore
from rallypoint.store.direct import DirectStore

T = TypeVar("T")


class Caller(Protocol):
    """Runs a coroutine on the background loop and waits for it."""

    def __call__(self, coro: Coroutine[Any, Any, T], /) -> T: ...


class Store:
    """The store of one round, for one member. Values are bytes or str, time-outs are timedeltas or seconds."""

    def __init__(self, store: AsyncStore, call: Caller, owner: object) -> None:
        self._store = store
        self._call = call
        self._owner = owner  # the handler: the session lives at least as long as the store
        self._direct: DirectStore | None = None
        self._forks_seen: int | None = forks.count()
        """None after the first call, which opens the blocking connections."""

    @property
    def timeout(self) -> timedelta:
        """The default time-out of calls."""
        return timedelta(seconds=self._store.timeout_s)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change the default time-out."""
        self._store.timeout_s = checked_s(timeout)

    def do(self, request: Callable[[AsyncStore], Coroutine[Any, Any, T]], limit_s: float | None = None) -> T:
        """Make a call of `AsyncStore` that needs no watch.

        `limit_s` replaces the default time-out for a call without a time-out parameter.
        """
        direct = self.usable_direct()
        if direct is not None:
            return direct.run(request, limit_s)
        if limit_s is None:
            return self._call(request(self._store))
        return self._call(within(limit_s, lambda: request(self._store)))

    def usable_direct(self) -> DirectStore | None:
        """The store on blocking connections, if this thread and process may use them."""
        if self._forks_seen is not None:
            if self._forks_seen == forks.count():  # a forked child must not use them
                connections = self._store.direct()
                self._direct = DirectStore(self._store, connections) if connections is not None else None
            self._forks_seen = None
        direct = self._direct
        return direct if direct is not None and direct.connections.is_usable else None

    def set(self, key: str, value: bytes | str) -> None:
        self.do(lambda store: store.set(key, value))

    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        limit_s = None if timeout is None else checked_s(timeout)
        return self.do(lambda store: store.get(key, limit_s))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        limit_s = None if timeout is None else checked_s(timeout)
        self.do(lambda store: store.wait(keys, limit_s))

    def multi_get(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> list[bytes]:
        limit_s = None if timeout is None else checked_s(timeout)
        return self.do(lambda store: store.multi_get(several(keys), limit_s))

    def check(self, keys: Sequence[str]) -> bool:
        return self.do(lambda store: store.check(keys))

    def add(self, key: str, amount: int) -> int:
        return self.do(lambda store: store.add(key, amount))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self.do(lambda store: store.compare_set(key, expected, desired))

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
        """As `AsyncStore.watch`. Each step blocks until the next change; close the iterator to stop."""
        changes = self._store.watch(key)
        try:
            while True:
                yield self._call(_step(changes))
        finally:
            # If waiting is not possible here (on the loop, in a fork), the loop that owns `changes` closes it.
            with suppress(RendezvousError, RuntimeError):
                self._call(_finish(changes))


async def _step(changes: AsyncGenerator[T, None]) -> T:
    return await anext(changes)


async def _finish(changes: AsyncGenerator[object, None]) -> None:
    await changes.aclose()


async def within(limit_s: float, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """A store call with a time limit."""
    try:
        async with asyncio.timeout(limit_s):
            return await call()
    except StoreTimeoutError:
        raise
    except TimeoutError:
        raise StoreTimeoutError(f"no answer from the store within {limit_s:g} s") from None
