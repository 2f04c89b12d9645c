"""The latency of a cell, and whether a time to live is long enough for it.

The writes of all nodes take turns, and a turn is a read and a write. A time to live that is shorter than a few turns of
every session loses sessions of living nodes. The fastest call of each kind counts: a slower one has waited for other
writers, so it shows their number and not the latency. If all calls wait because many nodes write at once, the rate of
observed writes shows the latency.
"""

from __future__ import annotations

from collections import deque

from rallypoint.kv.document import Document

TURNS = 10
"""A time to live must allow this many turns of each session: three renewals with the races that they lose, the writes
of a round, and an outage with time left after it."""
REMEMBERED = 16
FEWEST_WRITES = 8
"""The rate of writes is used only after this many."""


class CellLatency:
    """Measurements of one cell."""

    def __init__(self) -> None:
        self._reads: deque[float] = deque(maxlen=REMEMBERED)
        self._writes: deque[float] = deque(maxlen=REMEMBERED)
        self._looks: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)

    def observed(self, now: float, version: int) -> None:
        """The document, written by any process, has this version."""
        if self._looks and version < self._looks[-1][1]:
            self._looks.clear()  # it is another document
        self._looks.append((now, version))

    def read(self, took_s: float) -> None:
        """A read was answered."""
        self._reads.append(took_s)

    def written(self, took_s: float) -> None:
        """A write was answered."""
        self._writes.append(took_s)

    @property
    def turn_s(self) -> float:
        """The time of a read and a write without contention; 0 before there was one of each."""
        if not self._reads or not self._writes:
            return 0.0
        return min(min(self._reads) + min(self._writes), self._interval_s)

    @property
    def _interval_s(self) -> float:
        """The average time between two observed writes of any process."""
        if not self._looks or (writes := self._looks[-1][1] - self._looks[0][1]) < FEWEST_WRITES:
            return float("inf")
        return (self._looks[-1][0] - self._looks[0][0]) / writes

    def too_short(self, ttl_s: float, document: Document | None) -> str | None:
        """Why a session in this document cannot have this time to live; None: it can.

        Leases with at most this time to live count as sessions: a run's own leases last longer.
        """
        leases = document.engine.leases if document is not None else ()
        sessions = max(1, sum(lease.ttl_s <= ttl_s for lease in leases))
        least_s = TURNS * self.turn_s * sessions
        if ttl_s >= least_s:
            return None
        return (
            f"it takes {self.turn_s:.3g} s to read and write it, and with {sessions} nodes that take turns a session "
            f"needs a time to live of at least {least_s:.3g} s, not {ttl_s:g} s. Set keep_alive_interval (by default a "
            f"third of the time to live) to {least_s / 3:.2g} or more on all nodes, or use tcp:// or etcd://, where "
            f"nodes do not take turns"
        )
