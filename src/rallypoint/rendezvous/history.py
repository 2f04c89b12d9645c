"""The reports of a run's rounds, as the coordinator writes them: who came when, how long each phase took, why it ended.

Wall-clock times are in them for people; nothing compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import Item
from rallypoint.rendezvous.records import HistoryRecord, RoundRecord, decode
from rallypoint.rendezvous.view import FEW, Plan, View

KEPT = 20


class Reports:
    """The reports that are kept, by round number, and the times of the attempt under way."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._kept: dict[int, HistoryRecord] = {}
        self._active_since: dict[int, float] = {}
        self._arrivals: tuple[tuple[str, float], ...] = ()
        self._first_arrival = ""
        self._gather_s = 0.0
        self._last_call_s = 0.0

    def load(self, items: Iterable[Item]) -> None:
        """What an earlier coordinator wrote; what cannot be read is left alone."""
        for item in items:
            try:
                record = decode(HistoryRecord, item)
            except RendezvousStateError:
                continue
            self._kept[record.number] = record

    def formed(self, plan: Plan, view: View) -> None:
        """An attempt was committed: note who arrived when, while it is known."""
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

    def ended(self, number: int, view: View, now: float) -> tuple[HistoryRecord | None, str]:
        """The report of a round whose last member has gone (None: it was not kept), and why in words."""
        members = [gone for gone in view.departures if gone.round == number]
        verbs = {True: "left", False: "was lost", None: "is gone"}
        causes = [f"{gone.name} {verbs[gone.left]} ({gone.why})" for gone in members]
        if view.rejoined:
            causes.append(f"{len(view.rejoined)} joined again")
        why = "; ".join(causes) or "its members have gone"
        report = self._kept.get(number)
        if report is None or report.ended:
            return None, why
        since = self._active_since.get(number)
        lasted_s = None if since is None else round(now - since, 3)
        return msgspec.structs.replace(report, ended=why, lasted_s=lasted_s), why

    def of(self, number: int) -> HistoryRecord | None:
        """The report of a round, if it is kept."""
        return self._kept.get(number)

    def keep(self, report: HistoryRecord) -> None:
        """A report was written."""
        self._kept[report.number] = report

    def surplus(self) -> list[int]:
        """Numbers whose reports are to be removed; they are forgotten here."""
        numbers = sorted(self._kept)[:-KEPT]
        for number in numbers:
            del self._kept[number]
        return numbers
