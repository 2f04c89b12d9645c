"""A line to a backend is the backend itself until somebody throws a switch."""

import asyncio

import pytest

from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import Unavailable
from rallypoint.kv.types import Put
from rallypoint.testing.conformance.backend import BackendKit, backend_checks
from rallypoint.testing.line import CALL_TIMEOUT_S, Line
from rallypoint.testing.loop import run


@pytest.mark.parametrize("check", backend_checks(bounded_history=True))
def test_line_without_a_switch_thrown_conforms(check):
    server = MemoryServer(500)

    async def connect():
        return Line(MemoryBackend(server))

    kit = BackendKit(connect, asyncio.sleep, prefix="/test/", lease_slack_s=0.0, history_limit=500)
    run(check(kit), limit_s=100.0)


def test_calls_on_a_cut_line_time_out_and_are_not_executed():
    async def main():
        line = Line(MemoryBackend(MemoryServer()))
        line.cut()
        with pytest.raises(Unavailable) as failed:
            await line.txn((), [Put("k", b"v")])
        waited_s = asyncio.get_running_loop().time()
        line.heal()
        return str(failed.value), waited_s, (await line.get("k")).item

    assert run(main()) == ("no answer within 5 s", CALL_TIMEOUT_S, None)


def test_call_goes_on_when_a_cut_line_is_healed_in_time():
    async def main():
        line = Line(MemoryBackend(MemoryServer()))
        line.cut()
        asyncio.get_running_loop().call_later(2.0, line.heal)
        await line.txn((), [Put("k", b"v")])
        return asyncio.get_running_loop().time()

    assert run(main()) == 2.0


def test_calls_on_a_refused_line_fail_at_once():
    async def main():
        line = Line(MemoryBackend(MemoryServer()))
        line.refuse()
        with pytest.raises(Unavailable) as failed:
            await line.get("k")
        return str(failed.value), asyncio.get_running_loop().time()

    assert run(main()) == ("connection refused", 0.0)


def test_watch_on_a_cut_line_loses_nothing():
    async def main():
        server = MemoryServer()
        line, other = Line(MemoryBackend(server)), MemoryBackend(server)
        watch = line.watch("k", 0)
        first = asyncio.create_task(anext(watch))
        await asyncio.sleep(1)
        line.cut()
        for value in (b"1", b"2"):
            await other.txn((), [Put("k", value)])
        await asyncio.sleep(1)
        assert not first.done()
        assert watch.ready() is None
        line.heal()
        return [change.item.value for batch in (await first, await anext(watch)) for change in batch.changes]

    assert run(main()) == [b"1", b"2"]


def test_watch_on_a_cut_line_can_be_cancelled():
    async def main():
        server = MemoryServer()
        line = Line(MemoryBackend(server))
        watch = line.watch("k", 0)
        reading = asyncio.create_task(anext(watch))
        await asyncio.sleep(1)
        line.cut()
        await MemoryBackend(server).txn((), [Put("k", b"1")])
        await asyncio.sleep(1)
        watch.cancel()
        with pytest.raises(StopAsyncIteration):
            await reading

    run(main(), limit_s=10.0)


def test_withheld_writes_wait_until_they_are_released():
    async def main():
        line = Line(MemoryBackend(MemoryServer()))
        line.withhold(lambda put: put.key == "k")
        held = asyncio.create_task(line.txn((), [Put("k", b"v")]))
        await line.txn((), [Put("other", b"v")])
        await asyncio.sleep(60)
        assert not held.done()
        line.release()
        return (await held).committed

    assert run(main())
