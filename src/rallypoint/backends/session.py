"""A session on top of the contract's leases, for all backends.

The session expires on this side one time to live after the *sending* of the last renewal that succeeded, on this
process's monotonic clock. The backend measures from the arrival, so it must never have ended the lease before this side
considers it lost. A renewal without an answer in time counts as missed and is sent again, but a late answer still
counts: a slow backend must not end all sessions.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from rallypoint._marks import mark
from rallypoint.backends.contract import Backend, Session
from rallypoint.backends.loss_signal import LossSignal
from rallypoint.errors import BackendError, Rejected, Unavailable

CLOSE_TIMEOUT_S = 5.0
RETRY_S = 0.5
MAX_PENDING_RENEWALS = 8
LATE_S = 0.1
"""A wake-up that is this late means that the process was stopped."""
LOOP_ITERATIONS = 4
"""After a stop, all data that arrived meanwhile has been processed after this many iterations of the event loop."""
FIRST_RANDOM_LEASE = 1 << 52
RANDOM_LEASE_BITS = 52
"""The range of ids that clients choose: above those that servers assign, below 2**53 (exact as doubles, in JSON)."""
GOLDEN = 0.6180339887498949


def draw_lease(rng: random.Random) -> int:
    """A random lease id, unused with overwhelming probability."""
    return FIRST_RANDOM_LEASE + rng.getrandbits(RANDOM_LEASE_BITS)


def first_interval_fraction(lease: int) -> float:
    """The delay before the first renewal, as a fraction of the interval, from one half to one.

    Otherwise sessions that are opened together would be renewed together for ever. Multiples of the golden ratio spread
    evenly, for consecutive and for random leases.
    """
    return 1.0 - lease % 1_000_003 * GOLDEN % 1.0 / 2


class LeaseSession(Session):
    """Renews one lease of `backend` in a task until the session is closed, abandoned or lost."""

    def __init__(
        self,
        backend: Backend,
        lease: int,
        ttl_s: float,
        granted_at: float,
        *,
        interval_s: float | None,
        renew_timeout_s: float | None,
        on_missed: Callable[[str], None] | None,
        spread: bool = False,
        reports_expiry: bool = False,
    ) -> None:
        """`spread`: many sessions may be opened together; renew them at different times.

        `reports_expiry`: the backend reports an expired lease as soon as it can be reached again.
        """
        self.lease = lease
        self.ttl_s = ttl_s
        self.lost = LossSignal()
        self._backend = backend
        self._interval_s = min(interval_s or ttl_s / 3, ttl_s / 2)
        self._first_s = self._interval_s * (first_interval_fraction(lease) if spread else 1.0)
        self._renew_timeout_s = renew_timeout_s or self._interval_s / 2
        self._on_missed = on_missed
        self._reported_missed_at = float("-inf")
        """When missed renewals were last reported; they are reported again after a time to live without a success."""
        self.expires_at = granted_at + ttl_s
        self._reports_expiry = reports_expiry
        self._expires_locally = True
        self._asleep_until = float("-inf")
        """While local expiry is disabled, `_keep_renewing` may sleep until then, even beyond `expires_at`."""
        self._pending: dict[asyncio.Task[str | None], None] = {}
        """Unanswered renewals, the oldest first."""
        self._task = asyncio.create_task(self._renew(), name=f"renew lease {lease}")

    @classmethod
    async def open(
        cls,
        backend: Backend,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
        spread: bool = False,
    ) -> LeaseSession:
        """Grant a lease and start renewing it."""
        granted_at = asyncio.get_running_loop().time()
        lease = await backend.grant(ttl_s)
        return cls(
            backend,
            lease,
            ttl_s,
            granted_at,
            interval_s=interval_s,
            renew_timeout_s=renew_timeout_s,
            on_missed=on_missed,
            spread=spread,
        )

    async def close(self) -> None:
        self._task.cancel()
        try:
            async with asyncio.timeout(min(CLOSE_TIMEOUT_S, self.ttl_s)):
                await self._backend.revoke(self.lease)
        except (BackendError, TimeoutError):
            pass  # the lease expires

    def abandon(self) -> None:
        self._task.cancel()

    def set_local_expiry(self, enabled: bool) -> None:
        self._expires_locally = enabled or not self._reports_expiry
        if enabled:
            self._check_expiry()

    def _check_expiry(self) -> None:
        """Expire the session if it is time, or set a timer for it if `_keep_renewing` sleeps for longer."""
        loop = asyncio.get_running_loop()
        if self.lost.is_set() or self._task.done() or not self._expires_locally:
            return
        if loop.time() >= self.expires_at:
            self._expire()
        elif self.expires_at < self._asleep_until:
            loop.call_at(self.expires_at, self._check_expiry)

    def _expire(self) -> None:
        mark("session.expired_here")
        self.lost.set(f"the session was not renewed within its time to live of {self.ttl_s:g} s")

    async def _renew(self) -> None:
        try:
            await self._keep_renewing(asyncio.get_running_loop())
        finally:
            for renewal in self._pending:
                renewal.cancel()

    async def _keep_renewing(self, loop: asyncio.AbstractEventLoop) -> None:
        # If granting took long, little time is left: renew early enough for an answer.
        pause_s = min(self._first_s, (self.expires_at - loop.time()) / 2)
        has_failed, sent_at = False, float("-inf")
        while not self.lost.is_set():
            wake_at = self._bounded(loop.time() + max(0.0, pause_s))
            await asyncio.sleep(wake_at - loop.time())
            has_expired = loop.time() >= self.expires_at
            if has_expired and self._pending and wake_at + LATE_S < loop.time() < sent_at + self.ttl_s:
                await self._process_arrived()
                has_expired = loop.time() >= self.expires_at
            if has_expired and (self._expires_locally or (has_failed and not self._pending)):
                self._expire()
                return
            if self.lost.is_set():
                return
            if len(self._pending) >= MAX_PENDING_RENEWALS:
                # A slow backend answers the oldest first, so the newest is replaced. If all got lost, this one counts.
                next(reversed(self._pending)).cancel()
            sent_at = loop.time()
            renewal = loop.create_task(self._renew_once(sent_at), name=f"renewal of lease {self.lease}")
            self._pending[renewal] = None
            renewal.add_done_callback(lambda done: self._pending.pop(done, None))
            # Without local expiry, the server must get renewals in time even if it does not answer.
            limit_s = min(self._renew_timeout_s, self.ttl_s if self._expires_locally else self._interval_s)
            until = self._bounded(sent_at + limit_s)
            await asyncio.wait((renewal,), timeout=until - loop.time())
            if not renewal.done() and until + LATE_S < loop.time():
                await self._process_arrived()
            missed = renewal.result() if renewal.done() else "no answer in time"
            has_failed = renewal.done() and missed is not None
            if missed is None:
                self._reported_missed_at = float("-inf")
                for earlier in self._pending:  # their answers are no longer needed
                    earlier.cancel()
                # The time to live counts from the sending of the renewal, and so does the interval.
                pause_s = max(sent_at + self._interval_s - loop.time(), self._interval_s / 5)
            else:
                pause_s = min(self._interval_s / 5, RETRY_S)
                self._report_missed(missed)

    def _bounded(self, at: float) -> float:
        """This time, but not after `expires_at` unless that has passed and local expiry is disabled."""
        now = asyncio.get_running_loop().time()
        if now < self.expires_at or self._expires_locally:
            return max(now, min(at, self.expires_at))
        self._asleep_until = at
        return max(now, at)

    async def _process_arrived(self) -> None:
        """This process was stopped: process the answers that arrived meanwhile before the session is judged."""
        for _ in range(LOOP_ITERATIONS):
            await asyncio.sleep(0)

    def _report_missed(self, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._on_missed is not None and now - self._reported_missed_at >= self.ttl_s:
            self._reported_missed_at = now
            self._on_missed(why)

    async def _renew_once(self, sent_at: float) -> str | None:
        """Renew. Returns why it was missed, or None. Sets `lost` if the backend reports that the lease has ended."""
        try:
            alive = await self._backend.keep_alive(self.lease)
        except Rejected as error:
            self.lost.set(f"the backend refused to renew the session: {error}")
            return str(error)
        except BackendError as error:
            if isinstance(error, Unavailable) and error.nothing_ended_at is not None:
                mark("session.nothing_ended")
                self.expires_at = max(self.expires_at, error.nothing_ended_at + self.ttl_s)
            return str(error)
        except Exception as error:  # a bug of the backend must not end the renewals silently
            return f"renewing failed: {error!r}"
        if alive:
            self.expires_at = max(self.expires_at, sent_at + self.ttl_s)
        else:
            self.lost.set("the backend ended the session: it had not been renewed in time, or was revoked")
        return None
