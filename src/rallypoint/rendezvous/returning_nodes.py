"""Nodes that return to a server which has lost its data: no round forms before members of an old one can know. Pure.

A server restarted without its data knows no rounds, but members of one may still be working. They learn that their
round is over when they reach the new server, or by their own clocks one time to live after they lost the old one. So
once a node has returned, nothing forms for one time to live from the start of the server. Nothing may shorten that: the
returned nodes may have missed a round, or a whole life of the server, whose members are still working. New numbers are
above all that were ever confirmed, as far as the returned nodes report (rule 9).
"""

from __future__ import annotations

from collections.abc import Set

from rallypoint.rendezvous.records import ClaimRecord

LOOK_AGAIN_S = 0.1
ASSUMED_TTL_S = 15.0
"""The time to live that is assumed until a node has reported its own."""


class ReturningNodes:
    """What returned nodes reported. Filled by the server, read by `decide`. Times are by the coordinator's clock."""

    def __init__(self, started_at: float) -> None:
        self.floor = 0
        """The highest number that was ever confirmed, as far as reported."""
        self.round = 0
        """The last active round, as far as reported, and its size."""
        self.size = 0
        self._started_at = started_at
        self._ttl_s = 0.0
        self._has_nodes = False
        self._expected: set[str] = set()
        self._members: dict[int, set[str]] = {}

    def expect(self, client: str) -> None:
        """A client of the server's earlier life has connected, and has not sent its claim yet."""
        self._expected.add(client)

    def claim(self, client: str, claim: ClaimRecord) -> None:
        """The claim of a client, which has ended its session. Without a time to live it is a read-only client."""
        self._expected.discard(client)
        self._has_nodes |= claim.ttl_s > 0
        self.floor = max(self.floor, claim.floor, claim.round)
        self._ttl_s = max(self._ttl_s, claim.ttl_s)
        if claim.round > self.round:
            self.round, self.size = claim.round, claim.size
        if claim.is_member:
            self._members.setdefault(claim.round, set()).add(claim.id)

    def summary(self) -> ClaimRecord:
        """All claims as one, for a server that is restarted from its data. Its time to live is 0 if there are none."""
        ttl_s = self._ttl_s or (ASSUMED_TTL_S if self._expected else 0.0)
        return ClaimRecord(id="", round=self.round, size=self.size, floor=self.floor, ttl_s=ttl_s)

    def holds_until(self, now: float) -> float | None:
        """When to decide again while nothing may form; None: forming is allowed."""
        ends_at = self._started_at + (self._ttl_s or ASSUMED_TTL_S)
        if now >= ends_at or not (self._has_nodes or self._expected):
            return None
        return min(ends_at, now + LOOK_AGAIN_S)

    @property
    def members(self) -> Set[str]:
        """The ids of the members of the last active round that have returned."""
        return self._members.get(self.round, frozenset())

    def sentence(self) -> str:
        """Why nothing forms, for people."""
        back = f"; {len(self.members)} of {self.size} members of round {self.round} are back" if self.round else ""
        return (
            f"the server was restarted without its data: nothing forms for one time to live from its start, because "
            f"nodes may still be working in a round{back}"
        )
