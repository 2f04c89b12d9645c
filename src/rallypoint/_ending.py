"""The end of a handler: its node leaves, its backend is closed, and waiters for a change of its world are woken.

The backend must be closed even if leaving fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from rallypoint._world import AsyncChanged
from rallypoint.backends.contract import Backend
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.node import Node

_leaving: set[asyncio.Task[None]] = set()


def signal_left(changed: AsyncChanged | None, why: str) -> None:
    """Set `changed` because the node has left, unless a graver cause is set."""
    if changed is not None and changed.cause not in (Cause.SESSION_LOST, Cause.ROUND_OVER):
        changed.set(Cause.ROUND_OVER, f"this node left: {why}")


async def end(node: Node | None, backend: Backend, then: Callable[[], None] = lambda: None) -> None:
    """Stop the node, close the backend, call `then`. If stopping is cancelled, closing does not wait for others."""
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
    """Finalizer of a handler that was not closed: its node leaves, if its loop still runs."""
    if os.getpid() != pid or loop.is_closed():
        return

    def start() -> None:
        task = loop.create_task(end(node, backend), name="leave for a dropped handler")
        _leaving.add(task)
        task.add_done_callback(_leaving.discard)

    loop.call_soon_threadsafe(start)
