"""A place in a round, for asyncio: its members, its store, and the signal that the world has changed.

A listener that fails must never affect the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rallypoint.api import RendezvousStoreInfo
from rallypoint.errors import BackendError, RendezvousConnectionError
from rallypoint.events import logger
from rallypoint.rendezvous.membership import Cause, Joined
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.records import RosterMember
from rallypoint.store import AsyncStore

RETRY_S = 0.1


class AsyncChanged:
    """Set when the world has changed. `cause` is the kind of change, `reason` a sentence."""

    def __init__(self) -> None:
        self.cause: Cause | None = None
        self.reason = ""
        self._event = asyncio.Event()
        self._listeners: list[Callable[[Cause, str], None]] = []

    def is_set(self) -> bool:
        return self.cause is not None

    async def wait(self) -> str:
        """Wait until the world has changed; returns the reason."""
        await self._event.wait()
        return self.reason

    def add_listener(self, listener: Callable[[Cause, str], None]) -> None:
        """Call on every change, and at once if there has been one."""
        self._listeners.append(listener)
        if self.cause is not None:
            self._call(listener)

    def set(self, cause: Cause, reason: str) -> None:
        """Called by the node. A later, graver cause replaces an earlier one."""
        self.cause, self.reason = cause, reason
        self._event.set()
        for listener in list(self._listeners):
            self._call(listener)

    def _call(self, listener: Callable[[Cause, str], None]) -> None:
        """A listener that raises is logged and removed."""
        assert self.cause is not None
        try:
            listener(self.cause, self.reason)
        except Exception:
            logger.exception("a listener failed and is not called again: %r", listener)
            self._listeners.remove(listener)


class AsyncWorld:
    """A place in a round."""

    def __init__(self, node: Node, joined: Joined, store: AsyncStore) -> None:
        self.rank = joined.rank
        self.world_size = joined.size
        self.round = joined.number
        self.bootstrap_store_info = RendezvousStoreInfo(joined.addr, joined.port)
        self.store = store
        self.changed = AsyncChanged()
        self._node = node
        self._joined = joined

    async def members(self) -> tuple[RosterMember, ...]:
        """All members in rank order, with name and address. One read, retried until `read_timeout`.

        SessionLostError or RendezvousError if the round is over, RendezvousConnectionError without an answer.
        """
        limit_s = self._node.settings.read_timeout_s
        trouble = "no answer"
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._node.roster(self._joined)
                    except BackendError as error:
                        trouble = str(error)
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise RendezvousConnectionError(
                f"the members of round {self.round} could not be read within {limit_s:g} s: {trouble}"
            ) from None

    def __repr__(self) -> str:
        return f"<AsyncWorld round={self.round} rank={self.rank} world_size={self.world_size}>"
