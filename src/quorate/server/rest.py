"""A server that takes renewals together while it is asked for nothing else.

Thousands of idle nodes renew their sessions one after the other. To be woken for each costs a server several times what
the renewal costs, and none of them is urgent: an answer that comes milliseconds later changes nothing. So while
renewals are all that comes, and many of them, the loop looks only now and then and takes what has gathered; with the
first other request that is over. Only for a server that is a process of its own: elsewhere the loop is somebody else's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from quorate.kv.types import KeepAlive, Op
from quorate.server.traffic import Traffic

JUDGED_S = 1.0
"""How long nothing but renewals has to come first; and how often that is asked."""
LEAST = 400
"""So many of them: with fewer there is little to gather."""
REST_S = 0.005
"""So much later at most is anything else noticed that comes then."""


class Rest:
    """Keeps a loop from looking too often. Costs a request nothing: it reads the sums that are kept anyway."""

    def __init__(
        self, traffic: Traffic, executed: Mapping[type[Op], int], sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._traffic = traffic
        self._executed = executed
        self._sleep = sleep
        self._loop = asyncio.get_running_loop()
        self._frames = self._before = self._seen = 0
        self.is_resting = False
        self._timer = self._loop.call_later(JUDGED_S, self._judge)

    def stop(self) -> None:
        """Rest no more."""
        self.is_resting = False
        self._timer.cancel()

    def _judge(self) -> None:
        """Whether the time since this was last asked was one of renewals only."""
        frames, others = self._traffic.frames_in, self._others
        is_calm = others <= self._before and frames - self._frames >= LEAST
        self._frames, self._before = frames, others
        if is_calm and not self.is_resting:
            self.is_resting = True
            self._seen = others
            self._loop.call_soon(self._rest)
        elif not is_calm:
            self.is_resting = False
        self._timer = self._loop.call_later(JUDGED_S, self._judge)

    @property
    def _others(self) -> int:
        """Frames that were no renewals, so far; each lease that the server renews by itself makes it one less."""
        return self._traffic.frames_in - self._executed[KeepAlive]

    def _rest(self) -> None:
        """Once in every turn of the loop, which has taken what had come and would wait now."""
        others = self._others
        if not self.is_resting or others > self._seen:
            self.is_resting = False
            return
        self._seen = others
        self._sleep(REST_S)
        self._loop.call_soon(self._rest)
