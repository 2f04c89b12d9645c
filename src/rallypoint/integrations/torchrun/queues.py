"""Queues and the list of keys in the store of a round: the features of newer torch stores that `AsyncStore` lacks.

It uses private parts of `AsyncStore`: the same connection, fence and prefix. Each item of a queue is a key of its own,
numbered by a counter, so that pushes do not wait for each other. The client that deletes the key has popped the item.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from rallypoint.errors import HistoryGone, RallypointError, Unavailable
from rallypoint.kv.types import Delete, Exists, GotRange, Item, Put, Range
from rallypoint.store.async_store import RETRY_S, AsyncStore


class QueueEmpty(RallypointError):
    """The queue is empty, and the call was not to wait."""


class Queues:
    """The queues of one round's store."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store

    async def push(self, key: str, value: bytes) -> None:
        """Append an item."""
        store, what = self._store, f"queue_push({key!r})"
        counter = f"{store._root}queued/{quote(key, safe='')}"
        async with store._limit(what):
            added = await store._reach(
                what, lambda: store._backend.add(counter, 1, compares=(store._fence,), lease=store._lease)
            )
            if not added.committed:
                raise store._fenced(what)
            await store._transact(what, (), [Put(f"{self._place(key)}{added.value:016d}", value, store._lease)])

    async def pop(self, key: str, timeout_s: float | None) -> bytes:
        """Remove the first item, waiting for one. With `timeout_s` None, raise QueueEmpty instead of waiting."""
        what = f"queue_pop({key!r})"
        if timeout_s is None:
            async with self._store._limit(what):
                taken = await self._take(what, key)
            if taken is None:
                raise QueueEmpty("queue is empty")
            return taken
        async with self._store._limit(what, timeout_s):
            while (taken := await self._take(what, key)) is None:
                await self._await_more(what, key)
            return taken

    async def length(self, key: str) -> int:
        """The number of items in the queue."""
        what = f"queue_len({key!r})"
        async with self._store._limit(what):
            return (await self._range(what, Range(self._place(key), count_only=True))).count

    async def keys(self) -> list[str]:
        """All keys of the store, without those of queues."""
        place = self._store._path("")
        async with self._store._limit("list_keys"):
            found = await self._range("list_keys", Range(place))
        return [item.key.removeprefix(place) for item in found.items]

    def _place(self, key: str) -> str:
        return f"{self._store._root}queue/{quote(key, safe='')}/"

    async def _range(self, what: str, wanted: Range) -> GotRange:
        result = await self._store._reach(what, lambda: self._store._backend.txn((), [wanted]), idempotent=True)
        (found,) = result.results
        assert isinstance(found, GotRange)
        return found

    async def _take(self, what: str, key: str) -> bytes | None:
        while True:
            first: tuple[Item, ...] = (await self._range(what, Range(self._place(key), limit=1))).items
            if not first:
                return None
            path = first[0].key
            if (await self._store._transact(what, [Exists(path, True)], [Delete(path)])).committed:
                return first[0].value

    async def _await_more(self, what: str, key: str) -> None:
        """Wait until an item may have been pushed. It may return too early: the caller checks."""
        store, place = self._store, self._place(key)
        read = await store._reach(what, lambda: store._backend.scan(place), idempotent=True)
        if read.items:
            return
        watch = store._backend.watch(place, read.revision)
        try:
            async for _ in watch:
                return
        except (HistoryGone, Unavailable):
            await asyncio.sleep(RETRY_S)
        finally:
            watch.cancel()
