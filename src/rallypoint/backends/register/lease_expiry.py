"""Lease expiry without a shared clock: a lease has expired when its counter did not change for its time to live.

Only this process's monotonic clock is used, and only for differences. A counter changes before this process sees the
change, so a lease whose counter was seen unchanged for its time to live has not been renewed for at least that long;
and its holder measures from before the renewal. So no lease is ended that its holder still counts on.
"""

from __future__ import annotations

from collections.abc import Collection

from rallypoint.kv.document import Document


class LeaseExpiry:
    """The observed counters of the leases of a document."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float, float]] = {}
        """By lease: its counter, when the lease expires if the counter does not change, and its time to live."""

    def observe(self, document: Document, now: float) -> None:
        """Note the counters in the current document."""
        seen: dict[int, tuple[int, float, float]] = {}
        for lease in document.engine.leases:
            counter = document.counters[lease.id]
            known = self._seen.get(lease.id)
            fresh = (counter, now + lease.ttl_s, lease.ttl_s)
            seen[lease.id] = known if known is not None and known[0] == counter else fresh
        self._seen = seen

    def due(self, now: float) -> list[tuple[int, int]]:
        """The expired leases with their counters, in the order of expiry."""
        due = [(until, lease, counter) for lease, (counter, until, _) in self._seen.items() if until <= now]
        return [(lease, counter) for _, lease, counter in sorted(due)]

    def next_due(self) -> float | None:
        """When the next lease expires if none is renewed."""
        return min((until for _, until, _ in self._seen.values()), default=None)

    def age(self, lease: int, now: float) -> float:
        """How much of its time to live has passed since it was seen renewed: 0 to 1, and more if it has expired."""
        seen = self._seen.get(lease)
        return 0.0 if seen is None else 1.0 - (seen[1] - now) / seen[2]

    def oldest(self, now: float, without: Collection[int]) -> float:
        """The greatest age of the other leases that have not expired; 0 if there is none."""
        ages = (self.age(lease, now) for lease in self._seen if lease not in without)
        return max((age for age in ages if age < 1.0), default=0.0)
