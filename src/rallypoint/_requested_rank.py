"""A node that asked for a rank (`node_rank`) and did not get it: which node has that rank, and why."""

from __future__ import annotations

from contextlib import suppress

from rallypoint.errors import BackendError, RendezvousError
from rallypoint.kv.types import Item
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.records import (
    ROSTER_CHUNK,
    NodePhase,
    NodeRecord,
    RosterRecord,
    RoundPhase,
    decode,
)


async def member_with_request(node: Node, rank: int) -> NodeRecord | None:
    """Another node that asked for this rank and is a member, if a round is active without this node. Reads all nodes.

    None also if the backend does not answer. Such a member may be dead, until its session ends.
    """
    record = node.view.round
    if record is None or record.phase is not RoundPhase.ACTIVE or node.current is not None:
        return None
    with suppress(BackendError):
        for item in (await node.backend.scan(node.keys.nodes)).items:
            other = _read(item)
            if other is None or other.id == node.identity.id or other.node_rank != rank:
                continue
            if other.phase is NodePhase.MEMBER and other.round == record.number:
                return other
    return None


async def why_not_given(node: Node, joined: Joined, rank: int) -> str:
    """Why this node does not have the rank it asked for. RendezvousError or BackendError if that cannot be read.

    Reads one chunk of the roster only: with one rank missing, all nodes above may ask.
    """
    if rank >= joined.size:
        return f"the round has {joined.size} nodes, whose ranks are given in the order of what they asked for"
    chunk, index = divmod(rank, ROSTER_CHUNK)
    item = (await node.backend.get(node.keys.roster_chunk(joined.number, chunk))).item
    if item is None:
        return "the round is over"
    holder = decode(RosterRecord, item).members[index]
    item = (await node.backend.get(node.keys.node(holder.id))).item
    other = None if item is None else _read(item)
    if other is not None and other.node_rank == rank:
        return f"{holder.name} asked for rank {rank}, too, and joined earlier. Give each node its own node_rank"
    return f"{holder.name} has rank {rank}, because not all ranks that were asked for could be given"


def _read(item: Item) -> NodeRecord | None:
    with suppress(RendezvousError):
        return decode(NodeRecord, item)
    return None
