"""The round's key-value store for user code: the calls of `torch.distributed.Store`, and barrier, gather and watch.

`AsyncStore` is the implementation, on any backend; `blocking` is its blocking API. Keys are under the round's own
prefix, so that a round never sees the keys of another. Every write compares that the writer is still a member of the
round: a node that lost its session cannot change anything (`StoreFencedError`).

A call ends within its time-out, plus at most `CHECK_S` for finding the missing keys. Until then it is retried while the
backend is unreachable. This layer must never repeat a write whose outcome is unknown: it raises `OutcomeUnknown`. Reads
and arrivals at a barrier or gather are idempotent, and are repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from rallypoint.backends.contract import Backend, Direct, Watch
from rallypoint.errors import (
    HistoryGone,
    OutcomeUnknown,
    Rejected,
    StoreError,
    StoreFencedError,
    StoreTimeoutError,
    Unavailable,
)
from rallypoint.kv.types import (
    BranchOp,
    Compare,
    Delete,
    Deleted,
    DeleteRange,
    Exists,
    Get,
    GotItem,
    GotRange,
    Item,
    ModRevisionIs,
    Put,
    Range,
    TxnResult,
    ValueIs,
)
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.store.arguments import as_amount, as_bytes, as_key, listed, several

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 300.0
RETRY_S = 0.1
CHECK_S = 1.0
"""The time limit, after a time-out, for finding the missing keys or ranks."""


@dataclass(slots=True)
class StoreStatus:
    """The state shared by the blocking and the asynchronous API of one store."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    ended: str | None = None
    """Why the store can no longer be used, or None."""
    left: str | None = None
    """Why the node left the round, or None."""


