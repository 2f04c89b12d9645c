"""What one node sees of its run: `state/`, its own assignment, and whether it was asked to go. Pushed, decoded once.

What is seen may be old and only goes forward. Without the backend, the last known values stay.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from quorate.backends.contract import Backend
from quorate.errors import BackendError, RendezvousStateError
from quorate.kv.types import Item
from quorate.rendezvous.keys import RunKeys
from quorate.rendezvous.mirror import Mirror
from quorate.rendezvous.reach import Reach
from quorate.rendezvous.records import (
    AssignRecord,
    ClosedRecord,
    DrainRecord,
    Record,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
)

R = TypeVar("R", bound=Record)


class Sight:
    """Three mirrors and what is in them. `on_change` is called after every change."""

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        node_id: str,
        rng: random.Random,
        on_change: Callable[[], None],
        reach: Reach,
    ) -> None:
        self.round: RoundRecord | None = None
        self.waiting: WaitingRecord | None = None
        self.closed: ClosedRecord | None = None
        self.closed_revision = 0
        self.assign: AssignRecord | None = None
        self.drain: DrainRecord | None = None
        self._backend = backend
        self._keys = keys
        self._node_id = node_id
        self._rng = rng
        self._on_change = on_change
        self._reach = reach
        self._state: Mirror | None = None
        self._own: tuple[Mirror, Mirror] | None = None
        self._unreadable: dict[str, RendezvousStateError] = {}
        self._decoded: dict[str, tuple[Item, Record]] = {}

    def observe(self) -> None:
        """Follow `state/`: enough for a node that does not join."""
        if self._state is None:
            self._state = Mirror(self._backend, self._keys.state, self._rng, self._read_state, self._trouble)

    def start(self) -> None:
        """Follow everything."""
        self.observe()
        if self._own is None:
            assign, drain = self._keys.assign(self._node_id), self._keys.drain(self._node_id)
            self._own = (
                Mirror(self._backend, assign, self._rng, self._read_own, self._trouble),
                Mirror(self._backend, drain, self._rng, self._read_own, self._trouble),
            )

    def stop(self) -> None:
        """Follow nothing any more."""
        for mirror in (self._state, *(self._own or ())):
            if mirror is not None:
                mirror.stop()
        self._state = self._own = None

    @property
    def is_synced(self) -> bool:
        """`state/` was read at least once."""
        state = self._state  # once: other threads ask too
        return state is not None and state.synced.is_set()

    async def wait_synced(self) -> None:
        """Until `state/` was read once. Observe first."""
        assert self._state is not None
        await self._state.synced.wait()

    def has_vanished(self, closed_revision: int) -> bool:
        """Whether the run whose `state/closed` had this revision is gone: all its keys are under one lease."""
        return self.closed is None and self._state is not None and self._state.revision >= closed_revision > 0

    @property
    def is_closed(self) -> bool:
        return self.closed is not None and self.closed.closed

    @property
    def told(self) -> WaitingRecord | None:
        """How things stand around the active round; None if there is none, or it is not told yet."""
        record, told = self.round, self.waiting
        if record is None or told is None or record.phase is not RoundPhase.ACTIVE or told.number != record.number:
            return None
        return told

    @property
    def has_spares(self) -> bool:
        """There is a round, and none of those who want in would get in."""
        told = self.told
        return told is not None and (told.open_places == 0 or (told.spare > 0 and told.waiting == 0))

    def reason(self) -> str:
        """What the run waits for, in the coordinator's words."""
        if self.waiting is None:
            return ""
        if self.round is not None and self.waiting.number != self.round.number:
            return ""
        return self.waiting.reason

    def raise_if_unreadable(self) -> None:
        """RendezvousStateError if what the node has to know cannot be read."""
        for error in self._unreadable.values():
            raise error

    def _read_state(self) -> None:
        assert self._state is not None
        keys = self._keys
        self.round = self._decode(self._state, RoundRecord, keys.round)
        self.waiting = self._decode(self._state, WaitingRecord, keys.waiting)
        self.closed = self._decode(self._state, ClosedRecord, keys.closed)
        item = self._state.items.get(keys.closed)
        self.closed_revision = item.mod_revision if item else 0
        self._on_change()

    def _read_own(self) -> None:
        if self._own is None:
            return
        assign, drain = self._own
        self.assign = self._decode(assign, AssignRecord, self._keys.assign(self._node_id))
        self.drain = self._decode(drain, DrainRecord, self._keys.drain(self._node_id))
        self._on_change()

    def _decode(self, mirror: Mirror, kind: type[R], key: str) -> R | None:
        item = mirror.items.get(key)
        known = self._decoded.get(key)
        if item is not None and known is not None and known[0] is item:
            return known[1]  # type: ignore[return-value]  # always of the same kind for the same key
        self._unreadable.pop(key, None)
        if item is None:
            return None
        try:
            record = decode(kind, item)
            self._decoded[key] = (item, record)
            return record
        except RendezvousStateError as error:
            self._unreadable[key] = error
            return None

    def _trouble(self, error: BackendError | None) -> None:
        if error is None:
            self._reach.succeeded()
        else:
            self._reach.failed(error)
