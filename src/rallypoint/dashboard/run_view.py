"""One run as the page shows it, with versions: the difference to any version is one update. Pure, but for the
loggers that events import.

All sentences are made here, in the words of the commands; the browser only lays them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rallypoint.dashboard.past_states import past_states
from rallypoint.dashboard.timeline import State, Timeline
from rallypoint.dashboard.versioned import Versioned
from rallypoint.events import WaitingFor
from rallypoint.observe.explain import explain, is_present, restarts_sentence, run_url
from rallypoint.observe.phase import Phase, Tone
from rallypoint.observe.report import Drain, NodeReport, Report, Standing
from rallypoint.observe.run_events import SeenEvent
from rallypoint.rendezvous.view import Departure
from rallypoint.sentences import FEW

MOST_LINES = 200


class Line(msgspec.Struct, frozen=True):
    """An event."""

    at: float | None
    kind: str
    level: int
    text: str


class NodeDetails(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What hardly ever changes of a node. A lost node keeps it."""

    id: str
    name: str
    addr: str
    pid: int
    labels: dict[str, str]
    drain: Drain | None


class NodeState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What changes of a node with every round: small, because it is sent often."""

    id: str
    standing: Standing
    rank: int | None
    joined_at: float | None


class Update(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What has changed; what is absent has not. `full`: the reader starts from nothing."""

    version: int
    now: float
    full: bool = False
    state: dict[str, Any] | None = None
    rounds: Sequence[Any] | None = None
    nodes: list[NodeDetails] = []
    node_states: list[NodeState] = []
    gone: list[str] = []
    tracks: list[Any] = []
    dropped: list[int] = []
    lines: list[Line] = []


class RunView:
    """`update` it with every report; `since` is what a reader has missed."""

    def __init__(self, run_id: str, where: str) -> None:
        self.version = 1
        self._sections: Versioned[str, Any] = Versioned()
        self._reports: dict[str, NodeReport] = {}
        self._details: Versioned[str, NodeDetails] = Versioned()
        self._states: Versioned[str, NodeState] = Versioned()
        self._timeline = Timeline()
        self._lines: deque[tuple[Line, int]] = deque(maxlen=MOST_LINES)
        self._is_new = True
        self._sections.put("state", {"run_id": run_id, "where": where, "phase": None, "trouble": ""}, 1)
        self._sections.put("rounds", (), 1)

    @property
    def exists(self) -> bool:
        """Whether a report has shown the run."""
        return not self._is_new

    def add_past(self, events: Sequence[SeenEvent], rosters: Mapping[int, Sequence[str]]) -> None:
        """What happened before the view began, and the members of rounds as far as known. Before the first `update`."""
        self._timeline.add_past(past_states(events, rosters), self.version + 1)

    def update(
        self,
        report: Report,
        events: Sequence[SeenEvent],
        trouble: str,
        now: float,
        departures: Iterable[Departure] = (),
    ) -> bool:
        """Whether anything has changed. `departures`: nodes that have just gone."""
        version = self.version + 1
        changed = self._sections.put("state", _state(report, trouble, now), version)
        changed |= self._sections.put("rounds", report.rounds, version)
        changed |= self._take_nodes(report, _ways_out(departures), now, version)
        if self._is_new and report.exists:
            self._timeline.end_past(now, version)
        lines = _lines(events, report.has_round or report.phase is Phase.FORMING, now)
        self._lines.extend((line, version) for line in lines)
        self._is_new &= not report.exists
        if changed or lines:
            self.version = version
            return True
        return False

    def fail(self, trouble: str) -> bool:
        """Show why there are no reports at present, beside what is known; whether anything has changed."""
        state = self._sections.get("state") or {}
        if not self._sections.put("state", {**state, "trouble": trouble}, self.version + 1):
            return False
        self.version += 1
        return True

    def _take_nodes(self, report: Report, ways_out: dict[str, State], now: float, version: int) -> bool:
        changed = False
        number = report.round.number if report.round is not None else 0
        reports, show = self._reports, self._timeline.show
        for node in report.nodes:
            node_id = node.id
            before = reports.get(node_id)
            if before is node or before == node:
                continue
            changed = True
            reports[node_id] = node
            at = _since(report, node, now) if self._is_new else now
            show(node, number, at, version, ways_out)
            joined_at = node.joined_at
            state = NodeState(node_id, node.standing, node.rank, None if joined_at is None else round(joined_at, 3))
            self._states.put(node_id, state, version)
            if before is not None and _has_same_details(before, node):
                continue
            if node.standing is not Standing.GONE or node_id not in self._details:
                details = NodeDetails(node_id, node.name, node.addr, node.pid, node.labels, node.drain)
                self._details.put(node_id, details, version)
        for node_id in _gone(reports, report.nodes):
            changed = True
            del reports[node_id]
            self._details.remove(node_id, version)
            self._states.remove(node_id, version)
            self._timeline.hide(node_id, now, version, ways_out)
        return changed

    def since(self, version: int, now: float) -> Update:
        """The difference to a version; everything if that is 0 or too old."""
        details, tracks = self._details, self._timeline.tracks
        is_known = 0 < version <= self.version and details.knows(version) and tracks.knows(version)
        known = version if is_known else -1
        return Update(
            version=self.version,
            now=now,
            full=not is_known,
            **self._sections.changed(known),
            nodes=list(details.changed(known).values()),
            node_states=list(self._states.changed(known).values()),
            gone=details.removed(known) if is_known else [],
            tracks=[track.part(known) for track in tracks.changed(known).values()],
            dropped=tracks.removed(known) if is_known else [],
            lines=[line for line, at in self._lines if at > known],
        )


