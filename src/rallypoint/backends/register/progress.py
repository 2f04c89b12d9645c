"""Leases by observed progress: which of them this process has seen stand still for their time to live.

Only this process's monotonic clock is used, and only against itself. A counter was moved before it was seen here, so a
lease that is seen to stand still for its time to live has not been renewed for at least that long; and who renews it
counts from before the renewal. So nobody ends a lease that its holder may still count on.
"""

from __future__ import annotations

from rallypoint.kv.document import Document


class Progress:
    """What was seen of the leases of a document."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        """Of each lease its counter, and when that will have stood still for a time to live."""

    def look(self, document: Document, now: float) -> None:
        """The document is this, now."""
        seen: dict[int, tuple[int, float]] = {}
        for lease in document.engine.leases:
            counter = document.counters[lease.id]
            known = self._seen.get(lease.id)
            seen[lease.id] = known if known is not None and known[0] == counter else (counter, now + lease.ttl_s)
        self._seen = seen

    def due(self, now: float) -> list[tuple[int, int]]:
        """The leases that have stood still for long enough, with the counters they had, in the order they are due."""
        due = [(until, lease, counter) for lease, (counter, until) in self._seen.items() if until <= now]
        return [(lease, counter) for _, lease, counter in sorted(due)]

    def next_due(self) -> float | None:
        """When the next lease is due if none is renewed."""
        return min((until for _, until in self._seen.values()), default=None)
