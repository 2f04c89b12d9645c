"""The reports of a run's rounds: arrivals, duration of each phase, why the round ended. Pure.

The coordinator fills them and writes them to `history/`; nothing decides on them. Their wall-clock times are for people
and are never compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import Item
from rallypoint.rendezvous.records import HistoryRecord, LeaveKind, RoundEnd, RoundRecord, decode
from rallypoint.rendezvous.view import Plan, View
from rallypoint.sentences import FEW

KEPT = 20
"""Reports kept per run."""


class Reports:
    """The kept reports by round number, and the arrival times of the current attempt."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._kept: dict[int, HistoryRecord] = {}
        self._active_since: dict[int, float] = {}
        self._arrivals: tuple[tuple[str, float], ...] = ()
        self._first_arrival = ""
        self._gather_s = 0.0
        self._last_call_s = 0.0

    def load(self, items: Iterable[Item]) -> None:
        """Take over the reports of earlier coordinators. An unreadable one is skipped."""
        for item in items:
            try:
                record = decode(HistoryRecord, item)
            except RendezvousStateError:
                continue
            self._kept[record.number] = record

    def formed(self, plan: Plan, view: View) -> None:
        """An attempt was committed: keep the arrival times of its nodes, which change with their next join."""
        nodes = [view.nodes[node_id] for node_id in plan.ranks if node_id in view.nodes]
        if not nodes:
            return
        by_arrival = sorted(nodes, key=lambda node: node.order)
        first = by_arrival[0].joined_at
        self._first_arrival = by_arrival[0].record.name
        self._arrivals = tuple((node.record.name, round(node.joined_at - first, 3)) for node in by_arrival[-FEW:])
        self._gather_s = by_arrival[-1].joined_at - first
        since = view.minimum_since
        self._last_call_s = max(0.0, plan.started_at - since) if since is not None else 0.0

    def activated(self, plan: Plan, record: RoundRecord, now: float) -> HistoryRecord:
        """The report of a round that becomes active."""
        report = HistoryRecord(
            number=record.number,
            size=record.size,
            formed_at=self._wall(),
            why=record.why,
            gather_s=round(self._gather_s, 3),
            last_call_s=round(self._last_call_s, 3),
            confirm_s=round(now - plan.started_at, 3),
            first_arrival=self._first_arrival,
            last_arrivals=self._arrivals,
            last_confirmed=tuple(plan.last_confirmed),
        )
        self._kept[record.number] = report
        self._active_since = {record.number: now}
        return report

    def ended(self, end: RoundEnd) -> HistoryRecord | None:
        """The final report of a round whose last member has gone; None: no report of it is kept."""
        report = self._kept.get(end.round)
        if report is None:
            return None
        return msgspec.structs.replace(report, ended=end.why, ended_kind=end.kind, lasted_s=end.lasted_s)

    def end_of(self, number: int) -> RoundEnd | None:
        """The end of a round as it was reported; None: it was not."""
        report = self._kept.get(number)
        if report is None or not report.ended:
            return None
        kind = report.ended_kind or LeaveKind.ROUND_OVER
        return RoundEnd(round=number, kind=kind, why=report.ended, lasted_s=report.lasted_s)

    def lasted_s(self, number: int, now: float) -> float | None:
        """How long a round has been active; None: it became active under another coordinator."""
        since = self._active_since.get(number)
        return None if since is None else round(now - since, 3)

    def of(self, number: int) -> HistoryRecord | None:
        """The report of a round; None if it is not kept."""
        return self._kept.get(number)

    def keep(self, report: HistoryRecord) -> None:
        """Store a report that was written."""
        self._kept[report.number] = report

    def drop_surplus(self) -> list[int]:
        """Drop the oldest reports beyond `KEPT`; returns their numbers, whose keys are to be deleted."""
        numbers = sorted(self._kept)[:-KEPT]
        for number in numbers:
            del self._kept[number]
        return numbers
