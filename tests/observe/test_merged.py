"""Changes that are taken in together lead to the same picture, and nobody who left is called lost."""

import asyncio
import random

import msgspec
import pytest

from rallypoint.backends.contract import Watch
from rallypoint.backends.memory import MemoryBackend
from rallypoint.events import NodeLeft, NodeLost
from rallypoint.kv.types import Batch, Change, Item
from rallypoint.observe.follower import Follower, look, merged
from rallypoint.observe.happenings import Happenings
from tests.rendezvous.kit import Town, play

NAMES = [f"n{number}" for number in range(6)]


def change(key: str, revision: int, value: bytes | None) -> Change:
    item = None if value is None else Item(key, value, 1, revision, 1)
    return Change(key, item)


def test_only_the_last_change_of_a_key_is_kept_and_what_a_removed_key_held():
    batches = [
        Batch(1, (change("a", 1, b"1"), change("b", 1, b"1"))),
        Batch(2, (change("a", 2, b"2"),)),
        Batch(3, (change("b", 3, None), change("c", 3, None))),
        Batch(4, (change("a", 4, b"4"),)),
    ]
    (one,) = merged(batches)
    assert one.revision == 4
    assert [(found.key, found.item and found.item.value) for found in one.changes] == [
        ("b", b"1"),
        ("b", None),
        ("c", None),
        ("a", b"4"),
    ]
    assert merged(batches[:1]) == batches[:1]
    assert merged([]) == []


def plain(report):
    found = msgspec.to_builtins(report)
    found["nodes"] = sorted(found["nodes"], key=lambda line: line["id"])
    found["held"] = sorted(found["held"], key=lambda line: line["name"])
    found.pop("revision")
    return found


@pytest.mark.parametrize("seed", range(12))
def test_picture_of_merged_changes_equals_a_fresh_look(seed):
    async def scene(town: Town) -> None:
        rng = random.Random(seed)
        backend = MemoryBackend(town.server)
        reports = []

        async def follow():
            async for report in Follower(backend, town.keys, "memory://", quiet_s=0.1, pause_s=0.25):
                reports.append(report)  # noqa: PERF401 - they are looked at meanwhile

        task = asyncio.create_task(follow())
        for _ in range(25):
            town.stir(rng, NAMES)
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.3, 2.0, 20.0]))
            if rng.random() < 0.5:
                await asyncio.sleep(4.0)  # let what is under way come to rest
                assert plain(reports[-1]) == plain(await look(backend, town.keys, "memory://"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await backend.close()

    play(scene, seed=seed, min_nodes=2, max_nodes=4, last_call_timeout=1, hold_back_losses=2, keep_alive_interval=1)


def test_node_that_left_between_two_looks_is_not_called_lost():
    async def scene(town: Town) -> None:
        backend = MemoryBackend(town.server)
        happenings = Happenings()
        told = []

        async def follow():
            following = Follower(backend, town.keys, "memory://", quiet_s=0.1, on_changes=happenings.take)
            async for _ in following:
                told.extend(happenings.events)
                happenings.events = []

        await town.gathered("a", "b")
        task = asyncio.create_task(follow())
        await asyncio.sleep(1.0)
        await town.node("a").leave("done")
        await asyncio.sleep(3.0)
        assert [event.by for event in told if isinstance(event, NodeLeft)] == ["a"]
        assert not [event for event in told if isinstance(event, NodeLost)]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await backend.close()

    play(scene, min_nodes=2, last_call_timeout=1)


class Stream(Watch):
    """Batches that come one by one, and how often somebody waited for one."""

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
    """A backend whose watches are those streams."""

    def __init__(self, server) -> None:
        super().__init__(server)
        self.streams: dict[str, Stream] = {}

    def watch(self, prefix: str, after_revision: int) -> Watch:
        return self.streams.setdefault(prefix, Stream())


def test_changes_that_come_one_by_one_wake_the_reader_a_few_times_and_all_are_taken_in():
    async def scene(town: Town) -> None:
        backend = Streaming(town.server)
        taken = []

        async def follow():
            following = Follower(
                backend, town.keys, "memory://", quiet_s=0.1, on_changes=lambda _, changes: taken.append(changes)
            )
            async for _ in following:
                pass

        task = asyncio.create_task(follow())
        await asyncio.sleep(1.0)
        stream = backend.streams[town.keys.control]
        for number in range(200):
            key = f"{town.keys.drains}n{number}"
            stream.push(Batch(number + 2, (change(key, number + 2, b"{}"),)))
            await asyncio.sleep(0.001)
        await asyncio.sleep(1.0)
        assert [len(changes) for changes in taken if changes] == [200]
        assert stream.waits < 15
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await backend.close()

    play(scene, min_nodes=2, last_call_timeout=1)
