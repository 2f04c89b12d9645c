"""Who makes a run that all nodes come to at once, on a backend where making it in vain costs. Under virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from rallypoint.backends.contract import Backend
from rallypoint.backends.memory import MemoryBackend
from rallypoint.events import Emitter
from rallypoint.rendezvous.election import Election
from rallypoint.rendezvous.records import CoordinatorRecord
from tests.rendezvous.kit import Counting, Town, now, play

T = TypeVar("T")

MANY = 16
ANSWER_S = 0.1
"""What each request takes: longer than the nodes are apart."""
GIVES_WAY_S = (1.0, 2.0)
NAMES = [f"n{number}" for number in range(MANY)]


class Distant(Counting):
    """Each request takes a while, and somebody else is to make the run."""

    makes_run = False
    gives_way_s = GIVES_WAY_S

    async def call(self, name: str, execute: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(ANSWER_S / 2)
        try:
            return await super().call(name, execute)
        finally:
            await asyncio.sleep(ANSWER_S / 2)


class Counters:
    """The backends of all nodes."""

    def __init__(self) -> None:
        self.all: list[Distant] = []

    def wrap(self, _: str, backend: Backend) -> Backend:
        self.all.append(Distant(backend))
        return self.all[-1]

    def total(self, kind: str) -> int:
        return sum(one.counts[kind] for one in self.all)


def test_only_the_elected_node_makes_the_run_when_all_start_at_once() -> None:
    counters = Counters()

    async def scene(town: Town) -> None:
        await town.gathered(*NAMES)
        assert counters.total("grant") == MANY + 2  # a session each, and the run's two
        assert counters.total("revoke") == 0
        assert now() < GIVES_WAY_S[0] + 10 * ANSWER_S  # nobody waited for nothing

    play(scene, wrap=counters.wrap, min_nodes=MANY, max_nodes=MANY)


def test_run_is_made_by_another_when_the_coordinator_does_not_join() -> None:
    async def scene(town: Town) -> None:
        backend = MemoryBackend(town.server)
        session = await backend.open_session(60.0)
        record = CoordinatorRecord(id="absent", name="absent")
        candidate = Election(
            backend, town.keys, session, record, Emitter(), random.Random(1), lambda: 0.0, lambda: True
        )
        coordinator = asyncio.create_task(candidate.run())
        await asyncio.sleep(ANSWER_S)
        assert town.coordinator() == "absent"
        started_at = now()
        await town.gathered("a", "b")
        assert now() - started_at == pytest.approx(GIVES_WAY_S[1], abs=1.5)
        coordinator.cancel()
        await asyncio.wait([coordinator])
        await session.close()

    play(scene, wrap=Counters().wrap, min_nodes=2, max_nodes=2)
