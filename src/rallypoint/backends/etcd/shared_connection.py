"""Shares connections: all backends of an event loop with the same endpoints and credentials use one connection."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from typing import TypeAlias
from weakref import WeakKeyDictionary

from rallypoint.backends.etcd.cluster import Cluster
from rallypoint.backends.etcd.keepalive_stream import KeepAliveStream
from rallypoint.backends.etcd.security import Security
from rallypoint.backends.etcd.watch_stream import WatchStream

Key: TypeAlias = tuple[tuple[str, ...], Security]

_connections: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Key, SharedConnection]] = WeakKeyDictionary()
_inherited: list[object] = []


def _forget_in_child() -> None:
    """After a fork: the connections are the parent's. Kept alive, because destroying them would crash gRPC."""
    _inherited.extend(_connections.values())
    _connections.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class SharedConnection:
    """A cluster and its two streams. Closed when the last user has released it."""

    def __init__(self, endpoints: tuple[str, ...], security: Security) -> None:
        rng = random.Random(secrets.randbits(64))
        self.cluster = Cluster(endpoints, security, rng)
        self.keepalives = KeepAliveStream(self.cluster, rng)
        self.watches = WatchStream(self.cluster, rng)
        self._key: Key = (endpoints, security)
        self._users = 0

    @classmethod
    def to(cls, endpoints: tuple[str, ...], security: Security) -> SharedConnection:
        """The connection of the running loop, opened if there is none. Every call needs one `release`."""
        known = _connections.setdefault(asyncio.get_running_loop(), {})
        connection = known.get((endpoints, security))
        if connection is None:
            connection = known[endpoints, security] = cls(endpoints, security)
        connection._users += 1
        return connection

    async def release(self) -> None:
        self._users -= 1
        if self._users > 0:
            return
        known = _connections.get(asyncio.get_running_loop(), {})
        if known.get(self._key) is self:
            del known[self._key]
        await self.keepalives.close()
        await self.watches.close()
        await self.cluster.close()
