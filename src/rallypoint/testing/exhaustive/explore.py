"""Breadth-first search over all choices, so that the first trace found is a shortest one.

States are stored as hashes (64 bits). For each expanded state the explorer also records the next state of a world
without further faults; every such path must end in a quiescent state, which is checked. If a limit cuts the search,
some paths from its frontier are followed to quiescence, and some random walks start there; a trace from these is not a
shortest one.
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
from rallypoint.testing.exhaustive.blanking import patched
from rallypoint.testing.exhaustive.choices import beginning, check_quiescent, choices, fair_choice
from rallypoint.testing.exhaustive.state import Setup, State
from rallypoint.testing.exhaustive.trace import describe
from rallypoint.testing.exhaustive.world import World

MOST_STATES = 1_000_000
LONGEST_PATH = 2_000
FOLLOWED_STATES = 200
"""If the search was cut: how many states of the frontier are followed to quiescence."""
MOST_WALKS, STATES_A_WALK, LONGEST_WALK = 500, 100, 300
EVERY_S = 5.0

_UNKNOWN, _QUIESCENT = -2, -1


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an exploration. `trace` leads to the broken guarantee, one line per choice."""

    setup: Setup
    states: int
    transitions: int
    depth: int
    is_complete: bool
    seconds: float
    broke: Broke | None
    trace: tuple[str, ...]

    def line(self) -> str:
        explored = "all explored" if self.is_complete else "cut"
        verdict = "ok" if self.broke is None else f"{type(self.broke).__name__}: {self.broke}"
        return f"{self.setup.description()}: {self.states:,} states, depth {self.depth}, {explored}, {verdict}"

    def __str__(self) -> str:
        steps = [f"  {number:3} {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([self.line(), *steps])


class _Broken(Exception):
    """A guarantee is broken after these choices (indices in the choices of each state)."""

    def __init__(self, path: list[int], broke: Broke) -> None:
        super().__init__(str(broke))
        self.path = path
        self.broke = broke


class Explorer:
    """Explores one setup. `on_progress` is called with a line from time to time."""

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
        """By state: the next state without faults; negative: quiescent, or not known."""
        self._transitions = 0
        self._depth = 0
        self._told_at = 0.0

    def run(self) -> Report:
        """Explore until everything is explored, a guarantee is broken, or a limit is reached."""
        with patched():
            self._world = World(self._setup)
            try:
                return self._run()
            finally:
                self._world.close()

    def _run(self) -> Report:
        self._started_at = time.monotonic()
        broke, trace, is_complete = None, [], False
        try:
            frontier = self._search()
            is_complete = not frontier
            self._check_quiescence(frontier)
            self._random_walks(frontier)
        except _Broken as broken:
            broke = broken.broke
            trace = self._tell(broken.path)
        seconds = time.monotonic() - self._started_at
        states = len(self._parents)
        return Report(self._setup, states, self._transitions, self._depth, is_complete, seconds, broke, tuple(trace))

    # --- searching ----------------------------------------------------------------------------------------------------

    def _search(self) -> list[State]:
        """Expand layer by layer; the states that were not expanded because of a limit."""
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
        """The new states after one step."""
        found = choices(self._world, state)
        new: list[tuple[State, int]] = []
        if fair_choice(found) is None:
            self._fair[number] = _QUIESCENT
            try:
                check_quiescent(self._world, state)
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
            if place == 0 and self._fair[number] != _QUIESCENT:
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

    # --- quiescence ---------------------------------------------------------------------------------------------------

    def _check_quiescence(self, frontier: list[State]) -> None:
        """Check that every expanded state, and some of the frontier, reaches quiescence without further faults."""
        rested = bytearray(len(self._parents))
        for number in range(len(self._parents)):
            way: list[int] = []
            on_way: set[int] = set()
            at = number
            while at >= 0 and not rested[at]:
                if at in on_way:
                    message = "a world without faults loops for ever without reaching a round"
                    raise _Broken(self._path(at), BrokeCompletion(message))
                way.append(at)
                on_way.add(at)
                at = self._fair[at]
            for passed in way:
                rested[passed] = 1
        step = max(1, len(frontier) // FOLLOWED_STATES)
        for state in frontier[::step]:
            self._follow(state)

    def _follow(self, state: State) -> None:
        """Follow the fault-free path from a state of the frontier to quiescence."""
        number = self._index[hash(state)]
        path: list[int] = []
        for _ in range(LONGEST_PATH):
            found = choices(self._world, state)
            choice = fair_choice(found)
            try:
                if choice is None:
                    check_quiescent(self._world, state)
                    return
                path.append(0)
                state = self._world.take(state, choice)
            except Broke as broke:
                raise _Broken([*self._path(number), *path], broke) from broke
        raise _Broken([*self._path(number), *path], BrokeCompletion("a world without faults does not become quiescent"))

    def _random_walks(self, frontier: list[State]) -> None:
        """If the search was cut: random walks from its frontier, including faults."""
        rng = random.Random(len(frontier))
        for _ in range(min(MOST_WALKS, len(self._parents) // STATES_A_WALK) if frontier else 0):
            state = rng.choice(frontier)
            path = self._path(self._index[hash(state)])
            for _ in range(LONGEST_WALK):
                found = choices(self._world, state)
                try:
                    if fair_choice(found) is None:
                        check_quiescent(self._world, state)
                    if not found:
                        break
                    path.append(rng.randrange(len(found)))
                    state = self._world.take(state, found[path[-1]])
                except Broke as broke:
                    raise _Broken(path, broke) from broke

    # --- traces -------------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> list[int]:
        places: list[int] = []
        while self._parents[number] >= 0:
            places.append(self._places[number])
            number = self._parents[number]
        return places[::-1]

    def _tell(self, path: list[int]) -> list[str]:
        """Repeat the path and describe each step."""
        world = self._world
        state = beginning(world)
        lines: list[str] = []
        for place in path:
            answers: list[Any] = []
            choice = choices(world, state)[place]
            after: State | None = None
            with suppress(Broke):
                after = world.take(state, choice, answers.append)
            lines.append(describe(world, state, choice, after, answers[0] if answers else None))
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
