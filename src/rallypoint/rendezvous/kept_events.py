"""What happened in a run, kept beside its rounds' reports: the last events, for those who look after an incident.

The coordinator notes each event and writes them in batches under `events/`, one key a batch, together with a write that
happens anyway if there is one. Nothing decides on them, and they never delay a round. Every event has a number: the
numbers of a run have no gap and none twice, so a reader that remembers the last one reads on from there. A batch is
create-only: a write that arrives late changes nothing, and the coordinator looks whether it was executed. A later
coordinator continues the numbers.

Their instants are wall-clock times, for people. If more than a few nodes do the same at once, that is one event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from rallypoint._marks import mark
from rallypoint.errors import RendezvousStateError
from rallypoint.events import (
    CoordinatorElected,
    Event,
    JoinStarted,
    ManyGone,
    ManyJoined,
    ManyLeft,
    ManyLost,
    NodeGone,
    NodeHeldBack,
    NodeLeft,
    NodeLost,
    RecordUnreadable,
    RoundActive,
    RoundForming,
    RoundGivenUp,
    RoundOver,
)
from rallypoint.kv.types import BranchOp, Compare, Delete, Item, ModRevisionIs, Put
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import Record, decode, encode
from rallypoint.sentences import FEW

KEPT = 200
"""Events kept per run."""
KEPT_BYTES = 32 * 1024
"""Their size at most: on a register, the whole cell is written with each change."""
KEY_BYTES = 100
"""What a key costs beside its value."""
MOST_NAMES = 32
"""Names in one event."""
MOST_TEXT = 400
"""Characters of a reason."""
EVERY_S = 1.0
"""Shortest time between two writes only for events."""
SETTLE_S = 0.25
"""They wait so long for others, and for a write that takes them along."""

KINDS: tuple[type[Event], ...] = (
    *(JoinStarted, NodeLeft, NodeLost, NodeGone, NodeHeldBack, ManyJoined, ManyLeft, ManyLost, ManyGone),
    *(RoundForming, RoundActive, RoundGivenUp, RoundOver, CoordinatorElected, RecordUnreadable),
)
"""What is kept. Closing, drains and refusals have records of their own."""
Counted: TypeAlias = JoinStarted | NodeLeft | NodeLost | NodeGone
"""Events that thousands of nodes may have at once."""


class KeptEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. `nodes`: for a round that becomes active, its first members in rank order."""

    at: float
    event: msgspec.Raw
    nodes: tuple[str, ...] = ()


class EventsRecord(Record, frozen=True, kw_only=True):
    """Some events in order; the first one has the number `first`. The numbers go on in the run's next incarnation."""

    first: int
    incarnation: str = ""
    active: int = 0
    """The last round that is noted as active so far: its event may be older than those that are kept."""
    events: tuple[KeptEvent, ...]


@dataclass(frozen=True, slots=True)
class PastEvent:
    """An event as a reader sees it. `number` 0: it was not kept here, but follows from another record."""

    at: float | None
    event: Event
    nodes: tuple[str, ...] = ()
    number: int = 0


_encoder = msgspec.json.Encoder()
_decoders: dict[str, msgspec.json.Decoder[Any]] = {kind.__name__: msgspec.json.Decoder(kind) for kind in KINDS}


class _Kind(msgspec.Struct):
    event: str


def read_events(item: Item, run_id: str) -> list[PastEvent]:
    """The events under a key. RendezvousStateError. Events of kinds that this version does not know are left out."""
    record = decode(EventsRecord, item)
    found = []
    for number, one in enumerate(record.events, record.first):
        try:
            decoder = _decoders[msgspec.json.decode(one.event, type=_Kind).event]
            event = msgspec.structs.replace(decoder.decode(one.event), run_id=run_id)
        except (KeyError, msgspec.DecodeError):
            continue
        found.append(PastEvent(one.at, event, one.nodes, number))
    return found


