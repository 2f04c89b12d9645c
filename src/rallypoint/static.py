"""`static://`: a fixed number of nodes with fixed ranks, over a server that rank 0 hosts.

It is an ordinary run with special settings, so time-outs name the missing nodes and the store is the same. But every
node gets exactly its requested rank, no node is waiting or spare, and the run must never be closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from rallypoint._requested_rank import member_with_request
from rallypoint.aio import AsyncHandler, AsyncWorld, BootstrapMaker
from rallypoint.backends.schemes import BackendOpener
from rallypoint.errors import RendezvousError, SettingsError
from rallypoint.events import Sink
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.records import LeaveCause, NodeRecord
from rallypoint.settings import Settings

SCHEME = "static"
LOOK_S = 1.0
"""How often a node that is not in the active round looks for the node that has its rank."""


class StaticHandler(AsyncHandler):
    """The handler of one node of a static run."""

    def __init__(
        self,
        settings: Settings,
        *,
        backend_name: str | None = None,
        sinks: Iterable[Sink] = (),
        bootstrap: BootstrapMaker | None = None,
        opener: BackendOpener | None = None,
    ) -> None:
        super().__init__(
            _static_settings(settings), backend_name=backend_name, sinks=sinks, bootstrap=bootstrap, opener=opener
        )
        self._last_round = 0
        """The last round that this node was in: nobody else has its rank there."""

    async def next_rendezvous(self, *, cause: LeaveCause | None = None) -> AsyncWorld:
        """Wait until all ranks have joined. RendezvousError if another node has this node's rank."""
        rank = self.settings.node_rank
        assert rank is not None
        joining = asyncio.create_task(super().next_rendezvous(cause=cause), name="static join")
        looking = asyncio.create_task(self._wait_until_taken(rank), name="taken rank")
        try:
            await asyncio.wait({joining, looking}, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                await self.leave(looking.result())
                raise RendezvousError(looking.result())
            world = joining.result()
            self._last_round = world.round
        finally:
            looking.cancel()
            joining.cancel()
            await asyncio.gather(looking, joining, return_exceptions=True)
        if world.rank != rank:
            holder = "the other one"
            with suppress(RendezvousError):
                holder = (await world.members())[rank].name
            await self.leave(f"rank {rank} was requested twice")
            raise RendezvousError(
                f"rank {rank} of run {self.settings.run_id!r} was requested by two nodes and given to {holder}: "
                f"give each node of a static run its own node_rank"
            )
        return world

    async def _explain_rank(self, node: Node, joined: Joined, wanted: int) -> None:
        """Nothing: `next_rendezvous` raises an error that explains it."""

    async def _wait_until_taken(self, rank: int) -> str:
        """Wait until it is certain that another node has the rank. Returns the sentence about it.

        A member of a round may be dead, and this node its replacement: that is known once its session would have ended.
        """
        loop = asyncio.get_running_loop()
        seen_id, seen_at = "", 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            other = await self._other_with(rank)
            if other is None or other.id != seen_id:
                seen_id, seen_at = ("" if other is None else other.id), loop.time()
            elif loop.time() - seen_at > self.settings.session_ttl_s + LOOK_S:
                return (
                    f"rank {rank} of run {self.settings.run_id!r} is taken: {other.name} ({other.addr}, process "
                    f"{other.pid}) is a member with that rank. Give each node of a static run its own node_rank, or "
                    f"stop that node first"
                )

    async def _other_with(self, rank: int) -> NodeRecord | None:
        node = self._node
        if node is None or node.view.round is None or node.view.round.number == self._last_round:
            return None
        return await member_with_request(node, rank)

    def num_nodes_waiting(self) -> int:
        return 0

    @property
    def closed_now(self) -> bool | None:
        return False

    async def set_closed(self, why: str = "set_closed() was called", *, outcome: int | None = None) -> None:
        """A static run is never closed."""

    async def reopen(self, why: str = "reopen() was called") -> bool:
        return False


def _static_settings(settings: Settings) -> Settings:
    """The settings of a static node, derived from its rank and the size. SettingsError if they are inconsistent."""
    rank, size = settings.node_rank, settings.min_nodes
    if rank is None:
        raise SettingsError("a static run needs node_rank: give each node its own, from 0", option="node_rank")
    if settings.max_nodes != size:
        raise SettingsError(
            f"a static run has a fixed size: min_nodes={size} and max_nodes={settings.max_nodes} must be equal",
            option="max_nodes",
            value=settings.max_nodes,
        )
    if rank >= size:
        raise SettingsError(
            f"node_rank={rank} is not below min_nodes={size}: ranks go from 0 to {size - 1}",
            option="node_rank",
            value=rank,
        )
    return msgspec.structs.replace(settings, ranks="node_rank", is_host=rank == 0)


def handler_for(
    settings: Settings,
    *,
    backend_name: str | None = None,
    sinks: Iterable[Sink] = (),
    bootstrap: BootstrapMaker | None = None,
    opener: BackendOpener | None = None,
) -> AsyncHandler:
    """A `StaticHandler` for the scheme `static`, else an `AsyncHandler`."""
    if settings.scheme == SCHEME:
        return StaticHandler(settings, backend_name=backend_name, sinks=sinks, bootstrap=bootstrap, opener=opener)
    return AsyncHandler(settings, backend_name=backend_name, sinks=sinks, bootstrap=bootstrap, opener=opener)
