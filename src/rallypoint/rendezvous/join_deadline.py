"""How long a call of `next_round` may still take: its deadline, and when that does not count.

A spare has no deadline; when a place is free it gets a fresh one. A node that has confirmed waits for the outcome of
that attempt, at most `confirm_timeout` from its confirmation.
"""

from __future__ import annotations

import asyncio

from rallypoint._marks import mark
from rallypoint.errors import RendezvousConnectionError, RendezvousError, RendezvousTimeoutError
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.settings import Settings


class JoinDeadline:
    """Of one call. Use its `scope` as the time limit of the call's work."""

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
        """The node has confirmed a place just now."""
        self._confirmed_at = self._loop.time()

    def update(self, *, is_spare: bool, in_attempt: bool) -> None:
        """What the node knows of its standing now. `in_attempt`: it confirmed the attempt that is forming."""
        if is_spare:
            mark("node.spare")
        else:
            self.is_spare_no_more()
        self.is_spare = is_spare
        wanted: float | None = None if is_spare else self._deadline
        if wanted is not None and in_attempt:
            if self._loop.time() > wanted:
                mark("node.overtime")
            wanted = max(wanted, self._confirmed_at + self._confirm_timeout_s)
        if self.scope.when() != wanted:
            self.scope.reschedule(wanted)

    def is_spare_no_more(self) -> None:
        """A place is free, or the node has lost its own among the spares: it has a deadline again, a fresh one."""
        if self.is_spare:
            self.is_spare = False
            self._place_free_at = self._loop.time()
            self._deadline = self._place_free_at + self._join_timeout_s
            self.scope.reschedule(self._deadline)

    def end(self) -> None:
        """The call is over. Its scope refers to its task, and so to its error, whose frames refer to this: let go."""
        del self.scope

    @property
    def waited_s(self) -> float:
        """How long the call has taken."""
        return self._loop.time() - self._started_at

    def in_words(self) -> str:
        """How long it was in vain."""
        text = f"no round after {self.waited_s:.0f} s"
        if self._place_free_at is not None:
            text += f", {self._loop.time() - self._place_free_at:.0f} s of them since a place was free"
        return text

    def error(self, reachability: Reachability, reason: str, endpoint: str) -> RendezvousError:
        """What is raised when it has run out: `reason` is what the run said last."""
        trouble = reachability.sentence()
        if not reachability.ever_reached:
            return RendezvousConnectionError(
                f"could not reach {endpoint} within {self.waited_s:.0f} s: {trouble or 'no answer'}. "
                f"Is it running there, and can this machine reach it?"
            )
        parts = [part for part in (reason or "the run said nothing", trouble) if part]
        return RendezvousTimeoutError(f"{self.in_words()}: {'; '.join(parts)}")
