"""One run as the page shows it, with versions: what has changed since any of them is one message.

Pure but for the events' own loggers, which nothing here uses.
Everything the page says in words is said here already, in the words of the commands: the page only lays it out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rallypoint.dashboard.tracks import State, Tracks
from rallypoint.dashboard.versioned import Versioned
from rallypoint.events import Event, JoinStarted, NodeDrained, NodeLeft, NodeLost, WaitingFor
from rallypoint.observe.explain import explain
from rallypoint.observe.report import Drain, NodeReport, Phase, Report, Standing
from rallypoint.observe.run_events import recorded_events

MOST_LINES = 200
FEW = 5
"""So many of a kind are told one by one; more at once are counted."""


class Line(msgspec.Struct, frozen=True):
    """Something that happened."""

    at: float | None
    kind: str
    level: int
    text: str


class Card(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who a node is. Hardly ever changes: a node that is lost keeps it."""

    id: str
    name: str
    addr: str
    pid: int
    labels: dict[str, str]
    drain: Drain | None


class Spot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a node stands: what changes with every round, so it is small."""

    id: str
    standing: Standing
    rank: int | None
    joined_at: float | None


class Message(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a reader is told. Absent: as it was. `full`: forget everything that was said before."""

    version: int
    now: float
    full: bool = False
    state: dict[str, Any] | None = None
    rounds: Sequence[Any] | None = None
    nodes: list[Card] = []
    spots: list[Spot] = []
    gone: list[str] = []
    tracks: list[Any] = []
    dropped: list[int] = []
    lines: list[Line] = []


class Picture:
    """`update` after every report; `since` for every reader."""

    def __init__(self, run_id: str, where: str) -> None:
        self.version = 1
        self._sections: Versioned[str, Any] = Versioned()
        self._reports: dict[str, NodeReport] = {}
        self._cards: Versioned[str, Card] = Versioned()
        self._spots: Versioned[str, Spot] = Versioned()
        self._tracks = Tracks()
        self._lines: deque[tuple[Line, int]] = deque(maxlen=MOST_LINES)
        self._is_new = True
        self._sections.put("state", {"run_id": run_id, "where": where, "phase": None, "trouble": ""}, 1)
        self._sections.put("rounds", (), 1)

    @property
    def exists(self) -> bool:
        """Whether anything is known of the run."""
        return not self._is_new

    def remember(self, number: int, names: Sequence[str], from_at: float, until_at: float) -> None:
        """A round that was over before anybody looked. Before the first update."""
        self._tracks.remember(names, number, from_at, until_at, self.version + 1)

    def update(self, report: Report, events: Sequence[Event], trouble: str, now: float) -> bool:
        """Whether anything is different."""
        version = self.version + 1
        changed = self._sections.put("state", _state(report, trouble), version)
        changed |= self._sections.put("rounds", report.rounds, version)
        changed |= self._take_nodes(report, _departed(events), now, version)
        lines = _past_lines(report) if self._is_new and report.exists else []
        lines += _lines(events, report.phase, now)
        self._lines.extend((line, version) for line in lines)
        self._is_new &= not report.exists
        if changed or lines:
            self.version = version
            return True
        return False

    def fail(self, trouble: str) -> bool:
        """Nothing can be learned at present; what is known stays."""
        state = self._sections.get("state") or {}
        if not self._sections.put("state", {**state, "trouble": trouble}, self.version + 1):
            return False
        self.version += 1
        return True

    def _take_nodes(self, report: Report, departed: dict[str, State], now: float, version: int) -> bool:
        changed = False
        number = report.round.number if report.round is not None else 0
        reports, show = self._reports, self._tracks.show
        for node in report.nodes:
            node_id = node.id
            before = reports.get(node_id)
            if before is node or before == node:
                continue
            changed = True
            reports[node_id] = node
            at = _since(report, node, now) if self._is_new else now
            show(node, number, at, version, departed)
            joined_at = node.joined_at
            spot = Spot(node_id, node.standing, node.rank, None if joined_at is None else round(joined_at, 3))
            self._spots.put(node_id, spot, version)
            if before is not None and _is_same_process(before, node):
                continue
            if node.standing is not Standing.GONE or node_id not in self._cards:
                card = Card(node_id, node.name, node.addr, node.pid, node.labels, node.drain)
                self._cards.put(node_id, card, version)
        for node_id in _gone(reports, report.nodes):
            changed = True
            del reports[node_id]
            self._cards.remove(node_id, version)
            self._spots.remove(node_id, version)
            self._tracks.hide(node_id, now, version, departed)
        return changed

    def since(self, version: int, now: float) -> Message:
        """The difference to a version; all of it for a reader that has none (0) or one that is too old."""
        cards, rows = self._cards, self._tracks.rows
        is_known = 0 < version <= self.version and cards.knows(version) and rows.knows(version)
        known = version if is_known else -1
        return Message(
            version=self.version,
            now=now,
            full=not is_known,
            **self._sections.changed(known),
            nodes=list(cards.changed(known).values()),
            spots=list(self._spots.changed(known).values()),
            gone=cards.removed(known) if is_known else [],
            tracks=[track.part(known) for track in rows.changed(known).values()],
            dropped=rows.removed(known) if is_known else [],
            lines=[line for line, at in self._lines if at > known],
        )


