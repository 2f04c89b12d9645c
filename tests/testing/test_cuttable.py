"""A cuttable backend passes everything on until the test cuts it."""

import asyncio

import pytest

from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import Unavailable
from rallypoint.kv.types import Put
from rallypoint.testing.conformance.backend import BackendKit, backend_checks
from rallypoint.testing.cuttable import CALL_TIMEOUT_S, CuttableBackend
from rallypoint.testing.loop import run


@pytest.mark.parametrize("check", backend_checks(bounded_history=True))
def test_cuttable_backend_that_is_not_cut_conforms(check):
    server = MemoryServer(500)

    async def connect():
        return CuttableBackend(MemoryBackend(server))

    kit = BackendKit(connect, asyncio.sleep, prefix="/test/", lease_slack_s=0.0, history_limit=500)
    run(check(kit), limit_s=100.0)


def test_calls_during_a_cut_time_out_and_are_not_executed():
    async def main():
        cuttable = CuttableBackend(MemoryBackend(MemoryServer()))
        cuttable.cut()
        with pytest.raises(Unavailable) as failed:
            await cuttable.txn((), [Put("k", b"v")])
        waited_s = asyncio.get_running_loop().time()
        cuttable.heal()
        return str(failed.value), waited_s, (await cuttable.get("k")).item

    assert run(main()) == ("no answer within 5 s", CALL_TIMEOUT_S, None)


def test_call_continues_when_the_cut_is_healed_in_time():
    async def main():
        cuttable = CuttableBackend(MemoryBackend(MemoryServer()))
        cuttable.cut()
        asyncio.get_running_loop().call_later(2.0, cuttable.heal)
        await cuttable.txn((), [Put("k", b"v")])
        return asyncio.get_running_loop().time()

    assert run(main()) == 2.0


def test_refused_calls_fail_at_once():
    async def main():
        cuttable = CuttableBackend(MemoryBackend(MemoryServer()))
        cuttable.refuse()
        with pytest.raises(Unavailable) as failed:
            await cuttable.get("k")
        return str(failed.value), asyncio.get_running_loop().time()

    assert run(main()) == ("connection refused", 0.0)


def test_watch_loses_nothing_during_a_cut():
    async def main():
        server = MemoryServer()
        cuttable, other = CuttableBackend(MemoryBackend(server)), MemoryBackend(server)
        watch = cuttable.watch("k", 0)
        first = asyncio.create_task(anext(watch))
        await asyncio.sleep(1)
        cuttable.cut()
        for value in (b"1", b"2"):
            await other.txn((), [Put("k", value)])
        await asyncio.sleep(1)
        assert not first.done()
        assert watch.ready() is None
        cuttable.heal()
        return [change.item.value for batch in (await first, await anext(watch)) for change in batch.changes]

    assert run(main()) == [b"1", b"2"]


def test_watch_can_be_cancelled_during_a_cut():
    async def main():
        server = MemoryServer()
        cuttable = CuttableBackend(MemoryBackend(server))
        watch = cuttable.watch("k", 0)
        reading = asyncio.create_task(anext(watch))
        await asyncio.sleep(1)
        cuttable.cut()
        await MemoryBackend(server).txn((), [Put("k", b"1")])
        await asyncio.sleep(1)
        watch.cancel()
        with pytest.raises(StopAsyncIteration):
            await reading

    run(main(), limit_s=10.0)


def test_withheld_writes_wait_until_they_are_released():
    async def main():
        cuttable = CuttableBackend(MemoryBackend(MemoryServer()))
        cuttable.withhold(lambda put: put.key == "k")
        held = asyncio.create_task(cuttable.txn((), [Put("k", b"v")]))
        await cuttable.txn((), [Put("other", b"v")])
        await asyncio.sleep(60)
        assert not held.done()
        cuttable.release()
        return (await held).committed

    assert run(main())
