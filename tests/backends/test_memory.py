"""Specific to the memory backend: a server shared by loops and threads, and watches with a bounded buffer."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rallypoint.backends import memory
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import HistoryGone, Unavailable
from rallypoint.kv.types import Put
from rallypoint.testing.loop import run

PATIENCE_S = 20.0


async def put(backend, key, value=b"", lease=0) -> int:
    return (await backend.txn((), (Put(key, value, lease),))).revision


async def take(watch, count) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        return [(await anext(watch)).revision for _ in range(count)]


# --- loops and threads ------------------------------------------------------------------------------------------------


def test_watch_sees_what_another_thread_with_its_own_loop_writes():
    server = MemoryServer()
    watching = threading.Barrier(2)

    async def read():
        watch = MemoryBackend(server).watch("/", 1)
        reading = asyncio.create_task(take(watch, 200))
        await asyncio.sleep(0)  # now the watch waits
        watching.wait(PATIENCE_S)
        return await reading

    async def write():
        watching.wait(PATIENCE_S)
        backend = MemoryBackend(server)
        return [await put(backend, f"/{n % 7}", b"%d" % n) for n in range(200)]

    with ThreadPoolExecutor(2) as threads:
        seen, written = threads.submit(asyncio.run, read()), threads.submit(asyncio.run, write())
        assert seen.result(PATIENCE_S) == written.result(PATIENCE_S) == list(range(2, 202))


def test_threads_that_add_and_grant_at_the_same_time_lose_nothing():
    server = MemoryServer()

    async def work():
        backend = MemoryBackend(server)
        watch = backend.watch("/n", 1)
        for _ in range(50):
            await backend.add("/n", 1)
            lease = await backend.grant(0.001)
            await backend.keep_alive(lease)
            await backend.txn((), (Put("/other", b""),))
        return await take(watch, 200)

    with ThreadPoolExecutor(4) as threads:
        results = [thread.result(PATIENCE_S) for thread in [threads.submit(asyncio.run, work()) for _ in range(4)]]
    assert server.engine.items["/n"].value == b"200"
    assert all(seen == results[0] for seen in results)
    assert results[0] == sorted(set(results[0]))


def test_watch_gets_the_end_of_a_lease_whose_loop_is_closed():
    server = MemoryServer()

    async def grant_and_die():
        backend = MemoryBackend(server)
        await put(backend, "/a", b"x", await backend.grant(0.2))

    async def main():
        watch = MemoryBackend(server).watch("/", 1)
        first = asyncio.create_task(take(watch, 1))
        await asyncio.sleep(0)  # the watch waits before there is any lease
        await asyncio.to_thread(asyncio.run, grant_and_die())
        assert await first == [2]
        assert await take(watch, 1) == [3]

    asyncio.run(main())
    assert not server.engine.items


def test_writer_gets_no_error_from_a_watch_whose_loop_is_closed():
    server = MemoryServer()

    async def watch_and_die():
        backend = MemoryBackend(server)
        watch = backend.watch("/", 1)
        reading = asyncio.create_task(anext(watch))
        await asyncio.sleep(0)
        reading.cancel()
        return watch

    async def write():
        backend = MemoryBackend(server)
        lease = await backend.grant(1.0)
        return await put(backend, "/a", b"x", lease)

    watch = asyncio.run(watch_and_die())
    assert asyncio.run(write()) == 2
    assert watch.ready().revision == 2


# --- watches ----------------------------------------------------------------------------------------------------------


def test_watch_whose_buffer_overflowed_resumes_without_gap_or_repetition(monkeypatch):
    monkeypatch.setattr(memory, "WATCH_BUFFER", 8)

    async def main():
        backend = MemoryBackend(MemoryServer())
        watch = backend.watch("/", 1)
        written = [await put(backend, "/a")]
        seen = await take(watch, 1)
        for pause in (20, 3, 50, 8, 9):
            written += [await put(backend, "/a") for _ in range(pause)]
            seen += await take(watch, pause - 1)
        seen += await take(watch, 5)
        assert seen == written

    run(main(), limit_s=60.0)


def test_watch_gets_a_backlog_that_is_longer_than_its_buffer(monkeypatch):
    monkeypatch.setattr(memory, "WATCH_BUFFER", 8)

    async def main():
        backend = MemoryBackend(MemoryServer())
        written = [await put(backend, "/a") for _ in range(50)]
        watch = backend.watch("/", 1)
        seen = await take(watch, 20)
        written += [await put(backend, "/a") for _ in range(20)]
        seen += await take(watch, 50)
        assert seen == written

    run(main(), limit_s=60.0)


def test_watch_that_lags_behind_the_history_raises_history_gone(monkeypatch):
    monkeypatch.setattr(memory, "WATCH_BUFFER", 8)

    async def main():
        backend = MemoryBackend(MemoryServer(history=20))
        watch = backend.watch("/", 1)
        await put(backend, "/a")
        seen = await take(watch, 1)
        for _ in range(100):
            await put(backend, "/a")
        seen += await take(watch, 8)  # the content of its buffer
        with pytest.raises(HistoryGone) as caught:
            await anext(watch)
        assert seen == list(range(2, 11))
        assert caught.value.oldest == 82
        assert await take(backend.watch("/", 82), 20) == list(range(83, 103))

    run(main(), limit_s=60.0)


def test_cancelled_watch_is_released_by_its_server_and_its_connection():
    async def main():
        server = MemoryServer()
        backend = MemoryBackend(server)
        for _ in range(10):
            watch = backend.watch("/", 1)
            await put(backend, "/a")
            await anext(watch)
            watch.cancel()
            session = await backend.open_session(5.0)
            await session.close()
        del watch, session
        await asyncio.sleep(0.1)
        gc.collect()
        assert len(server._watches) == len(backend._watches) == len(backend._sessions) == 0

    run(main(), limit_s=60.0)


# --- closing ----------------------------------------------------------------------------------------------------------


def test_closing_ends_watches_and_sessions_of_that_connection_only():
    async def main():
        server = MemoryServer()
        closed, other = MemoryBackend(server), MemoryBackend(server)
        ended, going_on = await closed.open_session(3.0), await other.open_session(3.0)
        await put(closed, "/ended", b"", ended.lease)
        last = await put(other, "/going-on", b"", going_on.lease)
        watch, other_watch = closed.watch("/", last), other.watch("/", last)
        reading = asyncio.create_task(anext(watch, "ended"))
        await asyncio.sleep(0)
        await closed.close()
        await closed.close()
        assert await reading == "ended"
        assert await take(other_watch, 1) == [last + 1]
        assert asyncio.get_running_loop().time() == 3.0
        assert list(server.engine.items) == ["/going-on"]
        with pytest.raises(Unavailable, match="closed"):
            closed.watch("/", 1)
        with pytest.raises(Unavailable, match="closed"):
            await closed.get("/going-on")

    run(main(), limit_s=60.0)


def test_status_counts_keys_and_leases():
    async def main():
        backend = MemoryBackend(MemoryServer(), "here")
        await put(backend, "/a", b"", await backend.grant(1.0))
        before = await backend.status()
        await asyncio.sleep(1.0)
        return before, await backend.status()

    before, after = run(main())
    assert (before.backend, before.endpoint, before.revision) == ("memory", "here", 2)
    assert before.details == {"keys": "1", "leases": "1"}
    assert (after.revision, after.details) == (3, {"keys": "0", "leases": "0"})


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_expiry_of_a_very_short_lease_is_pushed_on_every_loop(kind):
    """uvloop runs callbacks with a delay of 0 without a timer, so `TimerHandle.when` cannot be used."""
    factory = None if kind == "asyncio" else pytest.importorskip("uvloop").new_event_loop

    async def main():
        server = MemoryServer()
        backend = MemoryBackend(server)
        reading = asyncio.create_task(take(backend.watch("/", 1), 1))
        await asyncio.sleep(0)  # now the watch waits
        for _ in range(3):
            await backend.grant(1e-9)
        await backend.grant(60.0)
        async with asyncio.timeout(PATIENCE_S):
            while len(server.engine.leases) > 1:  # noqa: ASYNC110 - a lease without keys ends without an event
                await asyncio.sleep(0.001)
        await put(backend, "/a")
        assert await reading == [2]

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