class AsyncStore:
    """The store of one round, for one member. Values are bytes; a str is encoded as UTF-8.

    Invalid arguments (a key that is no str, an amount that is no int) raise TypeError or UnicodeEncodeError before
    anything is sent.
    """

    def __init__(
        self, backend: Backend, keys: RunKeys, node_id: str, joined: Joined, same: AsyncStore | None = None
    ) -> None:
        """`same`: another API of this store, with which it shares the time-out and the end."""
        self.joined = joined
        self.keys = keys
        self.node_id = node_id
        self._backend = backend
        self._status: StoreStatus = StoreStatus() if same is None else same._status
        self._root = keys.store(joined.number)
        self._user_data = keys.user_data(joined.number)
        self._lease = joined.data_lease
        self._fence = ModRevisionIs(keys.node(node_id), joined.own_revision)
        self._uses: dict[str, int] = {}
        self._waits: set[Watch] = set()
        """The watches of calls that wait for a key."""
        self.owner: object = None  # the handler: the session lives at least as long as the store

    @property
    def round(self) -> int:
        return self.joined.number

    @property
    def rank(self) -> int:
        return self.joined.rank

    @property
    def world_size(self) -> int:
        return self.joined.size

    @property
    def timeout_s(self) -> float:
        """The default time-out of calls."""
        return self._status.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._status.timeout_s = timeout_s

    @property
    def ended(self) -> str | None:
        """Why the store can no longer be used, or None."""
        return self._status.ended

    @property
    def left(self) -> str | None:
        """Why the node left the round, or None."""
        return self._status.left

    def direct(self) -> Direct | None:
        """The blocking connections of the backend, if it has any."""
        return self._backend.direct()

    def end(self, why: str) -> None:
        """The backend is about to be closed: current and later calls raise StoreError."""
        self._status.ended = why

    def leave(self, why: str) -> None:
        """The node has left the round: existing keys can still be read, but waits for missing keys raise StoreError."""
        if self.left is None:
            self._status.left = why
            for watch in list(self._waits):
                watch.cancel()

    def _will_not_come(self, what: str, missing: Sequence[str]) -> StoreError:
        return StoreError(
            f"{what} in the store of round {self.round}: missing keys are no longer awaited, since this node left the "
            f"round ({self.left}): {listed(missing)}"
        )

    # --- the calls of torch.distributed.Store -------------------------------------------------------------------------

    async def set(self, key: str, value: bytes | str) -> None:
        """Write a key."""
        await self._write(f"set({key!r})", self._put(key, as_bytes(value)))

    async def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of a key. Waits until it exists."""
        return (await self.values("get", [key], timeout_s))[0]

    async def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Wait until all keys exist. The error names the missing ones."""
        await self.values("wait", several(keys), timeout_s)

    async def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist now."""
        async with self._limit("check"):
            paths = [self._path(key) for key in several(keys)]
            return all(item is not None for item in await self._get_many("check", paths))

    async def add(self, key: str, amount: int) -> int:
        """Add to the decimal number of a key (absent: 0); the new number. Executed once, even if it is sent again."""
        path, what, amount = self._path(key), f"add({key!r})", as_amount(amount)
        async with self._limit(what):
            result = await self._reach(
                what, lambda: self._backend.add(path, amount, compares=(self._fence,), lease=self._lease)
            )
        if not result.committed:
            raise self._fenced(what)
        return result.value

    async def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write `desired` if the value is `expected`, or the key is absent and `expected` empty. The resulting value.

        As in torch's store, the result for an absent key and a non-empty `expected` is `expected`; nothing is written.
        """
        wanted, new = as_bytes(expected), as_bytes(desired)
        what = f"compare_set({key!r})"
        absent = not wanted
        async with self._limit(what):
            while True:
                result = await self._transact(what, [self._expects(key, wanted, absent)], [self._put(key, new)])
                if result.committed:
                    return new
                held, absent = self._refused(result, wanted)
                if held is not None:
                    return held

    def _expects(self, key: str, wanted: bytes, absent: bool) -> Compare:
        return Exists(self._path(key), False) if absent else ValueIs(self._path(key), wanted)

    def _refused(self, result: TxnResult, wanted: bytes) -> tuple[bytes | None, bool]:
        """The result of `compare_set`; None: retry, and whether the retry expects the key to be absent."""
        item = _item(result, 1)
        if item is not None and item.value != wanted:
            return item.value, False
        if item is None and wanted:
            return wanted, False
        return None, item is None  # `expected` is empty, and the key is empty or has just been deleted

    async def delete_key(self, key: str) -> bool:
        """Delete a key; whether it existed."""
        result = await self._write(f"delete_key({key!r})", Delete(self._path(key)))
        (deleted,) = result.results
        assert isinstance(deleted, Deleted)
        return deleted.count > 0

    async def num_keys(self) -> int:
        """The number of keys in the store."""
        count = Range(self._path(""), count_only=True)
        async with self._limit("num_keys"):
            result = await self._reach("num_keys", lambda: self._backend.txn((), [count]), idempotent=True)
        (counted,) = result.results
        assert isinstance(counted, GotRange)
        return counted.count

    async def append(self, key: str, value: bytes | str) -> None:
        """Append bytes to the value of a key (absent: empty)."""
        path, tail, what = self._path(key), as_bytes(value), f"append({key!r})"
        async with self._limit(what):
            while True:
                item = (await self._reach(what, lambda: self._backend.get(path), idempotent=True)).item
                unchanged = ModRevisionIs(path, item.mod_revision if item else 0)
                whole = (item.value if item else b"") + tail
                if (await self._transact(what, [unchanged], [self._put(key, whole)])).committed:
                    return

    async def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of all keys. Waits until all exist."""
        return await self.values("multi_get", several(keys), timeout_s)

    async def values(self, verb: str, keys: Sequence[str], timeout_s: float | None) -> list[bytes]:
        """Implements `get`, `wait` and `multi_get`: wait for all keys and read them."""
        what = f"get({keys[0]!r})" if verb == "get" else verb
        async with self._limit(what, timeout_s, keys):
            items = await self._await_items(what, [self._path(key) for key in keys])
            return [item.value for item in items]

    async def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Write several keys in as few requests as the backend allows. Not atomic.

        The last value of a repeated key counts.
        """
        if len(several(keys)) != len(values):
            raise StoreError(f"multi_set needs as many values as keys: {len(keys)} keys, {len(values)} values")
        puts = list({key: self._put(key, as_bytes(value)) for key, value in zip(keys, values, strict=True)}.values())
        async with self._limit("multi_set"):
            for part in self._parts(puts):
                await self._transact("multi_set", (), part)

    # --- barrier, gather and watch ------------------------------------------------------------------------------------

    async def barrier(self, name: str, timeout_s: float | None = None) -> None:
        """Wait until all ranks have made this call as often as this rank. The error names the absent ranks."""
        await self._meet("barrier", name, b"", timeout_s)

    async def gather(self, name: str, value: bytes | str, timeout_s: float | None = None) -> list[bytes]:
        """The values of all ranks, in rank order. Waits for all ranks; the error names the absent ones."""
        return await self._meet("gather", name, as_bytes(value), timeout_s)

    async def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        """The current value, if any, and each new value; None: deleted. After an outage, only the latest one."""
        async with aclosing(self._follow(f"watch({key!r})", self._path(key))) as items:
            async for item in items:
                yield None if item is None else item.value

    async def _meet(self, verb: str, name: str, value: bytes, timeout_s: float | None) -> list[bytes]:
        """Arrive, wait until all ranks have arrived, and read their values.

        The cost per rank is one write and one small push, independent of the number of ranks. Arriving is idempotent,
        so a write with an unknown outcome is repeated. The last rank to arrive deletes the keys of the previous use,
        from which all ranks have returned.
        """
        use = self._uses[f"{verb} {name}"] = self._uses.get(f"{verb} {name}", 0) + 1
        place = f"{self._root}{verb}/{quote(name, safe='')}/"
        base = f"{place}{use}/"
        own = Put(f"{base}in/{self.rank:08d}", value, self._lease)
        arrive: list[BranchOp] = [own, Range(base + "in/", count_only=True)]
        finish: list[BranchOp] = [Put(base + "done", b"", self._lease), DeleteRange(f"{place}{use - 1}/")]
        what = f"{verb}({name!r})"
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                arrived = (await self._transact(what, (), arrive, idempotent=True)).results[1]
                assert isinstance(arrived, GotRange)
                if arrived.count == self.world_size:
                    await self._transact(what, (), finish, idempotent=True)
                else:
                    await self._await_item(what, base + "done")
                if verb == "barrier":
                    return []
                brought = await self._reach(what, lambda: self._backend.scan(base + "in/"), idempotent=True)
                return [item.value for item in brought.items]
        except BaseException as error:
            self._uses[f"{verb} {name}"] = use - 1  # a retry joins the same use
            if not isinstance(error, TimeoutError):
                raise
            values = await self._finish_or_name_absent(what, base, finish, limit_s)
            self._uses[f"{verb} {name}"] = use
            return values

    async def _finish_or_name_absent(self, what: str, base: str, finish: list[BranchOp], limit_s: float) -> list[bytes]:
        """After the time-out: StoreTimeoutError with the absent ranks. If no rank is absent, the last one died before
        it could finish the use: then this rank finishes it."""
        try:
            async with asyncio.timeout(min(CHECK_S, limit_s)):
                items = (await self._reach(what, lambda: self._backend.scan(base + "in/"), idempotent=True)).items
                if len(items) == self.world_size:
                    await self._transact(what, (), finish, idempotent=True)
                    return [item.value for item in items]
        except (TimeoutError, StoreError) as error:
            text = f"{what} of round {self.round}: no answer from the store within {limit_s:g} s"
            raise error if isinstance(error, StoreFencedError) else StoreTimeoutError(text) from None
        present = {int(item.key.rpartition("/")[2]) for item in items}
        absent = [rank for rank in range(self.world_size) if rank not in present]
        raise StoreTimeoutError(
            f"{what} of round {self.round}: {len(present)} of {self.world_size} ranks came within {limit_s:g} s; "
            f"absent: {listed(absent)}",
            missing=absent,
        ) from None

    # --- requests -----------------------------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._user_data}{as_key(key)}"

    def key_of(self, path: str) -> str:
        """The user's key of a path."""
        return path.removeprefix(self._path(""))

    def _put(self, key: str, value: bytes) -> Put:
        return Put(self._path(key), value, self._lease)

    async def _write(self, what: str, op: BranchOp) -> TxnResult:
        async with self._limit(what):
            return await self._transact(what, (), [op])

    async def _transact(
        self, what: str, compares: Sequence[Compare], ops: Sequence[BranchOp], *, idempotent: bool = False
    ) -> TxnResult:
        """A fenced transaction; it may be refused by `compares`, never by the fence."""
        fenced = (self._fence, *compares)
        result = await self._reach(what, lambda: self._backend.txn(fenced, ops), idempotent=idempotent)
        if not result.committed:
            self._check_fence(what, result)
        return result

    def _check_fence(self, what: str, refused: TxnResult) -> None:
        own = _item(refused, 0)
        if own is None or own.mod_revision != self._fence.revision:
            raise self._fenced(what)

    def _fenced(self, what: str) -> StoreFencedError:
        return StoreFencedError(
            f"{what}: this node is no longer a member of round {self.round} (it left, or its session was lost): "
            f"nothing was written; join again"
        )

    async def _get_many(self, what: str, paths: Sequence[str]) -> list[Item | None]:
        found: list[Item | None] = []
        for part in self._parts([Get(path) for path in paths]):
            result = await self._reach(what, partial(self._backend.txn, (), part), idempotent=True)
            found += [got.item for got in result.results if isinstance(got, GotItem)]
        return found

    def _parts(self, ops: Sequence[BranchOp]) -> Iterator[list[BranchOp]]:
        """Split into as few transactions as the backend's limits allow. A value above the limit gets its own one."""
        limits = self._backend.limits
        part: list[BranchOp] = []
        size = 0
        for op in ops:
            more = len(op.value) if isinstance(op, Put) else 0
            if part and (len(part) >= limits.max_txn_ops or size + more > limits.max_txn_bytes):
                yield part
                part, size = [], 0
            part.append(op)
            size += more
        if part:
            yield part

    async def _await_items(self, what: str, paths: Sequence[str]) -> list[Item]:
        """The items at all paths. Waits until all exist."""
        items = await self._get_many(what, paths) if len(paths) > 1 else [None] * len(paths)
        return [item or await self._await_item(what, path) for path, item in zip(paths, items, strict=True)]

    async def _await_item(self, what: str, path: str) -> Item:
        async with aclosing(self._follow(what, path, waits=True)) as items:
            async for item in items:
                if item is not None:
                    return item
        raise AssertionError("the stream has no end")

    async def _follow(self, what: str, path: str, *, waits: bool = False) -> AsyncGenerator[Item | None, None]:
        """The current item (if the key exists) and each change; None: deleted. Has no end.

        With `waits`, StoreError if the key does not exist when the node leaves the round.
        """
        seen, present = 0, False
        while True:
            got = await self._reach(what, lambda: self._backend.get(path), idempotent=True)
            if waits and got.item is None and self.left is not None:
                raise self._will_not_come(what, [self.key_of(path)])
            was_present, present = present, got.item is not None
            if (got.item is None and was_present) or (got.item is not None and got.item.mod_revision > seen):
                yield got.item
            seen = got.revision
            watch: Watch | None = None
            try:
                watch = self._backend.watch(path, seen)
                if waits:
                    self._waits.add(watch)
                async for batch in watch:
                    seen = batch.revision
                    for change in batch.changes:
                        if change.key == path:
                            present = change.item is not None
                            yield change.item
            except (HistoryGone, Unavailable):
                await asyncio.sleep(RETRY_S)
            finally:
                if watch is not None:
                    self._waits.discard(watch)
                    watch.cancel()

    async def _reach(self, what: str, request: Callable[[], Awaitable[T]], *, idempotent: bool = False) -> T:
        """Retry until the backend answers or the caller's limit ends it. An unknown outcome: only if `idempotent`."""
        while True:
            self._check_open(what)
            try:
                return await request()
            except (Unavailable, OutcomeUnknown) as error:
                if isinstance(error, OutcomeUnknown) and not idempotent:
                    raise
                await asyncio.sleep(RETRY_S)
            except Rejected as error:
                raise StoreError(f"{what} in the store of round {self.round}: {error}") from error

    def _check_open(self, what: str) -> None:
        if self.ended is not None:
            raise StoreError(f"{what}: the store of round {self.round} can no longer be used: {self.ended}")

    def _limit(
        self, what: str, timeout_s: float | None = None, awaited: Sequence[str] = ()
    ) -> AbstractAsyncContextManager[None]:
        return _Limit(self, what, self.timeout_s if timeout_s is None else timeout_s, awaited)


