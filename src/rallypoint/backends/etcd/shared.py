"""The connections of a process: all backends of a loop that mean the same cluster, as the same user, share one."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from typing import TypeAlias
from weakref import WeakKeyDictionary

from rallypoint.backends.etcd.cluster import Cluster
from rallypoint.backends.etcd.keeper import Keeper
from rallypoint.backends.etcd.security import Security
from rallypoint.backends.etcd.watcher import Watcher

Key: TypeAlias = tuple[tuple[str, ...], Security]

_connections: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Key, Connection]] = WeakKeyDictionary()
_inherited: list[object] = []


def _let_go() -> None:
    """In a child: they are the parent's. They are not destroyed here: gRPC would crash."""
    _inherited.extend(_connections.values())
    _connections.clear()


os.register_at_fork(after_in_child=_let_go)


class Connection:
    """A cluster and the two streams that everybody uses. Closed when the last one has let go of it."""

    def __init__(self, endpoints: tuple[str, ...], security: Security) -> None:
        rng = random.Random(secrets.randbits(64))
        self.cluster = Cluster(endpoints, security, rng)
        self.keeper = Keeper(self.cluster, rng)
        self.watcher = Watcher(self.cluster, rng)
        self._key: Key = (endpoints, security)
        self._users = 0

    @classmethod
    def to(cls, endpoints: tuple[str, ...], security: Security) -> Connection:
        """The connection of the running loop; made if there is none. `release` it."""
        known = _connections.setdefault(asyncio.get_running_loop(), {})
        connection = known.get((endpoints, security))
        if connection is None:
            connection = known[endpoints, security] = cls(endpoints, security)
        connection._users += 1
        return connection

    async def release(self) -> None:
        """One user less."""
        self._users -= 1
        if self._users > 0:
            return
        known = _connections.get(asyncio.get_running_loop(), {})
        if known.get(self._key) is self:
            del known[self._key]
        await self.keeper.close()
        await self.watcher.close()
        await self.cluster.close()
