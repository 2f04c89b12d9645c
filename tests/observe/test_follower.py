"""A report that is kept up to date equals one that is read anew, and observing a run leaves no trace in it."""

import asyncio
import random

import msgspec
import pytest

from rallypoint.backends.memory import MemoryBackend
from rallypoint.kv.types import Change, Item
from rallypoint.observe.follower import Follower, read_report
from rallypoint.observe.report import NodeReport, Phase, Report, Standing
from rallypoint.observe.report_builder import ReportBuilder
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import NodePhase, encode
from tests.rendezvous.fake_run import KEYS, config, node
from tests.rendezvous.kit import CheckedWorld, run_scenario

NAMES = [f"n{number}" for number in range(7)]


class Watcher:
    """Follows a world's run and keeps the last report."""

    def __init__(self, world: CheckedWorld) -> None:
        self.backend = MemoryBackend(world.server)
        self.keys = world.keys
        self.reports: list[Report] = []
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for report in Follower(self.backend, self.keys, "memory://"):
            self.reports.append(report)

    async def fresh(self) -> Report:
        return await read_report(self.backend, self.keys, "memory://")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.backend.close()


def comparable(report: Report) -> object:
    """A report without the order of its nodes and without its revision."""
    plain = msgspec.to_builtins(report)
    plain["nodes"] = sorted(plain["nodes"], key=lambda node: node["id"])
    plain["held"] = sorted(plain["held"], key=lambda held: held["name"])
    plain.pop("revision")
    return plain


@pytest.mark.parametrize("seed", range(30))
def test_followed_report_equals_one_that_is_read_anew(seed):
    async def case(world: CheckedWorld) -> None:
        rng = random.Random(seed)
        watcher = Watcher(world)
        for _ in range(25):
            world.random_event(rng, NAMES)
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.3, 2.0, 20.0]))
            if rng.random() < 0.5:
                await asyncio.sleep(3.0)  # until no more changes arrive
                assert comparable(watcher.reports[-1]) == comparable(await watcher.fresh())
        await watcher.stop()

    run_scenario(
        case,
        seed=seed,
        min_nodes=2,
        max_nodes=4,
        last_call_timeout=1,
        hold_back_losses=2,
        hold_back=5,
        keep_alive_interval=1,
    )


def test_observing_creates_no_key_no_lease_and_no_run():
    async def case(world: CheckedWorld) -> None:
        backend = MemoryBackend(world.server)
        report = await read_report(backend, world.keys, "memory://")
        assert report.phase is Phase.ABSENT
        follower = aiter(Follower(backend, world.keys, "memory://"))
        await anext(follower)
        assert not world.server.engine.items
        assert len(world.server.engine.leases) == 0
        await backend.close()

    run_scenario(case, min_nodes=1)


def test_members_have_ranks_labels_and_the_time_they_joined():
    async def case(world: CheckedWorld) -> None:
        await world.join_all("a", "b", labels={"zone": "x"})
        backend = MemoryBackend(world.server)
        report = await read_report(backend, world.keys, "memory://")
        members = report.standing(Standing.MEMBER)
        assert [(member.name, member.rank, member.labels) for member in members] == [
            ("a", 0, {"zone": "x"}),
            ("b", 1, {"zone": "x"}),
        ]
        assert all(member.joined_at is not None and member.joined_at >= 1_000_000.0 for member in members)
        assert report.round is not None
        assert (report.round.number, report.round.phase, report.round.present) == (1, "active", 2)
        assert report.coordinator is not None
        assert report.coordinator.name in ("a", "b")
        await backend.close()

    run_scenario(case, min_nodes=2)


def test_nodes_that_would_be_admitted_are_waiting_and_the_others_are_spares():
    async def case(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        for name in ("c", "d", "e"):
            world.enter(name)
            await asyncio.sleep(0.5)
        backend = MemoryBackend(world.server)
        report = await read_report(backend, world.keys, "memory://")
        assert [waiting.name for waiting in report.standing(Standing.WAITING)] == ["c", "d"]
        assert [spare.name for spare in report.standing(Standing.SPARE)] == ["e"]
        await backend.close()

    run_scenario(case, min_nodes=2, max_nodes=4, last_call_timeout=0.1, admission_window=600)


class CountingBuilder(ReportBuilder):
    """Counts the reports of nodes that it makes."""

    made = 0

    def _node_report(self, node_id: str, standing: Standing) -> NodeReport:
        self.made += 1
        return super()._node_report(node_id, standing)


def test_a_change_costs_the_same_however_many_nodes_there_are():
    def item(name: str, revision: int, phase: NodePhase = NodePhase.JOINING) -> Item:
        return Item(KEYS.node(name), encode(node(name, phase=phase)), revision, revision, 1)

    for count in (10, 2_000):
        builder = CountingBuilder(KEYS, "memory://", 0.0)
        first = Item(KEYS.config, encode(config(min_nodes=5_000, max_nodes=5_000)), 1, 1, 1)
        builder.load([first, *(item(f"n{number}", number + 2) for number in range(count))], count + 2, 0.0)
        assert builder.report().counts.joining == count
        builder.made = 0
        builder.apply([Change(KEYS.node("late"), item("late", count + 3))], count + 3, 1.0)
        assert builder.report().counts.joining == count + 1
        assert builder.made == 1


def test_key_whose_record_cannot_be_read_is_named():
    builder = ReportBuilder(RunKeys("rallypoint", "run"), "memory://", 0.0)
    builder.load([Item(KEYS.config, b"not ours", 1, 1, 1)], 1, 0.0)
    report = builder.report()
    assert list(report.unreadable) == [KEYS.config]
    assert report.exists
