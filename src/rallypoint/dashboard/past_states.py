"""The states of nodes in a run's past, derived from its kept events. Pure, but for the loggers that events import.

The names in an event are limited: of rounds with very many members, only those of the last two are known in full, from
their rosters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rallypoint.dashboard.timeline import PastState, State
from rallypoint.events import (
    JoinStarted,
    ManyGone,
    ManyJoined,
    ManyLeft,
    ManyLost,
    NodeGone,
    NodeHeldBack,
    NodeLeft,
    NodeLost,
    RoundActive,
    RoundOver,
)
from rallypoint.observe.run_events import SeenEvent


def past_states(events: Sequence[SeenEvent], rosters: Mapping[int, Sequence[str]]) -> Iterator[PastState]:
    """The states in order. `rosters`: the members of rounds, in rank order, where they are known."""
    past = _Past(rosters)
    for one in events:
        if one.at is not None:
            yield from past.take(one, one.at)


class _Past:
    def __init__(self, rosters: Mapping[int, Sequence[str]]) -> None:
        self._rosters = rosters
        self._members: set[str] = set()
        """Those of the current round that have not joined again."""
        self._down: set[str] = set()
        """Those of the current round that are lost or have left."""
        self._joining: set[str] = set()

    def take(self, one: SeenEvent, at: float) -> Iterator[PastState]:
        match one.event:
            case JoinStarted(by=name):
                yield from self._join([name], at)
            case ManyJoined(nodes=names):
                yield from self._join(names, at)
            case NodeLost(node=name):
                yield from self._go([name], State.LOST, at)
            case NodeGone(node=name):
                yield from self._go([name], State.GONE, at)
            case ManyGone(nodes=names):
                yield from self._go(names, State.GONE, at)
            case ManyLost(nodes=names):
                yield from self._go(names, State.LOST, at)
            case NodeLeft(by=name):
                yield from self._go([name], State.LEFT, at)
            case ManyLeft(nodes=names):
                yield from self._go(names, State.LEFT, at)
            case NodeHeldBack(node=name) if name in self._joining:
                yield PastState(at, name, State.HELD_BACK)
            case RoundActive():
                yield from self._active(one.event, one.nodes, at)
            case RoundOver():
                for name in self._members | self._down:
                    yield PastState(at, name, State.OUT)
                self._members, self._down = set(), set()
            case _:
                pass

    def _join(self, names: Sequence[str], at: float) -> Iterator[PastState]:
        for name in names:
            waits = bool(self._members) and name not in self._members
            self._members.discard(name)
            self._joining.add(name)
            yield PastState(at, name, State.WAITING if waits else State.JOINING)

    def _go(self, names: Sequence[str], how: State, at: float) -> Iterator[PastState]:
        for name in names:
            yield PastState(at, name, how)
            self._joining.discard(name)
            if name in self._members:
                self._members.discard(name)
                self._down.add(name)
            else:
                yield PastState(at, name, State.OUT)

    def _active(self, event: RoundActive, nodes: Sequence[str], at: float) -> Iterator[PastState]:
        names = self._rosters.get(event.round) or nodes
        rest = self._joining.difference(names)
        for rank, name in enumerate(names):
            yield PastState(at, name, State.MEMBER, event.round, rank)
        all_named = len(names) >= event.size
        for name in rest:  # with more members than names, it is most likely one of them
            yield PastState(at, name, State.WAITING) if all_named else PastState(at, name, State.MEMBER, event.round)
        self._members, self._down = {*names, *(() if all_named else rest)}, set()
        self._joining = rest if all_named else set()
