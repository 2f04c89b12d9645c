"""Gets a request to some endpoint of the cluster, and says what may be assumed when that did not work.

One endpoint is current; all calls and streams use it. When it cannot be used (no connection, no answer, no leader) the
others are tried, a moment after each other, and the first that answers is the current one. A call that may not be
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
from rallypoint.backends.etcd.faults import Fault, Means, fault_of
from rallypoint.backends.etcd.forks import grpc
from rallypoint.backends.etcd.link import AUTHENTICATE, MEMBERS, STATUS, Link, Metadata, Method, is_cancelled
from rallypoint.backends.etcd.probe import Trouble, probe
from rallypoint.backends.etcd.security import Security
from rallypoint.errors import BackendError, OutcomeUnknown, Rejected, Unavailable

Q = TypeVar("Q")
A = TypeVar("A")

CONNECT_S = 4.0
"""One attempt to reach one endpoint, with all that is asked first, takes no longer."""
STAGGER_S = 0.3
"""The next endpoint is tried when one has not answered for so long."""
HURRY_S = 1.0
"""How long the others are waited for once one endpoint has failed."""
READ_S = 3.0
WRITE_S = 5.0
"""How long one attempt of a call may take; a read is given twice as long each time."""
AGAIN_S = 0.1
OLDEST = (3, 4)


class LeaseFault(Exception):
    """etcd says that a lease is not there, or is already."""

    def __init__(self, means: Means) -> None:
        super().__init__(means.value)
        self.means = means


class Cluster:
    """A client of one etcd cluster. Belongs to one event loop; `close` it."""

    def __init__(self, endpoints: tuple[str, ...], security: Security, rng: random.Random | None = None) -> None:
        self.where = ",".join(endpoints)
        self._security = security
        rng = rng or random.Random(secrets.randbits(64))
        self._links = [Link(endpoint, security) for endpoint in endpoints]
        rng.shuffle(self._links)  # so that not everybody asks the same member
        self._loop = asyncio.get_running_loop()
        self._current: Link | None = None
        self._connecting: asyncio.Task[Link] | None = None
        self._token: str | None = None
        self._members = 0
        """As long as that is not known, nothing is certain."""
        self._listeners: list[Callable[[BackendError | None], None]] = []
        self._is_down = False
        self.is_closed = False

    # --- calls --------------------------------------------------------------------------------------------------------

    async def call(self, method: Method[Q, A], request: Q, *, changes: bool, timeout_s: float) -> A:
        """The answer. `changes`: it must not be executed twice.

        Raises Unavailable (it was not executed), OutcomeUnknown (only if it changes something), Rejected, LeaseFault.
        """
        deadline = self._loop.time() + timeout_s
        attempt_s = WRITE_S if changes else READ_S
        renewed = tries = 0
        while True:
            link = await self.ready(deadline)
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                raise Unavailable(f"etcd at {self.where} did not answer within {timeout_s:g} s")
            try:
                return await link.ask(method, request, min(attempt_s, left_s), self.metadata())
            except grpc.aio.AioRpcError as error:
                fault = fault_of(error)
            except ConnectionResetError as error:
                fault = Fault(Means.UNKNOWN, str(error), answered=False)
            tries += 1
            if fault.means is Means.TOKEN and renewed < 2:
                renewed += 1
                await self._renew_token(link)
                continue
            self._raise_if_final(link, fault)
            self.failed(link, fault)
            if fault.means is Means.UNKNOWN and changes:
                mark("etcd.outcome_unknown")
                raise OutcomeUnknown(f"etcd at {link.endpoint}: {fault.text}; whether it was done is not known")
            if fault.means is not Means.UNKNOWN and tries > 2 * len(self._links):
                raise Unavailable(f"etcd at {link.endpoint}: {fault.text}")
            if fault.answered:
                await asyncio.sleep(AGAIN_S)
            attempt_s *= 2

    def _raise_if_final(self, link: Link, fault: Fault) -> None:
        match fault.means:
            case Means.LEASE_GONE | Means.LEASE_EXISTS:
                raise LeaseFault(fault.means)
            case Means.REJECTED | Means.TOKEN:
                raise Rejected(f"etcd at {link.endpoint}: {fault.text}")

    def failed(self, link: Link, fault: Fault) -> None:
        """A call or stream through this link failed: is it still the one to use?"""
        if fault.means is Means.NO_LEADER:
            self._leave(link)
        elif not fault.answered:
            self.suspect(link)

    def suspect(self, link: Link) -> None:
        """It was silent, or its connection broke: everything moves to another endpoint, or to a new connection."""
        mark("etcd.suspected")
        self._leave(link)
        link.drop()

    def _leave(self, link: Link) -> None:
        if self._current is link:
            self._current = None
            self._links.remove(link)
            self._links.append(link)  # the last to be tried again

    def metadata(self) -> Metadata:
        """What goes with every call: that an answer without a leader is none, and who asks."""
        leader = ("hasleader", "true")
        return (leader,) if self._token is None else (leader, ("token", self._token))

    # --- the current endpoint -----------------------------------------------------------------------------------------

    async def ready(self, deadline: float | None = None) -> Link:
        """The current endpoint. Unavailable as soon as all were tried in vain; Rejected if none can ever be used."""
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

    def _connected(self, task: asyncio.Task[Link]) -> None:
        self._connecting = None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._tell(None)
        else:
            self._tell(error if isinstance(error, BackendError) else Unavailable(f"connecting failed: {error!r}"))

    async def _connect(self) -> Link:
        """Try the endpoints, each a moment after the one before; the first that answers.

        Once one has failed, the others are not waited for much longer: what failed may work by now.
        """
        started_at = self._loop.time()
        give_up_at = float("inf")
        troubles: dict[str, Trouble] = {}
        checks: dict[asyncio.Task[Trouble | None], Link] = {}
        waiting = list(self._links)
        try:
            while waiting or checks:
                if waiting:
                    link = waiting.pop(0)
                    checks[asyncio.create_task(self._check(link), name=f"try etcd at {link.endpoint}")] = link
                left_s = max(0.0, give_up_at - self._loop.time())
                pause_s = STAGGER_S if waiting else None if left_s == float("inf") else left_s
                done, _ = await asyncio.wait(checks, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    link = checks.pop(task)
                    trouble = task.result()
                    if trouble is None:
                        self._current = link
                        return link
                    troubles[link.endpoint] = trouble
                    give_up_at = min(give_up_at, self._loop.time() + HURRY_S)
                if not done and not waiting:
                    troubles |= {link.endpoint: Trouble("no answer yet") for link in checks.values()}
                    break
        finally:
            await _end(checks)
        raise self._verdict(troubles, started_at)

    async def _check(self, link: Link) -> Trouble | None:
        """Whether an endpoint can be used: connected, an etcd that is new enough, with a leader, and it knows us."""
        try:
            async with asyncio.timeout(CONNECT_S):
                if not await link.connect():
                    link.drop()
                    return await probe(link.endpoint, self._security)
                status = await link.ask(STATUS, rpc.StatusRequest(), CONNECT_S)
                if (old := too_old(status.version)) is not None:
                    return Trouble(old, is_hopeless=True)
                if not status.leader:
                    return Trouble("it knows of no leader", is_out=True)
                if self._security.user is not None and self._token is None:
                    await self._authenticate(link)
                if not self._members:
                    await self._count_members(link)
        except TimeoutError:
            link.drop()
            return await probe(link.endpoint, self._security)
        except ConnectionResetError as error:
            return Trouble(str(error))
        except Rejected as error:
            return Trouble(str(error), is_hopeless=True)
        except grpc.aio.AioRpcError as error:
            fault = fault_of(error)
            if not fault.answered:
                link.drop()
                return await probe(link.endpoint, self._security)
            return Trouble(fault.text, is_hopeless=fault.means is Means.REJECTED)
        return None

    def _verdict(self, troubles: dict[str, Trouble], started_at: float) -> BackendError:
        """All endpoints were tried in vain: the error that says why."""
        reasons = dict.fromkeys(trouble.text for trouble in troubles.values())
        if len(reasons) == 1:
            text = f"etcd at {self.where} cannot be used: {next(iter(reasons))}"
        else:
            listed = "; ".join(f"{endpoint}: {trouble.text}" for endpoint, trouble in troubles.items())
            text = f"etcd cannot be used: {listed}"
        if troubles and all(trouble.is_hopeless for trouble in troubles.values()):
            return Rejected(text)
        return Unavailable(text, nothing_ended_at=self._nothing_ended_at(troubles, started_at))

    # --- whether there can be a leader --------------------------------------------------------------------------------

    async def take_census(self) -> float | None:
        """Ask all members at once; a moment at which etcd certainly had no leader, if that is what they say."""
        started_at = self._loop.time()
        checks = {asyncio.create_task(self._check(link), name=f"ask {link.endpoint}"): link for link in self._links}
        try:
            done, _ = await asyncio.wait(checks, timeout=HURRY_S)
        finally:
            await _end(checks)
        troubles = {checks[task].endpoint: trouble for task in done if (trouble := task.result()) is not None}
        return self._nothing_ended_at(troubles, started_at)

    def _nothing_ended_at(self, troubles: dict[str, Trouble], started_at: float) -> float | None:
        """A moment at which etcd certainly had no leader.

        Leases end only by a leader, and a new one first gives each its full time. That there is none is certain if
        *every* member is out. One that only says nothing may be a leader that is paused: it goes on where it stopped,
        and ends what has run out meanwhile; or it has a majority with it that this process cannot reach.
        """
        out = sum(trouble.is_out for trouble in troubles.values())
        if not self._members or out < max(self._members, len(self._links)):
            return None
        mark("etcd.leaderless")
        return started_at

    async def _count_members(self, link: Link) -> None:
        try:
            told = await link.ask(MEMBERS, rpc.MemberListRequest(), CONNECT_S, self.metadata())
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED):
                self._members = len(self._links)  # not everybody may ask; else it is asked again next time
        else:
            self._members = sum(not member.isLearner for member in told.members)

    # --- who asks -----------------------------------------------------------------------------------------------------

    async def _authenticate(self, link: Link) -> None:
        """Get a token. Rejected if this user is not known; without authentication in etcd there is none."""
        request = rpc.AuthenticateRequest(name=self._security.user, password=self._security.password)
        try:
            self._token = (await link.ask(AUTHENTICATE, request, CONNECT_S)).token
        except grpc.aio.AioRpcError as error:
            if "not enabled" in str(error.details()):
                return
            fault = fault_of(error)
            if fault.means is Means.REJECTED:
                raise Rejected(fault.text) from None
            raise

    async def _renew_token(self, link: Link) -> None:
        """The token is no longer accepted: it was not used for a while, or etcd was started again."""
        mark("etcd.token_renewed")
        if self._security.user is None:
            raise Rejected(f"etcd at {link.endpoint} asks for a user: give user and password_file")
        self._token = None
        try:
            await self._authenticate(link)
        except (grpc.aio.AioRpcError, ConnectionResetError):
            self.suspect(link)  # the next one asks for it

    def forget_token(self) -> None:
        """A stream was refused for its token: get another before the next one is opened."""
        self._token = None
        if self._current is not None:
            self._leave(self._current)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[BackendError | None], None]) -> None:
        """Be told when no endpoint can be used (with the cause), and when one can again (None)."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[BackendError | None], None]) -> None:
        """Be told no more."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def _tell(self, error: BackendError | None) -> None:
        if error is not None or self._is_down:
            for listener in list(self._listeners):
                listener(error)
        self._is_down = error is not None

    async def close(self) -> None:
        """Let go of all connections."""
        self.is_closed = True
        self._current = None
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        for link in self._links:
            await link.close()


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel them, and see them end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def version_of(text: str) -> tuple[int, ...]:
    """The numbers of a version such as 3.5.1-rc.0; empty if it is none."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in found.groups() if part is not None) if found else ()


def too_old(version: str) -> str | None:
    """Why an etcd of this version is not used; None: it is new enough."""
    numbers = version_of(version)
    if not numbers or numbers[:2] >= OLDEST:
        return None
    return f"it is etcd {version}: 3.4 or newer is needed"
