"""The store through which the workers of a round find each other: torch's TCPStore, which the round's rank 0 hosts.

Rank 0 binds it before it confirms. Every attempt has a store of its own, so that no key of an earlier round is ever
seen. The store of a round lives until this node enters a later round: by then, all members have left the earlier one.
If sharing is turned off, rank 0 only publishes a free port, and a worker binds it.
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
"""The server listens on all addresses. Its own client uses this one, which needs no name look-up."""


class RoundTCPStores:
    """The stores that this node hosts as rank 0: at most one for the active round and one for a forming one."""

    def __init__(self, is_shared: Callable[[], bool], limit_s: float) -> None:
        self._is_shared = is_shared
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._active: tuple[int, dist.TCPStore] | None = None
        self._forming: tuple[int, dist.TCPStore] | None = None
        self._is_closed = False

    def bootstrap(self, identity: Identity) -> Bootstrap:
        """The function that makes the address and port that this node publishes when it confirms as rank 0."""

        async def publish(number: int, size: int) -> tuple[str, int]:
            if not self._is_shared():
                return identity.addr, free_port()
            return identity.addr, await asyncio.get_running_loop().run_in_executor(None, self._open, number)

        return publish

    def entered(self, number: int) -> None:
        """The node has entered that round: drop the stores of all others."""
        with self._lock:
            kept = [one for one in (self._forming, self._active) if one is not None and one[0] == number]
            old, self._forming = (self._forming, self._active), None
            self._active = kept[0] if kept else None
        del old  # outside the lock: the destructor of a server waits for its thread

    def close(self) -> None:
        """Drop all stores, and host no more."""
        with self._lock:
            old = self._forming, self._active
            self._forming = self._active = None
            self._is_closed = True
        del old

    @property
    def rounds(self) -> list[int]:
        """The numbers of the rounds and attempts that have a store."""
        return [one[0] for one in (self._active, self._forming) if one is not None]

    def _open(self, number: int) -> int:
        """Host a store and return its port. Blocks briefly. RendezvousError if that fails: no worker could start."""
        try:
            store = dist.TCPStore(
                LOOPBACK, 0, is_master=True, multi_tenant=True, timeout=timedelta(seconds=self._limit_s)
            )
        except Exception as error:
            raise RendezvousError(
                f"this node is rank 0 of round {number}, but cannot host the workers' TCPStore: {error}"
            ) from error
        with self._lock:
            old = self._forming
            self._forming = None if self._is_closed else (number, store)
        del old
        return int(store.port)
