"""A server that takes renewals together while nothing else happens.

Thousands of idle nodes renew their sessions one after the other. To be woken for each costs a server several times what
the renewal costs, and none of them is urgent: an answer that comes milliseconds later changes nothing. So while
renewals are all that comes, and many of them, the loop looks only now and then and takes what has gathered. Any other
frame, a change of any key (a lease may have ended) and a request of the page end that, for a second at least. Only for
a server that is a process of its own: elsewhere the loop is somebody else's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rallypoint.kv.engine import Engine
from rallypoint.server.door import Door
from rallypoint.server.traffic import Traffic

JUDGED_S = 1.0
"""How long nothing but renewals has to come first; and how often that is asked."""
LEAST = 400
"""So many of them: with fewer there is little to gather."""
REST_S = 0.005
"""So much later at most is noticed what ends it."""


class Rest:
    """Keeps a loop from looking too often. Costs a request next to nothing: it reads sums that are kept."""

    def __init__(
        self, traffic: Traffic, engine: Engine, door: Door, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._traffic = traffic
        self._engine = engine
        self._door = door
        self._sleep = sleep
        self._loop = asyncio.get_running_loop()
        self._renewals = 0
        self._before = self._seen = self._others()
        self.is_resting = False
        self._timer = self._loop.call_later(JUDGED_S, self._judge)

    def stop(self) -> None:
        """Rest no more."""
        self.is_resting = False
        self._timer.cancel()

    def _others(self) -> tuple[int, int, int]:
        """Stays the same while there is nothing but renewals."""
        traffic = self._traffic
        return traffic.frames_in - traffic.renewals, self._engine.revision, self._door.page_asked

    def _judge(self) -> None:
        """Whether the time since this was last asked was one of renewals only."""
        others, renewals = self._others(), self._traffic.renewals
        is_calm = others == self._before and renewals - self._renewals >= LEAST
        self._before, self._renewals = others, renewals
        if is_calm and not self.is_resting:
            self.is_resting = True
            self._seen = others
            self._loop.call_soon(self._look)
        elif not is_calm:
            self.is_resting = False
        self._timer = self._loop.call_later(JUDGED_S, self._judge)

    def _look(self) -> None:
        """A turn of the loop in which it takes what has come: some loops do that after what was due, as this."""
        self._loop.call_soon(self._rest)

    def _rest(self) -> None:
        """In every other turn, when the loop would wait."""
        if not self.is_resting or self._others() != self._seen:
            self.is_resting = False
            return
        self._sleep(REST_S)
        self._loop.call_soon(self._look)
