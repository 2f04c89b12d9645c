"""The time line: for every node, what it was and from when. Pure: times come in as arguments.

A track is a row, by name: a node that comes back as a new process goes on in the row it had. Tracks only grow at the
end, so a reader is told what was added; their number and their length are bounded.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from rallypoint.dashboard.versioned import Versioned
from rallypoint.observe.report import NodeReport, Standing

MOST_TRACKS = 4_096
MOST_SPANS = 256
"""Of one track. Whoever flaps more often than that is known for it."""


class State(enum.Enum):
    """What a node is during a span."""

    __hash__ = object.__hash__  # there is one of each; that of an enumeration is computed anew every time

    JOINING = "joining"
    FORMING = "forming"
    """It has a place in an attempt."""
    MEMBER = "member"
    WAITING = "waiting"
    SPARE = "spare"
    HELD_BACK = "held back"
    DRAINED = "drained"
    LOST = "lost"
    LEFT = "left"
    GONE = "gone"
    """A member that is not there, and nobody here saw how it went."""
    OUT = "out"
    """It is not there, and nothing waits for it."""


_STATES = {
    Standing.MEMBER: State.MEMBER,
    Standing.CONFIRMED: State.FORMING,
    Standing.CONFIRMING: State.FORMING,
    Standing.JOINING: State.JOINING,
    Standing.WAITING: State.WAITING,
    Standing.SPARE: State.SPARE,
    Standing.HELD_BACK: State.HELD_BACK,
    Standing.DRAINED: State.DRAINED,
    Standing.LEFT: State.LEFT,
    Standing.GONE: State.GONE,
}
_DOWN = frozenset({State.LOST, State.LEFT, State.GONE})
_HAS_ROUND = frozenset({State.MEMBER, State.FORMING})
_GONE = State.GONE


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From `at` on, until the next one. `round` is 0 where there is none."""

    at: float
    state: State
    round: int


class TrackPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a reader is told of a track: everything, or what was added to it."""

    key: int
    name: str
    node_id: str
    rank: int | None
    spans: list[Span]


@dataclass(eq=False, slots=True)
class Track:
    """One row."""

    key: int
    name: str
    node_id: str
    rank: int | None
    spans: list[Span] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """When each span was added."""

    def add(self, span: Span, version: int) -> bool:
        """Whether it is another state than the last one. Times of a track never go back."""
        spans = self.spans
        if spans:
            last = spans[-1]
            if last.state is span.state and last.round == span.round:
                return False
            if span.at < last.at:
                span = Span(last.at, span.state, span.round)
        spans.append(span)
        self.versions.append(version)
        if len(spans) > MOST_SPANS:
            del spans[0], self.versions[0]
        return True

    def part(self, since: int) -> TrackPart:
        first = len(self.versions)
        while first and self.versions[first - 1] > since:
            first -= 1
        return TrackPart(self.key, self.name, self.node_id, self.rank, self.spans[first:])


class Tracks:
    """All rows of a run."""

    def __init__(self) -> None:
        self.rows: Versioned[int, Track] = Versioned()
        self._of_id: dict[str, Track] = {}
        self._free: dict[str, list[Track]] = {}
        """Name -> rows whose node is not there."""
        self._next = 0
        self._shared_key: tuple[float, State, int] | None = None
        self._shared_span = Span(0.0, State.OUT, 0)

    def remember(self, names: Iterable[str], number: int, from_at: float, until_at: float, version: int) -> None:
        """Members of a round that was over before anybody looked, in rank order."""
        for rank, name in enumerate(names):
            track = self._row(name)
            track.rank = rank
            track.add(_span(from_at, State.MEMBER, number), version)
            track.add(_span(until_at, State.OUT, 0), version)
            self._let_go(track)

    def show(self, node: NodeReport, number: int, at: float, version: int, departed: Mapping[str, State]) -> None:
        """A node as it stands, from this instant on. `departed` says how those went who did."""
        track = self._of_id.get(node.id)
        if track is None:
            track = self._of_id[node.id] = self._row(node.name)
            track.node_id = node.id
        state = _STATES[node.standing]
        if state is _GONE:
            state = departed.get(node.name, track.spans[-1].state if _is_down(track) else State.GONE)
        is_new_rank = node.rank is not None and node.rank != track.rank
        if is_new_rank:
            track.rank = node.rank
        if track.add(self._shared(at, state, number if state in _HAS_ROUND else 0), version) or is_new_rank:
            self.rows.touch(track.key, version)

    def hide(self, node_id: str, at: float, version: int, departed: Mapping[str, State]) -> None:
        """A node is not shown any more: it went, or the round that it was missed in is over."""
        track = self._of_id.pop(node_id, None)
        if track is None:
            return
        how = departed.get(track.name)
        if how is not None and not _is_down(track):
            track.add(_span(at, how, 0), version)
        track.add(_span(at, State.OUT, 0), version)
        self.rows.touch(track.key, version)
        self._let_go(track)
        self._forget(version)

    def _shared(self, at: float, state: State, number: int) -> Span:
        """What many nodes become at one instant is one value for all of them."""
        key = (at, state, number)
        if key != self._shared_key:
            self._shared_key, self._shared_span = key, _span(at, state, number)
        return self._shared_span

    def _row(self, name: str) -> Track:
        free = self._free.get(name)
        if free:
            track = free.pop()
            if not free:
                del self._free[name]
            return track
        self._next += 1
        track = Track(self._next, name, "", None)
        self.rows.put(track.key, track, 0)
        return track

    def _let_go(self, track: Track) -> None:
        self._free.setdefault(track.name, []).append(track)

    def _forget(self, version: int) -> None:
        """Those that have been away for longest, when there are too many."""
        while len(self.rows) > MOST_TRACKS and self._free:
            name, free = next(iter(self._free.items()))
            track = free.pop(0)
            if not free:
                del self._free[name]
            self.rows.remove(track.key, version)


def _span(at: float, state: State, number: int) -> Span:
    return Span(round(at, 3), state, number)


def _is_down(track: Track) -> bool:
    return bool(track.spans) and track.spans[-1].state in _DOWN
