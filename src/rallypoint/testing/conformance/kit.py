"""The kit of the backend checks, their error, and the runner of several checks.

A check is an `async def check_...(kit)` whose docstring is the promise that it checks. It returns, or it raises
`NotConforming` with the promise and what was seen, or an unexpected error of the backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from rallypoint.backends.contract import Backend
from rallypoint.errors import BackendError
from rallypoint.kv.types import Batch, DeleteRange, Item, Put, TxnResult

_T = TypeVar("_T")
_E = TypeVar("_E", bound=BaseException)


@dataclass(frozen=True)
class BackendKit:
    """A backend to check. Its store must have no other writers, and need not be empty."""

    connect: Callable[[], Awaitable[Backend]]
    """Opens a new connection, always to the same store."""
    advance: Callable[[float], Awaitable[None]]
    """Lets this many seconds of the backend's time pass: `asyncio.sleep`, on a virtual or on a real loop."""
    prefix: str
    """The checks use only keys under it. Different for each check."""
    lease_slack_s: float
    """How much later than its time to live a lease may end."""
    ttl_s: float = 2.0
    """The time to live of the leases of the checks: at least the backend's minimum."""
    patience_s: float = 10.0
    """The longest wait for an event that should happen at once."""
    history_limit: int | None = None
    """An old watch is refused with `HistoryGone` after this many changes; None: the history has no known bound."""
    seed: int = 0
    """The seed of the random history."""

    def key(self, name: str) -> str:
        """A key under this check's prefix."""
        return self.prefix + name

    async def until_expired(self) -> None:
        """Let so much time pass that a lease without renewals has expired."""
        await self.advance(self.ttl_s + self.lease_slack_s)

    async def soon(self, promise: str, awaitable: Awaitable[_T]) -> _T:
        """The result; NotConforming if it takes longer than `patience_s`."""
        try:
            async with asyncio.timeout(self.patience_s):
                return await awaitable
        except TimeoutError:
            raise NotConforming(promise, f"nothing for {self.patience_s:g} s") from None

    @asynccontextmanager
    async def connections(self, count: int) -> AsyncIterator[list[Backend]]:
        """New connections; at the end the keys of the check are deleted and the connections closed."""
        async with AsyncExitStack() as stack:
            backends: list[Backend] = []
            for _ in range(count):
                backends.append(await self.connect())
                stack.push_async_callback(backends[-1].close)
            stack.push_async_callback(self._clean, backends[0])
            yield backends

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Backend]:
        """One new connection, as in `connections`."""
        async with self.connections(1) as (backend,):
            yield backend

    @asynccontextmanager
    async def two_connections(self) -> AsyncIterator[tuple[Backend, Backend]]:
        """Two new connections, as in `connections`."""
        async with self.connections(2) as (one, other):
            yield one, other

    async def _clean(self, backend: Backend) -> None:
        # Without keys, a lease that expires later makes no revision and so does not affect other checks.
        with suppress(BackendError):
            await backend.txn((), (DeleteRange(self.prefix),))


class NotConforming(Exception):
    """A backend broke a promise of the contract."""

    def __init__(self, promise: str, seen: str) -> None:
        super().__init__(f"promised: {promise}; seen: {seen}")
        self.promise = promise
        self.seen = seen


Check: TypeAlias = Callable[[BackendKit], Awaitable[None]]


def expect(promise: str, condition: bool, seen: object) -> None:
    """NotConforming unless the condition holds."""
    if not condition:
        raise NotConforming(promise, f"{seen!r}")


def expect_same(promise: str, seen: object, wanted: object) -> None:
    """NotConforming unless both are equal."""
    if seen != wanted:
        raise NotConforming(promise, f"{_short(seen)} instead of {_short(wanted)}")


async def expect_error(promise: str, error_type: type[_E], awaitable: Awaitable[object]) -> _E:
    """The error; NotConforming if none or another one was raised."""
    try:
        result = await awaitable
    except error_type as error:
        return error
    except Exception as error:
        raise NotConforming(promise, f"{error!r} instead of {error_type.__name__}") from error
    raise NotConforming(promise, f"{_short(result)} instead of {error_type.__name__}")


async def put(backend: Backend, key: str, value: bytes = b"", lease: int = 0) -> int:
    """Write one key; the revision."""
    return (await backend.txn((), (Put(key, value, lease),))).revision


async def value_of(backend: Backend, key: str) -> bytes | None:
    """The value of a key; None if it is absent."""
    item = (await backend.get(key)).item
    return None if item is None else item.value


async def item_of(backend: Backend, key: str) -> Item:
    """The item of a key that has just been written."""
    item = (await backend.get(key)).item
    if item is None:
        raise NotConforming("a key that was written is there", f"{key!r} is absent")
    return item


def results_of(result: TxnResult, wanted: int) -> tuple[object, ...]:
    """The answers of a transaction; NotConforming unless there is one per operation."""
    expect_same("a transaction gives one answer per operation", len(result.results), wanted)
    return result.results


def changes_of(batch: Batch) -> dict[str, bytes | None]:
    """The changes of a batch: key -> value, None for a removed key."""
    return {change.key: None if change.item is None else change.item.value for change in batch.changes}


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """The results of several checks."""

    passed: tuple[str, ...]
    failed: dict[str, Exception]

    @property
    def conforming(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        lines = [f"{len(self.passed)} of {len(self.passed) + len(self.failed)} checks passed"]
        lines += [f"{name}: {type(error).__name__}: {error}" for name, error in self.failed.items()]
        return "\n".join(lines)


async def run_each(kit: BackendKit, checks: Iterable[Check]) -> Report:
    """Run all checks one after the other, each under a prefix of its own; a failing check does not stop the others."""
    passed: list[str] = []
    failed: dict[str, Exception] = {}
    for check in checks:
        name = name_of(check)
        try:
            await check(replace(kit, prefix=f"{kit.prefix}{name}/"))
        except Exception as error:
            failed[name] = error
        else:
            passed.append(name)
    return Report(tuple(passed), failed)


def name_of(check: Check) -> str:
    """The name of a check: that of its function."""
    return str(getattr(check, "__name__", repr(check)))


def _short(value: object, limit: int = 400) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
