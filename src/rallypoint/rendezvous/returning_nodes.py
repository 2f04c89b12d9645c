"""Those who come back to a server that has lost its memory: nothing forms before everybody can know that.

A restarted server without data knows no rounds, but the members of one may still be at work. They learn that their
round is over when they reach the new server, or from their own clocks one time to live after they lost the old one. So
once a node has come back, nothing forms for one time to live from the server's start. Nothing shortens that: whoever
came back may have missed a round, or a whole life of the server, in which others are still at work. New numbers are
above all that were ever confirmed, as far as anybody tells.
"""

from __future__ import annotations

from collections.abc import Set

from rallypoint.rendezvous.records import ClaimRecord

LOOK_AGAIN_S = 0.1
UNTOLD_TTL_S = 15.0
"""What is taken for the time to live as long as nobody has said it."""


class ReturningNodes:
    """Filled by the server, asked by `decide`. `started_at` is on the coordinator's clock."""

    def __init__(self, started_at: float) -> None:
        self.floor = 0
        """The highest number that anybody ever confirmed."""
        self.round = 0
        self.size = 0
        self._started_at = started_at
        self._ttl_s = 0.0
        self._has_nodes = False
        self._expected: set[str] = set()
        self._members: dict[int, set[str]] = {}

    def expect(self, client: str) -> None:
        """A client of the server's earlier life is back, and has not said yet where it stood."""
        self._expected.add(client)

    def claim(self, client: str, claim: ClaimRecord) -> None:
        """It has, and has given up whatever it held. One without a time to live is no node: it only looks on."""
        self._expected.discard(client)
        self._has_nodes |= claim.ttl_s > 0
        self.floor = max(self.floor, claim.floor, claim.round)
        self._ttl_s = max(self._ttl_s, claim.ttl_s)
        if claim.round > self.round:
            self.round, self.size = claim.round, claim.size
        if claim.is_member:
            self._members.setdefault(claim.round, set()).add(claim.id)

    def summary(self) -> ClaimRecord:
        """What was told so far, as one claim: a server that is started again from its data has to go on with it.

        Without a time to live: nothing that it would have to know.
        """
        ttl_s = self._ttl_s or (UNTOLD_TTL_S if self._expected else 0.0)
        return ClaimRecord(id="", round=self.round, size=self.size, floor=self.floor, ttl_s=ttl_s)

    def holds_until(self, now: float) -> float | None:
        """When to look again while nothing may form; None: it may."""
        ends_at = self._started_at + (self._ttl_s or UNTOLD_TTL_S)
        if now >= ends_at or not (self._has_nodes or self._expected):
            return None
        return min(ends_at, now + LOOK_AGAIN_S)

    @property
    def members(self) -> Set[str]:
        """The ids of those members of the last active round that are back."""
        return self._members.get(self.round, frozenset())

    def sentence(self) -> str:
        """What is waited for."""
        back = f"; {len(self.members)} of {self.size} members of round {self.round} are back" if self.round else ""
        return (
            f"the server was restarted without its data: nothing forms for one time to live from its start, because "
            f"somebody may still be at work in a round{back}"
        )
