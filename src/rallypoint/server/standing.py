"""Those who wait for the place of a node on a connection of their own, and are told in a few bytes.

A node that waits has nothing to do with most of what is pushed to it: it wants to know its place in an attempt, and
that the attempt is active. Said by itself, on a connection that the waiting thread reads, that wakes nobody else and is
known by its first bytes. Meanwhile the node's own connection holds back what it has to push, for a moment: whatever
else is to be sent there takes it along.

What is said is taken from the keys as they are when the node's connection has something to send: never ahead of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, cast

from rallypoint.backends.contract import Asked
from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import Item, Put
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import AssignRecord, NodePhase, NodeRecord, RoundPhase, RoundRecord, decode, prepare
from rallypoint.server.outbox import guarded
from rallypoint.server.runs import PREFIX
from rallypoint.wire.frames import frame
from rallypoint.wire.messages import Place, Pledge, encoder

if TYPE_CHECKING:
    from rallypoint.server.house import House

HELD_S = 0.1
"""How long the node's own connection holds back what was said here."""
MOST_PLEDGED_S = 10.0
MOST_PLEDGED_BYTES = 64 * 1024
"""A place is never confirmed beforehand for longer, nor with more."""
MOST_CONNECTIONS = 4_096
"""With more connections than these nobody is told that way: each node would need two."""

_ACTIVE, _MEMBER = RoundPhase.ACTIVE, NodePhase.MEMBER


@lru_cache(maxsize=256)
def _keys_of(run_id: str) -> RunKeys:
    """Asked for again with every node of a run."""
    return RunKeys(PREFIX, run_id)


class Line(Protocol):
    """A connection."""

    stands: Stands | None

    @property
    def run(self) -> str:
        """The run that its client comes for; empty: none."""

    def say(self, first: bytes) -> None:
        """Send a frame, and behind it whatever else is to be sent."""

    def flush_soon(self) -> None:
        """Send what waits."""


class Stands:
    """What one connection has to do with it: somebody waits on it, or on another one for the place of its node."""

    def __init__(self, line: Line, house: House) -> None:
        self._line = line
        self._house = house
        self._told: Standing | None = None
        """Who is told on another connection where this one's node stands."""
        self._held: tuple[float, Stands] | None = None
        """What waits to be sent here was told there: its place in the list of those."""
        self._for: Stands | None = None
        """The node's, for whose place somebody waits here, or has waited."""
        self._client_id = ""
        """Which is this client."""

    def wait_for(self, client_id: str, node_id: str) -> None:
        """Somebody waits on this connection for the place of a node, which is that client."""
        self._wait_no_more()
        self._client_id = client_id
        other = cast("Line | None", self._house.clients.line_of(client_id))
        if other is None or other is self._line or not other.run or len(self._house.connections) > MOST_CONNECTIONS:
            return
        if other.stands is None:
            other.stands = Stands(other, self._house)
        self._for = other.stands
        other.stands._tell_nobody()
        other.stands._told = Standing(self._house, other.run, node_id, self._line)
        if self._house.rehearsal is not None:
            self._house.rehearsal.wanted()

    def _wait_no_more(self) -> Stands | None:
        """Nobody waits on this connection any more; for whose node's place somebody has."""
        other, self._for = self._for, None
        if other is not None and other._told is not None and other._told.line is self._line:
            other._tell_nobody()
        return other

    def pledge(self, pledge: Pledge) -> None:
        """Whoever waits here confirms beforehand."""
        told = self._for._told if self._for is not None else None
        if told is not None and told.line is self._line:
            told.pledge(pledge)

    def holds_for_another(self, lease: int, grace_s: float) -> bool:
        """Whether a session that was opened here is that client's; if that is away, it says so itself when it comes."""
        client = self._house.clients.known(self._client_id)
        if client is not None:
            self._house.clients.hold(client, lease, grace_s)
        return self._client_id != ""

    @property
    def is_told_elsewhere(self) -> bool:
        """Somebody waits elsewhere for the place of this connection's node."""
        return self._told is not None

    @property
    def is_holding(self) -> bool:
        """What waits to be sent was told elsewhere, a moment ago."""
        return self._held is not None

    def holds(self) -> bool:
        """Whether what is about to be sent is told elsewhere, and can wait a moment. If not, nothing is held back."""
        if self._told is None or (place := self._told.tells()) is None:
            self._held = None
            return False
        if place.is_active:
            self._tell_nobody()
        if self._held is None:
            self._held = self._house.held.add(self)
        return True

    def end(self) -> None:
        """The connection is closed. If somebody waited on it, nobody has heard what was held back for that."""
        self._tell_nobody()
        self._held = None
        other = self._wait_no_more()
        if other is not None and other.is_holding:
            self._house.held.let_go(other)

    def _tell_nobody(self) -> None:
        told, self._told = self._told, None
        if told is not None:
            told.end()

    def is_held(self, since: tuple[float, Stands]) -> bool:
        """Whether it still holds back what it did then."""
        return self._held is since

    def release(self) -> None:
        """Hold nothing back any more."""
        told, self._told = self._told, None  # which has nothing to say about what is held already
        self._held = None
        try:
            self._line.flush_soon()
        finally:
            self._told = told


