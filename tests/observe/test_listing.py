"""Runs are listed whatever their ids are, at a few reads each."""

import asyncio

from rallypoint.backends.contract import Limits
from rallypoint.backends.memory import MemoryBackend
from rallypoint.observe.listing import READS, list_runs
from rallypoint.observe.phase import Phase
from rallypoint.observe.target import read_backend_target, read_target
from rallypoint.server.clients import Clients
from rallypoint.server.engine_host import EngineHost
from rallypoint.server.local_backend import LocalBackend
from rallypoint.server.runs import Runs
from rallypoint.testing import loop as virtual
from rallypoint.testing.world import World
from tests.rendezvous.kit import CheckedWorld, CountingBackend, run_scenario

ODD = ["config", "a/b", ":runs", "ä ö", "x" * 200]


def test_runs_with_any_id_are_listed_until_they_are_gone():
    async def main() -> None:
        first = World(run_id="plain", min_nodes=1, reopen_after=1)
        worlds = [first, *(World(run_id=name, server=first.server, min_nodes=2, reopen_after=1) for name in ODD)]
        for world in worlds:
            world.start("a")
            world.join("a")
        await asyncio.sleep(2.0)
        backend = MemoryBackend(first.server)
        found = await list_runs(backend, "rallypoint")
        assert [run.run_id for run in found] == sorted(["plain", *ODD])
        by_id = {run.run_id: run for run in found}
        assert (by_id["plain"].phase, by_id["plain"].nodes, by_id["plain"].round) == (Phase.ACTIVE, 1, 1)
        assert by_id["a/b"].phase is Phase.BELOW_MINIMUM
        assert by_id["a/b"].reason == "1 of at least 2 nodes joined: a"
        for world in worlds:
            world.crash("a")
        await asyncio.sleep(60.0)
        assert await list_runs(backend, "rallypoint") == []

    virtual.run(main(), seed=1)


def test_listing_makes_one_scan_and_one_transaction():
    async def case(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        backend = CountingBackend(MemoryBackend(world.server))
        backend.limits = Limits(max_txn_ops=READS)
        assert len(await list_runs(backend, "rallypoint")) == 1
        assert sum(backend.counts.values()) == 2

    run_scenario(case, min_nodes=2)


def test_restored_server_starts_no_coordinator_for_the_index_because_of_a_run_called_config():
    async def main() -> None:
        world = World(run_id="config", min_nodes=1)
        world.start("a")
        await world.join("a")
        import random

        from rallypoint.events import Emitter

        engine_host = EngineHost(world.server.engine)
        runs = Runs(
            engine_host,
            Clients(engine_host),
            "server",
            Emitter(),
            random.Random(1),
            lambda: 0.0,
            LocalBackend(engine_host),
        )
        runs.start()
        assert len(runs) == 1
        await runs.stop()
        engine_host.stop()

    virtual.run(main(), seed=1)


def test_target_of_a_backend_needs_no_run_id_and_target_of_a_run_no_sizes():
    for url in ("tcp://head:29400", "tcp://head:29400/", "tcp://head:29400/some-run", "tcp://head?token_file=x"):
        assert read_backend_target(url).settings.endpoints == ("head:29400",)
    target = read_target("tcp://head/run?max_nodes=8&step=4")
    assert target.given == {"max_nodes": 8, "step": 4}
    assert target.settings.is_host is False
