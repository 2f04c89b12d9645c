"""The words of a node: who it is, what it joined, and why its world is no longer the one it joined."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from rallypoint.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousError, RendezvousTimeoutError
from rallypoint.rendezvous.records import ClaimRecord


@dataclass(frozen=True, slots=True)
class Identity:
    """A node. `id` is drawn anew for every handler of every process; sticky ranks go by `name`."""

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

    `own_revision` is the revision of the node's confirmation: as long as its key has it, the node is a member.
    """

    number: int
    rank: int
    size: int
    addr: str
    port: int
    own_revision: int
    data_lease: int


class Cause(enum.Enum):
    """Why a member should look up from its work."""

    SESSION_LOST = "session lost"
    ROUND_OVER = "round over"
    DRAIN = "drain"
    LOSS = "loss"
    WAITING = "waiting"


Bootstrap: TypeAlias = Callable[[int, int], Awaitable[tuple[str, int]]]
"""Called on the node that is to be rank 0 of a round, with its number and size: the address and port to publish."""


def goodbye(error: RendezvousError) -> str:
    """What the others are told of a node that did not get in; short, because it becomes a part of their sentences."""
    match error:
        case RendezvousTimeoutError() | RendezvousConnectionError():
            return "its join timed out"
        case RendezvousClosedError():
            return "the run was closed"
        case _:
            return str(error)


def claim_of(
    identity: Identity, was_in: Joined | None, last_active: tuple[int, int], floor: int, ttl_s: float
) -> ClaimRecord:
    """Where the run stood, as a node knows it, for a server that has lost its memory.

    `last_active` is the last active round that the node ever saw, with its size: of any life of the server, because
    somebody may still be in it who has heard from none since. Whoever was in that round and has left it knows as well
    as who is in it and is told now: neither has to be waited for.
    """
    number, size = last_active
    if was_in is not None and was_in.number >= number:
        number, size = was_in.number, was_in.size
    is_member = was_in is not None and was_in.number == number
    return ClaimRecord(id=identity.id, round=number, size=size, is_member=is_member, floor=floor, ttl_s=ttl_s)
