"""Clients that wait for keys: what they are told and when, and that the server is left as it was."""

import asyncio
import math
import random

import pytest

from rallypoint.kv.types import Delete, Grant, Put, Revoke, Txn
from rallypoint.wire.messages import Await, Do
from tests.server.kit import Raw, eventually, run, serving


def keys_of(result) -> list[bytes | None]:
    return [got.item and got.item.value for got in result.results]


def put(server, *keys: str) -> None:
    server.engine_host.execute(Txn((), tuple(Put(key, key.encode()) for key in keys)))


def drop(server, key: str) -> None:
    server.engine_host.execute(Txn((), (Delete(key),)))


async def waits(raw, server, number: int = 1) -> None:
    """Until the server has that many requests that wait."""

    def waiting() -> int:
        return sum(len(one._awaiting) for one in server.connections if one._awaiting is not None)

    await eventually(lambda: waiting() == number, f"{number} wait")


def test_keys_that_are_there_are_answered_at_once_and_in_order():
    async def main():
        async with serving() as server:
            put(server, "/b", "/a")
            raw, _ = await Raw.welcomed(server)
            before = server.traffic.frames_in, server.traffic.frames_out
            raw.send(Await(1, ("/a", "/b", "/a"), 5.0))
            assert keys_of(await raw.answer(1)) == [b"/a", b"/b", b"/a"]
            assert (server.traffic.frames_in, server.traffic.frames_out) == (before[0] + 1, before[1] + 1)
            raw.send(Await(2, (), 5.0))
            assert keys_of(await raw.answer(2)) == []

    run(main())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_answered_once_when_the_last_key_comes_in_whatever_order_they_come(order):
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            watches = server.engine_host.watch_count
            out = server.traffic.frames_out
            raw.send(Await(1, ("/0", "/1", "/2"), 60.0))
            await waits(raw, server)
            assert server.engine_host.watch_count == watches + 1
            for number in order:
                assert server.traffic.frames_out == out
                put(server, f"/{number}")
                await asyncio.sleep(0)
            assert keys_of(await raw.answer(1)) == [b"/0", b"/1", b"/2"]
            assert server.engine_host.watch_count == watches
            assert server.traffic.frames_out == out + 1

    run(main())


def test_keys_whose_names_begin_alike_are_different_keys():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, ("/a",), 60.0), Await(2, ("/ab", "/a"), 60.0))
            await waits(raw, server, 2)
            put(server, "/ab")
            put(server, "/abc")
            await waits(raw, server, 2)
            put(server, "/a")
            assert keys_of(await raw.answer(1)) == [b"/a"]
            assert keys_of(await raw.answer(2)) == [b"/ab", b"/a"]

    run(main())


def test_key_that_goes_again_before_all_are_there_is_waited_for_again():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, ("/a", "/b"), 60.0))
            await waits(raw, server)
            put(server, "/a")
            drop(server, "/a")
            put(server, "/b")
            await waits(raw, server)
            drop(server, "/b")
            put(server, "/a")
            await waits(raw, server)
            put(server, "/b")
            assert keys_of(await raw.answer(1)) == [b"/a", b"/b"]

    run(main())


def test_key_of_a_lease_that_ends_is_not_there():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            lease = server.engine_host.execute(Grant(60.0)).lease
            server.engine_host.execute(Txn((), (Put("/a", b"", lease),)))
            raw.send(Await(1, ("/a", "/b"), 60.0))
            await waits(raw, server)
            server.engine_host.execute(Revoke(lease))
            put(server, "/b")
            await waits(raw, server)
            put(server, "/a")
            assert keys_of(await raw.answer(1)) == [b"/a", b"/b"]

    run(main())


def test_when_its_time_is_over_it_is_told_what_is_there_and_nothing_is_left():
    async def main():
        async with serving() as server:
            put(server, "/a")
            raw, _ = await Raw.welcomed(server)
            watches = server.engine_host.watch_count
            raw.send(Await(1, ("/a", "/b"), 0.05))
            assert keys_of(await raw.answer(1)) == [b"/a", None]
            await waits(raw, server, 0)
            assert server.engine_host.watch_count == watches
            put(server, "/b")
            raw.send(Await(2, ("/b",), 1.0))
            assert keys_of(await raw.answer(2)) == [b"/b"]
            assert not raw.messages

    run(main())