@dataclass(slots=True)
class _Tally:
    """Events of one kind that came together."""

    at: float
    first: list[Counted] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, event: Counted) -> None:
        self.count += 1
        if len(self.first) < FEW:
            self.first.append(event)
        if len(self.names) < MOST_NAMES:
            self.names.append(event.node if isinstance(event, NodeLost | NodeGone) else event.by)

    def events(self, by: str) -> Sequence[Event]:
        """One for each node, or one for all of them."""
        if self.count <= FEW:
            return self.first
        names, count, run = tuple(self.names), self.count, self.first[0].run_id
        match self.first[0]:
            case JoinStarted():
                return [ManyJoined(run_id=run, by=by, nodes=names, count=count)]
            case NodeLost(round=number, reason=why):
                return [ManyLost(run_id=run, by=by, nodes=names, count=count, round=number, reason=why)]
            case NodeGone(round=number, reason=why):
                return [ManyGone(run_id=run, by=by, nodes=names, count=count, round=number, reason=why)]
            case NodeLeft(reason=why):
                return [ManyLeft(run_id=run, by=by, nodes=names, count=count, reason=why)]


@dataclass(frozen=True, slots=True)
class EventWrites:
    """Writes for the next transaction; pass it to `written` when that is committed."""

    ops: tuple[BranchOp, ...] = ()
    compares: tuple[Compare, ...] = ()
    count: int = 0
    size: int = 0
    dropped: int = 0


