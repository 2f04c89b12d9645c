"""Leases of the engine: which are alive, which keys they hold, which end next.

A renewal is O(1): the heap keeps one entry per lease, whose deadline may be too early; an entry that is too early when
it reaches the top is reinserted with the current deadline. A shortened lease gets one more entry. Obsolete entries stay
until they reach the top, or until they outnumber the living leases.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

SPARE_ENTRIES = 64
"""Up to this many obsolete entries are not worth a rebuild of the heap."""


@dataclass(slots=True)
class Lease:
    """One lease; it ends at `deadline` unless it is renewed."""

    id: int
    ttl_s: float
    deadline: float
    keys: set[str] = field(default_factory=set)


class Leases:
    """All leases of one engine. Does not change keys."""

    def __init__(self, first: int = 1) -> None:
        self.next_id = first
        self._alive: dict[int, Lease] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._alive.values())

    def get(self, lease_id: int) -> Lease | None:
        """The lease, if it is alive."""
        return self._alive.get(lease_id)

    def are_alive(self, lease_ids: set[int]) -> bool:
        """Whether all of them are alive."""
        return lease_ids <= self._alive.keys()

    def attach(self, lease_id: int, key: str) -> None:
        """Attach a key to a living lease."""
        self._alive[lease_id].keys.add(key)

    def grant(self, ttl_s: float, now: float, wanted: int = 0) -> Lease:
        """A new lease with the id `wanted`, which must be free, or (0) any free id."""
        if not wanted:
            while self.next_id in self._alive:
                self.next_id += 1
            wanted = self.next_id
            self.next_id += 1
        lease = Lease(wanted, ttl_s, now + ttl_s)
        self.insert(lease)
        return lease

    def insert(self, lease: Lease) -> None:
        """Add an existing lease (from a snapshot)."""
        self._alive[lease.id] = lease
        heapq.heappush(self._heap, (lease.deadline, lease.id))

    def shorten(self, lease_id: int, deadline: float) -> Lease | None:
        """Make a lease end at `deadline` at the latest; None if it is not alive."""
        lease = self._alive.get(lease_id)
        if lease is not None and deadline < lease.deadline:
            lease.deadline = deadline
            heapq.heappush(self._heap, (deadline, lease_id))
            self._tidy()
        return lease

    def remove(self, lease_id: int) -> Lease | None:
        """Remove a lease; the caller removes its keys. None if it was not alive."""
        lease = self._alive.pop(lease_id, None)
        self._tidy()
        return lease

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._alive) + SPARE_ENTRIES:
            self._heap = [(lease.deadline, lease.id) for lease in self._alive.values()]
            heapq.heapify(self._heap)

    def next_deadline(self) -> float | None:
        """The earliest time at which a lease ends if none is renewed; None without leases."""
        while self._heap:
            deadline, lease_id = self._heap[0]
            lease = self._alive.get(lease_id)
            if lease is None:
                heapq.heappop(self._heap)
            elif lease.deadline > deadline:
                heapq.heapreplace(self._heap, (lease.deadline, lease_id))
            else:
                return deadline
        return None

    def pop_expired(self, now: float) -> Lease | None:
        """Remove and return one expired lease; call until None. Earliest deadline first, then lowest id."""
        if not self._heap or self._heap[0][0] > now:  # entries are never later than their deadlines
            return None
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        _, lease_id = heapq.heappop(self._heap)
        return self._alive.pop(lease_id)
