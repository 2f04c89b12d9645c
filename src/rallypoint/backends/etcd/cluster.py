"""Sends requests to a working endpoint of the cluster, fails over, and says whether a failed request was executed.

One endpoint is current; all calls and streams use it. When it cannot be used (no connection, no answer, no leader), the
others are tried at short intervals, and the first that answers becomes the current one. A call that must not be
executed twice is sent again only if it certainly was not executed.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from rallypoint._marks import mark
from rallypoint.backends.etcd import rpc_pb2 as rpc
from rallypoint.backends.etcd.channel import AUTHENTICATE, MEMBERS, STATUS, Channel, Metadata, Method, is_cancelled
from rallypoint.backends.etcd.faults import Fault, FaultKind, fault_of
from rallypoint.backends.etcd.grpc_fork import grpc
from rallypoint.backends.etcd.probe import Problem, probe
from rallypoint.backends.etcd.security import Security
from rallypoint.errors import BackendError, OutcomeUnknown, Rejected, Unavailable

Q = TypeVar("Q")
A = TypeVar("A")

CONNECT_S = 4.0
"""The longest that one attempt to connect to one endpoint may take, including the first requests on it."""
STAGGER_S = 0.3
"""The next endpoint is tried when the one before has not answered for this long."""
HURRY_S = 1.0
"""How long to wait for the remaining endpoints once one has failed."""
READ_S = 3.0
WRITE_S = 5.0
"""How long one attempt of a call may take; the time doubles with each attempt of a read."""
AGAIN_S = 0.1
OLDEST = (3, 4)


class LeaseFault(Exception):
    """A lease does not exist, or exists already."""

    def __init__(self, kind: FaultKind) -> None:
        super().__init__(kind.value)
        self.kind = kind


class Cluster:
    """A client of one etcd cluster. Belongs to one event loop; `close` it."""

    def __init__(self, endpoints: tuple[str, ...], security: Security, rng: random.Random | None = None) -> None:
        self.where = ",".join(endpoints)
        self._security = security
        rng = rng or random.Random(secrets.randbits(64))
        self._channels = [Channel(endpoint, security) for endpoint in endpoints]
        rng.shuffle(self._channels)  # spreads clients over the members
        self._loop = asyncio.get_running_loop()
        self._current: Channel | None = None
        self._connecting: asyncio.Task[Channel] | None = None
        self._token: str | None = None
        self._members = 0
        """How many members vote; 0: not known yet."""
        self._listeners: list[Callable[[BackendError | None], None]] = []
        self._is_down = False
        self.is_closed = False

    # --- calls --------------------------------------------------------------------------------------------------------

    async def call(self, method: Method[Q, A], request: Q, *, changes: bool, timeout_s: float) -> A:
        """The response. `changes`: the request must not be executed twice.

        Raises Unavailable (not executed), OutcomeUnknown (only with `changes`), Rejected, LeaseFault.
        """
        deadline = self._loop.time() + timeout_s
        attempt_s = WRITE_S if changes else READ_S
        renewed = tries = 0
        while True:
            channel = await self.ready(deadline)
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                raise Unavailable(f"etcd at {self.where} did not answer within {timeout_s:g} s")
            try:
                return await channel.ask(method, request, min(attempt_s, left_s), self.metadata())
            except grpc.aio.AioRpcError as error:
                fault = fault_of(error)
            except ConnectionResetError as error:
                fault = Fault(FaultKind.UNKNOWN, str(error), answered=False)
            tries += 1
            if fault.kind is FaultKind.TOKEN and renewed < 2:
                renewed += 1
                await self._renew_token(channel)
                continue
            self._raise_if_final(channel, fault)
            self.failed(channel, fault)
            if fault.kind is FaultKind.UNKNOWN and changes:
                mark("etcd.outcome_unknown")
                raise OutcomeUnknown(f"etcd at {channel.endpoint}: {fault.text}; it may have been executed")
            if fault.kind is not FaultKind.UNKNOWN and tries > 2 * len(self._channels):
                raise Unavailable(f"etcd at {channel.endpoint}: {fault.text}")
            if fault.answered:
                await asyncio.sleep(AGAIN_S)
            attempt_s *= 2

    def _raise_if_final(self, channel: Channel, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.LEASE_GONE | FaultKind.LEASE_EXISTS:
                raise LeaseFault(fault.kind)
            case FaultKind.REJECTED | FaultKind.TOKEN:
                raise Rejected(f"etcd at {channel.endpoint}: {fault.text}")

    def failed(self, channel: Channel, fault: Fault) -> None:
        """A call or stream on this channel failed: use another one if the channel or its member is the cause."""
        if fault.kind is FaultKind.NO_LEADER:
            self._demote(channel)
        elif not fault.answered:
            self.suspect(channel)

    def suspect(self, channel: Channel) -> None:
        """The endpoint did not answer, or its connection broke: move to another endpoint or to a new connection."""
        mark("etcd.suspected")
        self._demote(channel)
        channel.drop()

    def _demote(self, channel: Channel) -> None:
        if self._current is channel:
            self._current = None
            self._channels.remove(channel)
            self._channels.append(channel)  # tried last

    def metadata(self) -> Metadata:
        """Sent with every call: refuse it if there is no leader; the user's token."""
        leader = ("hasleader", "true")
        return (leader,) if self._token is None else (leader, ("token", self._token))

    # --- the current endpoint -----------------------------------------------------------------------------------------

    async def ready(self, deadline: float | None = None) -> Channel:
        """The current endpoint. Unavailable as soon as all of them have failed; Rejected if none can ever be used."""
        if self.is_closed:
            raise Unavailable(f"this connection to etcd at {self.where} was closed")
        if self._current is not None:
            return self._current
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name=f"connect to etcd at {self.where}")
            self._connecting.add_done_callback(self._connected)
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(self._connecting)
        except TimeoutError:
            raise Unavailable(f"etcd at {self.where} was not reached in time") from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise Unavailable(f"this connection to etcd at {self.where} was closed") from None

    def _connected(self, task: asyncio.Task[Channel]) -> None:
        self._connecting = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._tell(None)
        else:
            self._tell(error if isinstance(error, BackendError) else Unavailable(f"connecting failed: {error!r}"))

    async def _connect(self) -> Channel:
        """Try the endpoints at intervals of STAGGER_S; the first that answers.

        Once one has failed, wait only HURRY_S for the others: the failed one may work again by then.
        """
        started_at = self._loop.time()
        give_up_at = float("inf")
        problems: dict[str, Problem] = {}
        checks: dict[asyncio.Task[Problem | None], Channel] = {}
        waiting = list(self._channels)
        try:
            while waiting or checks:
                if waiting:
                    channel = waiting.pop(0)
                    checks[asyncio.create_task(self._check(channel), name=f"try etcd at {channel.endpoint}")] = channel
                left_s = max(0.0, give_up_at - self._loop.time())
                pause_s = STAGGER_S if waiting else None if left_s == float("inf") else left_s
                done, _ = await asyncio.wait(checks, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    channel = checks.pop(task)
                    problem = task.result()
                    if problem is None:
                        self._current = channel
                        return channel
                    problems[channel.endpoint] = problem
                    give_up_at = min(give_up_at, self._loop.time() + HURRY_S)
                if not done and not waiting:
                    problems |= {channel.endpoint: Problem("no answer yet") for channel in checks.values()}
                    break
        finally:
            await _cancel(checks)
        raise self._failure(problems, started_at)

    async def _check(self, channel: Channel) -> Problem | None:
        """Why an endpoint cannot be used; None: it is a supported etcd with a leader and accepts the user."""
        try:
            async with asyncio.timeout(CONNECT_S):
                if not await channel.connect():
                    channel.drop()
                    return await probe(channel.endpoint, self._security)
                status = await channel.ask(STATUS, rpc.StatusRequest(), CONNECT_S)
                if (old := too_old(status.version)) is not None:
                    return Problem(old, is_permanent=True)
                if not status.leader:
                    return Problem("it knows of no leader", is_down=True)
                if self._security.user is not None and self._token is None:
                    await self._authenticate(channel)
                if not self._members:
                    await self._count_members(channel)
        except TimeoutError:
            channel.drop()
            return await probe(channel.endpoint, self._security)
        except ConnectionResetError as error:
            return Problem(str(error))
        except Rejected as error:
            return Problem(str(error), is_permanent=True)
        except grpc.aio.AioRpcError as error:
            fault = fault_of(error)
            if not fault.answered:
                channel.drop()
                return await probe(channel.endpoint, self._security)
            return Problem(fault.text, is_permanent=fault.kind is FaultKind.REJECTED)
        return None

    def _failure(self, problems: dict[str, Problem], started_at: float) -> BackendError:
        """All endpoints failed: the error that says why."""
        reasons = dict.fromkeys(problem.text for problem in problems.values())
        if len(reasons) == 1:
            text = f"etcd at {self.where} cannot be used: {next(iter(reasons))}"
        else:
            listed = "; ".join(f"{endpoint}: {problem.text}" for endpoint, problem in problems.items())
            text = f"etcd cannot be used: {listed}"
        if problems and all(problem.is_permanent for problem in problems.values()):
            return Rejected(text)
        return Unavailable(text, nothing_ended_at=self._nothing_ended_at(problems, started_at))

    # --- whether there can be a leader --------------------------------------------------------------------------------

    async def check_leaderless(self) -> float | None:
        """Ask all members at once; a moment at which etcd certainly had no leader, or None."""
        started_at = self._loop.time()
        checks = {
            asyncio.create_task(self._check(channel), name=f"ask {channel.endpoint}"): channel
            for channel in self._channels
        }
        try:
            done, _ = await asyncio.wait(checks, timeout=HURRY_S)
        finally:
            await _cancel(checks)
        problems = {checks[task].endpoint: problem for task in done if (problem := task.result()) is not None}
        return self._nothing_ended_at(problems, started_at)

    def _nothing_ended_at(self, problems: dict[str, Problem], started_at: float) -> float | None:
        """A moment at which etcd certainly had no leader.

        Only a leader ends leases, and a new leader first gives each lease its full time. There is certainly no leader
        if *every* member is down or knows of none. A member that does not answer may be a paused leader, which ends
        expired leases when it continues, or may belong to a majority that this process cannot reach.
        """
        out = sum(problem.is_down for problem in problems.values())
        if not self._members or out < max(self._members, len(self._channels)):
            return None
        mark("etcd.leaderless")
        return started_at

    async def _count_members(self, channel: Channel) -> None:
        try:
            told = await channel.ask(MEMBERS, rpc.MemberListRequest(), CONNECT_S, self.metadata())
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED):
                self._members = len(self._channels)  # this user may not ask; after other errors it is asked again
        else:
            self._members = sum(not member.isLearner for member in told.members)

    # --- authentication -----------------------------------------------------------------------------------------------

    async def _authenticate(self, channel: Channel) -> None:
        """Get a token, unless authentication is off in etcd. Rejected if the user or the password is wrong."""
        request = rpc.AuthenticateRequest(name=self._security.user, password=self._security.password)
        try:
            self._token = (await channel.ask(AUTHENTICATE, request, CONNECT_S)).token
        except grpc.aio.AioRpcError as error:
            if "not enabled" in str(error.details()):
                return
            fault = fault_of(error)
            if fault.kind is FaultKind.REJECTED:
                raise Rejected(fault.text) from None
            raise

    async def _renew_token(self, channel: Channel) -> None:
        """The token is no longer accepted: it has expired, or etcd was restarted."""
        mark("etcd.token_renewed")
        if self._security.user is None:
            raise Rejected(f"etcd at {channel.endpoint} asks for a user: give user and password_file")
        self._token = None
        try:
            await self._authenticate(channel)
        except (grpc.aio.AioRpcError, ConnectionResetError):
            self.suspect(channel)  # connecting to the next endpoint gets a new token

    def forget_token(self) -> None:
        """A stream was refused because of its token: get a new one before the next stream is opened."""
        self._token = None
        if self._current is not None:
            self._demote(self._current)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[BackendError | None], None]) -> None:
        """Call `listener` with the cause when no endpoint can be used, and with None when one can be used again."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[BackendError | None], None]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def _tell(self, error: BackendError | None) -> None:
        if error is not None or self._is_down:
            for listener in list(self._listeners):
                listener(error)
        self._is_down = error is not None

    async def close(self) -> None:
        """Close all channels. Callers of `ready` get Unavailable."""
        self.is_closed = True
        self._current = None
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        for channel in self._channels:
            await channel.close()


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version such as 3.5.1-rc.0; empty if the text is not a version."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in found.groups() if part is not None) if found else ()


def too_old(version: str) -> str | None:
    """Why an etcd of this version is not supported; None: it is."""
    numbers = version_of(version)
    if not numbers or numbers[:2] >= OLDEST:
        return None
    return f"it is etcd {version}: 3.4 or newer is needed"
