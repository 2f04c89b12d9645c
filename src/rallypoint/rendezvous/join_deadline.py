"""The deadline of one call of `next_round`, and when it is suspended.

The deadline is `join_timeout` after the start of the call. A spare has none; when a place becomes free, it gets a new
one. A node that has confirmed an attempt waits for the outcome of that attempt, at most `confirm_timeout` from its
confirmation. No call waits longer than that (Release).
"""

from __future__ import annotations

import asyncio

from rallypoint._marks import mark
from rallypoint.errors import RendezvousConnectionError, RendezvousError, RendezvousTimeoutError
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.settings import Settings


class JoinDeadline:
    """Deadline of one call. The caller does its work inside `scope`, which raises TimeoutError at the deadline."""

    def __init__(self, settings: Settings, started_at: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._join_timeout_s = settings.join_timeout_s
        self._confirm_timeout_s = settings.confirm_timeout_s
        self._started_at = self._loop.time() if started_at is None else started_at
        self._deadline = self._started_at + settings.join_timeout_s
        self._confirmed_at = self._started_at
        self._place_free_at: float | None = None
        self.is_spare = False
        self.scope = asyncio.timeout_at(self._deadline)

    def confirmed(self) -> None:
        """The node has just confirmed a place."""
        self._confirmed_at = self._loop.time()

    def update(self, *, is_spare: bool, in_attempt: bool) -> None:
        """The node's state has changed. `in_attempt`: it has confirmed the attempt that is forming."""
        if is_spare:
            mark("node.spare")
        else:
            self.end_spare()
        self.is_spare = is_spare
        deadline: float | None = None if is_spare else self._deadline
        if deadline is not None and in_attempt:
            if self._loop.time() > deadline:
                mark("node.overtime")
            deadline = max(deadline, self._confirmed_at + self._confirm_timeout_s)
        if self.scope.when() != deadline:
            self.scope.reschedule(deadline)

    def end_spare(self) -> None:
        """If the node was a spare, it is none any more: the deadline is a full `join_timeout` from now."""
        if self.is_spare:
            self.is_spare = False
            self._place_free_at = self._loop.time()
            self._deadline = self._place_free_at + self._join_timeout_s
            self.scope.reschedule(self._deadline)

    def end(self) -> None:
        """The call is over. Breaks the reference cycle scope -> task -> error -> frames -> this object."""
        del self.scope

    @property
    def waited_s(self) -> float:
        """Seconds since the call started."""
        return self._loop.time() - self._started_at

    def _elapsed(self) -> str:
        """Start of the sentence of a time-out error."""
        text = f"no round after {self.waited_s:.0f} s"
        if self._place_free_at is not None:
            text += f", {self._loop.time() - self._place_free_at:.0f} s of them since a place was free"
        return text

    def error(self, reachability: Reachability, reason: str, endpoint: str) -> RendezvousError:
        """The error to raise at the deadline. `reason`: the coordinator's last sentence."""
        outage = reachability.sentence()
        if not reachability.ever_reached:
            return RendezvousConnectionError(
                f"could not reach {endpoint} within {self.waited_s:.0f} s: {outage or 'no answer'}. "
                f"Is it running there, and can this machine reach it?"
            )
        parts = [part for part in (reason or "no reason is known", outage) if part]
        return RendezvousTimeoutError(f"{self._elapsed()}: {'; '.join(parts)}")
