"""The time line: the state of each node over time. Pure: times are arguments.

A track is the row of a node name: a node that comes back as a new process continues its track. Tracks only grow at
the end, so an update contains only what was added. Their number and length are bounded.
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
"""Of one track: older ones are dropped."""


class State(enum.Enum):
    """What a node is during a span."""

    __hash__ = object.__hash__  # faster than the hash of an enumeration, which is computed each time

    JOINING = "joining"
    FORMING = "forming"
    """It has a place in a round that forms."""
    MEMBER = "member"
    WAITING = "waiting"
    SPARE = "spare"
    HELD_BACK = "held back"
    DRAINED = "drained"
    LOST = "lost"
    LEFT = "left"
    GONE = "gone"
    """A member that went before the view began: how is not known."""
    OUT = "out"
    """It is not there, and no round misses it."""


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
    """Lasts from `at` until the next one. `round` is 0 where there is none."""

    at: float
    state: State
    round: int


class TrackPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A track in an update: all of it, or what was added."""

    key: int
    name: str
    node_id: str
    rank: int | None
    spans: list[Span]


class PastState(msgspec.Struct, frozen=True, gc=False):
    """From `at` on, the node of this name was in this state."""

    at: float
    name: str
    state: State
    round: int = 0
    rank: int | None = None


@dataclass(eq=False, slots=True)
class Track:
    key: int
    name: str
    node_id: str
    rank: int | None
    spans: list[Span] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The version that each span was added in."""

    def add(self, span: Span, version: int) -> bool:
        """Add a span, unless its state is the last one's; whether it was added. The times of a track never go back."""
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


class Timeline:
    def __init__(self) -> None:
        self.tracks: Versioned[int, Track] = Versioned()
        self._of_id: dict[str, Track] = {}
        self._free: dict[str, list[Track]] = {}
        """Name -> tracks without a present node, for the next node of that name."""
        self._next = 0
        self._shared_key: tuple[float, State, int] | None = None
        self._shared_span = Span(0.0, State.OUT, 0)

    def add_past(self, past: Iterable[PastState], version: int) -> None:
        """The states of nodes before the view began, in order of time. Only before the first `show`."""
        tracks: dict[str, Track] = {}
        for one in past:
            track = tracks.get(one.name)
            if track is None:
                track = tracks[one.name] = self._take_track(one.name)
            track.rank = track.rank if one.rank is None else one.rank
            track.add(self._shared(one.at, one.state, one.round), version)
        for track in tracks.values():
            self.tracks.touch(track.key, version)
            self._release(track)

    def end_past(self, at: float, version: int) -> None:
        """The current nodes were shown: those that are not among them are not there any more."""
        for tracks in self._free.values():
            for track in tracks:
                if track.add(self._shared(at, State.OUT, 0), version):
                    self.tracks.touch(track.key, version)
        self._drop_oldest(version)

    def show(self, node: NodeReport, number: int, at: float, version: int, ways_out: Mapping[str, State]) -> None:
        """A node's state from this instant on. `ways_out` has how nodes went, by name."""
        track = self._of_id.get(node.id)
        if track is None:
            track = self._of_id[node.id] = self._take_track(node.name)
            track.node_id = node.id
        state = _STATES[node.standing]
        if state is _GONE:
            state = ways_out.get(node.name, track.spans[-1].state if _is_down(track) else State.GONE)
        is_new_rank = node.rank is not None and node.rank != track.rank
        if is_new_rank:
            track.rank = node.rank
        if track.add(self._shared(at, state, number if state in _HAS_ROUND else 0), version) or is_new_rank:
            self.tracks.touch(track.key, version)

    def hide(self, node_id: str, at: float, version: int, ways_out: Mapping[str, State]) -> None:
        """A node that went, or whose round is over without it, is not shown any more."""
        track = self._of_id.pop(node_id, None)
        if track is None:
            return
        how = ways_out.get(track.name)
        if how is not None and not _is_down(track):
            track.add(_span(at, how, 0), version)
        track.add(_span(at, State.OUT, 0), version)
        self.tracks.touch(track.key, version)
        self._release(track)
        self._drop_oldest(version)

    def _shared(self, at: float, state: State, number: int) -> Span:
        """One value for all nodes that change to the same state at the same time."""
        key = (at, state, number)
        if key != self._shared_key:
            self._shared_key, self._shared_span = key, _span(at, state, number)
        return self._shared_span

    def _take_track(self, name: str) -> Track:
        free = self._free.get(name)
        if free:
            track = free.pop()
            if not free:
                del self._free[name]
            return track
        self._next += 1
        track = Track(self._next, name, "", None)
        self.tracks.put(track.key, track, 0)
        return track

    def _release(self, track: Track) -> None:
        self._free.setdefault(track.name, []).append(track)

    def _drop_oldest(self, version: int) -> None:
        """Drop the tracks that have had no node for longest, if there are too many."""
        while len(self.tracks) > MOST_TRACKS and self._free:
            name, free = next(iter(self._free.items()))
            track = free.pop(0)
            if not free:
                del self._free[name]
            self.tracks.remove(track.key, version)


def _span(at: float, state: State, number: int) -> Span:
    return Span(round(at, 3), state, number)


def _is_down(track: Track) -> bool:
    return bool(track.spans) and track.spans[-1].state in _DOWN
