"""`add` on a store that has none: read, compare, write, again until nobody came in between, and never twice.

Each write also leaves a mark: a key of this very request. Whoever does not know whether his write was done sends it
again, unchanged: it compares the revision that was read, so only one of them can be done; and if that is refused, the
mark says whether the first one was. A mark is removed with the next write; those that are left go with their lease.
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
from rallypoint.backends.etcd.words import holds, reader_of
from rallypoint.errors import BackendError, LeaseGone, OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import AddResult, BranchOp, Compare, Delete, Get, GotItem, Item, ModRevisionIs, Put, TxnResult

if TYPE_CHECKING:
    from rallypoint.backends.contract import Backend

LEAST_NUMBER, GREATEST_NUMBER = -(2**63), 2**63 - 1
MOST_DIGITS = 19
MARKS_TTL_S = 300.0
CLOSE_S = 2.0
MOST_REMOVED = 8
"""How many old marks a write removes."""


class Adder:
    """Adds for one backend, whose marks are under one prefix."""

    def __init__(self, backend: Backend, marks: str, rng: random.Random) -> None:
        self._backend = backend
        self._marks = marks
        self._rng = rng
        self._numbers = count(1)
        self._settled: list[str] = []
        """Marks that nobody will ask for any more."""
        self._lease = 0
        self._granted_at = float("-inf")

    async def add(self, key: str, amount: int, compares: Sequence[Compare], lease: int) -> AddResult:
        """Raises Unavailable, Rejected, LeaseGone; OutcomeUnknown only if it stays unknown until it is given up."""
        marks_lease = await self._ensure_lease()
        own_mark = f"{self._marks}/{next(self._numbers)}"
        old_marks, self._settled = self._settled[:MOST_REMOVED], self._settled[MOST_REMOVED:]
        reads: list[BranchOp] = [Get(key), Get(own_mark), *map(reader_of, compares)]
        backoff = Backoff(self._rng, first_s=0.002, most_s=0.1)
        base: Item | None = None
        is_read = False
        while True:
            value = _sum(key, base, amount)
            unchanged = ModRevisionIs(key, base.mod_revision if base is not None else 0)
            writes: list[BranchOp] = [Put(key, b"%d" % value, lease), Put(own_mark, b"", marks_lease)]
            writes += map(Delete, old_marks)
            result = await self._settle([unchanged, *compares], writes, reads)
            if result.committed:
                self._settled.append(own_mark)
                return AddResult(True, result.revision, value)
            own, done, *rest = result.results
            assert isinstance(own, GotItem)
            assert isinstance(done, GotItem)
            if done.item is not None:
                mark("etcd.add_was_done")
                self._settled.append(own_mark)
                return AddResult(True, done.item.mod_revision, value)
            if not all(holds(compare, read) for compare, read in zip(compares, rest, strict=True)):
                return AddResult(False, result.revision, 0)
            base = own.item
            if is_read:
                await backoff.sleep()  # somebody came in between
            is_read = True

    async def _settle(
        self, compares: Sequence[Compare], writes: Sequence[BranchOp], reads: Sequence[BranchOp]
    ) -> TxnResult:
        """Sent until the outcome is known. It compares a revision, and so is done at most once."""
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
                raise OutcomeUnknown(f"{unknown}; its lease has ended meanwhile") from None
            await backoff.sleep()

    async def _ensure_lease(self) -> int:
        """The lease of the marks: one that lasts longer than any call."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._granted_at > MARKS_TTL_S / 2:
            now = loop.time()
            self._lease = await self._backend.grant(MARKS_TTL_S)
            self._granted_at = now
        return self._lease

    async def close(self, revoke: Callable[[int], Awaitable[None]]) -> None:
        """Remove the marks, if that is quickly done: time does it else."""
        lease, self._lease = self._lease, 0
        if lease:
            with suppress(BackendError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await revoke(lease)


def _sum(key: str, item: Item | None, amount: int) -> int:
    """The new number. Rejected if there is none."""
    number = 0 if item is None else _number(item.value)
    if number is None:
        raise Rejected(f"{key!r} holds no decimal number that could be added to")
    value = number + amount
    if not LEAST_NUMBER <= value <= GREATEST_NUMBER:
        raise Rejected(f"the sum under {key!r} would not fit into 64 bits")
    return value


def _number(text: bytes) -> int | None:
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > MOST_DIGITS:
        return None
    return int(text)
