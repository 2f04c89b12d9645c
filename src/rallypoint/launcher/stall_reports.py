"""The keys by which the launchers of a round tell each other of a stall.

The launcher that first sees one of its workers stall writes `stall`: it is the reporter. Every launcher watches that
key, writes the stacks of its own workers, and then its report, `stacks/{node rank}`. The reporter reads all reports,
names the cause, and has the round restarted. So nobody is killed before the stacks of all nodes are there. Each
launcher writes one key; only the reporter reads all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec

from rallypoint.errors import StoreTimeoutError
from rallypoint.launcher.stall import NodeReport
from rallypoint.launcher.worker_ranks import PREFIX, compare_set, write
from rallypoint.store import AsyncStore

KEY = "stall"


class StallNotice(msgspec.Struct, frozen=True, kw_only=True):
    """The reporter, and its first sentence about the stall."""

    node_rank: int
    why: str


async def announce(store: AsyncStore, why: str) -> StallNotice:
    """Write the notice unless there is one. Returns the one in force."""
    own = msgspec.json.encode(StallNotice(node_rank=store.rank, why=why))
    return msgspec.json.decode(await compare_set(store, KEY, b"", own), type=StallNotice)


async def follow(store: AsyncStore) -> AsyncIterator[StallNotice]:
    """The notice, once there is one."""
    async with aclosing(store.watch(PREFIX + KEY)) as values:
        async for value in values:
            if value is not None:
                yield msgspec.json.decode(value, type=StallNotice)
                return


async def report(store: AsyncStore, own: NodeReport) -> None:
    """Write this node's report."""
    await write(store, f"stacks/{store.rank}", msgspec.json.encode(own))


async def collect(store: AsyncStore, timeout_s: float) -> tuple[list[NodeReport], list[int]]:
    """The reports of all nodes that wrote one in time, and the ranks of the others."""
    keys = {rank: f"{PREFIX}stacks/{rank}" for rank in range(store.world_size)}
    try:
        values = await store.multi_get(list(keys.values()), timeout_s)
    except StoreTimeoutError as error:
        missing = {rank for rank, key in keys.items() if key in error.missing}
        values = await store.multi_get([key for rank, key in keys.items() if rank not in missing], timeout_s)
    else:
        missing = set()
    return [msgspec.json.decode(value, type=NodeReport) for value in values], sorted(missing)