def _state(report: Report, trouble: str) -> dict[str, Any]:
    """The run without its nodes and its past."""
    why = explain(report)
    return {
        "run_id": report.run_id,
        "where": report.where,
        "phase": report.phase.value,
        "trouble": trouble,
        "why": why.paragraph,
        "facts": why.facts,
        "advice": why.advice,
        "round": report.round,
        "counts": report.counts,
        "open_places": report.open_places,
        "sizes": {name: report.shared(name) for name in ("min_nodes", "max_nodes", "step")},
        "closing": report.closing,
        "is_closed": report.is_closed,
        "coordinator": report.coordinator.name if report.coordinator is not None else None,
        "started_by": report.config.started_by if report.config is not None else "",
        "held": [held for held in report.held if held.is_held],
        "missing": report.missing[:FEW],
    }


def _since(report: Report, node: NodeReport, now: float) -> float:
    """Since when a node is what it is, as far as the run itself knows: by the clocks of others, so never after now."""
    if node.standing in (Standing.MEMBER, Standing.GONE) and report.round is not None and report.phase is Phase.ACTIVE:
        at = report.round.active_at
    else:
        at = node.joined_at
    return now if at is None else min(at, now)


def _gone(known: Mapping[str, NodeReport], nodes: Sequence[NodeReport]) -> list[str]:
    """Who is known and not among these, all of whom are known."""
    if len(known) == len(nodes):
        return []
    there = {node.id for node in nodes}
    return [node_id for node_id in known if node_id not in there]


def _is_same_process(before: NodeReport, node: NodeReport) -> bool:
    """Who it is has not changed, only where it stands."""
    return (
        before.pid == node.pid
        and before.drain == node.drain
        and before.name == node.name
        and before.addr == node.addr
        and before.labels == node.labels
    )


def _departed(events: Iterable[Event]) -> dict[str, State]:
    found = {}
    for event in events:
        if type(event) is JoinStarted:  # by the thousand
            continue
        if isinstance(event, NodeLeft):
            found[event.by] = State.LEFT
        elif isinstance(event, NodeLost):
            found[event.node] = State.LOST
    return found


def _past_lines(report: Report) -> list[Line]:
    past = [_line(one.event, one.at) for one in recorded_events(report)]
    return sorted(past, key=lambda line: line.at or 0.0)


def _lines(events: Sequence[Event], phase: Phase, now: float) -> list[Line]:
    """Each event; of the kinds that come by the hundred, one line for all that came together.

    What is waited for is a line while it is waited for; once there is a round, what happens has lines of its own.
    """
    is_quiet = phase in (Phase.ACTIVE, Phase.FORMING)
    by_kind: dict[type[Event], list[Event]] = {}
    for event in events:
        by_kind.setdefault(type(event), []).append(event)
    together = {kind: some for kind, some in by_kind.items() if len(some) > FEW and kind in _TOGETHER}
    lines = []
    for event in events:
        kind = type(event)
        some = together.get(kind)
        if some is None:
            if not (is_quiet and isinstance(event, WaitingFor)):
                lines.append(_line(event, now))
        elif event is some[0]:
            names = ", ".join(_who(one) for one in some[:FEW])
            text = f"{len(some)} nodes {_TOGETHER[kind]}: {names} and {len(some) - FEW} more"
            lines.append(Line(now, kind.__name__, event.level, text))
    return lines


_TOGETHER: dict[type[Event], str] = {
    JoinStarted: "ask to join",
    NodeLost: "were lost",
    NodeLeft: "left",
    NodeDrained: "were asked to go",
}


def _who(event: Event) -> str:
    return event.node if isinstance(event, NodeLost | NodeDrained) else event.by


def _line(event: Event, at: float | None) -> Line:
    return Line(at, type(event).__name__, event.level, f"{event.by}: {event.text()}")
