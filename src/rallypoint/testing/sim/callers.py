"""How nodes are used: by callers who wait on another thread, so to say, and may be released before a call has ended."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import NamedTuple

from rallypoint.backends.contract import Begun, Lane
from rallypoint.kv.types import Op, Put, Txn
from rallypoint.rendezvous.express import joined_at
from rallypoint.rendezvous.membership import Bootstrap, Joined
from rallypoint.rendezvous.node import Node
from rallypoint.testing.sim.lanes import WiredLane
from rallypoint.testing.sim.plan import Plan


class Call(NamedTuple):
    """A call that goes on, although whoever waited for it was released."""

    task: asyncio.Task[Joined]
    in_time: bool
    """The session had not ended by this side's clock."""


class _Port:
    """What is published of rank 0, as a `HeldZero` does it."""

    def __init__(self, addr: str) -> None:
        self._addr = addr

    async def __call__(self, number: int, size: int) -> tuple[str, int]:
        return self._addr, 20_000 + number % 10_000

    def hold(self) -> tuple[str, int]:
        return self._addr, 10_000

    def let_go(self) -> None:
        pass


def waits_elsewhere(plan: Plan, machine: str) -> bool:
    """Whether whoever calls is on another thread, so to say."""
    return plan.all_pledge or random.Random(f"{plan.seed} {machine} waits").random() < 0.5


def bootstrap(plan: Plan, machine: str, addr: str) -> Bootstrap:
    """With a port that is held beforehand, or not before it is asked for."""
    port = _Port(addr)
    holds = plan.all_pledge or random.Random(f"{plan.seed} {machine} holds").random() < 0.5
    return port if holds else port.__call__


class _Caller:
    """Waits for a node's place."""

    def __init__(self, node: Node) -> None:
        self.released: asyncio.Future[tuple[Joined, bool]] = asyncio.get_running_loop().create_future()
        self._node = node

    def prepare(self) -> None:
        """There is nothing to make."""

    def lend(self, lane: Lane) -> None:
        assert isinstance(lane, WiredLane)
        lane.attend()

    def enter(self, joined: Joined) -> object:
        self(joined)
        return joined

    def __call__(self, joined: Joined) -> None:
        session = self._node._presence.session
        in_time = session is not None and asyncio.get_running_loop().time() < session.expires_at
        self.released.set_result((joined, in_time))


LOOKS_S = 0.5
"""How long one who looks at the run before it joins waits for what it sees."""
ALONE_S = (0.0, 0.2)
"""How long one who has joined by itself waits for its place."""


async def look(node: Node, rng: random.Random) -> Lane | None:
    """What some do before they join: they may begin by themselves then."""
    if rng.random() < 0.5:
        return None
    node.observe()
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOKS_S):
            await node.sight.wait_synced()
    lane = node.starts.stand_by(node.identity.id)
    if lane is not None:
        assert isinstance(lane, WiredLane)
        await lane.stands_by()
    await asyncio.sleep(rng.uniform(0.0, LOOKS_S))
    return lane


async def _begin(node: Node, caller: _Caller, lane: Lane, rng: random.Random) -> Begun | None:
    """What a caller has done by itself, if it did anything. It may lose interest while it does."""
    start = node.starts.take()
    if start is None:
        return None
    assert isinstance(lane, WiredLane)
    begun = Begun(start)
    done = await lane.begins(begun, rng.uniform(*ALONE_S))
    if done is not None:
        joined = joined_at(done, start.door.config.data_lease)
        node.entered_early(joined)
        in_time = asyncio.get_running_loop().time() < begun.sent_at + start.ttl_s
        caller.released.set_result((joined, in_time))
    elif rng.random() < 0.05:
        begun.is_given_up = True
    return begun if begun.sent_at else None


async def join(
    node: Node, machine: str, waits_elsewhere: bool, lane: Lane | None, rng: random.Random
) -> tuple[Joined, Call | None]:
    """A place in a round; and the call, if whoever waits for it was released before it had ended."""
    if not waits_elsewhere:
        return await node.next_round(), None
    caller = _Caller(node)
    begun = await _begin(node, caller, lane, rng) if lane is not None else None
    began_at = begun.sent_at if begun is not None else None
    task = asyncio.create_task(node.next_round(began_at, caller, begun), name=f"{machine} joins")
    await asyncio.wait((caller.released, task), return_when=asyncio.FIRST_COMPLETED)
    if not caller.released.done():
        return await task, None
    joined, in_time = caller.released.result()
    return joined, Call(task, in_time)


async def go_on(node: Node, call: Call, joined: Joined, rng: random.Random) -> str:
    """What a caller does that was released: asks for more at once, or a while later. What is wrong, if anything is."""
    if not call.in_time:
        return f"released with {joined} after its session had ended by its own clock"
    if not call.task.done() and node._told_cause is None and (count := node.waiting_count()):
        return f"released with {joined}, and told that {count} wait for the next round"
    if rng.random() < 0.5:
        node.settle()
    (outcome,) = await asyncio.gather(call.task, return_exceptions=True)
    return "" if outcome == joined else f"released with {joined}, and the call ended with {outcome!r}"


def never_confirms(op: Op) -> bool:
    """Whether a request is a confirmation."""
    if not isinstance(op, Txn):
        return False
    return any(
        isinstance(step, Put) and "/nodes/" in step.key and b'"phase":"member"' in step.value for step in op.then
    )
