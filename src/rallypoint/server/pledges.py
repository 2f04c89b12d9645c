"""Places that were confirmed beforehand (`Pledge`), and are written down together with the places.

Whoever waits for a node's place has nothing to decide when it is told: it compares, and confirms. If it has said so
beforehand, and not long ago, the server need not wake it for that: the coordinator writes it with the attempt, in one
transaction that compares what the node would have compared. When all members have, the round is active with that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from rallypoint._marks import mark
from rallypoint.backends.contract import Asked
from rallypoint.kv.types import Put, Txn
from rallypoint.server.hub import Hub
from rallypoint.server.quota import Quota


class Promised(Protocol):
    """Somebody who waits for the place of a node, and has confirmed it beforehand."""

    def confirms(self, number: int, incarnation: str, asked: Asked, now: float) -> Put | None:
        """How, if that place is what was confirmed, and still is."""


class Pledges:
    """Of one server. Belongs to the loop it is made on."""

    def __init__(self, hub: Hub, quota: Quota) -> None:
        self._hub = hub
        self._quota = quota
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, dict[str, Promised]] = {}
        """By run, and by node."""

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    @property
    def runs(self) -> Iterator[str]:
        """Where somebody has confirmed a place."""
        return iter(self._known)

    def keep(self, run_id: str, node_id: str, one: Promised) -> None:
        """Remember who has confirmed a node's place."""
        self._known.setdefault(run_id, {})[node_id] = one

    def forget(self, run_id: str, node_id: str, one: Promised) -> None:
        """It is not waited for there any more."""
        known = self._known.get(run_id, {})
        if known.get(node_id) is one:
            del known[node_id]
            if not known:
                del self._known[run_id]

    def confirmed(self, run_id: str, number: int, incarnation: str, asked: Iterable[Asked]) -> Sequence[Put | None]:
        """As in `Backend.confirmed`."""
        known = self._known.get(run_id)
        if known is None or not self._hub.is_able:
            return ()
        now, said, size = self._loop.time(), list[Put | None](), 0
        for place in asked:
            one = known.get(place.node_id)
            put = one.confirms(number, incarnation, place, now) if one is not None else None
            said.append(put)
            if put is not None:
                size += len(put.key) + len(put.value)
        if not size or not self._has_room(said, size):
            return ()
        mark("pledges.written")
        return said

    def _has_room(self, said: Sequence[Put | None], size: int) -> bool:
        """Whether the quotas have: what a node says by itself is asked the same."""
        self._quota.room -= size
        if self._quota.room >= 0 or not self._quota.is_tight(size):
            return True
        return self._quota.refusal(Txn((), tuple([put for put in said if put is not None])), None) is None
