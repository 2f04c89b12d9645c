"""Reading a watch for the coordinator, with watches that call back and watches that do not."""

import asyncio

import pytest

from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import HistoryGone, Unavailable
from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Put
from rallypoint.rendezvous.watch_reader import WatchReader
from rallypoint.server.engine_host import EngineHost
from rallypoint.server.local_backend import LocalBackend
from tests.server.kit import run

SOON_S = 5.0


def with_callback():
    return LocalBackend(EngineHost(Engine(history=3)))


def without_callback():
    return MemoryBackend(MemoryServer(history=3))


@pytest.fixture(params=[with_callback, without_callback])
def make(request):
    return request.param


async def put(backend, value):
    await backend.txn((), [Put("/a/x", value)])


def values(reader):
    received = []
    while (batch := reader.ready()) is not None:
        received += [change.item.value for change in batch.changes]
    return received


async def read_to_the_end(reader):
    async with asyncio.timeout(SOON_S):
        while True:
            values(reader)
            await reader.wait(None)


def test_batch_ends_the_wait(make):
    async def main():
        backend = make()
        reader = WatchReader(backend.watch("/a/", 0), "reader")
        assert values(reader) == []
        waiting = asyncio.create_task(reader.wait(None))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await put(backend, b"1")
        async with asyncio.timeout(SOON_S):
            await waiting
        assert values(reader) == [b"1"]
        reader.stop()

    run(main())


def test_batch_that_arrived_before_the_wait_ends_it_at_once(make):
    async def main():
        backend = make()
        reader = WatchReader(backend.watch("/a/", 0), "reader")
        async with asyncio.timeout(SOON_S):
            await put(backend, b"1")
            await reader.wait(None)
            assert values(reader) == [b"1"]
            await put(backend, b"2")
            await put(backend, b"3")
            await reader.wait(None)
            received = values(reader)
            while received != [b"2", b"3"]:
                await reader.wait(None)
                received += values(reader)
        reader.stop()

    run(main())


def test_wait_ends_at_its_instant_without_losing_a_batch(make):
    async def main():
        backend, loop = make(), asyncio.get_running_loop()
        reader = WatchReader(backend.watch("/a/", 0), "reader")
        assert values(reader) == []
        async with asyncio.timeout(SOON_S):
            await reader.wait(loop.time() + 0.01)
            assert values(reader) == []
            await reader.wait(loop.time() - 1.0)
            await put(backend, b"1")
            await reader.wait(None)
        assert values(reader) == [b"1"]
        reader.stop()

    run(main())


def test_compacted_revisions_raise_history_gone(make):
    async def main():
        backend = make()
        for value in b"abcdefgh":
            await put(backend, bytes([value]))
        reader = WatchReader(backend.watch("/a/", 1), "reader")
        with pytest.raises(HistoryGone):
            await read_to_the_end(reader)
        reader.stop()

    run(main())


def test_closed_watch_raises_unavailable(make):
    async def main():
        backend = make()
        watch = backend.watch("/a/", 0)
        reader = WatchReader(watch, "reader")
        assert values(reader) == []
        waiting = asyncio.create_task(reader.wait(None))
        await asyncio.sleep(0)
        watch.cancel()
        async with asyncio.timeout(SOON_S):
            await waiting
        with pytest.raises(Unavailable, match="was closed"):
            await read_to_the_end(reader)
        reader.stop()

    run(main())
