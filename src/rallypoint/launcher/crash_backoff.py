"""How long a node pauses before its workers start again, if they fail as soon as they have started. Pure.

A program that crashes at its import fails again at once, in every round, until the restarts are used up or, with many
of them, for hours. So from the third such failure in a row on, the node waits before it joins again, longer each time.
"""

from __future__ import annotations

QUICK_S = 2.0
"""A failure within so many seconds of the start counts."""
PAUSES_FROM = 3
FIRST_S = 4.0
MOST_S = 60.0
JITTER = 0.25
"""A pause is longer or shorter by up to this part of it: not all nodes start at the same moment."""


class CrashBackoff:
    """The failures of one node's workers."""

    def __init__(self) -> None:
        self._started_at: float | None = None
        """None: no worker could be started in this round, or its end has been judged."""
        self._failures = 0

    def started(self, now: float) -> None:
        """The workers have been started."""
        self._started_at = now

    def failed(self, now: float) -> None:
        """A worker has failed. Called once a round."""
        is_quick = self._started_at is None or now - self._started_at <= QUICK_S
        self._failures = self._failures + 1 if is_quick else 0
        self._started_at = None

    def round_ended(self, now: float) -> None:
        """The round is over, and its workers have ended. If none had failed and they worked for longer, begin anew."""
        if self._started_at is not None and now - self._started_at > QUICK_S:
            self._failures = 0
        self._started_at = None

    def pause_s(self, fraction: float) -> float:
        """How long to wait before the next start; `fraction` is a random number from 0 to 1."""
        if self._failures < PAUSES_FROM:
            return 0.0
        whole_s = FIRST_S * 2.0 ** min(self._failures - PAUSES_FROM, 10)
        return min(whole_s, MOST_S) * (1 + JITTER * (2 * fraction - 1))

    def why(self, pause_s: float) -> str:
        """The sentence about the pause."""
        return (
            f"the workers failed {self._failures} times within {QUICK_S:g} s of their start: the next start is in "
            f"{pause_s:.0f} s"
        )
