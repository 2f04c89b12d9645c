"""Value types of a node: its identity, its place in a round, the cause of a change of that round. Pure."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from rallypoint.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousError, RendezvousTimeoutError
from rallypoint.rendezvous.records import ClaimRecord, LeaveCause, LeaveKind, one_line


@dataclass(frozen=True, slots=True)
class Identity:
    """A node. `id` is drawn anew for every handler of every process (rule 5); sticky ranks go by `name`."""

    id: str
    name: str
    addr: str
    pid: int
    local_id: int
    labels: Mapping[str, str]
    node_rank: int | None = None

    def __str__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.local_id}"


class Joined(msgspec.Struct, frozen=True):
    """A place in an active round: what `next_rendezvous` returns, without its store.

    `own_revision` is the revision of the node's confirmation: while its key has that revision, the node is a member.
    """

    number: int
    rank: int
    size: int
    addr: str
    port: int
    own_revision: int
    data_lease: int


class Cause(enum.Enum):
    """How a member's round has changed, gravest first."""

    SESSION_LOST = "session lost"
    ROUND_OVER = "round over"
    DRAIN = "drain"
    LOSS = "loss"
    WAITING = "waiting"


Bootstrap: TypeAlias = Callable[[int, int], Awaitable[tuple[str, int]]]
"""Called on rank 0 of an attempt, with the attempt's number and size. Returns the address and port to publish."""


def derived_cause(name: str, change: Cause | None, reason: str, why: str = "") -> LeaveCause:
    """Why the node `name` leaves its round, from the last change of the round that it was told of.

    `why`: its own words, if it leaves without having been told of a change.
    """
    match change:
        case Cause.SESSION_LOST:
            return LeaveCause(kind=LeaveKind.SESSION_LOST, why=f"{name} lost its session: {reason}")
        case Cause.ROUND_OVER:
            return LeaveCause(kind=LeaveKind.ROUND_OVER, why=reason)
        case Cause.DRAIN:
            return LeaveCause(kind=LeaveKind.DRAIN, why=f"{name} was {reason}")
        case Cause.LOSS:
            return LeaveCause(kind=LeaveKind.MEMBER_LOST, why=reason)
        case Cause.WAITING:
            return LeaveCause(kind=LeaveKind.ADMISSION, why=reason)
        case None:
            return LeaveCause(
                kind=LeaveKind.REQUESTED, why=f"{name} left: {why}" if why else f"{name} asked for the next round"
            )


def cause_of(joined: Joined, cause: LeaveCause) -> LeaveCause:
    """The cause as it is written: of this round, and no longer than a record may be."""
    return msgspec.structs.replace(cause, round=joined.number, why=one_line(cause.why))


def leave_reason(error: RendezvousError) -> str:
    """Why a node withdrew, for the other nodes; short, because it becomes a part of their sentences."""
    match error:
        case RendezvousTimeoutError() | RendezvousConnectionError():
            return "its join timed out"
        case RendezvousClosedError():
            return "the run was closed"
        case _:
            return str(error)


def claim_of(
    identity: Identity, last_joined: Joined | None, last_active: tuple[int, int], floor: int, ttl_s: float
) -> ClaimRecord:
    """What a node reports of the run to a server that has lost its data.

    `last_active` is number and size of the last active round that the node saw, in any life of the server: some members
    may still be working in it. `last_joined` is the last round that the node itself was in. If that is the same round,
    the node counts as a member that is back, whether it has left the round already or learns of its end now: the server
    does not have to wait for it.
    """
    number, size = last_active
    if last_joined is not None and last_joined.number >= number:
        number, size = last_joined.number, last_joined.size
    is_member = last_joined is not None and last_joined.number == number
    return ClaimRecord(id=identity.id, round=number, size=size, is_member=is_member, floor=floor, ttl_s=ttl_s)
