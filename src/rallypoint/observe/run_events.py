"""The events of a run as observers see them: first those of its past, in order, then new ones as they come.

Most are those that the coordinator keeps (`rendezvous/kept_events.py`). Closing, drains and refusals have records of
their own; waiting reasons are only told while somebody follows. Nothing is told twice, also if the follower has to scan
again: kept events have numbers, and records revisions. Pure, except that events have loggers, which this module does
not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.errors import RendezvousStateError
from rallypoint.events import (
    Event,
    NodeDrained,
    NodeRefused,
    RecordUnreadable,
    RunClosed,
    RunReopened,
    WaitingFor,
)
from rallypoint.kv.types import Change
from rallypoint.observe.report_builder import ReportBuilder
from rallypoint.rendezvous.kept_events import read_events
from rallypoint.rendezvous.view import Departure

COORDINATOR = "the coordinator"
"""The emitter of an event if the coordinator's name is not known."""


@dataclass(frozen=True, slots=True)
class SeenEvent:
    """An event, and its time by the clock of the process that recorded it (None: unknown, or just now).

    `nodes`: for a round that became active, its first members in rank order.
    """

    at: float | None
    event: Event
    nodes: tuple[str, ...] = ()


class RunEvents:
    """Pass `take` to a `Follower` as `on_changes`. The caller empties `events` and `departures`."""

    def __init__(self) -> None:
        self.events: list[SeenEvent] = []
        self.departures: list[Departure] = []
        """Nodes that went while this followed the run: known before the coordinator has kept it."""
        self._last = 0
        """The number of the last kept event that was told."""
        self._told: dict[str, int] = {}
        """Key -> the revision of its record that was told."""
        self._reason = ""

    def take(self, builder: ReportBuilder, changes: Sequence[Change] | None) -> None:
        """Take the events of a batch that was applied. `changes` None: a scan was loaded, with what was missed."""
        run = builder.keys.run_id
        found = self._kept(builder, run)
        found += self._records(builder, run)
        if changes is None:
            found.sort(key=lambda one: one.at or 0.0)
            self._reason = builder.view.waiting.reason if builder.view.waiting is not None else ""
        elif (waits := self._waiting(builder, run)) is not None:
            found.append(waits)
        self.events += found
        if changes is not None:
            self.departures += [
                fact for fact in builder.view.facts if isinstance(fact, Departure) and fact.gone_s is not None
            ]

    def _kept(self, builder: ReportBuilder, run: str) -> list[SeenEvent]:
        found = []
        for item in builder.new_events:
            try:
                past = read_events(item, run)
            except RendezvousStateError as error:
                event = RecordUnreadable(run_id=run, by=COORDINATOR, key=item.key, reason=str(error))
                found.append(SeenEvent(None, event))
                continue
            new = [one for one in past if one.number > self._last]
            found += [SeenEvent(one.at, one.event, one.nodes) for one in new]
            self._last = new[-1].number if new else self._last
        builder.new_events.clear()
        return found

    def _records(self, builder: ReportBuilder, run: str) -> list[SeenEvent]:
        """The closing, drains and refusals that were recorded since."""
        found: list[SeenEvent] = []
        view, keys = builder.view, builder.keys
        closed = view.closed
        if closed is not None and self._is_new(keys.closed, view.closed_revision) and (closed.closed or closed.by):
            kind = RunClosed if closed.closed else RunReopened
            found.append(SeenEvent(closed.at or None, kind(run_id=run, by=closed.by, reason=closed.why)))
        for node_id, revision in builder.drained.items():
            if self._is_new(keys.drain(node_id), revision) and (drain := view.drains.get(node_id)) is not None:
                node = view.nodes.get(node_id)
                name, why = node.record.name if node is not None else node_id, drain.why or "no reason given"
                event = NodeDrained(run_id=run, by=drain.by or "an operator", node=name, reason=why)
                found.append(SeenEvent(drain.at or None, event))
        by = builder.coordinator.name if builder.coordinator is not None else COORDINATOR
        for name, (record, revision) in builder.refusals.items():
            if self._is_new(keys.refusal(name), revision):
                found.append(SeenEvent(record.at or None, NodeRefused(run_id=run, by=by, node=name, reason=record.why)))
        return found

    def _is_new(self, key: str, revision: int) -> bool:
        """Whether the record of this revision was not told yet; from now on it was."""
        if self._told.get(key) == revision:
            return False
        self._told[key] = revision
        return True

    def _waiting(self, builder: ReportBuilder, run: str) -> SeenEvent | None:
        told = builder.view.waiting
        if told is None or not told.reason or told.reason == self._reason:
            return None
        self._reason = told.reason
        by = builder.coordinator.name if builder.coordinator is not None else COORDINATOR
        return SeenEvent(None, WaitingFor(run_id=run, by=by, reason=told.reason))
