"""Which node makes a run when all join at once, on a backend where a vain attempt is costly. Virtual time."""

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
from tests.rendezvous.kit import CheckedWorld, CountingBackend, now, run_scenario

T = TypeVar("T")

MANY = 16
ANSWER_S = 0.1
"""The time of each request: longer than the nodes' starts are apart."""
MAKE_RUN_DELAY_S = (1.0, 2.0)
NAMES = [f"n{number}" for number in range(MANY)]


class SlowBackend(CountingBackend):
    """Each request takes `ANSWER_S`, and the elected node is to make the run."""

    makes_run = False
    make_run_delay_s = MAKE_RUN_DELAY_S

    async def call(self, name: str, execute: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(ANSWER_S / 2)
        try:
            return await super().call(name, execute)
        finally:
            await asyncio.sleep(ANSWER_S / 2)


class Backends:
    """The backends of all nodes, and their counts."""

    def __init__(self) -> None:
        self.all: list[SlowBackend] = []

    def wrap(self, _: str, backend: Backend) -> Backend:
        self.all.append(SlowBackend(backend))
        return self.all[-1]

    def total(self, kind: str) -> int:
        return sum(one.counts[kind] for one in self.all)


def test_only_the_elected_node_makes_the_run_when_all_start_at_once() -> None:
    backends = Backends()

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all(*NAMES)
        assert backends.total("grant") == MANY + 2  # one session per node, and the two leases of the run
        assert backends.total("revoke") == 0
        assert now() < MAKE_RUN_DELAY_S[0] + 10 * ANSWER_S  # no node waited for longer than necessary

    run_scenario(scenario, wrap=backends.wrap, min_nodes=MANY, max_nodes=MANY)


def test_another_node_makes_the_run_when_the_coordinator_does_not_join() -> None:
    async def scenario(world: CheckedWorld) -> None:
        backend = MemoryBackend(world.server)
        session = await backend.open_session(60.0)
        record = CoordinatorRecord(id="absent", name="absent")
        election = Election(
            backend, world.keys, session, record, Emitter(), random.Random(1), lambda: 0.0, lambda: True
        )
        coordinator = asyncio.create_task(election.run())
        await asyncio.sleep(ANSWER_S)
        assert world.coordinator() == "absent"
        started_at = now()
        await world.join_all("a", "b")
        assert now() - started_at == pytest.approx(MAKE_RUN_DELAY_S[1], abs=1.5)
        coordinator.cancel()
        await asyncio.wait([coordinator])
        await session.close()

    run_scenario(scenario, wrap=Backends().wrap, min_nodes=2, max_nodes=2)
