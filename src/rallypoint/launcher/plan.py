"""Which worker has which rank: the nodes of a round agree on it in the round's store.

Every node says how many workers it has; the node of rank 0 reads that and writes one plan, which is small as long as
neighbouring nodes are alike. Each node costs three small requests, whatever the number of nodes.
"""

from __future__ import annotations

import asyncio
from itertools import groupby

import msgspec

from rallypoint.errors import OutcomeUnknown
from rallypoint.store import AsyncStore

PREFIX = "rallypoint.run/"
"""Of all keys that launchers have in the store of a round."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one node brings."""

    workers: int
    role: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes of a round bring, in rank order: runs of equal neighbours."""

    shares: tuple[tuple[int, Share], ...]
    """(How many nodes, what each of them brings)."""
    restarts: int
    """Used by the run before this round."""
    max_restarts: int

    @property
    def world_size(self) -> int:
        return sum(count * share.workers for count, share in self.shares)

    def place(self, node_rank: int) -> Place:
        """Where the workers of a node begin."""
        base = role_base = role_size = seen = 0
        own: Share | None = None
        for count, share in self.shares:
            if own is None and node_rank < seen + count:
                own = share
                base += (node_rank - seen) * share.workers
            elif own is None:
                base += count * share.workers
            seen += count
        if own is None:
            raise ValueError(f"the plan has {seen} nodes, and none of rank {node_rank}")
        seen = 0
        for count, share in self.shares:
            if share.role == own.role:
                role_size += count * share.workers
                before = min(count, max(0, node_rank - seen))
                role_base += before * share.workers
            seen += count
        return Place(rank=base, role_rank=role_base, role_size=role_size, workers=own.workers)


class Place(msgspec.Struct, frozen=True):
    """The ranks of a node's first worker; those of the others follow."""

    rank: int
    role_rank: int
    role_size: int
    workers: int


def planned(shares: list[Share], restarts: int, max_restarts: int) -> Plan:
    """The plan for these nodes, in rank order."""
    runs = tuple((len(list(group)), share) for share, group in groupby(shares))
    return Plan(shares=runs, restarts=restarts, max_restarts=max_restarts)


async def agree(store: AsyncStore, own: Share, restarts: int, max_restarts: int, timeout_s: float) -> Plan:
    """The plan of the round; the node of rank 0 makes it. StoreError, naming ranks, if somebody does not come."""
    await write(store, f"share/{store.rank}", msgspec.json.encode(own))
    if store.rank == 0:
        keys = [f"{PREFIX}share/{rank}" for rank in range(store.world_size)]
        found = await store.multi_get(keys, timeout_s)
        shares = [msgspec.json.decode(value, type=Share) for value in found]
        await write(store, "plan", msgspec.json.encode(planned(shares, restarts, max_restarts)))
    return msgspec.json.decode(await store.get(f"{PREFIX}plan", timeout_s), type=Plan)


async def write(store: AsyncStore, key: str, value: bytes) -> None:
    """Set a key of the launchers; sent again until it is known to be there, which does no harm."""
    while True:
        try:
            return await store.set(PREFIX + key, value)
        except OutcomeUnknown:
            await asyncio.sleep(0.1)
