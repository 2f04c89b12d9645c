"""What a check of the round's store is given: members of real rounds on any backend, each with its store.

Every member has two connections: its node's, which is left alone, and its store's, which goes through a
`ChaosBackend`, so that it can be cut off while the node lives on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from rallypoint.backends.contract import Backend
from rallypoint.events import Emitter
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Identity, Joined
from rallypoint.rendezvous.node import Node
from rallypoint.settings import Settings
from rallypoint.store import AsyncStore
from rallypoint.testing.chaos import ChaosBackend, Faults
from rallypoint.testing.conformance.kit import NotConforming

_T = TypeVar("_T")

SHORT_S = 0.5
"""A time-out that is meant to pass."""


NO_FAULTS = Faults.none()


@dataclass(frozen=True)
class StoreKit:
    """A backend whose store is to be checked. Nobody else uses its run meanwhile."""

    connect: Callable[[], Awaitable[Backend]]
    """A fresh connection, always to the same backend."""
    advance: Callable[[float], Awaitable[None]]
    """Let this many seconds of the backend's time pass: `asyncio.sleep`, on a virtual or on a real loop."""
    run_id: str
    """Fresh for each check."""
    lease_slack_s: float
    """How much later than its time to live a lease may end."""
    ttl_s: float = 3.0
    """The time to live of a member's session: no less than what the backend can keep."""
    patience_s: float = 20.0
    """How long anything that should happen at once may take."""
    late_s: float = 2.0
    """How much later than asked for a time-out may come."""
    faults: Faults = NO_FAULTS
    """What befalls the stores' connections all the time. No unknown outcomes: a store tells its caller of those."""
    seed: int = 0

    @property
    def keys(self) -> RunKeys:
        return RunKeys("rallypoint", self.run_id)

    @asynccontextmanager
    async def members(self, count: int) -> AsyncIterator[Group]:
        """The members of an active round, in rank order. Afterwards they have left."""
        async with AsyncExitStack() as stack:
            group = Group(self)
            stack.push_async_callback(group.leave)
            for index in range(count):
                connections: list[Backend] = []
                for _ in range(2):
                    connections.append(await self.connect())
                    stack.push_async_callback(connections[-1].close)
                group.add(index, count, *connections)
            await group.next_round()
            yield group

    async def soon(self, promise: str, awaitable: Awaitable[_T]) -> _T:
        """The result, if it comes within `patience_s`; NotConforming otherwise."""
        try:
            async with asyncio.timeout(self.patience_s):
                return await awaitable
        except TimeoutError as error:
            raise NotConforming(promise, f"{error!r} after {self.patience_s:g} s or less") from error

    @asynccontextmanager
    async def in_time(self, promise: str, after_s: float) -> AsyncIterator[None]:
        """What is inside ends after so many seconds, not earlier, and not later than `late_s` more."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        yield
        took_s = loop.time() - started_at
        if not after_s - 0.05 <= took_s <= after_s + self.late_s:
            raise NotConforming(promise, f"{took_s:.3f} s instead of {after_s:g} s")


class Group:
    """The members of one round after the other. `stores` are those of the current one, in rank order."""

    def __init__(self, kit: StoreKit) -> None:
        self.stores: list[AsyncStore] = []
        self._kit = kit
        self._rng = random.Random(kit.seed)
        self._members: list[Member] = []

    def add(self, index: int, size: int, backend: Backend, store_backend: Backend) -> None:
        """One member more; it joins with the next round."""
        kit = self._kit
        settings = Settings.build(
            scheme="memory",
            run_id=kit.run_id,
            min_nodes=size,
            name=f"n{index}",
            keep_alive_interval=kit.ttl_s / 3,
            keep_alive_max_attempt=3,
        )
        identity = Identity(
            id=f"{self._rng.getrandbits(64):016x}",
            name=f"n{index}",
            addr=f"n{index}",
            pid=index + 1,
            local_id=0,
            labels={},
        )
        node = Node(
            backend,
            settings,
            identity,
            bootstrap=_no_port,
            emit=Emitter(),
            rng=random.Random(self._rng.getrandbits(64)),
            wall=asyncio.get_running_loop().time,
        )
        chaos = ChaosBackend(store_backend, random.Random(self._rng.getrandbits(64)), kit.faults)
        self._members.append(Member(node, backend, chaos))

    async def next_round(self) -> list[AsyncStore]:
        """All members go on to the next round; its stores, in rank order."""
        joined = await self._kit.soon(
            "a round forms when all its nodes have joined",
            asyncio.gather(*(member.node.next_round() for member in self._members)),
        )
        ranks = [place.rank for place in joined]
        self._members = [self._members[ranks.index(rank)] for rank in range(len(ranks))]
        self.stores = [
            member.enter(place)
            for member, place in zip(self._members, sorted(joined, key=lambda place: place.rank), strict=True)
        ]
        return self.stores

    async def leave_round(self, rank: int) -> None:
        """That member leaves in good order."""
        await self._members[rank].node.leave("the check says so")

    def crash(self, rank: int) -> None:
        """That member's node dies without a word. Its store object is still there, as with a process that hung."""
        self._members[rank].node.abandon()

    async def lose_session(self, rank: int) -> None:
        """The backend ends that member's session, as if it had not been renewed."""
        node = self._members[rank].node
        item = (await self._members[rank].backend.get(node.keys.node(node.identity.id))).item
        if item is None or not item.lease:
            raise NotConforming("a member has a key under its session", f"{item!r}")
        await self._members[rank].backend.revoke(item.lease)

    @contextmanager
    def outage(self, rank: int, *, hanging: bool = False) -> Iterator[None]:
        """That member's store cannot reach the backend: requests are refused, or hang. Its node still can."""
        chaos = self._members[rank].chaos
        usual = chaos.faults
        if hanging:
            chaos.cut()
        else:
            chaos.faults = replace(usual, unavailable=1.0)
        try:
            yield
        finally:
            chaos.faults = usual
            chaos.heal()

    @property
    def backend(self) -> Backend:
        """A connection without faults."""
        return self._members[0].backend

    async def leave(self) -> None:
        """Everybody goes."""
        for member in self._members:
            await member.node.stop()
            await member.chaos.close()
            await member.chaos.settled()


@dataclass(frozen=True, slots=True)
class Member:
    """One node, and the connection of its stores."""

    node: Node
    backend: Backend
    chaos: ChaosBackend

    def enter(self, joined: Joined) -> AsyncStore:
        """The store of a round."""
        return AsyncStore(self.chaos, self.node.keys, self.node.identity.id, joined)


StoreCheck: TypeAlias = Callable[[StoreKit], Coroutine[Any, Any, None]]


@asynccontextmanager
async def started(coro: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """Something that goes on meanwhile; ended with the block."""
    task = asyncio.create_task(coro)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _no_port(number: int, size: int) -> tuple[str, int]:
    return "nowhere", 1
