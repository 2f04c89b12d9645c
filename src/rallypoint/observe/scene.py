"""Draws the picture of a run from its keys, and keeps it up to date. Pure: keys and times come in as arguments.

A change costs O(1): only the nodes that it is about are looked at again; a change of `state/round` or of the roster
looks at all of them. `report()` makes a value of it: one tuple of lines that are known already.

Who is waiting and who is a spare is decided as the coordinator decides it: members of the last round first, then by
order of joining. Who is held back is what the coordinator says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import Change, Item
from rallypoint.observe.report import (
    Closing,
    Config,
    Coordinator,
    Counts,
    Drain,
    Held,
    NodeReport,
    PastRound,
    Phase,
    Refusal,
    Report,
    RoundReport,
    Standing,
)
from rallypoint.rendezvous.decide import active_sentence, forming_sentence
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import (
    CoordinatorRecord,
    HistoryRecord,
    NodePhase,
    Record,
    RefusedRecord,
    RosterMember,
    RoundPhase,
    decode,
    join_roster,
)
from rallypoint.rendezvous.view import FEW, View

R = TypeVar("R", bound=Record)

# Up to Python 3.11, asking an enumeration for one of its members takes as long as making a line.
_MEMBER, _CONFIRMED, _CONFIRMING, _GONE = Standing.MEMBER, Standing.CONFIRMED, Standing.CONFIRMING, Standing.GONE
_CONFIRMED_ONE, _HAS_LEFT = NodePhase.MEMBER, NodePhase.LEFT
_ACTIVE = RoundPhase.ACTIVE


class Scene:
    """One run. `load` first, then `apply`; give it the roster whenever it wants one."""

    def __init__(self, keys: RunKeys, where: str, now: float) -> None:
        self.keys = keys
        self.view = View(keys, now)
        self.coordinator: Coordinator | None = None
        self.histories: dict[int, HistoryRecord] = {}
        self.refusals: dict[str, tuple[RefusedRecord, int]] = {}
        """Name -> its note, and the revision that was written at."""
        self._where = where
        self._revision = 0
        self._config_revision = 0
        self._roster: dict[str, tuple[int, RosterMember]] = {}
        """id -> (rank, member) of the current round or attempt."""
        self._roster_number = 0
        self._unreadable: dict[str, str] = {}
        self._lines: dict[str, NodeReport] = {}
        self._groups: dict[Standing, dict[str, None]] = {standing: {} for standing in Standing}
        self._stale: dict[str, None] = {}
        self._all_stale = True
        self._is_current = False
        """Some member is in the active round."""

    # --- keys ---------------------------------------------------------------------------------------------------------

    def load(self, items: Iterable[Item], revision: int, now: float) -> None:
        """Everything under `RunKeys.control`, `histories` and `refusals`, at one revision."""
        found = list(items)
        self.view.load([item for item in found if item.key.startswith(self.keys.control)], revision, now)
        self.histories.clear()
        self.refusals.clear()
        self._unreadable.clear()
        self.coordinator, self._config_revision = None, 0
        for item in found:
            self._take(item.key, item)
        self._revision = revision
        self._all_stale = True

    def apply(self, changes: Sequence[Change], revision: int, now: float) -> None:
        """One batch of a watch on any of them."""
        self.view.apply([change for change in changes if change.key.startswith(self.keys.control)], revision, now)
        for change in changes:
            self._take(change.key, change.item)
        self._tell_view()
        self._revision = max(self._revision, revision)

    def _take(self, key: str, item: Item | None) -> None:
        keys = self.keys
        if key.startswith(keys.nodes):
            self._stale[key[len(keys.nodes) :]] = None
        elif key.startswith(keys.drains):
            self._stale[key[len(keys.drains) :]] = None
        elif key.startswith(keys.histories):
            self._take_history(key, item)
        elif key.startswith(keys.refusals):
            self._take_refusal(key, item)
        elif key == keys.coordinator:
            self._take_coordinator(item)
        elif key == keys.waiting:  # who is held back may have changed
            wanting = (Standing.HELD_BACK, Standing.JOINING, Standing.WAITING, Standing.SPARE)
            self._stale.update({node_id: None for standing in wanting for node_id in self._groups[standing]})
        elif key == keys.config:
            self._config_revision = item.mod_revision if item is not None else 0
            self._all_stale = True
        elif key == keys.round or key.startswith(keys.healths):
            self._all_stale = True

    def _take_coordinator(self, item: Item | None) -> None:
        record = self._read(CoordinatorRecord, item)
        self.coordinator = None
        if record is not None and item is not None:
            self.coordinator = Coordinator(id=record.id, name=record.name, term=item.create_revision)

    def _take_history(self, key: str, item: Item | None) -> None:
        record = self._read(HistoryRecord, item)
        if record is not None:
            self.histories[record.number] = record
            return
        number = key[len(self.keys.histories) :]
        self.histories.pop(int(number) if number.isdecimal() else 0, None)

    def _take_refusal(self, key: str, item: Item | None) -> None:
        record = self._read(RefusedRecord, item)
        if record is not None and item is not None:
            self.refusals[record.name] = (record, item.mod_revision)
            return
        for name in [name for name in self.refusals if self.keys.refusal(name) == key]:
            del self.refusals[name]

    def _read(self, kind: type[R], item: Item | None) -> R | None:
        if item is None:
            return None
        self._unreadable.pop(item.key, None)
        try:
            return decode(kind, item)
        except RendezvousStateError as error:
            self._unreadable[item.key] = str(error)
            return None

    # --- the roster ---------------------------------------------------------------------------------------------------

    @property
    def wanted_roster(self) -> int | None:
        """The number of the round whose roster has to be read; None: it is known, or there is none."""
        record, config = self.view.round, self.view.config
        if record is None or config is None or record.incarnation != config.incarnation:
            return None
        return record.number if record.number != self._roster_number else None

    def set_roster(self, number: int, items: Sequence[Item], now: float) -> None:
        """What is under `RunKeys.roster(number)`. One that is not whole counts as empty, and is named."""
        record = self.view.round
        if record is None or record.number != number:
            return
        key = self.keys.roster(number)
        self._unreadable.pop(key, None)
        members: tuple[RosterMember, ...] = ()
        try:
            members = join_roster(record, items)
        except RendezvousStateError as error:
            self._unreadable[key] = str(error)
        self._roster_number = number
        self._roster = {member.id: (rank, member) for rank, member in enumerate(members)}
        self._tell_view()
        self._all_stale = True

    def _tell_view(self) -> None:
        """The view wants to know the members of an active round, whenever it became one."""
        record = self.view.round
        if record is None or record.phase is not RoundPhase.ACTIVE or record.number != self._roster_number:
            return
        if self.view.roster_number != record.number:
            self.view.set_roster(record.number, [member for _, member in self._roster.values()])

    # --- lines --------------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Look again at every node that something was said about."""
        if not self._all_stale and not self._stale:
            return
        is_current = bool(self.view.members)
        if is_current != self._is_current:
            self._is_current, self._all_stale = is_current, True  # a round has begun or is over: all stand elsewhere
        if self._all_stale:
            self._stale = dict.fromkeys([*self._lines, *self.view.nodes, *self._roster])
        for node_id in self._stale:
            self._draw(node_id, self._standing(node_id))
        self._stale, self._all_stale = {}, False
        if is_current:
            self._split()

    def _standing(self, node_id: str) -> Standing | None:
        """Where a node stands; None: it is not there. Spares are told from waiting nodes by `_split`."""
        node, record = self.view.nodes.get(node_id), self.view.round
        place = self._roster.get(node_id) if record is not None and record.number == self._roster_number else None
        if node is None:
            return _GONE if place is not None and self._is_current else None
        own = node.record
        if own.phase is _HAS_LEFT:
            return Standing.LEFT
        if record is not None and own.phase is _CONFIRMED_ONE and own.round == record.number:
            return _MEMBER if record.phase is _ACTIVE else _CONFIRMED
        is_forming = record is not None and record.phase is RoundPhase.FORMING
        if is_forming and place is not None and place[1].join == own.join:
            return Standing.CONFIRMING
        if self._is_held(own.name):
            return Standing.HELD_BACK
        if node_id in self.view.drains:
            return Standing.DRAINED
        return Standing.WAITING if self._is_current else Standing.JOINING

    def _is_held(self, name: str) -> bool:
        """What the coordinator says; it names only a few, and then a record of it has to do."""
        told = self.view.waiting
        if told is None or told.held_back == 0:
            return False
        return name in told.held or (len(told.held) >= FEW and name in self.view.hold_back.records)

    def _split(self) -> None:
        """Who of those that want in would get a place, as the coordinator would choose."""
        rules, nodes = self.view.rules, self.view.nodes
        members = len(self._groups[Standing.MEMBER])
        wanting = [*self._groups[Standing.WAITING], *self._groups[Standing.SPARE]]
        if rules is None or not wanting:
            return
        size = rules.usable(members + len(wanting))
        places = len(wanting) if size < rules.min_nodes else max(0, size - members)
        if 0 < places < len(wanting):
            wanting.sort(key=lambda node_id: (node_id not in self._roster, nodes[node_id].order))
        for index, node_id in enumerate(wanting):
            standing = Standing.WAITING if index < places else Standing.SPARE
            if self._lines[node_id].standing is not standing:
                self._draw(node_id, standing)

    def _draw(self, node_id: str, standing: Standing | None) -> None:
        before = self._lines.get(node_id)
        stood = None if before is None else before.standing
        if stood is not standing:
            if stood is not None:
                del self._groups[stood][node_id]
            if standing is not None:
                self._groups[standing][node_id] = None
        if standing is not None:
            self._lines[node_id] = self._line(node_id, standing)
        elif stood is not None:
            del self._lines[node_id]

    def _line(self, node_id: str, standing: Standing) -> NodeReport:
        node, place = self.view.nodes.get(node_id), self._roster.get(node_id)
        rank = None
        if place is not None and standing in (_MEMBER, _CONFIRMED, _CONFIRMING, _GONE):
            rank = place[0]
        if node is None:
            assert place is not None
            member = place[1]
            return NodeReport(
                id=node_id, name=member.name, addr=member.addr, standing=standing, rank=rank, join=member.join
            )
        record, drain = node.record, self.view.drains.get(node_id)
        return NodeReport(
            id=node_id,
            name=record.name,
            addr=record.addr,
            standing=standing,
            rank=rank,
            pid=record.pid,
            local_id=record.local_id,
            labels=record.labels,
            join=record.join,
            joined_at=record.at or None,
            drain=None if drain is None else Drain(by=drain.by, why=drain.why, drained_at=drain.at or None),
        )

    # --- the picture --------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """The run as it stands now."""
        self._refresh()
        view, config = self.view, self.view.config
        if config is None and not view.nodes and self.keys.config not in view.unreadable:
            return Report(run_id=self.keys.run_id, where=self._where, revision=self._revision, phase=Phase.ABSENT)
        return Report(
            run_id=self.keys.run_id,
            where=self._where,
            revision=self._revision,
            phase=self._phase(),
            reason=self._reason(),
            round=self._round(),
            counts=self._counts(),
            open_places=max(0, view.rules.max_nodes - len(self._groups[Standing.MEMBER])) if view.rules else 0,
            config=self._config(),
            closing=self._closing(),
            coordinator=self.coordinator,
            nodes=tuple(self._lines.values()),
            missing=self._missing(),
            held=self._held(),
            refused=self._refused(),
            rounds=tuple(_past(self.histories[number]) for number in sorted(self.histories)),
            unreadable={**view.unreadable, **self._unreadable},
        )

    def _phase(self) -> Phase:
        record = self.view.round
        if self._is_current:
            return Phase.ACTIVE
        if self.view.is_closed:
            return Phase.CLOSED
        if record is None or record.phase is not RoundPhase.FORMING:
            return Phase.GATHERING
        planned = len(self._groups[Standing.CONFIRMED]) + len(self._groups[Standing.CONFIRMING])
        return Phase.FORMING if planned == record.size else Phase.GATHERING  # one that lost a member is given up

    def _reason(self) -> str:
        """In the coordinator's words; in those of the record while it has said nothing of this round yet."""
        record, told = self.view.round, self.view.waiting
        if told is not None and told.number == (record.number if record is not None else 0):
            return told.reason
        if record is None:
            return ""
        if record.phase is RoundPhase.FORMING:
            return forming_sentence(record.number, record.size, record.why)
        return active_sentence(record.number, len(self._groups[Standing.MEMBER]), record.size)

    def _round(self) -> RoundReport | None:
        record = self.view.round
        if record is None:
            return None
        is_active = record.phase is RoundPhase.ACTIVE
        history = self.histories.get(record.number)
        return RoundReport(
            number=record.number,
            phase=("active" if self._is_current else "over") if is_active else "forming",
            size=record.size,
            present=len(self._groups[Standing.MEMBER if is_active else Standing.CONFIRMED]),
            why=record.why,
            addr=record.addr,
            port=record.port,
            active_at=history.formed_at if history is not None and is_active else None,
        )

    def _counts(self) -> Counts:
        count = {standing: len(group) for standing, group in self._groups.items()}
        return Counts(
            member=count[Standing.MEMBER],
            confirmed=count[Standing.CONFIRMED],
            confirming=count[Standing.CONFIRMING],
            joining=count[Standing.JOINING],
            waiting=count[Standing.WAITING],
            spare=count[Standing.SPARE],
            held_back=count[Standing.HELD_BACK],
            drained=count[Standing.DRAINED],
            gone=count[Standing.GONE],
        )

    def _config(self) -> Config | None:
        config = self.view.config
        if config is None:
            return None
        timing = msgspec.structs.asdict(config.timing)
        return Config(incarnation=config.incarnation, started_by=config.by, shared=dict(config.shared), timing=timing)

    def _closing(self) -> Closing | None:
        closed = self.view.closed
        if closed is None or not (closed.closed or closed.by):
            return None
        return Closing(is_closed=closed.closed, by=closed.by, why=closed.why, changed_at=closed.at or None)

    def _missing(self) -> tuple[str, ...]:
        record = self.view.round
        if record is None or record.phase is not RoundPhase.ACTIVE or record.number != self._roster_number:
            return ()
        return tuple(
            dict.fromkeys(member.name for _, member in self._roster.values() if not self.view.is_present(member.name))
        )

    def _held(self) -> tuple[Held, ...]:
        told = self.view.waiting
        names = told.held if told is not None else ()
        return tuple(
            Held(name=one.name, is_held=one.name in names, losses=one.losses, hold_s=one.hold_s, why=one.why)
            for one in self.view.hold_back.records.values()
        )

    def _refused(self) -> tuple[Refusal, ...]:
        """Notes that are not older than the config they speak of, of nodes that have not come in since."""
        return tuple(
            Refusal(name=one.name, why=one.why, differences=one.differences, refused_at=one.at or None)
            for one, revision in self.refusals.values()
            if revision > self._config_revision and not self.view.is_present(one.name)
        )


def _past(one: HistoryRecord) -> PastRound:
    return PastRound(
        number=one.number,
        size=one.size,
        active_at=one.formed_at,
        why=one.why,
        gather_s=one.gather_s,
        last_call_s=one.last_call_s,
        confirm_s=one.confirm_s,
        first_arrival=one.first_arrival,
        last_arrivals=one.last_arrivals,
        last_confirmed=one.last_confirmed,
        ended=one.ended,
        lasted_s=one.lasted_s,
    )
