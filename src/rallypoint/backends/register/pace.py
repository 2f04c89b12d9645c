"""How fast a cell is, and whether a time to live is long enough for it.

Everything that all the nodes write takes turns, and a turn is a read and a write. A session that must be renewed before
all the others have had a few turns is lost although nobody died. What is measured is the fastest call of each kind:
those that waited for others say how many others there are, not how fast the cell is. Where many write at once all calls
wait, and the writes that are seen to get through say how fast it is.
"""

from __future__ import annotations

from collections import deque

from rallypoint.kv.document import Document

TURNS = 10
"""A time to live must have room for so many turns of each session: three renewals, the races that they lose, what a
round costs, and an outage of which some of it must be left."""
REMEMBERED = 16
FEWEST_WRITES = 8
"""So many writes have to be seen before they say anything about how long one takes."""


class Pace:
    """What was measured of a cell."""

    def __init__(self) -> None:
        self._reads: deque[float] = deque(maxlen=REMEMBERED)
        self._writes: deque[float] = deque(maxlen=REMEMBERED)
        self._looks: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)

    def looked(self, now: float, version: int) -> None:
        """The document had been written so many times, by whomever."""
        if self._looks and version < self._looks[-1][1]:
            self._looks.clear()  # it is another one
        self._looks.append((now, version))

    def read(self, took_s: float) -> None:
        """A read was answered."""
        self._reads.append(took_s)

    def written(self, took_s: float) -> None:
        """A write was answered."""
        self._writes.append(took_s)

    @property
    def turn_s(self) -> float:
        """What a read and a write take when nobody is in the way; 0 before there was one of each."""
        if not self._reads or not self._writes:
            return 0.0
        return min(min(self._reads) + min(self._writes), self._seen_s)

    @property
    def _seen_s(self) -> float:
        """How far apart the writes of everybody were, on average, as far as they were seen."""
        if not self._looks or (writes := self._looks[-1][1] - self._looks[0][1]) < FEWEST_WRITES:
            return float("inf")
        return (self._looks[-1][0] - self._looks[0][0]) / writes

    def too_short(self, ttl_s: float, document: Document | None) -> str | None:
        """Why a session of this document cannot have this time to live; None: it can.

        Sessions are the leases with no longer a time to live than that: a run's own leases have a longer one.
        """
        leases = document.engine.leases if document is not None else ()
        sessions = max(1, sum(lease.ttl_s <= ttl_s for lease in leases))
        least_s = TURNS * self.turn_s * sessions
        if ttl_s >= least_s:
            return None
        return (
            f"it takes {self.turn_s:.3g} s to read and write it, and with {sessions} nodes that take turns a session "
            f"needs a time to live of at least {least_s:.3g} s, not {ttl_s:g} s. Set keep_alive_interval (a third of "
            f"it, by default) to {least_s / 3:.2g} or more on all nodes, or use tcp:// or etcd://, where nodes do not "
            f"take turns"
        )
