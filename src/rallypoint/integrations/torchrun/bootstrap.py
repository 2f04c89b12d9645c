"""Where the workers of a round meet: a real TCPStore of torch, which rank 0 of the round binds before it confirms.

Every attempt has a store of its own, so that no key of an earlier round is ever seen; the store of a round is there
until a later round was entered, which is when every member has left the earlier one. With sharing turned off, only a
free port is published, and a worker binds it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from rallypoint.api import free_port
from rallypoint.errors import RendezvousError
from rallypoint.rendezvous.membership import Bootstrap, Identity

LOOPBACK = "127.0.0.1"
"""The server listens on every address; its own client need not ask anybody for a name to reach it."""


class RoundStores:
    """The stores that this node has served as rank 0 and that may still be in use. Never more than two."""

    def __init__(self, is_shared: Callable[[], bool], limit_s: float) -> None:
        self._is_shared = is_shared
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._active: tuple[int, dist.TCPStore] | None = None
        self._forming: tuple[int, dist.TCPStore] | None = None
        self._is_closed = False

    def bootstrap(self, identity: Identity) -> Bootstrap:
        """What the node publishes in its confirmation when it is to be rank 0."""

        async def publish(number: int, size: int) -> tuple[str, int]:
            if not self._is_shared():
                return identity.addr, free_port()
            return identity.addr, await asyncio.get_running_loop().run_in_executor(None, self._open, number)

        return publish

    def entered(self, number: int) -> None:
        """The node is in that round: whatever was served for others is over."""
        with self._lock:
            kept = [one for one in (self._forming, self._active) if one is not None and one[0] == number]
            old, self._forming = (self._forming, self._active), None
            self._active = kept[0] if kept else None
        del old  # outside the lock: a server that goes waits for its thread

    def close(self) -> None:
        """Serve nothing any more."""
        with self._lock:
            old = self._forming, self._active
            self._forming = self._active = None
            self._is_closed = True
        del old

    @property
    def rounds(self) -> list[int]:
        """For which rounds and attempts something is served."""
        return [one[0] for one in (self._active, self._forming) if one is not None]

    def _open(self, number: int) -> int:
        """Blocks, but not for long. RendezvousError if it cannot be: without it, no worker could start."""
        try:
            store = dist.TCPStore(
                LOOPBACK, 0, is_master=True, multi_tenant=True, timeout=timedelta(seconds=self._limit_s)
            )
        except Exception as error:
            raise RendezvousError(
                f"this node is to be rank 0 of round {number} and cannot serve the workers' TCPStore: {error}"
            ) from error
        with self._lock:
            old = self._forming
            self._forming = None if self._is_closed else (number, store)
        del old
        return int(store.port)
