"""What one node sees of its run: `state/`, its own assignment, and whether it was asked to go. Pushed, decoded once.

What is seen may be old and only goes forward. Without the backend, the last known values stay.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from rallypoint.backends.contract import Backend
from rallypoint.errors import BackendError, RendezvousError, RendezvousStateError, SessionLostError
from rallypoint.kv.types import Item
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Cause, Joined
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.rendezvous.records import (
    AssignRecord,
    ClosedRecord,
    ConfigRecord,
    DrainRecord,
    NodeRecord,
    Record,
    RosterMember,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
    join_roster,
    prepare,
)
from rallypoint.rendezvous.run_config import drain_sentence
from rallypoint.rendezvous.watched_keys import WatchedKeys

R = TypeVar("R", bound=Record)

_ACTIVE = RoundPhase.ACTIVE  # as in `view.py`

SOON_S = 1.0
"""How long a first look may take before it is made again on its own."""


class NodeView:
    """A watched and what is in it. `on_change` is called after every change."""

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        node_id: str,
        rng: random.Random,
        on_change: Callable[[], None],
        reachability: Reachability,
    ) -> None:
        self.round: RoundRecord | None = None
        self.last_active = (0, 0)
        """Number and size of the last active round that was ever seen."""
        self._waiting: WaitingRecord | None = None
        self._waiting_is_new = False
        self.closed: ClosedRecord | None = None
        self.closed_revision = 0
        self.assign: AssignRecord | None = None
        self.drain: DrainRecord | None = None
        self._backend = backend
        self._keys = keys
        self._assign_key, self._drain_key = keys.assign(node_id), keys.drain(node_id)
        self._rng = rng
        self._on_change = on_change
        self._reachability = reachability
        self._watched: WatchedKeys | None = None
        self._is_synced = False
        self._door_moved = asyncio.Event()
        self._unreadable: dict[str, RendezvousStateError] = {}
        prepare(RoundRecord, WaitingRecord, ClosedRecord, AssignRecord)

    def snapshot(self) -> tuple[Item | None, Item | None]:
        """`config` and `state/closed` as they were last seen, if they are followed."""
        if self._watched is None:
            return None, None
        return self._watched.items.get(self._keys.config), self._watched.items.get(self._keys.closed)

    def config_since(self, known: ConfigRecord, revision: int) -> ConfigRecord:
        """What was known at that revision, or what was seen since: a server may give a run's data another lease."""
        item = self.snapshot()[0]
        if item is None or item.mod_revision <= revision:
            return known
        try:
            seen = decode(ConfigRecord, item)
        except RendezvousStateError:
            return known  # whoever joins next is told
        return seen if seen.incarnation == known.incarnation else known

    def start(self) -> None:
        """Follow it all, the keys of this node too: who only looks may join next, and then nothing is left to ask."""
        if self._watched is None:
            prefixes = [self._keys.state, self._assign_key, self._drain_key, self._keys.config]
            self._watched = WatchedKeys(self._backend, prefixes, self._rng, self._read, self._trouble)

    async def wait_seen(self) -> None:
        """Until the run was looked at once, or for a moment if that does not come."""
        watched = self._watched
        if watched is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(SOON_S):
                    await watched.synced.wait()

    def stop(self) -> None:
        """Follow nothing any more."""
        if self._watched is not None:
            self._watched.stop()
        self._watched = None
        self._is_synced = False

    @property
    def is_synced(self) -> bool:
        """`state/` was read at least once."""
        return self._is_synced

    async def wait_synced(self) -> None:
        """Until `state/` was read once. Start first."""
        assert self._watched is not None
        await self._watched.synced.wait()

    async def wait_closed(self, is_closed: bool) -> None:
        """Until the run is seen closed, or open, by the one who has made it so; or for a moment: others may, too."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SOON_S):
                while self._is_synced and self.is_closed is not is_closed:
                    self._door_moved.clear()
                    await self._door_moved.wait()

    def has_vanished(self, closed_revision: int) -> bool:
        """Whether the run whose `state/closed` had this revision is gone: all its keys are under one lease."""
        return self.closed is None and self._watched is not None and self._watched.revision >= closed_revision > 0

    @property
    def is_closed(self) -> bool:
        return self.closed is not None and self.closed.closed

    @property
    def waiting(self) -> WaitingRecord | None:
        """How things stand. Decoded when somebody asks: on the way into a round nobody does."""
        if self._waiting_is_new and self._watched is not None:
            self._waiting_is_new = False
            self._waiting = self._decode(self._watched, WaitingRecord, self._keys.waiting)
        return self._waiting

    @property
    def told(self) -> WaitingRecord | None:
        """How things stand around the active round; None if there is none, or it is not told yet."""
        record, told = self.round, self.waiting
        if record is None or told is None or record.phase is not _ACTIVE or told.number != record.number:
            return None
        return told

    @property
    def has_spares(self) -> bool:
        """There is a round, and none of those who want in would get in."""
        told = self.told
        return told is not None and (told.open_places == 0 or (told.spare > 0 and told.waiting == 0))

    def count_waiting(self, min_nodes: int) -> int:
        """Who would be in a next round and is not in this one, and who is lost of it, if it can go on without them."""
        record, told = self.round, self.told
        if record is None or told is None:
            return 0
        survivors = record.size - told.lost
        return told.waiting + (told.lost if survivors >= min_nodes else 0)

    def standing(self, own: NodeRecord | None) -> tuple[bool, bool]:
        """Whether this node, with this record, is spare, and whether it has confirmed the attempt that is forming."""
        record = self.round
        # Who was in this round has freed its own place.
        is_spare = self.has_spares and (own is None or record is None or own.floor < record.number)
        is_forming = record is not None and record.phase is RoundPhase.FORMING
        return is_spare, is_forming and record is not None and own is not None and own.round == record.number

    def reason(self) -> str:
        """What the run waits for, in the coordinator's words."""
        if self.waiting is None:
            return ""
        if self.round is not None and self.waiting.number != self.round.number:
            return ""
        return self.waiting.reason

    async def read_roster(self, joined: Joined, lost: str | None) -> tuple[RosterMember, ...]:
        """The members of a round that this node is in. `lost` is why its session is, if it is."""
        if self.round is None or self.round.number != joined.number:
            if lost is not None:
                raise SessionLostError(f"this node is no longer in round {joined.number}: {lost}; join again")
            raise RendezvousError(f"round {joined.number} is over: its members can no longer be read")
        record = self.round
        return join_roster(record, (await self._backend.scan(self._keys.roster(joined.number))).items)

    def what_changed(self, current: Joined, lost: str | None, is_forgotten: bool) -> tuple[Cause | None, str]:
        """Why the round that the node is in is not what it was; `lost` is why its session is, if it is."""
        if lost is not None:
            return Cause.SESSION_LOST, lost
        if self.round is None or self.round.number != current.number or is_forgotten:
            return Cause.ROUND_OVER, "the run's state says that this round is no longer current"
        if self.drain is not None:
            return Cause.DRAIN, drain_sentence(self.drain)
        told = self.waiting
        if told is None or told.number != current.number:
            return None, ""
        if told.lost > 0:
            return Cause.LOSS, told.reason
        if told.waiting > 0:
            return Cause.WAITING, told.reason
        return None, ""

    def raise_if_unreadable(self) -> None:
        """RendezvousStateError if what the node has to know cannot be read."""
        for error in self._unreadable.values():
            raise error

    def _read(self, changed: Sequence[str] | None) -> None:
        watched, keys = self._watched, self._keys
        if watched is None:
            return
        if changed is None or not self._is_synced:
            changed = (keys.round, keys.waiting, keys.closed, self._assign_key, self._drain_key)
        self._is_synced = True
        for key in changed:
            if key == keys.round:
                self._read_round(watched)
            elif key == keys.waiting:
                self._waiting_is_new = True
                self._unreadable.pop(key, None)  # until it is read
            elif key == keys.closed:
                self.closed = self._decode(watched, ClosedRecord, key)
                item = watched.items.get(key)
                self.closed_revision = item.mod_revision if item else 0
                self._door_moved.set()
            elif key == self._assign_key:
                self.assign = self._decode(watched, AssignRecord, key)
            elif key == self._drain_key:
                self.drain = self._decode(watched, DrainRecord, key)
        self._on_change()

    def _read_round(self, watched: WatchedKeys) -> None:
        self.round = self._decode(watched, RoundRecord, self._keys.round)
        if self.round is not None and self.round.phase is _ACTIVE and self.round.number > self.last_active[0]:
            self.last_active = (self.round.number, self.round.size)

    def _decode(self, watched: WatchedKeys, kind: type[R], key: str) -> R | None:
        item = watched.items.get(key)
        self._unreadable.pop(key, None)
        if item is None:
            return None
        try:
            return decode(kind, item)
        except RendezvousStateError as error:
            self._unreadable[key] = error
            return None

    def _trouble(self, error: BackendError | None) -> None:
        if error is None:
            self._reachability.succeeded()
        else:
            self._reachability.failed(error)