class _Limit:
    """A time limit whose error names the missing ones of the awaited keys."""

    def __init__(self, store: AsyncStore, what: str, limit_s: float, awaited: Sequence[str]) -> None:
        self._store = store
        self._what = what
        self._limit_s = limit_s
        self._awaited = awaited
        self._scope = asyncio.timeout(limit_s)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await self._scope.__aexit__(*exc)
        except TimeoutError:
            raise await self._error() from None

    async def _error(self) -> StoreTimeoutError:
        what = f"{self._what} in the store of round {self._store.round}"
        missing = await self._missing() if self._awaited else None
        if missing is None:
            return StoreTimeoutError(f"{what}: no answer within {self._limit_s:g} s", missing=self._awaited)
        return StoreTimeoutError(f"{what}: missing after {self._limit_s:g} s: {listed(missing)}", missing=missing)

    async def _missing(self) -> list[str] | None:
        """The awaited keys that do not exist; None: unknown, the backend did not answer."""
        try:
            async with asyncio.timeout(min(CHECK_S, self._limit_s)):
                items = await self._store._get_many(self._what, [self._store._path(key) for key in self._awaited])
        except (TimeoutError, StoreError):
            return None
        return [key for key, item in zip(self._awaited, items, strict=True) if item is None]


def _item(result: TxnResult, index: int) -> Item | None:
    got = result.results[index]
    assert isinstance(got, GotItem)
    return got.item
