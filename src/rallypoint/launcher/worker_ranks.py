"""The ranks of the workers, on which the nodes of a round agree in the round's store.

Every node writes how many workers it has. The node of rank 0 reads these shares and writes one plan, which stays small
as long as neighbouring nodes have equal shares. Each node makes three small requests, whatever the number of nodes.
"""

from __future__ import annotations

import asyncio
from itertools import groupby

import msgspec

from rallypoint.errors import OutcomeUnknown
from rallypoint.store import AsyncStore

PREFIX = "rallypoint.run/"
"""The prefix of all keys that launchers have in the store of a round."""
RETRY_S = 0.1


class NodeShare(msgspec.Struct, frozen=True, array_like=True):
    """The workers of one node."""

    workers: int
    role: str


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of all nodes of a round, in rank order and run-length encoded."""

    shares: tuple[tuple[int, NodeShare], ...]
    """(number of consecutive nodes, the share of each of them)."""
    restarts: int
    """How many restarts the run had used before this round."""
    max_restarts: int

    @property
    def world_size(self) -> int:
        return sum(count * share.workers for count, share in self.shares)

    def ranks_of(self, node_rank: int) -> NodeRanks:
        """The ranks of a node's workers. ValueError if the plan has no such node."""
        first = role_first = role_size = seen = 0
        own: NodeShare | None = None
        for count, share in self.shares:
            if own is None and node_rank < seen + count:
                own = share
                first += (node_rank - seen) * share.workers
            elif own is None:
                first += count * share.workers
            seen += count
        if own is None:
            raise ValueError(f"the plan has {seen} nodes, and none of rank {node_rank}")
        seen = 0
        for count, share in self.shares:
            if share.role == own.role:
                role_size += count * share.workers
                before = min(count, max(0, node_rank - seen))
                role_first += before * share.workers
            seen += count
        return NodeRanks(rank=first, role_rank=role_first, role_size=role_size, workers=own.workers)


class NodeRanks(msgspec.Struct, frozen=True):
    """The ranks of a node's first worker; those of its other workers follow."""

    rank: int
    role_rank: int
    role_size: int
    workers: int


def make_plan(shares: list[NodeShare], restarts: int, max_restarts: int) -> RankPlan:
    """The plan for nodes with these shares, in rank order."""
    runs = tuple((len(list(group)), share) for share, group in groupby(shares))
    return RankPlan(shares=runs, restarts=restarts, max_restarts=max_restarts)


async def agree(store: AsyncStore, own: NodeShare, restarts: int, max_restarts: int, timeout_s: float) -> RankPlan:
    """The plan of the round, which the node of rank 0 makes. StoreError if a node is missing; it names the ranks."""
    await write(store, f"share/{store.rank}", msgspec.json.encode(own))
    if store.rank == 0:
        keys = [f"{PREFIX}share/{rank}" for rank in range(store.world_size)]
        found = await store.multi_get(keys, timeout_s)
        shares = [msgspec.json.decode(value, type=NodeShare) for value in found]
        await write(store, "plan", msgspec.json.encode(make_plan(shares, restarts, max_restarts)))
    return msgspec.json.decode(await store.get(f"{PREFIX}plan", timeout_s), type=RankPlan)


async def compare_set(store: AsyncStore, key: str, expected: bytes, value: bytes) -> bytes:
    """Replace a key of the launchers, which any of them may write. Returns the value in force, own or not.

    No two launchers write the same value, so if it was written although the outcome is unknown, the next attempt
    returns it.
    """
    while True:
        try:
            return await store.compare_set(PREFIX + key, expected, value)
        except OutcomeUnknown:
            await asyncio.sleep(RETRY_S)


async def write(store: AsyncStore, key: str, value: bytes) -> None:
    """Set a key of the launchers. If the outcome is unknown it is set again, which is harmless."""
    while True:
        try:
            return await store.set(PREFIX + key, value)
        except OutcomeUnknown:
            await asyncio.sleep(RETRY_S)