@pytest.mark.parametrize("closing", ["close", "abort"])
def test_connection_that_closes_leaves_nothing(closing):
    async def main():
        async with serving() as server:
            watches = server.engine_host.watch_count
            raw, _ = await Raw.welcomed(server)
            raw.send(*(Await(seq, ("/a", "/b"), 3000.0) for seq in range(1, 101)))
            await eventually(lambda: server.engine_host.watch_count == watches + 100, "all wait")
            getattr(raw, closing)()
            await eventually(lambda: server.engine_host.watch_count == watches, "nothing is watched")
            put(server, "/a", "/b")
            loop = asyncio.get_running_loop()
            assert not [one for one in loop._scheduled if not one.cancelled() and one.when() > loop.time() + 1000.0]

    run(main())


@pytest.mark.parametrize("within_s", [math.nan, -math.inf, -1.0, 0.0])
def test_time_that_is_none_is_answered_at_once(within_s):
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            watches = server.engine_host.watch_count
            raw.send(Await(1, ("/a",), within_s))
            assert keys_of(await raw.answer(1)) == [None]
            assert server.engine_host.watch_count == watches

    run(main())


@pytest.mark.parametrize("within_s", [math.nan, math.inf, 1e300, -math.nan])
def test_absurd_times_do_not_disturb_the_timers_of_the_server(within_s):
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            for seq in range(1, 60):  # between them timers that must go off in their order
                raw.send(Await(seq, ("/never",), within_s), Do(seq + 100, Grant(random.Random(seq).uniform(0.05, 0.5))))
            await raw.answer(159)
            # Bug that this found: a time that is no number got into the loop's timers, whose order it breaks.
            assert not any(math.isnan(one.when()) for one in asyncio.get_running_loop()._scheduled)
            leases = server.engine_host.engine.leases
            await eventually(lambda: len(leases) == 0, "all leases end", 5.0)
            put(server, "/never")
            raw.send(Await(1000, ("/never",), within_s))
            assert keys_of(await raw.answer(1000)) == [b"/never"]
            assert len(server.connections) == 1

    run(main())


def test_number_that_is_used_twice_leaves_nothing_behind():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            watches = server.engine_host.watch_count
            raw.send(Await(1, ("/a",), 3000.0), Await(1, ("/b",), 3000.0), Await(1, ("/c",), 3000.0))
            await waits(raw, server)
            # Bug that this found: the first ones were forgotten, and watched for ever.
            assert server.engine_host.watch_count == watches + 1
            put(server, "/a", "/b")
            await waits(raw, server)
            raw.abort()
            await eventually(lambda: server.engine_host.watch_count == watches, "nothing is watched")

    run(main())


def test_many_keys_that_come_one_by_one_cost_about_one_look_each():
    class Counting(dict):
        looks = 0

        def __contains__(self, key):
            Counting.looks += 1
            return super().__contains__(key)

    async def main():
        async with serving() as server:
            number = 5_000
            server.engine_host.engine.items = Counting(server.engine_host.engine.items)
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, tuple(f"/{at}" for at in range(number)), 600.0))
            await waits(raw, server)
            Counting.looks = 0
            for at in range(number):
                put(server, f"/{at}")
            assert keys_of(await raw.answer(1)) == [b"/%d" % at for at in range(number)]
            # Bug that this found: every key that came was the occasion to look for all of them.
            assert Counting.looks < 20 * number, Counting.looks

    run(main())


def test_huge_list_of_keys_is_waited_for_and_answered():
    async def main():
        async with serving() as server:
            keys = tuple(f"/{at}" for at in range(200_000))
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, keys, 600.0))
            await waits(raw, server)
            put(server, *keys)
            assert len(keys_of(await raw.answer(1))) == len(keys)

    run(main())


def test_answer_that_fits_in_no_frame_is_refused_and_the_connection_goes_on():
    async def main():
        async with serving() as server:
            server.engine_host.execute(Txn((), (Put("/big", b"x" * 20_000_000),)))
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, ("/big", "/big"), 1.0))
            assert "too large" in (await raw.answer(1)).message
            raw.send(Await(2, ("/big",), 1.0))
            assert len(keys_of(await raw.answer(2))[0]) == 20_000_000

    run(main())


def test_who_waits_does_not_hold_up_what_comes_after_it():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, ("/a",), 60.0), Do(2, Txn((), (Put("/a", b"1"),))))
            await raw.answer(1)
            raw.send(Await(3, ("/b",), 60.0), Do(4, Txn((), (Put("/c", b"1"),))))
            assert (await raw.answer(4)).committed

    run(main())
