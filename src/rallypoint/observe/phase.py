"""The phase of a run with the colour that every tool shows it in, and the reason for it. Pure.

All commands, the dashboard and metrics take the phase of a run from here. Its arguments are counts, because `ls` knows
no more of a run than the counts that its coordinator writes; the report of one run counts the nodes itself.
"""

from __future__ import annotations

import enum

from rallypoint.rendezvous.decide import closed_reason
from rallypoint.rendezvous.records import ClosedRecord, RoundPhase, RoundRecord, WaitingRecord


class Phase(enum.Enum):
    """The phase of a run, in one word."""

    ABSENT = "absent"
    """There is no such run."""
    EMPTY = "empty"
    """All nodes have gone. The run id is free again `reopen_after` after the last one."""
    BELOW_MINIMUM = "below minimum"
    """Fewer than `min_nodes` nodes are there: no round can form until more are started."""
    GATHERING = "gathering"
    """No round is current, and enough nodes have joined: the last call, or nodes that must leave an older round."""
    FORMING = "forming"
    """An attempt was decided, and its members are confirming it."""
    ACTIVE = "active"
    """A round is current, and all its members are in it."""
    INCOMPLETE = "incomplete"
    """A round is current, and some of its members were lost or have left: the others are told to join again."""
    CLOSING = "closing"
    """The run is closed, and its last round goes on until its members leave."""
    CLOSED = "closed"
    """No node can join, and no round is current."""
    UNREADABLE = "unreadable"
    """A record of the run cannot be read, and so nothing is decided."""

    @property
    def tone(self) -> Tone:
        """How urgently somebody should look at a run in this phase."""
        return _TONES[self]


class Tone(enum.Enum):
    """The meaning of a colour."""

    GOOD = "good"
    LOOK = "look"
    """It is on its way, or soon over. If it lasts, somebody should look."""
    BAD = "bad"
    """It does not go on until somebody acts."""
    NONE = "none"
    """There is nothing to do."""


_TONES = {
    Phase.ABSENT: Tone.NONE,
    Phase.EMPTY: Tone.NONE,
    Phase.BELOW_MINIMUM: Tone.BAD,
    Phase.GATHERING: Tone.LOOK,
    Phase.FORMING: Tone.LOOK,
    Phase.ACTIVE: Tone.GOOD,
    Phase.INCOMPLETE: Tone.LOOK,
    Phase.CLOSING: Tone.LOOK,
    Phase.CLOSED: Tone.NONE,
    Phase.UNREADABLE: Tone.BAD,
}


def phase_of(
    *,
    nodes: int,
    is_closed: bool,
    round_phase: RoundPhase | None,
    size: int,
    members: int,
    candidates: int,
    min_nodes: int,
) -> Phase:
    """The phase of a run that exists and can be read.

    `round_phase` and `size` are those of `state/round`. `members` are the nodes that still have their place in that
    round or attempt, `candidates` those that ask to join and may be admitted, `nodes` all nodes in any role.
    """
    if not nodes:
        return Phase.CLOSED if is_closed else Phase.EMPTY
    if round_phase is RoundPhase.ACTIVE and members:
        if is_closed:
            return Phase.CLOSING
        if members >= size:
            return Phase.ACTIVE
        return Phase.BELOW_MINIMUM if members + candidates < min_nodes else Phase.INCOMPLETE
    if is_closed:
        return Phase.CLOSED
    if round_phase is RoundPhase.FORMING and members >= size:
        return Phase.FORMING
    there = candidates + members  # a broken attempt gives its nodes back
    return Phase.BELOW_MINIMUM if there < min_nodes else Phase.GATHERING


def reason_of(
    nodes: int,
    record: RoundRecord | None,
    told: WaitingRecord | None,
    told_revision: int,
    closed: ClosedRecord | None,
    closed_revision: int,
) -> str:
    """The coordinator's sentence on what the run waits for; empty if it has given none on the present state.

    A sentence on an earlier round, from before the last closing or reopening, or on nodes that have all gone since, is
    not used.
    """
    number = record.number if record is not None else 0
    if told is not None and told.number == number and told_revision > closed_revision:
        return told.reason if nodes or not (told.members or told.candidates) else "all nodes have gone"
    if closed is None:
        return ""
    if closed.closed:
        return closed_reason(closed)
    return f"the run was reopened by {closed.by}: {closed.why or 'no reason given'}" if closed.by else ""
