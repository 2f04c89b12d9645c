"""Atomic `add` on a store without one: a loop of read and compare-and-write that executes each request at most once.

Each write also creates a marker key of its own. If the outcome of a write is unknown, the same write is sent again: it
compares the revision that was read, so only one of the two can be executed; if the second is refused, the marker says
whether the first was executed. A marker is removed with a later write of this process; the remaining ones end with
their lease.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.etcd.conversion import holds, reader_of
from rallypoint.errors import BackendError, LeaseGone, OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import AddResult, BranchOp, Compare, Delete, Get, GotItem, Item, ModRevisionIs, Put, TxnResult

if TYPE_CHECKING:
    from rallypoint.backends.contract import Backend

LEAST_NUMBER, GREATEST_NUMBER = -(2**63), 2**63 - 1
MOST_DIGITS = 19
MARKERS_TTL_S = 300.0
CLOSE_S = 2.0
MOST_REMOVED = 8
"""How many old markers a write removes."""


class Adder:
    """The adds of one backend; all markers are under the prefix `markers`."""

    def __init__(self, backend: Backend, markers: str, rng: random.Random) -> None:
        self._backend = backend
        self._markers = markers
        self._rng = rng
        self._numbers = count(1)
        self._settled: list[str] = []
        """Markers that are no longer needed."""
        self._lease = 0
        self._granted_at = float("-inf")

    async def add(self, key: str, amount: int, compares: Sequence[Compare], lease: int) -> AddResult:
        """Raises Unavailable, Rejected, LeaseGone; OutcomeUnknown only if the outcome cannot be found out."""
        markers_lease = await self._ensure_lease()
        own_marker = f"{self._markers}/{next(self._numbers)}"
        old_markers, self._settled = self._settled[:MOST_REMOVED], self._settled[MOST_REMOVED:]
        reads: list[BranchOp] = [Get(key), Get(own_marker), *map(reader_of, compares)]
        backoff = Backoff(self._rng, first_s=0.002, most_s=0.1)
        base: Item | None = None
        is_read = False
        while True:
            value = _sum(key, base, amount)
            unchanged = ModRevisionIs(key, base.mod_revision if base is not None else 0)
            writes: list[BranchOp] = [Put(key, b"%d" % value, lease), Put(own_marker, b"", markers_lease)]
            writes += map(Delete, old_markers)
            result = await self._settle([unchanged, *compares], writes, reads)
            if result.committed:
                self._settled.append(own_marker)
                return AddResult(True, result.revision, value)
            own, done, *rest = result.results
            assert isinstance(own, GotItem)
            assert isinstance(done, GotItem)
            if done.item is not None:
                mark("etcd.add_was_done")
                self._settled.append(own_marker)
                return AddResult(True, done.item.mod_revision, value)
            if not all(holds(compare, read) for compare, read in zip(compares, rest, strict=True)):
                return AddResult(False, result.revision, 0)
            base = own.item
            if is_read:
                await backoff.sleep()  # another writer was faster
            is_read = True

    async def _settle(
        self, compares: Sequence[Compare], writes: Sequence[BranchOp], reads: Sequence[BranchOp]
    ) -> TxnResult:
        """Send until the outcome is known. The transaction compares a revision, so it is executed at most once."""
        unknown: OutcomeUnknown | None = None
        backoff = Backoff(self._rng)
        while True:
            try:
                return await self._backend.txn(compares, writes, reads)
            except OutcomeUnknown as error:
                unknown = error
            except Unavailable as error:
                if unknown is None:
                    raise
                unknown = OutcomeUnknown(f"{unknown}; then: {error}")
            except LeaseGone as error:
                if error.lease == self._lease:
                    self._granted_at = float("-inf")
                if unknown is None:
                    raise
                raise OutcomeUnknown(f"{unknown}; its lease has ended since") from None
            await backoff.sleep()

    async def _ensure_lease(self) -> int:
        """The lease of the markers: it lasts longer than any call."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._granted_at > MARKERS_TTL_S / 2:
            now = loop.time()
            self._lease = await self._backend.grant(MARKERS_TTL_S)
            self._granted_at = now
        return self._lease

    async def close(self, revoke: Callable[[int], Awaitable[None]]) -> None:
        """Remove the markers if etcd answers quickly; otherwise they end with their lease."""
        lease, self._lease = self._lease, 0
        if lease:
            with suppress(BackendError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await revoke(lease)


def _sum(key: str, item: Item | None, amount: int) -> int:
    """The new number. Rejected if the value is not a number or the sum does not fit."""
    number = 0 if item is None else _number(item.value)
    if number is None:
        raise Rejected(f"the value of {key!r} is not a decimal number")
    value = number + amount
    if not LEAST_NUMBER <= value <= GREATEST_NUMBER:
        raise Rejected(f"the sum under {key!r} would not fit into 64 bits")
    return value


def _number(text: bytes) -> int | None:
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > MOST_DIGITS:
        return None
    return int(text)
