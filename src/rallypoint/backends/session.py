"""A session made of the contract's own leases: for every backend that has no better way.

It counts as lost on this side when no renewal was *sent* for its time to live and then succeeded: the backend cannot
think so earlier. What is measured is this process's monotonic clock, and only against itself. A renewal whose answer is
late counts as missed and is made up for, but when the answer comes it counts: a backend that takes long to answer
everybody must not lose them all.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from rallypoint._marks import mark
from rallypoint.backends.contract import Backend, Session
from rallypoint.backends.lost import Lost
from rallypoint.errors import BackendError, Rejected, Unavailable

CLOSE_TIMEOUT_S = 5.0
RETRY_S = 0.5
MOST_ASKING = 8
"""So many renewals may wait for their answers at a time."""
LATE_S = 0.1
TURNS = 4
"""Whoever wakes up so much too late stood still, and has all that came meanwhile after so many turns of a loop."""
FIRST_DRAWN = 1 << 52
DRAWN_BITS = 52
"""Where clients draw leases from: above all that a server gives, below what other languages can hold."""
GOLDEN = 0.6180339887498949


def draw_lease(rng: random.Random) -> int:
    """A lease that nobody has."""
    return FIRST_DRAWN + rng.getrandbits(DRAWN_BITS)


def first_part(lease: int) -> float:
    """Which part of an interval passes before the first renewal, a half to one.

    Sessions that were opened together would be renewed together for ever. Multiples of the golden ratio spread evenly,
    whether leases are counted or drawn.
    """
    return 1.0 - lease % 1_000_003 * GOLDEN % 1.0 / 2


class LeaseSession(Session):
    """Renews one lease of `backend` in a task of its own until it is closed, abandoned or lost."""

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
        is_told: bool = False,
    ) -> None:
        """`spread`: many sessions are opened together, and they are not to be renewed together.

        `is_told`: the backend says of a session that has ended that it has, as soon as it can be asked again.
        """
        self.lease = lease
        self.ttl_s = ttl_s
        self.lost = Lost()
        self._backend = backend
        self._interval_s = min(interval_s or ttl_s / 3, ttl_s / 2)
        self._first_s = self._interval_s * (first_part(lease) if spread else 1.0)
        self._renew_timeout_s = renew_timeout_s or self._interval_s / 2
        self._on_missed = on_missed
        self._told_missed_at = float("-inf")
        """When it was last told that renewals are missed; it is told again when that has lasted for a time to live."""
        self.expires_at = granted_at + ttl_s
        self._is_told = is_told
        self._waits_for_word = False
        self._blind_until = float("-inf")
        """Until then the renewing waits, whenever the session ends by this side's clock: what counted was a word."""
        self._asking: dict[asyncio.Task[str | None], None] = {}
        """Renewals that are not answered yet, the oldest first."""
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
        """Grant a lease and start to renew it."""
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
            pass  # time ends the lease

    def abandon(self) -> None:
        self._task.cancel()

    def wait_for_word(self, waits: bool) -> None:
        self._waits_for_word = waits and self._is_told
        if not waits:
            self._judge()

    def _judge(self) -> None:
        """End the session by this side's clock if it is over, or as soon as it is, where the renewing would be late."""
        loop = asyncio.get_running_loop()
        if self.lost.is_set() or self._task.done() or self._waits_for_word:
            return
        if loop.time() >= self.expires_at:
            self._expire()
        elif self.expires_at < self._blind_until:
            loop.call_at(self.expires_at, self._judge)

    def _expire(self) -> None:
        mark("session.expired_here")
        self.lost.set(f"the session was not renewed within its time to live of {self.ttl_s:g} s")

    async def _renew(self) -> None:
        try:
            await self._keep_renewing(asyncio.get_running_loop())
        finally:
            for asking in self._asking:
                asking.cancel()

    async def _keep_renewing(self, loop: asyncio.AbstractEventLoop) -> None:
        # Of a session whose granting took long little is left: it is renewed while there is time for an answer.
        pause_s = min(self._first_s, (self.expires_at - loop.time()) / 2)
        has_failed, sent_at = False, float("-inf")
        while not self.lost.is_set():
            due = self._within(loop.time() + max(0.0, pause_s))
            await asyncio.sleep(due - loop.time())
            is_over = loop.time() >= self.expires_at
            if is_over and self._asking and due + LATE_S < loop.time() < sent_at + self.ttl_s:
                await self._hear()
                is_over = loop.time() >= self.expires_at
            if is_over and not (self._waits_for_word and (self._asking or not has_failed)):
                self._expire()
                return
            if self.lost.is_set():
                return
            if len(self._asking) >= MOST_ASKING:
                # The oldest are answered next if the backend is slow; if it has lost them, this one has to do.
                next(reversed(self._asking)).cancel()
            sent_at = loop.time()
            asking = loop.create_task(self._renew_once(sent_at), name=f"renewal of lease {self.lease}")
            self._asking[asking] = None
            asking.add_done_callback(self._answered)
            # A server that is asked whether the session lives has to hear of it in time, whenever it answers.
            most_s = min(self._renew_timeout_s, self._interval_s if self._waits_for_word else self.ttl_s)
            until = self._within(sent_at + most_s)
            await asyncio.wait((asking,), timeout=until - loop.time())
            if not asking.done() and until + LATE_S < loop.time():
                await self._hear()
            missed = asking.result() if asking.done() else "no answer in time"
            has_failed = asking.done() and missed is not None
            if missed is None:
                self._told_missed_at = float("-inf")
                for late in self._asking:  # what they would say is known
                    late.cancel()
                # From when it was sent: that is what the time to live counts from, however long the answer took.
                pause_s = max(sent_at + self._interval_s - loop.time(), self._interval_s / 5)
            else:
                pause_s = min(self._interval_s / 5, RETRY_S)
                self._tell_missed(missed)

    def _within(self, at: float) -> float:
        """That instant, or when the session ends by this side's clock, if that is ahead and earlier."""
        now = asyncio.get_running_loop().time()
        if now < self.expires_at or not self._waits_for_word:
            return max(now, min(at, self.expires_at))
        self._blind_until = at
        return max(now, at)

    def _answered(self, asking: asyncio.Task[str | None]) -> None:
        self._asking.pop(asking, None)

    async def _hear(self) -> None:
        """This process stood still: what may have been answered meanwhile is taken in before it is judged."""
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def _tell_missed(self, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._on_missed is not None and now - self._told_missed_at >= self.ttl_s:
            self._told_missed_at = now
            self._on_missed(why)

    async def _renew_once(self, sent_at: float) -> str | None:
        """Why the renewal was missed; None: it was not. Sets `lost` if the backend says that the lease has ended."""
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
        except Exception as error:  # a defect of the backend must not stop the renewing in silence
            return f"renewing failed: {error!r}"
        if alive:
            self.expires_at = max(self.expires_at, sent_at + self.ttl_s)
        else:
            self.lost.set("the backend ended the session: it had not been renewed in time, or was revoked")
        return None