class Held:
    """Who holds something back, and until when. One timer for all: they are told together, and wait equally long."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, Stands]] = deque()

    def add(self, one: Stands) -> tuple[float, Stands]:
        """Have it released in a moment, if it still holds something back then."""
        if not self._waiting:
            self._loop.call_later(HELD_S, self._look)
        entry = (self._loop.time() + HELD_S, one)
        self._waiting.append(entry)
        return entry

    def let_go(self, one: Stands) -> None:
        """Have it send what it holds back."""
        guarded(self._loop, one.release)

    def _look(self) -> None:
        now, waiting = self._loop.time(), self._waiting
        while waiting and waiting[0][0] <= now:
            entry = waiting.popleft()
            if entry[1].is_held(entry):
                self.let_go(entry[1])
        if waiting:
            self._loop.call_at(waiting[0][0], self._look)


class Standing:
    """One who waits, for one node of one run."""

    _decoded: tuple[Item | None, RoundRecord | None] = (None, None)
    """The `state/round` that was read last, for all of them."""

    def __init__(self, house: House, run_id: str, node_id: str, line: Line) -> None:
        prepare(RoundRecord, AssignRecord)
        keys = _keys_of(run_id)
        self._run_id, self._node_id = run_id, node_id
        self._pledges = house.pledges
        self._clock = asyncio.get_running_loop().time
        self._pledge: Pledge | None = None
        """What was confirmed beforehand ..."""
        self._pledged_until = 0.0
        self._pledged_on = 0
        """... of which revision of the node's key."""
        self._items = house.hub.engine.items
        self._round_key, self._assign_key, self._node_key = keys.round, keys.assign(node_id), keys.node(node_id)
        self.line = line
        known = self._items.get(self._round_key)
        self._told = known.mod_revision if known is not None else 0

    def tells(self) -> Place | None:
        """Say what is new about the place, and here; None: nothing is. Who has confirmed it hears when it is active."""
        place = self._place()
        if place is not None and (place.is_active or not self._has_confirmed(place.number)):
            self.line.say(frame(encoder.encode((place,))))
        return place

    def _has_confirmed(self, number: int) -> bool:
        """Whether what was said beforehand of a place in that attempt is written."""
        pledge, own = self._pledge, self._items.get(self._node_key)
        if pledge is None or own is None or pledge.number != number:
            return False
        return own.value in (pledge.value, pledge.as_zero)

    def end(self) -> None:
        """Nobody is told here any more, nor confirms anything."""
        self._pledge = None
        self._pledges.forget(self._run_id, self._node_id, self)

    def pledge(self, pledge: Pledge) -> None:
        """A place is confirmed beforehand, or the one that was is for longer."""
        self._pledged_until = self._clock() + (pledge.for_s if pledge.for_s <= MOST_PLEDGED_S else MOST_PLEDGED_S)
        if not pledge.number:
            return
        own = self._items.get(self._node_key)
        if own is None or own.lease != pledge.lease:
            self.end()
            return
        has_just_joined = own.mod_revision == own.create_revision
        self._pledged_on = pledge.revision or (own.mod_revision if has_just_joined else 0)
        if self._pledged_on and self._says_so(pledge):
            self._pledge = pledge
            self._pledges.keep(self._run_id, self._node_id, self)
        else:
            self.end()

    def _says_so(self, pledge: Pledge) -> bool:
        """Whether what is to be written confirms what it is said to confirm: the coordinator takes it for that."""
        if len(pledge.value) + len(pledge.as_zero) > MOST_PLEDGED_BYTES:
            return False
        for value in (pledge.value, pledge.as_zero):
            try:
                record = decode(NodeRecord, Item(self._node_key, value, 0, 0, 0, pledge.lease)) if value else None
            except RendezvousStateError:
                return False
            if record is not None and (record.id, record.phase, record.join, record.round) != (
                self._node_id,
                _MEMBER,
                pledge.join,
                pledge.number,
            ):
                return False
        return True

    def confirms(self, number: int, incarnation: str, asked: Asked, now: float) -> Put | None:
        """As in `Promised`."""
        pledge = self._pledge
        if (
            pledge is None
            or pledge.number != number
            or pledge.join != asked.join
            or pledge.incarnation != incarnation
            or self._pledged_on != asked.revision
            or now > self._pledged_until
            or not (value := pledge.value if asked.rank else pledge.as_zero)
        ):
            return None
        return Put(self._node_key, value, pledge.lease)

    def _place(self) -> Place | None:
        item = self._items.get(self._round_key)
        if item is None or item.mod_revision == self._told:
            return None
        self._told = item.mod_revision
        assigned, own = self._items.get(self._assign_key), self._items.get(self._node_key)
        if assigned is None or own is None:
            return None
        try:
            record, assign = self._read(item), decode(AssignRecord, assigned)
        except RendezvousStateError:
            return None  # whoever reads it says so
        if assign.number != record.number:
            return None
        return Place(
            record.phase is _ACTIVE,
            record.number,
            assign.join,
            record.incarnation,
            assign.rank,
            record.size,
            own.mod_revision,
            record.addr,
            record.port,
        )

    @staticmethod
    def _read(item: Item) -> RoundRecord:
        known, record = Standing._decoded
        if known is not item or record is None:
            record = decode(RoundRecord, item)
            Standing._decoded = (item, record)
        return record
