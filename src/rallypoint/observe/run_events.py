"""The events of a run, derived from the changes of its keys: the same ones that its processes write to their logs.

`recorded_events` returns past events that the run's keys still hold; `RunEvents` derives new ones from changes. Reasons
are those in the keys. Pure, except that events have loggers, which this module does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.events import (
    CoordinatorDeposed,
    CoordinatorElected,
    Event,
    JoinStarted,
    NodeDrained,
    NodeHeldBack,
    NodeLeft,
    NodeLost,
    NodeRefused,
    RecordUnreadable,
    RoundActive,
    RoundForming,
    RoundGivenUp,
    RoundOver,
    RunClosed,
    RunReopened,
    WaitingFor,
)
from rallypoint.kv.types import Change
from rallypoint.observe.report import Report
from rallypoint.observe.report_builder import ReportBuilder, kind_of
from rallypoint.rendezvous.records import RoundPhase, RoundRecord
from rallypoint.rendezvous.view import Departure

COORDINATOR = "the coordinator"
"""The emitter of an event if the coordinator's name is not known."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A past event, and its time by the clock of the process that recorded it (None: unknown)."""

    at: float | None
    event: Event


def recorded_events(report: Report) -> list[RecordedEvent]:
    """The past events in a report: last rounds, nodes that were refused or held back, closing or reopening."""
    run, by = report.run_id, report.coordinator.name if report.coordinator is not None else COORDINATOR
    past: list[RecordedEvent] = []
    for one in report.rounds:
        at = one.active_at
        active = RoundActive(
            run_id=run,
            by=by,
            round=one.number,
            size=one.size,
            reason=one.why,
            gather_s=one.gather_s,
            last_call_s=one.last_call_s,
            confirm_s=one.confirm_s,
        )
        past.append(RecordedEvent(at, active))
        if one.ended:
            over = RoundOver(
                run_id=run, by=by, round=one.number, kind=one.ended_kind, reason=one.ended, lasted_s=one.lasted_s
            )
            past.append(RecordedEvent(at + one.lasted_s if one.lasted_s is not None else None, over))
    past += [
        RecordedEvent(None, NodeHeldBack(run_id=run, by=by, node=held.name, hold_s=held.hold_s, reason=held.why))
        for held in report.held
    ]
    past += [
        RecordedEvent(refused.refused_at, NodeRefused(run_id=run, by=by, node=refused.name, reason=refused.why))
        for refused in report.refused
    ]
    if report.closing is not None:
        kind = RunClosed if report.closing.is_closed else RunReopened
        closing = kind(run_id=run, by=report.closing.by, reason=report.closing.why)
        past.append(RecordedEvent(report.closing.changed_at, closing))
    return past


