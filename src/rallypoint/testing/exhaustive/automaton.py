"""The processes as automata: the reaction of the real code to an input in a state is computed once and cached.

The state of a process is its fingerprint. In the world it has a binding: the revisions of the world that it holds, in
order. A step depends on the order of these and of the revisions in the input, not on their numbers. A step is looked up
first; only if it is new, it is executed by a live process in that state, which is either cached or restored by
repeating the inputs that first led there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rallypoint.kv.types import Op
from rallypoint.testing.exhaustive.actors import Actor, Input, Status
from rallypoint.testing.exhaustive.symbolic import number, rename_answer, rename_op, revisions_in

MOST_ALIVE = 256


class Step(NamedTuple):
    """The result of a step: the new state, its binding, and for each request and watch its index before (-1: new)."""

    state: int
    binding: tuple[int, ...]
    requests: tuple[int, ...]
    watches: tuple[int, ...]


@dataclass(slots=True)
class Path:
    """The inputs of a process, last first."""

    before: Path | None
    made: tuple[int, ...]
    """The indices in `Actor.made` of the revisions that it held before the input."""
    binding: tuple[int, ...]
    given: Input


@dataclass(slots=True)
class LocalState:
    """One state of a process. Revisions in `pending` are indices in the binding, from 1."""

    index: int
    status: Status
    pending: tuple[Op, ...]
    watches: tuple[tuple[str, bool], ...]
    """Prefix, and whether a reader waits for the next batch."""
    timer_s: float | None
    made: tuple[int, ...]
    """The indices in `Actor.made` of the binding's revisions, for the first process in this state."""
    path: Path | None
    """The inputs of the first process in this state."""
    instances: dict[tuple[int, ...], tuple[Op, ...]] = field(default_factory=dict)

    def requests(self, binding: tuple[int, ...]) -> tuple[Op, ...]:
        """The pending requests with the revisions of the world."""
        found = self.instances.get(binding)
        if found is None:
            found = tuple(rename_op(op, lambda place: binding[place - 1]) for op in self.pending)
            self.instances[binding] = found
        return found


class Automaton:
    """All states of one process that were reached so far."""

    def __init__(self, make: Callable[[], Actor]) -> None:
        self._make = make
        self.states: list[LocalState] = []
        self.replayed = 0
        """The number of inputs that were repeated to restore a state."""
        self._by_digest: dict[bytes, int] = {}
        self._steps: dict[tuple[int, tuple[int, ...], Input], Step] = {}
        self._seen: dict[tuple[int, tuple[int, ...], Input], Step] = {}
        self._alive: OrderedDict[int, Actor] = OrderedDict()
        self._paths: dict[Actor, Path | None] = {}
        self._settle_in(self._new())

    @property
    def steps(self) -> int:
        """The number of different steps executed by the real code."""
        return len(self._steps)

    def step(self, state: int, binding: tuple[int, ...], given: Input) -> Step:
        """The step of the process on this input."""
        seen = self._seen.get((state, binding, given))
        if seen is None:
            seen = self._seen[(state, binding, given)] = self._step(state, binding, given)
        return seen

    def _step(self, state: int, binding: tuple[int, ...], given: Input) -> Step:
        """The same with revisions numbered from 1, so that steps that differ only in numbers are equal."""
        known = set(binding)
        revisions_in(given, known)
        known.discard(0)
        names = sorted(known)
        places = {at: place for place, at in enumerate(names, 1)}
        places[0] = 0
        ranks = tuple([places[at] for at in binding])
        key = (state, ranks, rename_answer(given, lambda at: places[at]))
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._move(*key)
        return found._replace(binding=tuple([names[place - 1] for place in found.binding]))

    def close(self) -> None:
        """Discard all processes."""
        for actor in list(self._paths):
            self._discard(actor)
        self._alive.clear()

    def _move(self, state: int, binding: tuple[int, ...], given: Input) -> Step:
        actor = self._alive.pop(state, None) or self._replay(state)
        requests, watches = self._feed(actor, binding, given)
        reached = self._settle_in(actor)
        return Step(reached, tuple([number(rev) for rev in actor.revs]), requests, watches)

    def _feed(self, actor: Actor, binding: tuple[int, ...], given: Input) -> tuple[tuple[int, ...], tuple[int, ...]]:
        self._paths[actor] = Path(self._paths[actor], _places_made(actor), binding, given)
        actor.rebind(binding)
        return actor.feed(given)

    def _settle_in(self, actor: Actor) -> int:
        """The state that the actor is in now; added if it is new."""
        digest = actor.fingerprint().digest
        index = self._by_digest.get(digest)
        if index is None:
            index = self._by_digest[digest] = len(self.states)
            self.states.append(_described(index, actor, self._paths[actor]))
        if index in self._alive:
            self._discard(actor)
        else:
            self._alive[index] = actor
            if len(self._alive) > MOST_ALIVE:
                self._discard(self._alive.popitem(last=False)[1])
        return index

    def _replay(self, state: int) -> Actor:
        """A process in this state, restored with the inputs of the first one."""
        parts: list[Path] = []
        path = self.states[state].path
        while path is not None:
            parts.append(path)
            path = path.before
        actor = self._new()
        for part in reversed(parts):
            actor.revs = [actor.made[place] for place in part.made]
            self._feed(actor, part.binding, part.given)
            self.replayed += 1
        actor.revs = [actor.made[place] for place in self.states[state].made]
        return actor

    def _new(self) -> Actor:
        actor = self._make()
        self._paths[actor] = None
        return actor

    def _discard(self, actor: Actor) -> None:
        del self._paths[actor]
        actor.discard()


def _places_made(actor: Actor) -> tuple[int, ...]:
    made_at = {id(rev): place for place, rev in enumerate(actor.made)}
    return tuple([made_at[id(rev)] for rev in actor.revs])


def _described(index: int, actor: Actor, path: Path | None) -> LocalState:
    place_of = {id(rev): place for place, rev in enumerate(actor.revs, 1)}
    return LocalState(
        index=index,
        status=actor.status,
        pending=tuple(rename_op(op, lambda rev: place_of[id(rev)]) for op in actor.pending()),
        watches=tuple((watch.prefix, watch.is_read) for watch in actor.backend.watches),
        timer_s=actor.loop.next_timer_s(),
        made=_places_made(actor),
        path=path,
    )
