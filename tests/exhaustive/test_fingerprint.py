"""Fingerprints: processes with equal fingerprints behave the same, and dead variables are not included."""

import asyncio
from collections import defaultdict
from types import CoroutineType
from typing import Any

import pytest

from rallypoint.rendezvous.records import CoordinatorRecord, encode
from rallypoint.testing.exhaustive import Budget, Setup, explore
from rallypoint.testing.exhaustive.actors import Actor, Input
from rallypoint.testing.exhaustive.automaton import Automaton, Path, Step
from rallypoint.testing.exhaustive.blanking import blank_record
from rallypoint.testing.exhaustive.fingerprint import Fingerprint
from rallypoint.testing.exhaustive.live_variables import live_after
from rallypoint.testing.exhaustive.symbolic import Moment, Rev

OTHER_PATHS = 1


class CrossChecking(Automaton):
    """Executes every new step also with processes that reached the same state by other paths, and compares."""

    compared = 0

    def __init__(self, *args: Any) -> None:
        self.other_paths: dict[int, list[Path]] = defaultdict(list)
        super().__init__(*args)

    def _settle_in(self, actor: Actor) -> int:
        path = self._paths[actor]
        known = len(self.states)
        index = super()._settle_in(actor)
        if index < known and path is not None and len(self.other_paths[index]) < OTHER_PATHS:
            self.other_paths[index].append(path)
        return index

    def _move(self, state: int, binding: tuple[int, ...], given: Input) -> Step:
        step = super()._move(state, binding, given)
        for path in list(self.other_paths[state]):
            actor = self._restored(path)
            places = self._feed(actor, binding, given)
            digest = actor.fingerprint().digest
            same = self._by_digest.get(digest) == step.state and places == (step.requests, step.watches)
            assert same, f"processes with equal fingerprints handle {given} differently"
            assert tuple(rev.at for rev in actor.revs) == step.binding
            self._discard(actor)
            CrossChecking.compared += 1
        return step

    def _restored(self, path: Path) -> Actor:
        parts = []
        part: Path | None = path
        while part is not None:
            parts.append(part)
            part = part.before
        actor = self._new()
        for part in reversed(parts):
            actor.revs = [actor.made[place] for place in part.made]
            self._feed(actor, part.binding, part.given)
        actor.fingerprint()
        return actor


@pytest.mark.parametrize(
    "setup",
    [
        Setup("", begin="forming", budget=Budget(crash=1, late=1)),
        Setup("", begin="active", budget=Budget(expire=1)),
        Setup("", begin="joined", budget=Budget(take_over=1)),
    ],
)
def test_processes_with_equal_fingerprints_behave_the_same(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.testing.exhaustive.world.Automaton", CrossChecking)
    monkeypatch.setattr(CrossChecking, "compared", 0)
    report = explore(setup, max_states=600)
    assert report.broke is None, str(report)
    assert CrossChecking.compared > 10


def test_variable_that_is_never_read_again_is_not_live() -> None:
    async def waits(first: int, second: int) -> int:
        third = first + 1
        for fourth in range(third):
            await asyncio.sleep(fourth)
        return second

    coroutine: CoroutineType[Any, Any, int] = waits(1, 2)
    live_at_start = live_after(coroutine.cr_code, -1)
    coroutine.close()
    assert live_at_start == {"first", "second"}


class Holder:
    def __init__(self, **content: object) -> None:
        self.__dict__.update(content)


def digest(thing: object, now: float = 0.0) -> bytes:
    return Fingerprint([thing], now).digest


def test_fingerprint_depends_only_on_the_order_of_revisions() -> None:
    assert digest([Rev(3), Rev(9)]) == digest([Rev(4), Rev(5)])
    assert digest([Rev(3), Rev(9)]) != digest([Rev(9), Rev(3)])
    assert digest([Rev(3), Rev(3)]) != digest([Rev(3), Rev(4)])


def test_fingerprint_depends_only_on_the_distance_of_instants() -> None:
    assert digest(Moment(3.0), 1.0) == digest(Moment(7.0), 5.0)
    assert digest(Moment(3.0), 1.0) != digest(Moment(3.0), 2.0)


def test_fingerprint_distinguishes_one_object_held_twice_from_two_equal_ones() -> None:
    shared: list[int] = []
    assert digest([shared, shared]) != digest([[], []])


def test_fingerprint_includes_the_position_of_a_coroutine() -> None:
    class Pause:
        def __await__(self) -> Any:
            yield

    async def runs(parts: list[int]) -> None:
        for _ in parts:
            await Pause()
            await Pause()

    one, two = runs([1, 2]), runs([1, 2])
    one.send(None)
    two.send(None)
    assert digest(one) == digest(two)
    two.send(None)
    assert digest(one) != digest(two)
    two.send(None)
    assert digest(one) != digest(two)
    one.close()
    two.close()


def test_fingerprint_includes_every_attribute_except_sentences() -> None:
    assert digest(Holder(a=1, why="one")) == digest(Holder(a=1, why="another"))
    assert digest(Holder(a=1, why="one")) != digest(Holder(a=1, why=""))
    assert digest(Holder(a=1)) != digest(Holder(a=2))


def test_blank_record_keeps_the_encoding_of_its_writer() -> None:
    """Otherwise a coordinator does not recognise its own key, and there is no coordinator."""
    record = encode(CoordinatorRecord(id="c1", name="c1"))
    assert blank_record(record) == record
