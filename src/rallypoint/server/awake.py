"""A server that does not fall asleep between the requests of one client that makes them one after the other.

To be woken takes the kernel longer than a small request takes the server: measured, a call of a store needs 70 to 120
microseconds with a sleep on both sides and 20 to 30 without. So when the same connection has asked twice in quick
succession, the loop looks for more for a moment before it waits. With several clients at once there is no sleep to
save, and nothing is done. Only for a server that is a process of its own: elsewhere the time is somebody else's.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from rallypoint.server.connection import Connection
from rallypoint.server.house import House

AWAKE_S = 0.0001
"""How long it looks for the next request."""
NEAR_S = 0.0003
"""Requests that are no further apart follow each other."""


class Awake:
    """Keeps a loop from waiting, for a moment, after requests that follow each other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._last: Connection | None = None
        self._last_at = self._until = float("-inf")
        self._is_looking = False

    def asked(self, connection: Connection) -> None:
        """Somebody has asked for something, and was answered."""
        now = self._clock()
        if self._last is not connection:
            self._last, self._until = connection, now
        elif now - self._last_at < NEAR_S:
            self._until = now + AWAKE_S
            if not self._is_looking:
                self._is_looking = True
                self._loop.call_soon(self._look)
        self._last_at = now

    def _look(self) -> None:
        """A turn of the loop that does not wait, because another is due."""
        if self._clock() < self._until:
            os.sched_yield()  # whoever has something to do on this core does it
            self._loop.call_soon(self._look)
        else:
            self._is_looking = False
            self._last = None


class WakefulConnection(Connection):
    """A connection of a server that stays awake."""

    def __init__(self, house: House, awake: Awake) -> None:
        super().__init__(house)
        self._awake = awake

    def data_received(self, data: bytes) -> None:
        Connection.data_received(self, data)  # as super() says, which costs a request more
        self._awake.asked(self)
