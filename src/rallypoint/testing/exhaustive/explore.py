"""Breadth-first over all choices, so that the first trace that is found is a shortest one.

States are remembered by their hash (64 bits). For each state that is expanded the explorer also notes what a world
without further faults would do next; in the end every such path must have come to rest, and rest is judged. From the
edge of a search that was cut, some paths are followed to their rest, and some walks are drawn: they break nothing
either, but a trace that they give is no shortest one.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rallypoint.testing.checkers import Broke, BrokeCompletion
from rallypoint.testing.exhaustive.choices import beginning, choices, fair, judge_rest
from rallypoint.testing.exhaustive.story import tell
from rallypoint.testing.exhaustive.values import Setup, State
from rallypoint.testing.exhaustive.words import adapted
from rallypoint.testing.exhaustive.world import World

MOST_STATES = 1_000_000
LONGEST_WAY_TO_REST = 2_000
WAYS_FROM_THE_EDGE = 200
"""Of a search that was cut: how many of the states that were not expanded are followed to their rest."""
MOST_WALKS, STATES_A_WALK, LONGEST_WALK = 500, 100, 300
EVERY_S = 5.0

_UNKNOWN, _REST = -2, -1


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. `trace` leads to what broke, one line a choice."""

    setup: Setup
    states: int
    transitions: int
    depth: int
    is_complete: bool
    seconds: float
    broke: Broke | None
    trace: tuple[str, ...]

    def line(self) -> str:
        """One line."""
        explored = "all explored" if self.is_complete else "cut"
        verdict = "ok" if self.broke is None else f"{type(self.broke).__name__}: {self.broke}"
        return f"{self.setup.sentence()}: {self.states:,} states, depth {self.depth}, {explored}, {verdict}"

    def __str__(self) -> str:
        steps = [f"  {number:3} {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([self.line(), *steps])


class _Broken(Exception):
    """A guarantee is broken after these choices (places among the choices of each state), and why."""

    def __init__(self, path: list[int], broke: Broke) -> None:
        super().__init__(str(broke))
        self.path = path
        self.broke = broke


class Explorer:
    """Explores one setup. `on_progress` is told a line now and then."""

    def __init__(
        self,
        setup: Setup,
        *,
        max_states: int = MOST_STATES,
        seconds: float = float("inf"),
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self._setup = setup
        self._max_states = max_states
        self._seconds = seconds
        self._on_progress = on_progress
        self._index: dict[int, int] = {}
        self._parents = array("q")
        self._places = array("i")
        self._fair = array("q")
        """The state that a fair world comes to next; negative: at rest, or not known."""
        self._transitions = 0
        self._depth = 0
        self._told_at = 0.0

    def run(self) -> Report:
        """Explore until everything is explored, a guarantee is broken, or a limit is reached."""
        with adapted():
            self._world = World(self._setup)
            try:
                return self._run()
            finally:
                self._world.close()

    def _run(self) -> Report:
        self._started_at = time.monotonic()
        broke, trace, is_complete = None, [], False
        try:
            edge = self._search()
            is_complete = not edge
            self._check_ways_to_rest(edge)
            self._wander(edge)
        except _Broken as broken:
            broke = broken.broke
            trace = self._tell(broken.path)
        seconds = time.monotonic() - self._started_at
        states = len(self._parents)
        return Report(self._setup, states, self._transitions, self._depth, is_complete, seconds, broke, tuple(trace))

    # --- searching ----------------------------------------------------------------------------------------------------

    def _search(self) -> list[State]:
        """Expand layer by layer. The states that are left unexpanded by a limit."""
        first = beginning(self._world)
        self._note(first, -1, -1)
        layer = [first]
        numbers = [0]
        while layer:
            following: list[State] = []
            following_numbers: list[int] = []
            for place, (number, state) in enumerate(zip(numbers, layer, strict=True)):
                if self._is_over():
                    return layer[place:] + following
                for reached, reached_number in self._expand(number, state):
                    following.append(reached)
                    following_numbers.append(reached_number)
            layer, numbers = following, following_numbers
            if layer:
                self._depth += 1
        return []

    def _expand(self, number: int, state: State) -> list[tuple[State, int]]:
        """The new states that one step leads to."""
        found = choices(self._world, state)
        new: list[tuple[State, int]] = []
        if fair(found) is None:
            self._fair[number] = _REST
            try:
                judge_rest(self._world, state)
            except Broke as broke:
                raise _Broken(self._path(number), broke) from broke
        for place, choice in enumerate(found):
            self._transitions += 1
            try:
                reached = self._world.take(state, choice)
            except Broke as broke:
                raise _Broken([*self._path(number), place], broke) from broke
            known = self._index.get(hash(reached))
            if known is None:
                known = self._note(reached, number, place)
                new.append((reached, known))
            if place == 0 and self._fair[number] != _REST:
                self._fair[number] = known
        return new

    def _note(self, state: State, parent: int, place: int) -> int:
        number = self._index[hash(state)] = len(self._parents)
        self._parents.append(parent)
        self._places.append(place)
        self._fair.append(_UNKNOWN)
        return number

    def _is_over(self) -> bool:
        passed_s = time.monotonic() - self._started_at
        if self._on_progress is not None and passed_s > self._told_at + EVERY_S:
            self._told_at = passed_s
            local = ", ".join(f"{len(one.states)}/{one.steps}" for one in self._world.automata)
            self._on_progress(
                f"{len(self._parents):,} states, {self._transitions:,} steps, depth {self._depth}, {passed_s:.0f} s; "
                f"states/steps of the processes: {local}"
            )
        return len(self._parents) >= self._max_states or passed_s > self._seconds

    # --- rest ---------------------------------------------------------------------------------------------------------

    def _check_ways_to_rest(self, edge: list[State]) -> None:
        """From every expanded state a world without further faults comes to rest, and from some others as well."""
        rested = bytearray(len(self._parents))
        for number in range(len(self._parents)):
            way: list[int] = []
            on_way: set[int] = set()
            at = number
            while at >= 0 and not rested[at]:
                if at in on_way:
                    message = "a world without faults goes on and on, and no round comes of it"
                    raise _Broken(self._path(at), BrokeCompletion(message))
                way.append(at)
                on_way.add(at)
                at = self._fair[at]
            for passed in way:
                rested[passed] = 1
        step = max(1, len(edge) // WAYS_FROM_THE_EDGE)
        for state in edge[::step]:
            self._follow(state)

    def _follow(self, state: State) -> None:
        """From a state that was not expanded to its rest."""
        number = self._index[hash(state)]
        path: list[int] = []
        for _ in range(LONGEST_WAY_TO_REST):
            found = choices(self._world, state)
            choice = fair(found)
            try:
                if choice is None:
                    judge_rest(self._world, state)
                    return
                path.append(0)
                state = self._world.take(state, choice)
            except Broke as broke:
                raise _Broken([*self._path(number), *path], broke) from broke
        raise _Broken([*self._path(number), *path], BrokeCompletion("a world without faults comes to no rest"))

    def _wander(self, edge: list[State]) -> None:
        """Of a search that was cut: drawn walks on from its edge, faults included, as deep as they lead."""
        rng = random.Random(len(edge))
        for _ in range(min(MOST_WALKS, len(self._parents) // STATES_A_WALK) if edge else 0):
            state = rng.choice(edge)
            path = self._path(self._index[hash(state)])
            for _ in range(LONGEST_WALK):
                found = choices(self._world, state)
                try:
                    if fair(found) is None:
                        judge_rest(self._world, state)
                    if not found:
                        break
                    path.append(rng.randrange(len(found)))
                    state = self._world.take(state, found[path[-1]])
                except Broke as broke:
                    raise _Broken(path, broke) from broke

    # --- telling ------------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> list[int]:
        places: list[int] = []
        while self._parents[number] >= 0:
            places.append(self._places[number])
            number = self._parents[number]
        return places[::-1]

    def _tell(self, path: list[int]) -> list[str]:
        """Go the path again and say what happens."""
        world = self._world
        state = beginning(world)
        lines: list[str] = []
        for place in path:
            answers: list[Any] = []
            choice = choices(world, state)[place]
            after: State | None = None
            with suppress(Broke):
                after = world.take(state, choice, answers.append)
            lines.append(tell(world, state, choice, after, answers[0] if answers else None))
            if after is None:
                break
            state = after
        return lines


def explore(
    setup: Setup,
    *,
    max_states: int = MOST_STATES,
    seconds: float = float("inf"),
    on_progress: Callable[[str], None] | None = None,
) -> Report:
    """Explore one world: see `Explorer`."""
    return Explorer(setup, max_states=max_states, seconds=seconds, on_progress=on_progress).run()
