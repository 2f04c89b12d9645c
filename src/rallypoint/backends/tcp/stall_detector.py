"""What a client does about answers that do not come: requests end in time, and a connection that is dead is given up.

A connection can die without a word, and then only silence tells. A server that has too much to do is silent too, and
giving up its connections would be more to do: each of them is made anew, greeted, and told everything again. So one
whose words have arrived at the other machine, as far as the system can tell, has twice as long; and each time that one
was given up in vain, the next has twice as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rallypoint._marks import mark
from rallypoint.backends.tcp.connection import ClientConnection
from rallypoint.backends.tcp.requests import Requests
from rallypoint.errors import Unavailable

STALL_S = 6.0
"""A connection on which nothing is heard for so long, while an answer is due, is given up for a new one."""
MOST_STALL_S = 24.0
LATE_S = 0.1
"""Whoever looks so much too late stood still, and looks again after this."""


class StallDetector:
    """Of one client. At most one timer runs, and none while nothing is asked."""

    def __init__(
        self, endpoint: str, requests: Requests, link: Callable[[], ClientConnection | None], stall_s: float
    ) -> None:
        self._endpoint = endpoint
        self._requests = requests
        self._link = link
        self._stall_s = self._patience_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Something was asked."""
        if self._timer is not None:
            return
        first = next(self._requests.open(), None)
        if first is not None:
            self._look_at(min(first.deadline, self._loop.time() + self._patience_s))

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_at(self, due: float, is_again: bool = False) -> None:
        self._timer = self._loop.call_at(due, self._look, due, is_again)

    def _look(self, due: float, is_again: bool) -> None:
        self._timer = None
        now = self._loop.time()
        if now > due + LATE_S and not is_again:  # this process stood still: what came meanwhile is heard first
            self._look_at(now + LATE_S, is_again=True)
            return
        late = Unavailable(f"{self._endpoint} did not answer within {self._requests.timeout_s:g} s")
        self._requests.fail(late, lambda pending: pending.deadline <= now)
        link = self._link()
        if link is not None:
            self._judge(link, now)
        self.arm()

    def _judge(self, link: ClientConnection, now: float) -> None:
        waiting = next((pending for pending in self._requests.open() if pending.is_sent), None)
        silent_s = 0.0 if waiting is None else now - max(waiting.sent_at, link.heard_at)
        if silent_s < self._patience_s:
            self._patience_s = max(self._stall_s, self._patience_s / 2)
        elif silent_s >= 2 * self._patience_s or not link.has_arrived:
            mark("tcp.stalled")
            link.abort(f"nothing was heard from it for {silent_s:.1f} s")
            self._patience_s = max(self._stall_s, min(2 * self._patience_s, MOST_STALL_S))
