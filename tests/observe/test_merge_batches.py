"""Merged batches lead to the same report as single ones, and a node that left does not count as lost."""

import asyncio
import random

import msgspec
import pytest

from rallypoint.backends.contract import Watch
from rallypoint.backends.memory import MemoryBackend
from rallypoint.kv.types import Batch, Change, Item
from rallypoint.observe.follower import Follower, merge_batches, read_report
from rallypoint.observe.run_events import RunEvents
from tests.rendezvous.kit import CheckedWorld, run_scenario

NAMES = [f"n{number}" for number in range(6)]


def change(key: str, revision: int, value: bytes | None) -> Change:
    item = None if value is None else Item(key, value, 1, revision, 1)
    return Change(key, item)


def test_only_the_last_change_of_a_key_is_kept_and_before_a_removal_the_last_value():
    batches = [
        Batch(1, (change("a", 1, b"1"), change("b", 1, b"1"))),
        Batch(2, (change("a", 2, b"2"),)),
        Batch(3, (change("b", 3, None), change("c", 3, None))),
        Batch(4, (change("a", 4, b"4"),)),
    ]
    (one,) = merge_batches(batches)
    assert one.revision == 4
    assert [(found.key, found.item and found.item.value) for found in one.changes] == [
        ("b", b"1"),
        ("b", None),
        ("c", None),
        ("a", b"4"),
    ]
    assert merge_batches(batches[:1]) == batches[:1]
    assert merge_batches([]) == []


def plain(report):
    found = msgspec.to_builtins(report)
    found["nodes"] = sorted(found["nodes"], key=lambda node: node["id"])
    found["held"] = sorted(found["held"], key=lambda held: held["name"])
    found.pop("revision")
    return found


@pytest.mark.parametrize("seed", range(12))
def test_report_of_merged_changes_equals_one_that_is_read_anew(seed):
    async def case(world: CheckedWorld) -> None:
        rng = random.Random(seed)
        backend = MemoryBackend(world.server)
        reports = []

        async def follow():
            async for report in Follower(backend, world.keys, "memory://", quiet_s=0.1, pause_s=0.25):
                reports.append(report)  # noqa: PERF401 - they are read while the loop runs

        task = asyncio.create_task(follow())
        for _ in range(25):
            world.random_event(rng, NAMES)
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.3, 2.0, 20.0]))
            if rng.random() < 0.5:
                await asyncio.sleep(4.0)  # until no more changes arrive
                assert plain(reports[-1]) == plain(await read_report(backend, world.keys, "memory://"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await backend.close()

    run_scenario(
        case, seed=seed, min_nodes=2, max_nodes=4, last_call_timeout=1, hold_back_losses=2, keep_alive_interval=1
    )


def test_node_that_left_between_two_reports_does_not_count_as_lost():
    async def case(world: CheckedWorld) -> None:
        backend = MemoryBackend(world.server)
        run_events = RunEvents()
        gone = []

        async def follow():
            following = Follower(backend, world.keys, "memory://", quiet_s=0.1, on_changes=run_events.take)
            async for _ in following:
                gone.extend(run_events.departures)
                run_events.departures = []

        await world.join_all("a", "b")
        task = asyncio.create_task(follow())
        await asyncio.sleep(1.0)
        await world.node("a").leave("done")
        await asyncio.sleep(3.0)
        assert [(one.name, one.left) for one in gone] == [("a", True)]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await backend.close()

    run_scenario(case, min_nodes=2, last_call_timeout=1)


class Stream(Watch):
    """A watch whose batches come one by one. Counts how often the reader waited for one."""

    def __init__(self) -> None:
        self.waits = 0
        self._came: asyncio.Queue[Batch] = asyncio.Queue()

    def push(self, batch: Batch) -> None:
        self._came.put_nowait(batch)

    async def __anext__(self) -> Batch:
        self.waits += 1
        return await self._came.get()

    def ready(self) -> Batch | None:
        return None if self._came.empty() else self._came.get_nowait()

    def cancel(self) -> None:
        pass


class Streaming(MemoryBackend):
    """A backend whose watches are `Stream`s."""

    def __init__(self, server) -> None:
        super().__init__(server)
        self.streams: dict[str, Stream] = {}

    def watch(self, prefix: str, after_revision: int) -> Watch:
        return self.streams.setdefault(prefix, Stream())


def test_changes_that_come_one_by_one_wake_the_reader_a_few_times_and_all_are_applied():
    async def case(world: CheckedWorld) -> None:
        backend = Streaming(world.server)
        taken = []

        async def follow():
            following = Follower(
                backend, world.keys, "memory://", quiet_s=0.1, on_changes=lambda _, changes: taken.append(changes)
            )
            async for _ in following:
                pass

        task = asyncio.create_task(follow())
        await asyncio.sleep(1.0)
        stream = backend.streams[world.keys.control]
        for number in range(200):
            key = f"{world.keys.drains}n{number}"
            stream.push(Batch(number + 2, (change(key, number + 2, b"{}"),)))
            await asyncio.sleep(0.001)
        await asyncio.sleep(1.0)
        assert [len(changes) for changes in taken if changes] == [200]
        assert stream.waits < 15
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await backend.close()

    run_scenario(case, min_nodes=2, last_call_timeout=1)
