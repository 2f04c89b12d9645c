"""What one node knows of its run: `state/`, its own assignment, its drain request, `config`. Pushed, decoded once.

The values may be out of date, but never go back. While the backend is unreachable the last known values stay. It writes
nothing and decides nothing: `node.py` does.
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
from rallypoint.rendezvous.closed_mark import next_mark
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Cause, Joined
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.rendezvous.records import (
    AssignRecord,
    ClosedMark,
    ClosedRecord,
    ConfigRecord,
    DrainRecord,
    LeaveKind,
    NodeRecord,
    Record,
    RosterMember,
    RoundEnd,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
    join_roster,
    prepare,
)
from rallypoint.rendezvous.run_config import drain_sentence
from rallypoint.rendezvous.watched_keys import WatchedKeys
from rallypoint.sentences import round_ended

R = TypeVar("R", bound=Record)

_ACTIVE = RoundPhase.ACTIVE  # as in `view.py`

SOON_S = 1.0
"""How long to wait for a first scan, or until a write of ours comes back through the watch; then go on without it."""


class NodeView:
    """Watched keys, decoded. `on_change` is called after every change."""

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
        """Number and size of the last active round that this node has seen, in any life of the server."""
        self._waiting: WaitingRecord | None = None
        self._waiting_is_new = False
        self.closed: ClosedRecord | None = None
        self.closed_revision = 0
        self.mark: ClosedMark | None = None
        """The node was told that the run is closed. It keeps this when the server loses its data."""
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
        self._closed_changed = asyncio.Event()
        self._unreadable: dict[str, RendezvousStateError] = {}
        prepare(RoundRecord, WaitingRecord, ClosedRecord, AssignRecord)

    def snapshot(self) -> tuple[Item | None, Item | None]:
        """`config` and `state/closed` as last seen; None for one that is absent, or if the run is not followed."""
        if self._watched is None:
            return None, None
        return self._watched.items.get(self._keys.config), self._watched.items.get(self._keys.closed)

    def config_since(self, known: ConfigRecord, revision: int) -> ConfigRecord:
        """`known`, read at `revision`, or a newer config of the same incarnation: its data lease may have changed."""
        item = self.snapshot()[0]
        if item is None or item.mod_revision <= revision:
            return known
        try:
            seen = decode(ConfigRecord, item)
        except RendezvousStateError:
            return known  # the next join raises this error
        return seen if seen.incarnation == known.incarnation else known

    def start(self) -> None:
        """Follow the run, and the keys of this node: an observer may join next, and then needs no further read."""
        if self._watched is None:
            prefixes = [self._keys.state, self._assign_key, self._drain_key, self._keys.config]
            self._watched = WatchedKeys(self._backend, prefixes, self._rng, self._read, self._trouble)

    async def wait_seen(self) -> None:
        """Wait until the run was scanned once, at most `SOON_S`."""
        watched = self._watched
        if watched is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(SOON_S):
                    await watched.synced.wait()

    def stop(self) -> None:
        """Stop following."""
        if self._watched is not None:
            self._watched.stop()
        self._watched = None
        self._is_synced = False

    @property
    def is_synced(self) -> bool:
        """`state/` was read at least once since `start()`."""
        return self._is_synced

    async def wait_synced(self) -> None:
        """Wait until `state/` was read once. Needs `start()` before."""
        assert self._watched is not None
        await self._watched.synced.wait()

    async def wait_closed(self, is_closed: bool) -> None:
        """Wait, at most `SOON_S`, until this view shows a close or a reopening that this node has just written."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SOON_S):
                while self._is_synced and self.is_closed is not is_closed:
                    self._closed_changed.clear()
                    await self._closed_changed.wait()

    def has_vanished(self, closed_revision: int) -> bool:
        """Whether the run is gone whose `state/closed` had this revision: all its keys are under one lease."""
        return self.closed is None and self._watched is not None and self._watched.revision >= closed_revision > 0

    @property
    def is_closed(self) -> bool:
        """The run is closed, as far as this node was ever told."""
        return self.mark is not None or (self.closed is not None and self.closed.closed)

    @property
    def waiting(self) -> WaitingRecord | None:
        """`state/waiting`. Decoded when read: a node on its way into a round does not need it."""
        if self._waiting_is_new and self._watched is not None:
            self._waiting_is_new = False
            self._waiting = self._decode(self._watched, WaitingRecord, self._keys.waiting)
        return self._waiting

    @property
    def active_waiting(self) -> WaitingRecord | None:
        """`state/waiting` of the active round; None if no round is active, or it speaks of another number."""
        record, waiting = self.round, self.waiting
        if record is None or waiting is None or record.phase is not _ACTIVE or waiting.number != record.number:
            return None
        return waiting

    @property
    def has_spares(self) -> bool:
        """A round is active, and no node that wants in would be admitted."""
        counts = self.active_waiting
        return counts is not None and (counts.open_places == 0 or (counts.spare > 0 and counts.waiting == 0))

    def count_waiting(self, min_nodes: int) -> int:
        """Nodes that would be admitted to a next round, plus lost members if the survivors alone are enough for one."""
        record, counts = self.round, self.active_waiting
        if record is None or counts is None:
            return 0
        survivors = record.size - counts.lost
        return counts.waiting + (counts.lost if survivors >= min_nodes else 0)

    def standing(self, own: NodeRecord | None) -> tuple[bool, bool]:
        """(is_spare, in_attempt): whether a node with this record is spare, and has confirmed the forming attempt."""
        record = self.round
        # A node that was a member of this round has itself freed a place: it is no spare.
        is_spare = self.has_spares and (own is None or record is None or own.floor < record.number)
        is_forming = record is not None and record.phase is RoundPhase.FORMING
        return is_spare, is_forming and record is not None and own is not None and own.round == record.number

    def reason(self) -> str:
        """The coordinator's sentence on what the run waits for; empty if it speaks of another number."""
        if self.waiting is None:
            return ""
        if self.round is not None and self.waiting.number != self.round.number:
            return ""
        return self.waiting.reason

    async def read_roster(self, joined: Joined, lost: str | None) -> tuple[RosterMember, ...]:
        """The members of a round that this node is in. `lost`: why its session is lost, None if it is not."""
        if self.round is None or self.round.number != joined.number:
            if lost is not None:
                raise SessionLostError(f"this node is no longer in round {joined.number}: {lost}; join again")
            raise RendezvousError(f"round {joined.number} is over: its members can no longer be read")
        record = self.round
        return join_roster(record, (await self._backend.scan(self._keys.roster(joined.number))).items)

    def end_of(self, number: int) -> RoundEnd | None:
        """Why the members of this round leave it, or have left, as far as the coordinator knows; None: it does not."""
        end = self.waiting.end if self.waiting is not None else None
        return end if end is not None and end.round == number else None

    def what_changed(self, current: Joined, lost: str | None, is_forgotten: bool) -> tuple[Cause | None, str]:
        """The gravest change of the round `current`, with its reason. `lost`: why the session is lost, if it is."""
        if lost is not None:
            return Cause.SESSION_LOST, lost
        end = self.end_of(current.number)
        if self.round is None or self.round.number != current.number or is_forgotten:
            if end is not None:
                return Cause.ROUND_OVER, round_ended(end.round, end.lasted_s, end.why)
            return Cause.ROUND_OVER, "the run's state says that this round is no longer current"
        if self.drain is not None:
            return Cause.DRAIN, drain_sentence(self.drain)
        waiting = self.waiting
        if waiting is None or waiting.number != current.number:
            return None, ""
        if waiting.lost == 0 and waiting.waiting == 0:
            return None, ""
        is_left = end is not None and end.kind not in (LeaveKind.MEMBER_LOST, LeaveKind.ADMISSION)
        reason = f"members are leaving round {current.number}: {end.why}" if end is not None and is_left else ""
        return Cause.LOSS if waiting.lost > 0 else Cause.WAITING, reason or waiting.reason

    def raise_if_unreadable(self) -> None:
        """Raise RendezvousStateError if a key that the node depends on cannot be read."""
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
                self._unreadable.pop(key, None)  # until it is decoded
            elif key == keys.closed:
                self.closed = self._decode(watched, ClosedRecord, key)
                item = watched.items.get(key)
                self.closed_revision = item.mod_revision if item else 0
                self._closed_changed.set()
            elif key == self._assign_key:
                self.assign = self._decode(watched, AssignRecord, key)
            elif key == self._drain_key:
                self.drain = self._decode(watched, DrainRecord, key)
        if self.mark is not None or keys.closed in changed:
            self._read_mark(watched)
        self._on_change()

    def _read_mark(self, watched: WatchedKeys) -> None:
        item = watched.items.get(self._keys.config)
        try:
            config = decode(ConfigRecord, item) if item is not None else None
        except RendezvousStateError:
            return  # the next join raises this error
        if item is not None and item.create_revision > self.closed_revision and self.is_closed:
            return  # of a later life of the run id: the news of `state/closed` is still on its way
        if self._keys.closed not in self._unreadable:
            self.mark = next_mark(self.mark, config, self.closed, self.closed_revision, watched.revision)

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
