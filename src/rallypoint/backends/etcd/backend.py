"""The backend contract on etcd. Sessions and watches of all backends of a process share two streams."""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from rallypoint.backends.contract import Backend, BackendStatus, Got, Limits, Scanned, Session, Watch
from rallypoint.backends.etcd import rpc_pb2 as rpc
from rallypoint.backends.etcd.atomic_add import Adder
from rallypoint.backends.etcd.channel import GRANT, REVOKE, STATUS, TIME_TO_LIVE, TXN
from rallypoint.backends.etcd.cluster import LeaseFault
from rallypoint.backends.etcd.conversion import (
    check_branch,
    compare_of,
    leases_of,
    op_of,
    reader_of,
    result_of,
)
from rallypoint.backends.etcd.faults import FaultKind
from rallypoint.backends.etcd.grpc_fork import check_fork
from rallypoint.backends.etcd.security import Security
from rallypoint.backends.etcd.shared_connection import SharedConnection
from rallypoint.backends.etcd.watch_stream import EtcdWatch
from rallypoint.backends.session import LeaseSession, draw_lease
from rallypoint.errors import BackendError, LeaseGone, OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import (
    AddResult,
    BranchOp,
    Compare,
    Get,
    GotItem,
    GotRange,
    Range,
    TxnResult,
)
from rallypoint.settings import Settings

LIMITS = Limits(max_txn_ops=128, max_txn_bytes=1_000_000)
"""etcd accepts 128 operations and 1.5 MB; keys and framing need a part of that."""
CALL_S = 60.0
DEFAULT_RUN_ID = "none"
"""torchrun's run id if none is given."""
COUNT_ONE = Range("", limit=1, count_only=True)
"""Read in an otherwise empty transaction: without a read, etcd answers from the local state of one member."""


async def open_backend(settings: Settings) -> EtcdBackend:
    """A backend for these settings. Does not wait until etcd can be reached. Rejected for unusable files."""
    check_fork()
    if settings.run_id == DEFAULT_RUN_ID:
        raise Rejected(
            f"an etcd is shared, and {DEFAULT_RUN_ID!r} is the id of every run that was given none: two jobs would "
            f"become one. Give this run an id of its own (torchrun: --rdzv-id)"
        )
    connection = SharedConnection.to(settings.endpoints, Security.of(settings))
    return EtcdBackend(connection, prefix=settings.etcd_prefix, call_timeout_s=settings.read_timeout_s)


