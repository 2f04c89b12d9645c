"""The stream that renews all leases of a process.

etcd answers in the order of the requests, so the answers need no numbers. A renewal may be repeated: unanswered ones
are sent again on the next call. After `DOUBT_S` without an answer all members are asked whether there is a leader;
after `STALL_S` the stream moves to another member.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque

from rallypoint._marks import mark
from rallypoint.backends.etcd import rpc_pb2 as rpc
from rallypoint.backends.etcd.channel import KEEP_ALIVE
from rallypoint.backends.etcd.cluster import Cluster
from rallypoint.backends.etcd.stream import Stream
from rallypoint.errors import BackendError, Unavailable

STALL_S = 1.5
DOUBT_S = 0.5


class Renewal:
    """One renewal of one lease."""

    __slots__ = ("answer", "asked_at", "lease", "sent_at")

    def __init__(self, lease: int, answer: asyncio.Future[bool], asked_at: float) -> None:
        self.lease = lease
        self.answer = answer
        self.asked_at = self.sent_at = asked_at


class KeepAliveStream(Stream[rpc.LeaseKeepAliveRequest, rpc.LeaseKeepAliveResponse]):
    """Renews leases one by one."""

    method = KEEP_ALIVE

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Renewal] = deque()
        """In the order in which they were sent on the open call."""
        self._timer: asyncio.TimerHandle | None = None
        self._leader_check: asyncio.Task[None] | None = None

    async def renew(self, lease: int) -> bool:
        """Whether the lease is alive. Unavailable if no endpoint can be used."""
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

    def no_endpoint(self, error: BackendError) -> None:
        pending, self._pending = self._pending, deque()
        for renewal in pending:
            if not renewal.answer.done():
                renewal.answer.set_exception(error)

    def is_needed(self) -> bool:
        return True  # a session renews its lease periodically

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._leader_check is not None:
            self._leader_check.cancel()
            await asyncio.wait([self._leader_check])
        await super().close()

    def _arm(self) -> None:
        if self._timer is None and self._pending:
            self._timer = self._loop.call_later(DOUBT_S, self._check_stalled)

    def _check_stalled(self) -> None:
        """Leave a member whose answer is overdue: it, or the leader it depends on, is paused or cut off."""
        self._timer = None
        owing = [renewal for renewal in self._pending if not renewal.answer.done()]
        if (
            owing
            and self._loop.time() - owing[0].asked_at >= DOUBT_S
            and (self._leader_check is None or self._leader_check.done())
        ):
            self._leader_check = asyncio.create_task(self._check_leader(), name="check the leader of etcd")
        if self._pending and self._channel is not None and self._pending[0].sent_at + STALL_S <= self._loop.time():
            mark("etcd.renewals_stalled")
            self.cluster.suspect(self._channel)
        self._arm()

    async def _check_leader(self) -> None:
        """If there is certainly no leader, fail the pending renewals with that: no lease can end until there is one."""
        nothing_ended_at = await self.cluster.check_leaderless()
        if nothing_ended_at is None:
            return
        error = Unavailable(
            f"etcd at {self.cluster.where} has no leader: every member is down or knows of none",
            nothing_ended_at=nothing_ended_at,
        )
        for renewal in self._pending:  # they stay in the queue: the open call may still answer them, in order
            if not renewal.answer.done():
                renewal.answer.set_exception(error)
