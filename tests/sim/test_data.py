"""Worlds whose server has data: the real log and recovery, on disks that fail and machines that lose power."""

import asyncio
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from rallypoint.events import Emitter
from rallypoint.kv.types import Add
from rallypoint.server.durability.server import DurableServer
from rallypoint.testing.loop import VirtualTimeLoop
from rallypoint.testing.sim.data import SimData
from rallypoint.testing.sim.plan import Action, Fault, draw
from rallypoint.testing.sim.run import run_plan, run_seed

WITH_DATA = [seed for seed in range(1000) if draw(seed).has_data]
SMALL = [seed for seed in WITH_DATA if draw(seed).nodes < 20]


def test_some_wire_worlds_have_data():
    wired = [plan for plan in map(draw, range(1000)) if plan.wired]
    assert 0.2 < sum(plan.has_data for plan in wired) / len(wired) < 0.8


@pytest.mark.parametrize("seed", SMALL[:12])
def test_world_with_data_keeps_every_guarantee(seed):
    verdict = run_seed(seed)
    assert verdict.broke == "", verdict.why


@pytest.mark.parametrize("target", range(12))
def test_server_that_dies_repeatedly_continues_from_its_data(target):
    plan = draw(SMALL[target])
    actions = tuple(Action(0.5 + 0.6 * i, Fault.SERVER_RESTART, target + i, 1.0) for i in range(12))
    verdict = run_plan(replace(plan, actions=actions))
    assert verdict.broke == "", verdict.why


def test_world_with_data_does_not_depend_on_the_hash_seed():
    seeds = SMALL[:4]
    program = f"from rallypoint.testing.sim.run import run_seed\nfor seed in {seeds}: print(run_seed(seed).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
    assert digests.pop().split() == [run_seed(seed).digest for seed in seeds]


def test_restarts_lose_nothing_that_was_reported_as_durable():
    """The data alone, without nodes: adds, and deaths of all kinds between the steps of a write."""
    loop = VirtualTimeLoop(seed="data", limit_s=10_000)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_run_and_crash())
    finally:
        loop.cancel_pending()
        loop.close()
        asyncio.set_event_loop(None)


async def _run_and_crash() -> None:
    rng = random.Random(5)
    deaths = 0
    for seed in range(40):
        data = SimData(seed, history=1000)
        reported = requested = 0
        for _ in range(8):
            engine, journal = data.open("server", Emitter(), 1)
            server = DurableServer(engine, journal, rng=rng, wall=lambda: 1e9)
            found = int(engine.items["n"].value) if "n" in engine.items else 0
            assert reported <= found <= requested
            reported = requested = found
            for _ in range(rng.randint(0, 60)):
                await asyncio.sleep(rng.uniform(0, 0.01))
                if not journal.is_failing:
                    requested += 1
                    server.engine_host.execute(Add("n", 1))
                    count = requested

                    def report(count: int = count) -> None:
                        nonlocal reported
                        reported = max(reported, count)

                    journal.when_durable(report)
            data.crash(is_machine=rng.random() < 0.5)
            deaths += 1
            before = reported
            await server.journal.close()
            await server.runs.stop()
            server.engine_host.stop()
            assert reported == before
    assert deaths == 320
