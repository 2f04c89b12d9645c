"""A backend whose connection a test controls: it can be cut or refused, and single writes can be withheld.

By default it passes everything on. Nothing is random: see `chaos` for random faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rallypoint.backends.contract import Backend, BackendStatus, Got, Scanned, Session, Watch
from rallypoint.backends.session import LeaseSession
from rallypoint.errors import Unavailable
from rallypoint.kv.types import AddResult, Batch, BranchOp, Compare, Put, TxnResult

_T = TypeVar("_T")

CALL_TIMEOUT_S = 5.0
"""How long a call waits while the connection is cut."""


class CuttableBackend(Backend):
    """See the module. A call that fails because of it was never executed."""

    def __init__(self, inner: Backend) -> None:
        self.name = inner.name
        self.limits = inner.limits
        self.has_coordinator = inner.has_coordinator
        self.refused = False
        """Calls fail at once, as if no server listened."""
        self.withheld: Callable[[Put], bool] | None = None
        """Transactions with a put that this rule matches wait until `release`."""
        self._inner = inner
        self._intact = asyncio.Event()
        self._intact.set()
        self._released = asyncio.Event()
        self._sessions: list[Session] = []
        self._watches: dict[_CuttableWatch, None] = {}

    def cut(self) -> None:
        """From now on calls time out and watches stall."""
        self._intact.clear()

    def refuse(self) -> None:
        """From now on calls fail at once and watches stall."""
        self.refused = True
        self._intact.clear()

    def heal(self) -> None:
        """End `cut` and `refuse`; pending calls and watches continue."""
        self.refused = False
        self._intact.set()
        for watch in self._watches:
            watch.poke()

    def withhold(self, rule: Callable[[Put], bool]) -> None:
        """Hold back every transaction with a put that the rule matches."""
        self.withheld = rule
        self._released.clear()

    def release(self) -> None:
        """Execute the transactions that were held back, and end the rule."""
        self.withheld = None
        self._released.set()

    @property
    def is_intact(self) -> bool:
        return self._intact.is_set()

    # --- the contract -------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> Got:
        return await self._call(lambda: self._inner.get(key))

    async def scan(self, prefix: str) -> Scanned:
        return await self._call(lambda: self._inner.scan(prefix))

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        if self.withheld is not None and any(self.withheld(op) for op in then if isinstance(op, Put)):
            await self._released.wait()
        return await self._call(lambda: self._inner.txn(compares, then, otherwise))

    async def add(self, key: str, amount: int, *, compares: Sequence[Compare] = (), lease: int = 0) -> AddResult:
        return await self._call(lambda: self._inner.add(key, amount, compares=compares, lease=lease))

    def watch(self, prefix: str, after_revision: int) -> Watch:
        watch = _CuttableWatch(self, self._inner.watch(prefix, after_revision))
        self._watches[watch] = None
        return watch

    def forget(self, watch: _CuttableWatch) -> None:
        """Drop an ended watch."""
        self._watches.pop(watch, None)

    async def grant(self, ttl_s: float) -> int:
        return await self._call(lambda: self._inner.grant(ttl_s))

    async def keep_alive(self, lease: int) -> bool:
        return await self._call(lambda: self._inner.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self._inner.revoke(lease))

    async def open_session(
        self,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
    ) -> Session:
        session = await LeaseSession.open(
            self, ttl_s, interval_s=interval_s, renew_timeout_s=renew_timeout_s, on_missed=on_missed
        )
        self._sessions.append(session)
        return session

    async def status(self) -> BackendStatus:
        return await self._call(self._inner.status)

    async def close(self) -> None:
        for session in self._sessions:
            session.abandon()
        await self._inner.close()

    async def _call(self, execute: Callable[[], Awaitable[_T]]) -> _T:
        if self.refused:
            raise Unavailable("connection refused")
        if not self.is_intact:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await self._intact.wait()
            except TimeoutError:
                raise Unavailable(f"no answer within {CALL_TIMEOUT_S:g} s") from None
        return await execute()


class _CuttableWatch(Watch):
    """A watch that delivers nothing while its backend is cut, and everything afterwards."""

    def __init__(self, owner: CuttableBackend, inner: Watch) -> None:
        self._owner = owner
        self._inner = inner
        self._held: Batch | None = None
        """Arrived during the cut; it is not lost if the reader is cancelled."""
        self._cancelled = False
        self._poked = asyncio.Event()

    async def __anext__(self) -> Batch:
        if self._held is None:
            self._held = await anext(self._inner)
        while not self._owner.is_intact and not self._cancelled:
            self._poked.clear()
            await self._poked.wait()
        if self._cancelled:
            raise StopAsyncIteration
        batch, self._held = self._held, None
        return batch

    def ready(self) -> Batch | None:
        if not self._owner.is_intact or self._held is not None:
            return None
        return self._inner.ready()

    def cancel(self) -> None:
        self._cancelled = True
        self._inner.cancel()
        self._owner.forget(self)
        self.poke()

    def poke(self) -> None:
        """Check again whether to wait."""
        self._poked.set()