class RunEvents:
    """Pass `take` to a `Follower` as `on_changes`. The caller empties `events`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._run = ""
        self._by = COORDINATOR
        self._round: RoundRecord | None = None
        self._is_closed = False
        self._reason = ""
        self._term = 0
        self._joins: dict[str, int] = {}
        self._ended: set[int] = set()
        self._held: set[str] = set()

    def take(self, builder: ReportBuilder, changes: Sequence[Change] | None) -> None:
        """Derive events from a batch that was applied. `changes` None: a scan was loaded; start again from there."""
        self._run = builder.keys.run_id
        if builder.coordinator is not None:
            self._by = builder.coordinator.name
        if changes is None:
            builder.view.facts.clear()
            self._begin(builder)
            return
        keys, facts = builder.keys, builder.view.facts
        for change in changes:
            key = change.key
            if key.startswith(keys.nodes):
                self._node(builder, key[len(keys.nodes) :])
            elif key == keys.round:
                self._rounds(builder)
            elif key == keys.waiting:
                self._waiting(builder)
            elif key == keys.closed:
                self._closing(builder)
            elif key == keys.coordinator:
                self._coordinator(builder)
            elif key.startswith(keys.drains) and change.item is not None:
                self._drain(builder, key[len(keys.drains) :])
            elif key.startswith(keys.healths):
                self._health(builder)
            elif key.startswith(keys.histories):
                self._history(builder)
            elif key.startswith(keys.refusals) and change.item is not None:
                self._refusals(builder, key)
        for fact in facts:
            self._fact(fact)
        facts.clear()

    def _begin(self, builder: ReportBuilder) -> None:
        view = builder.view
        self._round, self._is_closed = view.round, view.is_closed
        self._reason = view.waiting.reason if view.waiting is not None else ""
        self._term = builder.coordinator.term if builder.coordinator is not None else 0
        self._joins = {node_id: node.record.join for node_id, node in view.nodes.items()}
        self._ended = {number for number, one in builder.histories.items() if one.ended}
        self._held = set(view.hold_back.records)

    def _add(self, event: Event) -> None:
        self.events.append(event)

    def _node(self, builder: ReportBuilder, node_id: str) -> None:
        node = builder.view.nodes.get(node_id)
        if node is None:
            self._joins.pop(node_id, None)
        elif self._joins.get(node_id) != node.record.join:
            self._joins[node_id] = node.record.join
            self._add(JoinStarted(run_id=self._run, by=node.record.name, join=node.record.join))

    def _rounds(self, builder: ReportBuilder) -> None:
        before, now = self._round, builder.view.round
        self._round = now
        if now is None:
            return
        run, by = self._run, self._by
        is_new = before is None or before.number != now.number
        if is_new:
            if before is not None and before.phase is RoundPhase.FORMING:
                why = f"round {now.number} forms instead"
                self._add(RoundGivenUp(run_id=run, by=by, round=before.number, reason=why))
            self._add(RoundForming(run_id=run, by=by, round=now.number, size=now.size, reason=now.why))
        if now.phase is RoundPhase.ACTIVE and (is_new or before is None or before.phase is RoundPhase.FORMING):
            self._add(RoundActive(run_id=run, by=by, round=now.number, size=now.size, reason=now.why))

    def _waiting(self, builder: ReportBuilder) -> None:
        told = builder.view.waiting
        if told is not None and told.reason and told.reason != self._reason:
            self._reason = told.reason
            self._add(WaitingFor(run_id=self._run, by=self._by, reason=told.reason))

    def _closing(self, builder: ReportBuilder) -> None:
        closed = builder.view.closed
        if closed is None or closed.closed == self._is_closed:
            return
        self._is_closed = closed.closed
        kind = RunClosed if closed.closed else RunReopened
        self._add(kind(run_id=self._run, by=closed.by, reason=closed.why))

    def _coordinator(self, builder: ReportBuilder) -> None:
        term = builder.coordinator.term if builder.coordinator is not None else 0
        if term == self._term:
            return
        before, self._term = self._term, term
        if term:
            self._add(CoordinatorElected(run_id=self._run, by=self._by, term=term))
        else:
            why = "its key is gone: its session ended, or it stopped"
            self._add(CoordinatorDeposed(run_id=self._run, by=self._by, term=before, reason=why))

    def _drain(self, builder: ReportBuilder, node_id: str) -> None:
        drain, node = builder.view.drains.get(node_id), builder.view.nodes.get(node_id)
        if drain is not None:
            name = node.record.name if node is not None else node_id
            why = drain.why or "no reason given"
            self._add(NodeDrained(run_id=self._run, by=drain.by or "an operator", node=name, reason=why))

    def _health(self, builder: ReportBuilder) -> None:
        records = builder.view.hold_back.records
        for name in records.keys() - self._held:
            one = records[name]
            self._add(NodeHeldBack(run_id=self._run, by=self._by, node=name, hold_s=one.hold_s, reason=one.why))
        self._held = set(records)

    def _history(self, builder: ReportBuilder) -> None:
        for number, one in builder.histories.items():
            if one.ended and number not in self._ended:
                self._ended.add(number)
                over = RoundOver(
                    run_id=self._run,
                    by=self._by,
                    round=number,
                    kind=kind_of(one),
                    reason=one.ended,
                    lasted_s=one.lasted_s,
                )
                self._add(over)

    def _refusals(self, builder: ReportBuilder, key: str) -> None:
        for name, (one, _) in builder.refusals.items():
            if builder.keys.refusal(name) == key:
                self._add(NodeRefused(run_id=self._run, by=self._by, node=name, reason=one.why))

    def _fact(self, fact: object) -> None:
        if isinstance(fact, Departure):
            if fact.left:
                self._add(NodeLeft(run_id=self._run, by=fact.name, reason=fact.why))
            elif fact.gone_s is not None:  # None: it was lost before this view was loaded
                lost = NodeLost(run_id=self._run, by=self._by, node=fact.name, round=fact.round, reason=fact.why)
                self._add(lost)
            return
        key, why = getattr(fact, "key", ""), getattr(fact, "why", "")
        self._add(RecordUnreadable(run_id=self._run, by=self._by, key=key, reason=why))
