"""Missing answers: requests end at their deadlines, and a dead connection is closed.

A connection can break without any notice; then only missing data shows it. An overloaded server sends nothing either,
and must not be burdened with needless reconnects. So a connection gets twice the time if the peer's system has
acknowledged all data, and each time that a connection was closed, the limit for the next is doubled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rallypoint._marks import mark
from rallypoint.backends.tcp.connection import ClientConnection
from rallypoint.backends.tcp.requests import Requests
from rallypoint.errors import Unavailable

STALL_S = 6.0
"""After this long without data while an answer is due, the connection is replaced."""
MAX_STALL_S = 24.0
LATE_S = 0.1
"""A timer that is this late means that the process was stopped; it checks again after the same time."""


class StallDetector:
    """The detector of one client. At most one timer runs, and none while no request is pending."""

    def __init__(
        self, endpoint: str, requests: Requests, link: Callable[[], ClientConnection | None], stall_s: float
    ) -> None:
        self._endpoint = endpoint
        self._requests = requests
        self._link = link
        self._stall_s = self._limit_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """A request was added."""
        if self._timer is not None:
            return
        first = next(self._requests.open(), None)
        if first is not None:
            self._check_at(min(first.deadline, self._loop.time() + self._limit_s))

    def end(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _check_at(self, due: float, is_again: bool = False) -> None:
        self._timer = self._loop.call_at(due, self._check, due, is_again)

    def _check(self, due: float, is_again: bool) -> None:
        self._timer = None
        now = self._loop.time()
        if now > due + LATE_S and not is_again:  # this process was stopped: process received data first
            self._check_at(now + LATE_S, is_again=True)
            return
        late = Unavailable(f"{self._endpoint} did not answer within {self._requests.timeout_s:g} s")
        self._requests.fail(late, lambda pending: pending.deadline <= now)
        link = self._link()
        if link is not None:
            self._check_connection(link, now)
        self.arm()

    def _check_connection(self, link: ClientConnection, now: float) -> None:
        waiting = next((pending for pending in self._requests.open() if pending.is_sent), None)
        silent_s = 0.0 if waiting is None else now - max(waiting.sent_at, link.received_at)
        if silent_s < self._limit_s:
            self._limit_s = max(self._stall_s, self._limit_s / 2)
        elif silent_s >= 2 * self._limit_s or not link.has_arrived:
            mark("tcp.stalled")
            link.abort(f"no data was received for {silent_s:.1f} s")
            self._limit_s = max(self._stall_s, min(2 * self._limit_s, MAX_STALL_S))
