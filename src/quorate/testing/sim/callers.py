"""How nodes are used: by callers who wait on another thread, so to say, and may be released before a call has ended."""

from __future__ import annotations

import asyncio
import random

from quorate.kv.types import Op, Put, Txn
from quorate.rendezvous.membership import Joined
from quorate.rendezvous.node import Node


async def join(node: Node, machine: str, waits_elsewhere: bool) -> tuple[Joined, asyncio.Task[Joined] | None]:
    """A place in a round; and the call, if whoever waits for it was released before it had ended."""
    if not waits_elsewhere:
        return await node.next_round(), None
    released: asyncio.Future[Joined] = asyncio.get_running_loop().create_future()
    call = asyncio.create_task(node.next_round(released=released.set_result), name=f"{machine} joins")
    await asyncio.wait((released, call), return_when=asyncio.FIRST_COMPLETED)
    return (released.result(), call) if released.done() else (await call, None)


async def go_on(node: Node, call: asyncio.Task[Joined], joined: Joined, rng: random.Random) -> str:
    """What a caller does that was released: asks for more at once, or a while later. What is wrong, if anything is."""
    if rng.random() < 0.5:
        node.settle()
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    return "" if outcome == joined else f"released with {joined}, and the call ended with {outcome!r}"


def never_confirms(op: Op) -> bool:
    """Whether a request is a confirmation."""
    if not isinstance(op, Txn):
        return False
    return any(
        isinstance(step, Put) and "/nodes/" in step.key and b'"phase":"member"' in step.value for step in op.then
    )
