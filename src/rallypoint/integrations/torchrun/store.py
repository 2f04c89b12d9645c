"""The store of a round as a `torch.distributed.Store`, for Python and for C++ callers (PrefixStore, process groups).

C++ finds the methods by name, some under different names (`deleteKey`, `getNumKeys`). It holds a reference only to the
C++ part of the object: once Python collects the Python part, calls from C++ fail. So every store is kept alive until
the store of its round has ended, or `release()` is called.

The time-out is kept in the C++ part, so that `PrefixStore.set_timeout` changes it, too. Zero means no time-out, as in
torch. Errors are torch's (`DistStoreError`, worded as by TCPStore), with Rallypoint's as their cause.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any, NoReturn, SupportsIndex, SupportsInt, TypeVar

import torch.distributed as dist

from rallypoint.errors import StoreError
from rallypoint.integrations.torchrun.errors import QUEUE_EMPTY, as_store_errors
from rallypoint.integrations.torchrun.queues import QueueEmpty, Queues
from rallypoint.store import AsyncStore
from rallypoint.store.arguments import as_amount
from rallypoint.store.blocking import Store, within

T = TypeVar("T")

NO_TIMEOUT_S = 1e9
SPARE_S = 2.0
"""How much longer than its time-out a call may take, to find out what was missing."""
_kept_alive: set[TorchStore] = set()


class TorchStore(dist.Store):  # type: ignore[misc]  # torch is not typed here
    """A replacement of `torch.distributed.TCPStore` for the members of one round. May be used from any thread."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._inner = store._store
        self._queues = Queues(self._inner)
        self.set_timeout(store.timeout)
        for old in [kept for kept in _kept_alive if kept._inner.ended is not None]:
            old.release()
        _kept_alive.add(self)

    def release(self) -> None:
        """Stop keeping the store alive: C++ no longer uses it. Idempotent."""
        _kept_alive.discard(self)

    # --- keys ---------------------------------------------------------------------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        name = _key(key)
        self._do([name], lambda store: store.set(name, value))

    def get(self, key: str) -> bytes:
        """The value of a key. Waits until it exists."""
        name, limit_s = _key(key), self._limit_s()
        with as_store_errors([name], round(limit_s * 1000)):
            return self._store.get(name, limit_s)

    def add(self, key: str, value: int) -> int:
        name, amount = _key(key), _amount(value)
        return self._do([name], lambda store: store.add(name, amount))

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        name = _key(key)
        return self._do([name], lambda store: store.compare_set(name, expected_value, desired_value))

    def check(self, keys: Sequence[str]) -> bool:
        names = _keys(keys)
        return not names or self._do(names, lambda store: store.check(names))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names, limit_s = _keys(keys), self._limit_s(timeout)
        if names:
            with as_store_errors(names, round(limit_s * 1000)):
                self._store.wait(names, limit_s)

    def delete_key(self, key: str) -> bool:
        name = _key(key)
        return self._do([name], lambda store: store.delete_key(name))

    def num_keys(self) -> int:
        return self._do([], lambda store: store.num_keys())

    def list_keys(self) -> list[str]:
        return self._queue([], self._queues.keys)

    def append(self, key: str, value: bytes | str) -> None:
        name = _key(key)
        self._do([name], lambda store: store.append(name, value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names, limit_s = _keys(keys), self._limit_s()
        with as_store_errors(names, round(limit_s * 1000)):
            return self._store.multi_get(names, limit_s) if names else []

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        names = _keys(keys)
        self._do(names, lambda store: store.multi_set(names, values))

    def has_extended_api(self) -> bool:
        """True: `append`, `multi_get` and `multi_set` exist."""
        return True

    # --- queues: only for Python, C++ does not call them on a Python store -------------------------------------------

    def queue_push(self, key: str, value: bytes | str) -> None:
        name, data = _key(key), value.encode() if isinstance(value, str) else bytes(value)
        self._queue([name], lambda: self._queues.push(name, data))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first item. Waits for one, or with `block=False` raises QueueEmptyError."""
        name, limit_s = _key(key), self._limit_s()
        try:
            return self._queue([name], lambda: self._queues.pop(name, limit_s if block else None), limit_s)
        except QueueEmpty as error:
            raise QUEUE_EMPTY(str(error)) from None

    def queue_len(self, key: str) -> int:
        name = _key(key)
        return self._queue([name], lambda: self._queues.length(name))

    # --- names that C++ uses, and copies ------------------------------------------------------------------------------

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()

    def clone(self) -> TorchStore:
        """A copy on the same connection, which any thread may use anyway."""
        copy = TorchStore(self._store)
        copy.set_timeout(self.timeout)
        return copy

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TorchStore cannot be pickled: it belongs to a member of a round. In another process, connect to "
            "MASTER_ADDR:MASTER_PORT, or join the run with another handler"
        )

    def __repr__(self) -> str:
        inner = self._inner
        return f"<TorchStore round={inner.round} rank={inner.rank} world_size={inner.world_size}>"

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _do(self, names: list[str], request: Callable[[AsyncStore], Coroutine[Any, Any, T]]) -> T:
        """Execute a request within the store's time-out."""
        limit_s = self._limit_s()
        with as_store_errors(names, round(limit_s * 1000)):
            return self._store.do(request, limit_s)

    def _queue(
        self, names: list[str], request: Callable[[], Coroutine[Any, Any, T]], limit_s: float | None = None
    ) -> T:
        """Execute a request of queues on the background loop.

        A request that waits has the time limit `limit_s` itself, so the call may take a little longer.
        """
        most_s = self._limit_s() if limit_s is None else limit_s + SPARE_S
        with as_store_errors(names, round((limit_s or most_s) * 1000)):
            return self._store._call(within(most_s, request))

    def _limit_s(self, timeout: timedelta | None = None) -> float:
        limit: Any = self.timeout if timeout is None else timeout
        if not isinstance(limit, timedelta):
            raise TypeError(f"a time-out is a timedelta, not {limit!r}")
        return limit.total_seconds() if limit > timedelta(0) else NO_TIMEOUT_S


def _key(key: str | bytes) -> str:
    if isinstance(key, bytes):
        return key.decode()
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {key!r}")
    return key


def _amount(value: SupportsInt | SupportsIndex) -> int:
    """The value as a 64-bit integer. As in torch, anything that converts to int is accepted, except floats and text."""
    if isinstance(value, float) or not isinstance(value, SupportsInt | SupportsIndex):
        raise TypeError(f"the amount is an int, not {value!r}")
    try:
        return as_amount(int(value))
    except StoreError as error:
        raise TypeError(str(error)) from None


def _keys(keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str | bytes):
        raise TypeError(f"keys are a list, not {keys!r}: write [{keys!r}]")
    return [_key(key) for key in keys]
