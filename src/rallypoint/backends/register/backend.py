"""A connection to a register: the backend contract on the process's `SharedCell`."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from weakref import WeakKeyDictionary

from rallypoint._marks import mark
from rallypoint.backends.contract import BackendStatus, Limits, Session, Watch
from rallypoint.backends.ops import OpBackend, changes_something
from rallypoint.backends.register.cell import AsyncCell
from rallypoint.backends.register.shared_cell import SharedCell
from rallypoint.backends.register.watch import RegisterWatch
from rallypoint.backends.session import LeaseSession
from rallypoint.errors import BackendError, OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import Grant, LeaseResult, Op, Result, Tick

CALL_TIMEOUT_S = 60.0
LEASE_BITS = 62
MEASURED = 4
"""A cell that seems too slow is measured this many times more before a session is refused, ..."""
DEAD_LEASES_TTLS = 1.2
"""... and for this many times to live: by then the leases of dead nodes have ended."""


class RegisterBackend(OpBackend):
    """A connection. `on_close` is called once, at close; it says whether the shared cell is to be closed, too."""

    limits = Limits(max_txn_ops=1_000, max_txn_bytes=1_000_000)

    def __init__(
        self,
        shared: SharedCell,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        rng: random.Random | None = None,
        on_close: Callable[[], bool] | None = None,
    ) -> None:
        self.name = shared.cell.name
        self.shared = shared
        self._call_timeout_s = call_timeout_s
        self._rng = rng or random.Random(secrets.randbits(64))
        self._on_close = on_close
        # Weak, so that ended ones are forgotten; ordered, so that closing is deterministic.
        self._watches: WeakKeyDictionary[RegisterWatch, None] = WeakKeyDictionary()
        self._sessions: WeakKeyDictionary[Session, None] = WeakKeyDictionary()
        self._listener: Callable[[BackendError | None], None] | None = None
        self._is_closed = False

    @classmethod
    def on(cls, cell: AsyncCell, *, call_timeout_s: float = CALL_TIMEOUT_S) -> RegisterBackend:
        """A connection that shares the cell with no other."""
        return cls(SharedCell(cell, random.Random(secrets.randbits(64))), call_timeout_s=call_timeout_s)

    async def execute(self, op: Op) -> Result:
        self._check_open()
        request = self.shared.submit(op)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await request.result
        except TimeoutError:
            cause = f": {self.shared.trouble}" if self.shared.trouble is not None else ""
            said = f"{self.name} did not answer within {self._call_timeout_s:g} s{cause}"
            if request.is_sent and changes_something(op):
                raise OutcomeUnknown(f"it may have happened: {said}") from None
            raise Unavailable(said) from None

    async def grant(self, ttl_s: float) -> int:
        """The id is random, so that it never equals the id of a lease in another store."""
        result = await self._checked(Grant(ttl_s, self._rng.getrandbits(LEASE_BITS) + 1))
        assert isinstance(result, LeaseResult)
        return result.lease

    def watch(self, prefix: str, after_revision: int) -> Watch:
        self._check_open()
        watch = RegisterWatch(self.shared, prefix, after_revision, self.shared.generation)
        self._watches[watch] = None
        return watch

    async def open_session(
        self,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
    ) -> Session:
        """Rejected if the cell is too slow for this time to live with this many sessions.

        If a renewal may wait for the next poll, it is requested earlier by that time.
        """
        interval_s = min(interval_s or ttl_s / 3, ttl_s / 2)
        interval_s = max(interval_s - self.shared.renewals_wait_s(ttl_s), interval_s / 2)
        session = await LeaseSession.open(
            self,
            ttl_s,
            interval_s=interval_s,
            renew_timeout_s=renew_timeout_s,
            on_missed=on_missed,
            spread=True,  # simultaneous renewals compete for the cell
        )
        self._sessions[session] = None
        if (why := await self._too_slow_for(session)) is not None:
            mark("register.too_slow")
            await session.close()
            raise Rejected(f"{self.name} is too slow for these time-outs: {why}")
        return session

    async def _too_slow_for(self, session: Session) -> str | None:
        """Why the cell is too slow for the time to live of a session; None: it is not.

        One slow call proves nothing, so it is measured repeatedly. Leases of dead nodes do not count: they are in the
        document until their time to live is over, so the check waits for that.
        """
        loop = asyncio.get_running_loop()
        until, measured = loop.time() + DEAD_LEASES_TTLS * session.ttl_s, 0
        while (why := self.shared.latency.too_short(session.ttl_s, self.shared.document)) is not None:
            if session.lost.is_set():
                return why
            if measured >= MEASURED:
                if loop.time() >= until or self.shared.latency.too_short(session.ttl_s, None) is not None:
                    return why  # too slow for a single session, too
                await asyncio.sleep(session.ttl_s / 10)
            measured += 1
            try:
                await self.keep_alive(session.lease)
                await self.execute(Tick())
            except (Unavailable, OutcomeUnknown):
                return None  # unreachable is not the same as slow
        return None

    def on_reachability(self, listener: Callable[[BackendError | None], None]) -> None:
        self._listener = listener
        self.shared.on_reach.append(listener)

    async def status(self) -> BackendStatus:
        await self.execute(Tick())
        document = self.shared.document
        if document is None:
            raise Unavailable(f"{self.name} is being written")
        details = {
            "keys": str(len(document.engine.items)),
            "leases": str(len(document.counters)),
            "version": str(document.version),
            "writers": str(len(document.clients)),
        }
        return BackendStatus(self.name, self.shared.cell.endpoint, document.engine.revision, details)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for watch in list(self._watches):
            watch.cancel()
        for session in list(self._sessions):
            session.abandon()
        if self._listener is not None:
            self.shared.on_reach.remove(self._listener)
        if self._on_close is None or self._on_close():
            await self.shared.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable(f"this connection to {self.name} is closed")