class EtcdBackend(Backend):
    """One user of the process's shared connection to a cluster."""

    name = "etcd"
    limits = LIMITS
    makes_run = False  # all nodes may start at once: the elected coordinator creates the run
    make_run_delay_s = (1.0, 2.0)

    def __init__(
        self,
        connection: SharedConnection,
        *,
        prefix: str = "rallypoint",
        call_timeout_s: float = CALL_S,
        rng: random.Random | None = None,
    ) -> None:
        self._connection = connection
        self._call_timeout_s = call_timeout_s
        self._rng = rng or random.Random(secrets.randbits(64))
        self._adder = Adder(self, f"/{prefix}/:once/{self._rng.getrandbits(96):024x}", self._rng)
        self._watches: WeakKeyDictionary[EtcdWatch, None] = WeakKeyDictionary()
        self._sessions: WeakKeyDictionary[LeaseSession, None] = WeakKeyDictionary()
        self._on_reach: Callable[[BackendError | None], None] | None = None
        self._is_closed = False

    # --- keys ---------------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> Got:
        result = await self.txn((), (Get(key),))
        (got,) = result.results
        assert isinstance(got, GotItem)
        return Got(got.item, result.revision)

    async def scan(self, prefix: str) -> Scanned:
        result = await self.txn((), (Range(prefix),))
        (got,) = result.results
        assert isinstance(got, GotRange)
        return Scanned(got.items, result.revision)

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        self._check_open()
        check_branch(then)
        check_branch(otherwise)
        self._check_limits(compares, then, otherwise)
        otherwise = otherwise or [reader_of(compare) for compare in compares]
        asked_then = then or (() if compares else (COUNT_ONE,))
        request = rpc.TxnRequest(
            compare=map(compare_of, compares), success=map(op_of, asked_then), failure=map(op_of, otherwise)
        )
        changes = any(not isinstance(step, Get | Range) for step in (*then, *otherwise))
        try:
            answer = await self._connection.cluster.call(TXN, request, changes=changes, timeout_s=self._call_timeout_s)
        except LeaseFault:
            raise await self._lease_gone(leases_of(then, otherwise)) from None
        branch = then if answer.succeeded else otherwise
        results = tuple([result_of(step, one) for step, one in zip(branch, answer.responses, strict=bool(branch))])
        return TxnResult(answer.succeeded, answer.header.revision, results)

    def _check_limits(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp]
    ) -> None:
        """etcd checks this too, but its limits are configurable."""
        if max(len(compares), len(then), len(otherwise)) > LIMITS.max_txn_ops:
            raise Rejected(
                f"a transaction with {len(compares)} compares and {max(len(then), len(otherwise))} operations is too "
                f"large: etcd accepts {LIMITS.max_txn_ops} of each"
            )

    async def _lease_gone(self, leases: Sequence[int]) -> LeaseGone:
        """Find out which of these leases has ended: etcd does not say."""
        for lease in leases[:-1]:
            request = rpc.LeaseTimeToLiveRequest(ID=lease)
            answer = await self._connection.cluster.call(
                TIME_TO_LIVE, request, changes=False, timeout_s=self._call_timeout_s
            )
            if answer.TTL <= 0:
                return LeaseGone(f"lease {lease} has ended", lease=lease)
        return LeaseGone(f"lease {leases[-1]} has ended", lease=leases[-1])

    async def add(self, key: str, amount: int, *, compares: Sequence[Compare] = (), lease: int = 0) -> AddResult:
        self._check_open()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await self._adder.add(key, amount, compares, lease)
        except TimeoutError:
            raise OutcomeUnknown(
                f"no outcome of the add to {key!r} within {self._call_timeout_s:g} s: read the key again"
            ) from None

    # --- watches ------------------------------------------------------------------------------------------------------

    def watch(self, prefix: str, after_revision: int) -> Watch:
        self._check_open()
        watch = EtcdWatch(self._connection.watches, prefix, after_revision)
        self._watches[watch] = None
        return watch

    # --- leases -------------------------------------------------------------------------------------------------------

    async def grant(self, ttl_s: float) -> int:
        """The lease lasts at least `ttl_s`: etcd counts in whole seconds."""
        self._check_open()
        if not 0 < ttl_s < math.inf:
            raise Rejected(f"a lease needs a positive time to live, not {ttl_s}")
        lease = draw_lease(self._rng)  # chosen by the client, so that the request can be sent again
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=lease)
        try:
            await self._connection.cluster.call(GRANT, request, changes=False, timeout_s=self._call_timeout_s)
        except LeaseFault as fault:
            if fault.kind is not FaultKind.LEASE_EXISTS:
                raise Unavailable("etcd did not grant a lease") from None
            # An earlier attempt granted it, and the answer was lost.
        return lease

    async def keep_alive(self, lease: int) -> bool:
        self._check_open()
        try:
            async with asyncio.timeout(self._call_timeout_s):
                return await self._connection.keepalives.renew(lease)
        except TimeoutError:
            raise Unavailable(
                f"etcd at {self._connection.cluster.where} did not renew a lease within {self._call_timeout_s:g} s"
            ) from None

    async def revoke(self, lease: int) -> None:
        self._check_open()
        await self._revoke(lease)

    async def _revoke(self, lease: int) -> None:
        request = rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self._connection.cluster.call(REVOKE, request, changes=False, timeout_s=self._call_timeout_s)
        except LeaseFault:
            return  # it has ended already

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
        self._sessions[session] = None
        return session

    # --- the rest -----------------------------------------------------------------------------------------------------

    def on_reachability(self, listener: Callable[[BackendError | None], None]) -> None:
        if self._on_reach is not None:
            self._connection.cluster.unlisten(self._on_reach)
        self._on_reach = listener
        self._connection.cluster.listen(listener)

    async def status(self) -> BackendStatus:
        self._check_open()
        cluster = self._connection.cluster
        answer = await cluster.call(STATUS, rpc.StatusRequest(), changes=False, timeout_s=self._call_timeout_s)
        details = {"version": answer.version, "leader": f"{answer.leader:x}", "database": f"{answer.dbSize} bytes"}
        return BackendStatus(self.name, cluster.where, answer.header.revision, details)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for watch in list(self._watches):
            watch.cancel()
        for session in list(self._sessions):
            session.abandon()
        if self._on_reach is not None:
            self._connection.cluster.unlisten(self._on_reach)
        await self._adder.close(self._revoke)
        await self._connection.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable(f"this connection to etcd at {self._connection.cluster.where} was closed")
