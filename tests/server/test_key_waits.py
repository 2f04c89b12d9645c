"""Requests that wait for keys: what is answered and when, and that no watch or timer is left over."""

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


async def wait_for_waits(server, number: int = 1) -> None:
    """Wait until the server has this number of waiting requests."""

    def waiting() -> int:
        return sum(len(one._awaiting) for one in server.connections if one._awaiting is not None)

    await eventually(lambda: waiting() == number, f"{number} requests wait")


def test_existing_keys_are_answered_at_once_and_in_order():
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
def test_answer_comes_once_with_the_last_key_in_any_order_of_writes(order):
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            watches = server.engine_host.watch_count
            out = server.traffic.frames_out
            raw.send(Await(1, ("/0", "/1", "/2"), 60.0))
            await wait_for_waits(server)
            assert server.engine_host.watch_count == watches + 1
            for number in order:
                assert server.traffic.frames_out == out
                put(server, f"/{number}")
                await asyncio.sleep(0)
            assert keys_of(await raw.answer(1)) == [b"/0", b"/1", b"/2"]
            assert server.engine_host.watch_count == watches
            assert server.traffic.frames_out == out + 1

    run(main())


def test_key_that_is_a_prefix_of_another_key_is_not_mistaken_for_it():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, ("/a",), 60.0), Await(2, ("/ab", "/a"), 60.0))
            await wait_for_waits(server, 2)
            put(server, "/ab")
            put(server, "/abc")
            await wait_for_waits(server, 2)
            put(server, "/a")
            assert keys_of(await raw.answer(1)) == [b"/a"]
            assert keys_of(await raw.answer(2)) == [b"/ab", b"/a"]

    run(main())


def test_key_that_is_deleted_before_all_exist_is_waited_for_again():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, ("/a", "/b"), 60.0))
            await wait_for_waits(server)
            put(server, "/a")
            drop(server, "/a")
            put(server, "/b")
            await wait_for_waits(server)
            drop(server, "/b")
            put(server, "/a")
            await wait_for_waits(server)
            put(server, "/b")
            assert keys_of(await raw.answer(1)) == [b"/a", b"/b"]

    run(main())


def test_key_of_an_ended_lease_is_missing():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            lease = server.engine_host.execute(Grant(60.0)).lease
            server.engine_host.execute(Txn((), (Put("/a", b"", lease),)))
            raw.send(Await(1, ("/a", "/b"), 60.0))
            await wait_for_waits(server)
            server.engine_host.execute(Revoke(lease))
            put(server, "/b")
            await wait_for_waits(server)
            put(server, "/a")
            assert keys_of(await raw.answer(1)) == [b"/a", b"/b"]

    run(main())


def test_timed_out_request_is_answered_with_the_existing_keys():
    async def main():
        async with serving() as server:
            put(server, "/a")
            raw, _ = await Raw.welcomed(server)
            watches = server.engine_host.watch_count
            raw.send(Await(1, ("/a", "/b"), 0.05))
            assert keys_of(await raw.answer(1)) == [b"/a", None]
            await wait_for_waits(server, 0)
            assert server.engine_host.watch_count == watches
            put(server, "/b")
            raw.send(Await(2, ("/b",), 1.0))
            assert keys_of(await raw.answer(2)) == [b"/b"]
            assert not raw.messages

    run(main())


@pytest.mark.parametrize("closing", ["close", "abort"])
def test_closed_connection_leaves_no_watch_or_timer(closing):
    async def main():
        async with serving() as server:
            watches = server.engine_host.watch_count
            raw, _ = await Raw.welcomed(server)
            raw.send(*(Await(seq, ("/a", "/b"), 3000.0) for seq in range(1, 101)))
            await eventually(lambda: server.engine_host.watch_count == watches + 100, "all requests wait")
            getattr(raw, closing)()
            await eventually(lambda: server.engine_host.watch_count == watches, "no watch is left")
            put(server, "/a", "/b")
            loop = asyncio.get_running_loop()
            assert not [one for one in loop._scheduled if not one.cancelled() and one.when() > loop.time() + 1000.0]

    run(main())


@pytest.mark.parametrize("within_s", [math.nan, -math.inf, -1.0, 0.0])
def test_request_without_a_positive_time_is_answered_at_once(within_s):
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            watches = server.engine_host.watch_count
            raw.send(Await(1, ("/a",), within_s))
            assert keys_of(await raw.answer(1)) == [None]
            assert server.engine_host.watch_count == watches

    run(main())


@pytest.mark.parametrize("within_s", [math.nan, math.inf, 1e300, -math.nan])
def test_absurd_times_do_not_break_the_timers_of_the_server(within_s):
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            for seq in range(1, 60):  # with leases in between, which must end in order
                raw.send(Await(seq, ("/never",), within_s), Do(seq + 100, Grant(random.Random(seq).uniform(0.05, 0.5))))
            await raw.answer(159)
            # This found a bug: NaN became the time of a timer, which breaks the order of all timers.
            assert not any(math.isnan(one.when()) for one in asyncio.get_running_loop()._scheduled)
            leases = server.engine_host.engine.leases
            await eventually(lambda: len(leases) == 0, "all leases end", 5.0)
            put(server, "/never")
            raw.send(Await(1000, ("/never",), within_s))
            assert keys_of(await raw.answer(1000)) == [b"/never"]
            assert len(server.connections) == 1

    run(main())


def test_request_with_a_used_number_replaces_the_waiting_one():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            watches = server.engine_host.watch_count
            raw.send(Await(1, ("/a",), 3000.0), Await(1, ("/b",), 3000.0), Await(1, ("/c",), 3000.0))
            await wait_for_waits(server)
            # This found a bug: the watches of the replaced requests were never removed.
            assert server.engine_host.watch_count == watches + 1
            put(server, "/a", "/b")
            await wait_for_waits(server)
            raw.abort()
            await eventually(lambda: server.engine_host.watch_count == watches, "no watch is left")

    run(main())


def test_many_keys_written_one_by_one_cost_about_one_look_each():
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
            await wait_for_waits(server)
            Counting.looks = 0
            for at in range(number):
                put(server, f"/{at}")
            assert keys_of(await raw.answer(1)) == [b"/%d" % at for at in range(number)]
            # This found a bug: each new key caused a look at all keys.
            assert Counting.looks < 20 * number, Counting.looks

    run(main())


def test_huge_list_of_keys_is_answered():
    async def main():
        async with serving() as server:
            keys = tuple(f"/{at}" for at in range(200_000))
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, keys, 600.0))
            await wait_for_waits(server)
            put(server, *keys)
            assert len(keys_of(await raw.answer(1))) == len(keys)

    run(main())


def test_answer_larger_than_a_frame_is_a_failure_and_the_connection_stays_open():
    async def main():
        async with serving() as server:
            server.engine_host.execute(Txn((), (Put("/big", b"x" * 20_000_000),)))
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, ("/big", "/big"), 1.0))
            assert "too large" in (await raw.answer(1)).message
            raw.send(Await(2, ("/big",), 1.0))
            assert len(keys_of(await raw.answer(2))[0]) == 20_000_000

    run(main())


def test_waiting_request_does_not_block_later_requests():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(Await(1, ("/a",), 60.0), Do(2, Txn((), (Put("/a", b"1"),))))
            await raw.answer(1)
            raw.send(Await(3, ("/b",), 60.0), Do(4, Txn((), (Put("/c", b"1"),))))
            assert (await raw.answer(4)).committed

    run(main())