class KeptEvents:
    """The events of a run as its coordinator keeps them."""

    def __init__(self, keys: RunKeys, by: str, wall: Callable[[], float]) -> None:
        self.last_active = 0
        """The last round of this incarnation that is noted as active, and as over."""
        self.last_over = 0
        self.incarnation = ""
        self.in_doubt: str | None = None
        """The key of a batch whose write has no answer yet."""
        self._keys = keys
        self._by = by
        self._wall = wall
        self._next = 1
        self._batches: deque[tuple[int, int, int]] = deque()
        """(first number, events, bytes) of the keys that are written, oldest first."""
        self._frozen: list[KeptEvent] = []
        """Those that the write in doubt holds, and those that the next one holds."""
        self._pending: list[tuple[float, Event, tuple[str, ...]] | _Tally] = []
        self._tallies: dict[type[Event], _Tally] = {}
        self._joining: set[str] = set()
        """Names in kept events of nodes that asked to join and are in no round since."""
        self._noted_at: float | None = None
        self._written_at = float("-inf")

    def begin(self, incarnation: str) -> None:
        """The run has this incarnation now. What was noted of another one is dropped, as its data was."""
        if self.incarnation:
            self._frozen.clear()
            self._pending.clear()
            self._tallies.clear()
            self._noted_at = None
        self.incarnation = incarnation
        self.last_active = self.last_over = 0
        self._joining.clear()

    def load(self, items: Iterable[Item]) -> None:
        """Continue the events of earlier coordinators. Unreadable ones only count."""
        for item in sorted(items, key=lambda item: item.key):
            first = int(item.key.removeprefix(self._keys.events))
            try:
                record = decode(EventsRecord, item)
                count = len(record.events)
                if record.incarnation == self.incarnation:
                    self._continue(record, item)
            except RendezvousStateError:
                count = 1
            self._batches.append((first, count, len(item.value) + KEY_BYTES))
            self._next = first + count
        if self._batches:
            mark("kept_events.continued")

    def _continue(self, record: EventsRecord, item: Item) -> None:
        for one in read_events(item, self._keys.run_id):
            self._saw(one.event, one.nodes)
        self.last_active = record.active

    def _saw(self, event: Event, nodes: Sequence[str]) -> None:
        match event:
            case RoundActive(round=number):
                self.last_active = number
                self._joining.clear()
            case RoundOver(round=number):
                self.last_over = number
            case JoinStarted(by=name):
                self._joining.add(name)
            case ManyJoined(nodes=names):
                self._joining.update(names)
            case _:
                pass

    # --- noting -------------------------------------------------------------------------------------------------------

    def note(self, event: Event, now: float, nodes: Sequence[str] = (), at: float | None = None) -> None:
        """Keep an event, soon. Events of rounds that are noted already are left out."""
        match event:
            case RoundActive(round=number) if number == self.last_active:
                return
            case RoundOver(round=number) if number == self.last_over:
                return
            case _:
                pass
        if len(self._pending) + len(self._frozen) >= KEPT:
            return  # the backend has been unreachable for long
        if self._noted_at is None:
            self._noted_at = now
        if isinstance(event, Counted):
            self._count(event)
            return
        self._saw(event, nodes)
        self._tallies.clear()
        self._pending.append((self._wall() if at is None else at, event, tuple(nodes[:MOST_NAMES])))

    def note_present(self, event: JoinStarted, now: float) -> None:
        """Keep the join of a node that was there before this coordinator, if the earlier ones did not."""
        if event.by not in self._joining:
            self.note(event, now)

    def _count(self, event: Counted) -> None:
        tally = self._tallies.get(type(event))
        if tally is None:
            tally = self._tallies[type(event)] = _Tally(self._wall())
            self._pending.append(tally)
        tally.add(event)

    # --- writing ------------------------------------------------------------------------------------------------------

    @property
    def due_at(self) -> float | None:
        """When they should be written even if nothing else is; None: there are none."""
        if self._noted_at is None:
            return None
        return max(self._noted_at + SETTLE_S, self._written_at + EVERY_S)

    def writes(self, lease: int, room: int) -> EventWrites:
        """The writes of all noted events, and the removal of the oldest, in at most `room` operations."""
        if self._noted_at is None or room < 1:
            return EventWrites()
        for one in self._pending:
            if isinstance(one, _Tally):
                self._frozen += [_kept(one.at, event, ()) for event in one.events(self._by)]
            else:
                self._frozen.append(_kept(*one))
        self._pending.clear()
        self._tallies.clear()
        record = EventsRecord(
            first=self._next,
            incarnation=self.incarnation,
            active=self.last_active,
            events=tuple(self._frozen),
        )
        value = encode(record)
        size = len(value) + KEY_BYTES
        ops: list[BranchOp] = [Put(self._keys.kept_events(self._next), value, lease)]
        count, total = len(self._frozen), size
        for _, events, stored in self._batches:
            count, total = count + events, total + stored
        dropped = 0
        while dropped < min(room - 1, len(self._batches)) and (count > KEPT or total > KEPT_BYTES):
            first, events, stored = self._batches[dropped]
            ops.append(Delete(self._keys.kept_events(first)))
            count, total, dropped = count - events, total - stored, dropped + 1
        self.in_doubt = self._keys.kept_events(self._next)
        return EventWrites(tuple(ops), (ModRevisionIs(self.in_doubt, 0),), len(self._frozen), size, dropped)

    def written(self, writes: EventWrites, now: float) -> None:
        """These writes were committed."""
        if not writes.count:
            return
        self.in_doubt = None
        mark("kept_events.written")
        if writes.dropped:
            mark("kept_events.trimmed")
        for _ in range(writes.dropped):
            self._batches.popleft()
        self._batches.append((self._next, writes.count, writes.size))
        self._next += writes.count
        del self._frozen[: writes.count]
        self._noted_at = now if self._pending or self._frozen else None
        self._written_at = now

    def settle(self, item: Item | None, now: float) -> None:
        """The content of the key in doubt: whether its write was executed."""
        self.in_doubt = None
        if item is not None:
            mark("kept_events.was_written")
            count = len(decode(EventsRecord, item).events)
            self.written(EventWrites(count=count, size=len(item.value) + KEY_BYTES), now)


def _kept(at: float, event: Event, nodes: tuple[str, ...]) -> KeptEvent:
    """The event as it is stored: without the run, which its key names, and with a reason of bounded length."""
    fields = {**msgspec.to_builtins(event), "run_id": ""}
    reason = fields.get("reason")
    if reason is not None and len(reason) > MOST_TEXT:
        fields["reason"] = reason[: MOST_TEXT - 1] + "…"
    shown = {name: value for name, value in fields.items() if value is not None}
    return KeptEvent(at=round(at, 3), event=msgspec.Raw(_encoder.encode(shown)), nodes=nodes)