def _state(report: Report, trouble: str, now: float) -> dict[str, Any]:
    """The run without its nodes and past rounds."""
    why = explain(report, now)
    return {
        "run_id": report.run_id,
        "where": report.where,
        "phase": report.phase.value,
        "tone": report.phase.tone.value,
        "trouble": trouble,
        "why": why.paragraph,
        "facts": why.facts,
        "advice": why.advice,
        "hints": why.hints,
        "edge": _edge(report, now),
        "tiles": _tiles(report, now),
        "commands": _commands(report),
        "round": report.round,
        "counts": report.counts,
        "open_places": report.open_places,
        "sizes": {name: report.shared(name) for name in ("min_nodes", "max_nodes", "step")},
        "closing": report.closing,
        "is_closed": report.is_closed,
        "coordinator": report.coordinator.name if report.coordinator is not None else None,
        "restarts": restarts_sentence(report.restarts) if report.restarts is not None else "",
        "started_by": report.config.started_by if report.config is not None else "",
        "held": [held for held in report.held if held.is_held],
        "missing": report.missing[:FEW],
    }


def _tiles(report: Report, now: float) -> dict[str, int]:
    """The numbers that stand for a run, as its sentences count: a held or lost node need not be there any more."""
    counts = report.counts
    is_over = not report.has_round and report.phase in (Phase.GATHERING, Phase.FORMING, Phase.BELOW_MINIMUM)
    return {
        "member": counts.member,
        "joining": counts.joining + counts.confirmed + counts.confirming,
        "waiting": counts.waiting,
        "spare": counts.spare,
        "held back": max(counts.held_back, sum(held.is_held for held in report.held)),
        "drained": counts.drained,
        "lost": len(report.missing) if is_over else counts.gone,
        "refused": sum(is_present(one, now) for one in report.refused),
    }


def _edge(report: Report, now: float) -> str:
    """The colour of the first card's edge: never calmer than the phase, and amber or red if nodes are missing."""
    tone, tiles = report.phase.tone, _tiles(report, now)
    if tone is Tone.BAD or tiles["lost"]:
        return Tone.BAD.value
    is_calm = tone is Tone.GOOD and not any(tiles[name] for name in ("waiting", "held back", "refused"))
    return tone.value if is_calm or tone is not Tone.GOOD else Tone.LOOK.value


def _commands(report: Report) -> list[tuple[str, str]]:
    """What somebody may want to type elsewhere: (for what, the command)."""
    url = run_url(report)
    if not report.exists:
        return []
    found = [("Explain it", f"rallypoint why {url}"), ("What happened", f"rallypoint events {url}")]
    if report.config is not None and not report.is_closed:
        shared = report.config.shared
        sizes = "&".join(
            f"{name}={shared[name]}" for name in ("min_nodes", "max_nodes", "step") if _is_set(shared, name)
        )
        found.append(("Join it", f"rallypoint run --url '{url}?{sizes}' PROGRAM"))
    return found


def _is_set(shared: Mapping[str, int | str], name: str) -> bool:
    return name in shared and not (name == "step" and shared[name] == 1)


def _since(report: Report, node: NodeReport, now: float) -> float:
    """Since when a node has been in this state, by the clocks of other machines, but never after now."""
    if node.standing in (Standing.MEMBER, Standing.GONE) and report.round is not None:
        at = report.round.active_at
    else:
        at = node.joined_at
    return now if at is None else min(at, now)


def _gone(known: Mapping[str, NodeReport], nodes: Sequence[NodeReport]) -> list[str]:
    """The ids of known nodes that are not among `nodes`; all of `nodes` are known."""
    if len(known) == len(nodes):
        return []
    there = {node.id for node in nodes}
    return [node_id for node_id in known if node_id not in there]


def _has_same_details(before: NodeReport, node: NodeReport) -> bool:
    """Whether the details of a node are as before."""
    return (
        before.pid == node.pid
        and before.drain == node.drain
        and before.name == node.name
        and before.addr == node.addr
        and before.labels == node.labels
    )


def _ways_out(departures: Iterable[Departure]) -> dict[str, State]:
    """How nodes went, by name."""
    return {one.name: State.LEFT if one.left else State.LOST for one in departures}


def _lines(events: Sequence[SeenEvent], is_quiet: bool, now: float) -> list[Line]:
    """A line for each event.

    `is_quiet`: a round is active or forming. Waiting reasons are left out then: events say what happens.
    """
    return [_line(one, now) for one in events if not (is_quiet and isinstance(one.event, WaitingFor))]


def _line(one: SeenEvent, now: float) -> Line:
    event = one.event
    at = now if one.at is None else one.at
    return Line(at, type(event).__name__, event.level, f"{event.by}: {event.text()}")
