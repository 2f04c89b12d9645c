"""What a coordinator takes in of a watch, of one that calls and of one that has to be waited for."""

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


def calling():
    return LocalBackend(EngineHost(Engine(history=3)))


def waited_for():
    return MemoryBackend(MemoryServer(history=3))


@pytest.fixture(params=[calling, waited_for])
def make(request):
    return request.param


async def put(backend, value):
    await backend.txn((), [Put("/a/x", value)])


def values(feed):
    taken = []
    while (batch := feed.ready()) is not None:
        taken += [change.item.value for change in batch.changes]
    return taken


async def to_its_end(feed):
    async with asyncio.timeout(SOON_S):
        while True:
            values(feed)
            await feed.wait(None)


def test_batch_wakes_whoever_waits(make):
    async def main():
        backend = make()
        feed = WatchReader(backend.watch("/a/", 0), "feed")
        assert values(feed) == []
        waits = asyncio.create_task(feed.wait(None))
        await asyncio.sleep(0.01)
        assert not waits.done()
        await put(backend, b"1")
        async with asyncio.timeout(SOON_S):
            await waits
        assert values(feed) == [b"1"]
        feed.stop()

    run(main())


def test_batch_that_came_before_anybody_waited_is_not_slept_through(make):
    async def main():
        backend = make()
        feed = WatchReader(backend.watch("/a/", 0), "feed")
        async with asyncio.timeout(SOON_S):
            await put(backend, b"1")
            await feed.wait(None)
            assert values(feed) == [b"1"]
            await put(backend, b"2")
            await put(backend, b"3")
            await feed.wait(None)
            taken = values(feed)
            while taken != [b"2", b"3"]:
                await feed.wait(None)
                taken += values(feed)
        feed.stop()

    run(main())


def test_instant_ends_the_wait_and_nothing_is_lost_by_it(make):
    async def main():
        backend, loop = make(), asyncio.get_running_loop()
        feed = WatchReader(backend.watch("/a/", 0), "feed")
        assert values(feed) == []
        async with asyncio.timeout(SOON_S):
            await feed.wait(loop.time() + 0.01)
            assert values(feed) == []
            await feed.wait(loop.time() - 1.0)
            await put(backend, b"1")
            await feed.wait(None)
        assert values(feed) == [b"1"]
        feed.stop()

    run(main())


def test_revisions_that_are_no_longer_kept_are_told(make):
    async def main():
        backend = make()
        for value in b"abcdefgh":
            await put(backend, bytes([value]))
        feed = WatchReader(backend.watch("/a/", 1), "feed")
        with pytest.raises(HistoryGone):
            await to_its_end(feed)
        feed.stop()

    run(main())


def test_watch_that_was_closed_with_its_backend_is_told(make):
    async def main():
        backend = make()
        watch = backend.watch("/a/", 0)
        feed = WatchReader(watch, "feed")
        assert values(feed) == []
        waits = asyncio.create_task(feed.wait(None))
        await asyncio.sleep(0)
        watch.cancel()
        async with asyncio.timeout(SOON_S):
            await waits
        with pytest.raises(Unavailable, match="was closed"):
            await to_its_end(feed)
        feed.stop()

    run(main())
