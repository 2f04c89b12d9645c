"""Lease expiry without a shared clock: a lease has expired when its counter did not change for its time to live.

Only this process's monotonic clock is used, and only for differences. A counter changes before this process sees the
change, so a lease whose counter was seen unchanged for its time to live has not been renewed for at least that long;
and its holder measures from before the renewal. So no lease is ended that its holder still counts on.
"""

from __future__ import annotations

from rallypoint.kv.document import Document


class LeaseExpiry:
    """The observed counters of the leases of a document."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        """By lease: its counter, and when the lease expires if the counter does not change."""

    def observe(self, document: Document, now: float) -> None:
        """Note the counters in the current document."""
        seen: dict[int, tuple[int, float]] = {}
        for lease in document.engine.leases:
            counter = document.counters[lease.id]
            known = self._seen.get(lease.id)
            seen[lease.id] = known if known is not None and known[0] == counter else (counter, now + lease.ttl_s)
        self._seen = seen

    def due(self, now: float) -> list[tuple[int, int]]:
        """The expired leases with their counters, in the order of expiry."""
        due = [(until, lease, counter) for lease, (counter, until) in self._seen.items() if until <= now]
        return [(lease, counter) for _, lease, counter in sorted(due)]

    def next_due(self) -> float | None:
        """When the next lease expires if none is renewed."""
        return min((until for _, until in self._seen.values()), default=None)
