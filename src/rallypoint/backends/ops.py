"""Backends on top of the engine in `kv`: the calls of the contract as operations of the engine.

A subclass transports an operation to the engine and its result back. The meaning of the calls is defined only here; a
subclass must not add to it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from rallypoint.backends.contract import Backend, Got, Scanned, Session
from rallypoint.backends.session import LeaseSession
from rallypoint.errors import LeaseGone, OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import (
    Add,
    AddResult,
    BranchOp,
    Compare,
    Failure,
    FailureCode,
    Get,
    GotItem,
    GotRange,
    Grant,
    KeepAlive,
    LeaseResult,
    Op,
    Range,
    Result,
    Revoke,
    Txn,
    TxnResult,
)

R = TypeVar("R")


class OpBackend(Backend):
    """Implements the contract with `execute`. The subclass implements watches, status and closing."""

    @abstractmethod
    async def execute(self, op: Op) -> Result:
        """Execute the operation once. Raises Unavailable, or OutcomeUnknown if the operation changes data."""

    async def get(self, key: str) -> Got:
        result = await self._txn(Txn((), (Get(key),)))
        (got,) = result.results
        assert isinstance(got, GotItem)
        return Got(got.item, result.revision)

    async def scan(self, prefix: str) -> Scanned:
        result = await self._txn(Txn((), (Range(prefix),)))
        (got,) = result.results
        assert isinstance(got, GotRange)
        return Scanned(got.items, result.revision)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        return await self._txn(Txn(tuple(compares), tuple(then), tuple(otherwise)))

    async def add(self, key: str, amount: int, *, compares: Sequence[Compare] = (), lease: int = 0) -> AddResult:
        result = await self._checked(Add(key, amount, lease, tuple(compares)))
        assert isinstance(result, AddResult)
        return result

    async def grant(self, ttl_s: float) -> int:
        result = await self._checked(Grant(ttl_s))
        assert isinstance(result, LeaseResult)
        return result.lease

    async def keep_alive(self, lease: int) -> bool:
        result = await self._checked(KeepAlive(lease))
        assert isinstance(result, LeaseResult)
        return result.alive

    async def revoke(self, lease: int) -> None:
        await self._checked(Revoke(lease))

    async def open_session(
        self,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
    ) -> Session:
        return await LeaseSession.open(
            self, ttl_s, interval_s=interval_s, renew_timeout_s=renew_timeout_s, on_missed=on_missed
        )

    async def _txn(self, op: Txn) -> TxnResult:
        result = await self._checked(op)
        assert isinstance(result, TxnResult)
        return result

    async def _checked(self, op: Op) -> Result:
        return self.checked(await self.execute(op))

    @staticmethod
    def checked(result: R) -> R:
        """Return the result; raise the error of the contract if it is a failure."""
        if isinstance(result, Failure):
            if result.code is FailureCode.LEASE_GONE:
                raise LeaseGone(result.message, lease=result.lease)
            if result.code is FailureCode.TOO_OLD:
                raise OutcomeUnknown(result.message)
            if result.code is FailureCode.UNAVAILABLE:
                raise Unavailable(result.message)
            raise Rejected(result.message)
        return result


_READS = (Get, Range)


def changes_something(op: Op) -> bool:
    """Whether the operation changes data, other than the expiry of a lease."""
    if isinstance(op, Txn):
        for step in op.then:  # called for every request: faster than a generator expression
            if not isinstance(step, _READS):
                return True
        return any(not isinstance(step, _READS) for step in op.otherwise) if op.otherwise else False
    return not isinstance(op, KeepAlive)
