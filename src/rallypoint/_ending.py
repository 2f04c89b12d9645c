"""How a handler ends: its node says goodbye, its backend is closed, and whoever waits for its world is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from rallypoint._world import AsyncChanged
from rallypoint.backends.contract import Backend
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.node import Node

_leaving: set[asyncio.Task[None]] = set()


def tell_left(changed: AsyncChanged | None, why: str) -> None:
    """Whoever waits for a change of its world is told that the node has left it."""
    if changed is not None and changed.cause not in (Cause.SESSION_LOST, Cause.ROUND_OVER):
        changed.set(Cause.ROUND_OVER, f"this node left: {why}")


async def end(node: Node | None, backend: Backend, then: Callable[[], None] = lambda: None) -> None:
    """Whoever does not want to wait for its goodbye does not want to wait for others either; `then` comes last."""
    try:
        if node is not None:
            await node.stop()
    except BaseException:
        backend.shorten_close()
        raise
    finally:
        try:
            await backend.close()
        finally:
            then()


def drop(loop: asyncio.AbstractEventLoop, node: Node, backend: Backend, pid: int) -> None:
    """A handler was dropped without a word: its node leaves, wherever its loop still runs."""
    if os.getpid() != pid or loop.is_closed():
        return

    def start() -> None:
        task = loop.create_task(end(node, backend), name="a dropped handler leaves")
        _leaving.add(task)
        task.add_done_callback(_leaving.discard)

    loop.call_soon_threadsafe(start)
