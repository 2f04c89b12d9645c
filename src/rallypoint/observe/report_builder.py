"""Builds the report of a run from its keys, and keeps it up to date. Pure: keys and times are arguments.

A change costs O(1): only the nodes that it concerns are evaluated again. A change of `state/round`, of `config`, of a
health record or of the roster evaluates all of them. `report()` assembles the `NodeReport`s that exist already.

Waiting nodes and spares are told apart as the coordinator would choose: members of the last round first, then in order
of joining. Which nodes are held back is read from the coordinator's record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import Change, Item
from rallypoint.observe.phase import Phase, phase_of, reason_of
from rallypoint.observe.report import (
    Closing,
    Config,
    Coordinator,
    Counts,
    Drain,
    Held,
    NodeReport,
    PastRound,
    Refusal,
    Report,
    Restarts,
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
from rallypoint.rendezvous.view import View
from rallypoint.sentences import FEW

R = TypeVar("R", bound=Record)

MOST_NEW_EVENTS = 400

# Up to Python 3.11, the access to a member of an enumeration takes as long as making a NodeReport.
_MEMBER, _CONFIRMED, _CONFIRMING, _GONE = Standing.MEMBER, Standing.CONFIRMED, Standing.CONFIRMING, Standing.GONE
_PHASE_MEMBER, _PHASE_LEFT = NodePhase.MEMBER, NodePhase.LEFT
_ACTIVE = RoundPhase.ACTIVE


class ReportBuilder:
    """One run. Call `load` first, then `apply`, and `set_roster` whenever `wanted_roster` is not None."""

    def __init__(self, keys: RunKeys, where: str, now: float) -> None:
        self.keys = keys
        self.view = View(keys, now)
        self.coordinator: Coordinator | None = None
        self.histories: dict[int, HistoryRecord] = {}
        self.refusals: dict[str, tuple[RefusedRecord, int]] = {}
        """Node name -> (its record, the revision at which it was written)."""
        self.drained: dict[str, int] = {}
        """Node id -> the revision at which it was asked to go."""
        self._revision = 0
        self.new_events: deque[Item] = deque(maxlen=MOST_NEW_EVENTS)
        """Batches of kept events since `load` or since their reader cleared this."""
        self._where = where
        self._config_revision = 0
        self._roster: dict[str, tuple[int, RosterMember]] = {}
        """id -> (rank, member) of the current round or attempt."""
        self._roster_number = 0
        self._unreadable: dict[str, str] = {}
        self._reports: dict[str, NodeReport] = {}
        """Node id -> its report."""
        self._groups: dict[Standing, dict[str, None]] = {standing: {} for standing in Standing}
        """The ids of the nodes with each standing, as ordered sets."""
        self._stale: dict[str, None] = {}
        """The ids of nodes whose reports are out of date, as an ordered set."""
        self._all_stale = True
        self._is_current = False
        """Whether the active round has a member, and so is current."""
        self._is_given_up = False
        """Whether the coordinator has given up the attempt in `state/round`: its places are void."""

    # --- keys ---------------------------------------------------------------------------------------------------------

    def load(self, items: Iterable[Item], revision: int, now: float) -> None:
        """Everything under `RunKeys.control`, `histories`, `events` and `refusals`, at one revision."""
        found = list(items)
        self.view.load([item for item in found if item.key.startswith(self.keys.control)], revision, now)
        self.histories.clear()
        self.refusals.clear()
        self.drained.clear()
        self.new_events.clear()
        self._unreadable.clear()
        self.coordinator, self._config_revision = None, 0
        for item in found:
            self._take(item.key, item)
        self._revision = revision
        self._all_stale = True

    def apply(self, changes: Sequence[Change], revision: int, now: float) -> None:
        """One batch of a watch on one of these prefixes."""
        self.view.apply([change for change in changes if change.key.startswith(self.keys.control)], revision, now)
        for change in changes:
            self._take(change.key, change.item)
        self._pass_roster()
        self._revision = max(self._revision, revision)

    def _take(self, key: str, item: Item | None) -> None:
        keys = self.keys
        if key.startswith(keys.nodes):
            self._stale[key[len(keys.nodes) :]] = None
        elif key.startswith(keys.drains):
            node_id = key[len(keys.drains) :]
            self._stale[node_id] = None
            self.drained.pop(node_id, None)
            if item is not None:
                self.drained[node_id] = item.mod_revision
        elif key.startswith(keys.events) and item is not None:
            self.new_events.append(item)
        elif key.startswith(keys.histories):
            self._take_history(key, item)
        elif key.startswith(keys.refusals):
            self._take_refusal(key, item)
        elif key == keys.coordinator:
            self._take_coordinator(item)
        elif key == keys.waiting:  # it says which nodes are held back
            candidates = (Standing.HELD_BACK, Standing.JOINING, Standing.WAITING, Standing.SPARE)
            self._stale.update({node_id: None for standing in candidates for node_id in self._groups[standing]})
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
        """The number of the round whose roster must be read; None if it is known, or there is no round."""
        record, config = self.view.round, self.view.config
        if record is None or config is None or record.incarnation != config.incarnation:
            return None
        return record.number if record.number != self._roster_number else None

    def set_roster(self, number: int, items: Sequence[Item], now: float) -> None:
        """The items under `RunKeys.roster(number)`. An incomplete roster counts as empty, and as unreadable."""
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
        self._pass_roster()
        self._all_stale = True

    def _pass_roster(self) -> None:
        """Pass the roster of an active round to the view, once."""
        record = self.view.round
        if record is None or record.phase is not RoundPhase.ACTIVE or record.number != self._roster_number:
            return
        if self.view.roster_number != record.number:
            self.view.set_roster(record.number, [member for _, member in self._roster.values()])

    # --- reports of nodes ---------------------------------------------------------------------------------------------

    def _has_been_given_up(self) -> bool:
        record, told = self.view.round, self.view.waiting
        if record is None or record.phase is not RoundPhase.FORMING or told is None:
            return False
        return told.number == record.number and told.members == 0

    def _refresh(self) -> None:
        """Evaluate all stale nodes again."""
        if not self._all_stale and not self._stale and self._is_given_up == self._has_been_given_up():
            return
        is_current = bool(self.view.members)
        if is_current != self._is_current:
            self._is_current, self._all_stale = is_current, True  # a round has begun or is over: all standings change
        is_given_up = self._has_been_given_up()
        if is_given_up != self._is_given_up:
            self._is_given_up, self._all_stale = is_given_up, True
        if self._all_stale:
            self._stale = dict.fromkeys([*self._reports, *self.view.nodes, *self._roster])
        for node_id in self._stale:
            self._update(node_id, self._standing(node_id))
        self._stale, self._all_stale = {}, False
        if is_current:
            self._separate_spares()

    def _standing(self, node_id: str) -> Standing | None:
        """The standing of a node; None: it is not in the run. `_separate_spares` tells spares from waiting nodes."""
        node, record = self.view.nodes.get(node_id), self.view.round
        place = self._roster.get(node_id) if record is not None and record.number == self._roster_number else None
        if node is None:
            return _GONE if place is not None and self._is_current else None
        own = node.record
        if own.phase is _PHASE_LEFT:
            return Standing.LEFT
        if record is not None and own.phase is _PHASE_MEMBER and own.round == record.number:
            if record.phase is _ACTIVE:
                return _MEMBER
            if not self._is_given_up:
                return _CONFIRMED
        is_forming = record is not None and record.phase is RoundPhase.FORMING and not self._is_given_up
        if is_forming and place is not None and place[1].join == own.join:
            return Standing.CONFIRMING
        if self._is_held(own.name):
            return Standing.HELD_BACK
        if node_id in self.view.drains:
            return Standing.DRAINED
        return Standing.WAITING if self._is_current else Standing.JOINING

    def _is_held(self, name: str) -> bool:
        """Whether the coordinator holds the node back.

        Its record names only the first few; beyond them, a node with a health record counts as held back.
        """
        told = self.view.waiting
        if told is None or told.held_back == 0:
            return False
        return name in told.held or (len(told.held) >= FEW and name in self.view.hold_back.records)

    def _separate_spares(self) -> None:
        """Decide which candidates would get a place in the next round (waiting) and which would not (spares)."""
        rules, nodes = self.view.rules, self.view.nodes
        members = len(self._groups[Standing.MEMBER])
        candidates = [*self._groups[Standing.WAITING], *self._groups[Standing.SPARE]]
        if rules is None or not candidates:
            return
        size = rules.usable(members + len(candidates))
        places = len(candidates) if size < rules.min_nodes else max(0, size - members)
        if 0 < places < len(candidates):
            candidates.sort(key=lambda node_id: (node_id not in self._roster, nodes[node_id].order))
        for index, node_id in enumerate(candidates):
            standing = Standing.WAITING if index < places else Standing.SPARE
            if self._reports[node_id].standing is not standing:
                self._update(node_id, standing)

    def _update(self, node_id: str, standing: Standing | None) -> None:
        """Set a node's standing and make its report anew. None: the node is not in the run any more."""
        before = self._reports.get(node_id)
        old = None if before is None else before.standing
        if old is not standing:
            if old is not None:
                del self._groups[old][node_id]
            if standing is not None:
                self._groups[standing][node_id] = None
        if standing is not None:
            self._reports[node_id] = self._node_report(node_id, standing)
        elif old is not None:
            del self._reports[node_id]

    def _node_report(self, node_id: str, standing: Standing) -> NodeReport:
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

    # --- the report of the run ----------------------------------------------------------------------------------------

    def report(self) -> Report:
        """The current state of the run."""
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
            restarts=self._restarts(),
            nodes=tuple(self._reports.values()),
            missing=self._missing(),
            held=self._held(),
            refused=self._refused(),
            rounds=tuple(_past(self.histories[number]) for number in sorted(self.histories)),
            unreadable={**view.unreadable, **self._unreadable},
        )

    def _phase(self) -> Phase:
        view, count = self.view, {standing: len(group) for standing, group in self._groups.items()}
        if view.unreadable:
            return Phase.UNREADABLE
        record = view.round
        return phase_of(
            nodes=len(view.nodes) - count[Standing.LEFT],
            is_closed=view.is_closed,
            round_phase=record.phase if record is not None else None,
            size=record.size if record is not None else 0,
            members=count[_MEMBER] + count[_CONFIRMED] + count[_CONFIRMING],
            candidates=view.waiting.candidates  # it may have left out nodes that did not confirm
            if self._is_given_up and view.waiting is not None
            else count[Standing.JOINING] + count[Standing.WAITING] + count[Standing.SPARE],
            min_nodes=view.rules.min_nodes if view.rules is not None else 0,
        )

    def _reason(self) -> str:
        """The coordinator's sentence, or the one that follows from the round's record if there is none yet."""
        view, record = self.view, self.view.round
        nodes, members = len(view.nodes), len(self._groups[_MEMBER])
        if self.coordinator is None and members and record is not None:  # nobody has counted since it went
            return active_sentence(record.number, members, record.size)
        told = reason_of(nodes, record, view.waiting, view.waiting_revision, view.closed, view.closed_revision)
        if told or record is None:
            return told
        if record.phase is RoundPhase.FORMING:
            return forming_sentence(record.number, record.size, record.why)
        return active_sentence(record.number, members, record.size) if members else ""

    def _round(self) -> RoundReport | None:
        record = self.view.round
        if record is None:
            return None
        is_active = record.phase is RoundPhase.ACTIVE
        history = self.histories.get(record.number)
        return RoundReport(
            number=record.number,
            phase=("active" if self._is_current else "over")
            if is_active
            else ("given up" if self._is_given_up else "forming"),
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
        changed_at = closed.at or None
        return Closing(
            is_closed=closed.closed, by=closed.by, why=closed.why, changed_at=changed_at, outcome=closed.outcome
        )

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

    def _restarts(self) -> Restarts | None:
        budget = self.view.budget
        if budget is None:
            return None
        why = budget.why if budget.outcome is None else ""  # `closing` says why the run has ended
        return Restarts(used=budget.used, limit=budget.limit, why=why)

    def _refused(self) -> tuple[Refusal, ...]:
        """Refusals under the current config of nodes that have not joined since."""
        return tuple(
            Refusal(name=one.name, why=one.why, differences=one.differences, refused_at=one.at or None)
            for one, revision in self.refusals.values()
            if revision > self._config_revision and not self.view.is_present(one.name)
        )


def kind_of(one: HistoryRecord) -> str:
    """The kind of the end of a round; empty if the round is not over, or its coordinator did not write it."""
    return one.ended_kind.value if one.ended_kind is not None else ""


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
        ended_kind=kind_of(one),
        lasted_s=one.lasted_s,
    )
