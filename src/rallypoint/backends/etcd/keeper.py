"""The stream on which all leases of a process are renewed.

etcd answers in the order in which it was asked, so the answers need no numbers. Renewing twice does no harm: what was
not answered is asked again on the next call. A member that does not answer within `STALL_S` is left for another one;
before that, all are asked whether there is a leader at all.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

from rallypoint._marks import mark
from rallypoint.backends.etcd import rpc_pb2 as rpc
from rallypoint.backends.etcd.cluster import Cluster
from rallypoint.backends.etcd.link import KEEP_ALIVE
from rallypoint.backends.etcd.stream import Stream
from rallypoint.errors import BackendError, Unavailable

STALL_S = 1.5
DOUBT_S = 0.5
"""A renewal that takes so long makes one wonder."""


class Renewal:
    """One lease to renew once."""

    __slots__ = ("answer", "asked_at", "lease", "sent_at")

    def __init__(self, lease: int, answer: asyncio.Future[bool], asked_at: float) -> None:
        self.lease = lease
        self.answer = answer
        self.asked_at = self.sent_at = asked_at


class Keeper(Stream[rpc.LeaseKeepAliveRequest, rpc.LeaseKeepAliveResponse]):
    """Renews leases one by one, for whoever asks."""

    method = KEEP_ALIVE

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Renewal] = deque()
        """In the order in which they were sent on the call that is open."""
        self._timer: asyncio.TimerHandle | None = None
        self._census: asyncio.Task[None] | None = None

    async def renew(self, lease: int) -> bool:
        """Whether the lease lives. Unavailable if there is no endpoint to ask."""
        renewal = Renewal(lease, self._loop.create_future(), self._loop.time())
        self._pending.append(renewal)
        self.send(rpc.LeaseKeepAliveRequest(ID=lease))
        self._arm()
        return await renewal.answer

    def begin(self) -> list[rpc.LeaseKeepAliveRequest]:
        now = self._loop.time()
        self._pending = deque(renewal for renewal in self._pending if not renewal.answer.done())
        for renewal in self._pending:
            renewal.sent_at = now
        return [rpc.LeaseKeepAliveRequest(ID=renewal.lease) for renewal in self._pending]

    def take(self, answer: rpc.LeaseKeepAliveResponse) -> None:
        if not self._pending:
            return
        renewal = self._pending.popleft()
        assert renewal.lease == answer.ID, "etcd answers in order"
        if not renewal.answer.done():
            renewal.answer.set_result(answer.TTL > 0)

    def trouble(self, error: BackendError) -> None:
        pending, self._pending = self._pending, deque()
        for renewal in pending:
            if not renewal.answer.done():
                renewal.answer.set_exception(error)

    def is_needed(self) -> bool:
        return True  # once there is a session there will be another renewal soon

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._census is not None:
            self._census.cancel()
            await asyncio.wait([self._census])
        await super().close()

    def _arm(self) -> None:
        if self._timer is None and self._pending:
            self._timer = self._loop.call_later(DOUBT_S, self._look)

    def _look(self) -> None:
        """Leave a member that owes an answer for too long: it is paused, cut off, or waits for a leader that is."""
        self._timer = None
        owing = [renewal for renewal in self._pending if not renewal.answer.done()]
        if owing and self._loop.time() - owing[0].asked_at >= DOUBT_S and (self._census is None or self._census.done()):
            self._census = asyncio.create_task(self._take_census(), name="census of etcd")
        if self._pending and self._link is not None and self._pending[0].sent_at + STALL_S <= self._loop.time():
            mark("etcd.renewals_stalled")
            self.cluster.suspect(self._link)
        self._arm()

    async def _take_census(self) -> None:
        """If there certainly is no leader, everybody who waits is told: no lease can end meanwhile."""
        nothing_ended_at = await self.cluster.take_census()
        if nothing_ended_at is None:
            return
        error = Unavailable(
            f"etcd at {self.cluster.where} has no leader: its members are out, or say so",
            nothing_ended_at=nothing_ended_at,
        )
        for renewal in self._pending:  # they stay: the call that is open may still answer them, in order
            if not renewal.answer.done():
                renewal.answer.set_exception(error)
