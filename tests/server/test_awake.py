"""A server that looks for the next request for a moment, and when it does not."""

import asyncio

import pytest

from rallypoint.server.awake import AWAKE_S, NEAR_S, Awake, WakefulConnection
from rallypoint.server.connection import Connection
from rallypoint.server.server import Server


class Clock:
    """Stands still unless it is told, or is looked at too often: then it must be past everything."""

    def __init__(self):
        self.now = 100.0
        self.looks = 0

    def __call__(self):
        self.looks += 1
        if self.looks > 1_000:
            self.now += 1
        return self.now


def turns(asks):
    """How many turns of the loop did not wait, after somebody asked: (who, seconds later) each."""

    async def main():
        clock = Clock()
        one = Awake(clock)
        for who, later_s in asks:
            clock.now += later_s
            one.asked(who)
        looked = 0
        while one._is_looking and looked < 10:
            await asyncio.sleep(0)
            looked += 1
        clock.now += 2 * AWAKE_S
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not one._is_looking
        return looked

    return asyncio.run(main())


def test_looks_for_more_after_one_client_asked_twice_in_quick_succession():
    assert turns([("a", 0), ("a", NEAR_S / 2)]) == 10


@pytest.mark.parametrize(
    "asks",
    [
        [("a", 0)],
        [("a", 0), ("a", 2 * NEAR_S)],
        [("a", 0), ("b", 0), ("a", 0), ("b", 0)],
        [("a", 0), ("a", NEAR_S / 2), ("b", 0)],
    ],
    ids=["once", "slowly", "in turn", "another comes"],
)
def test_waits_at_once_otherwise(asks):
    assert turns(asks) <= 1


def test_looks_on_only_while_requests_keep_coming():
    async def main():
        clock = Clock()
        one = Awake(clock)
        one.asked("a")
        one.asked("a")
        for _ in range(3):
            clock.now += AWAKE_S / 2
            one.asked("a")
            await asyncio.sleep(0)
            assert one._is_looking
        clock.now += AWAKE_S
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not one._is_looking

    asyncio.run(main())


@pytest.mark.parametrize("is_dedicated", [True, False])
def test_only_a_server_of_its_own_stays_awake(is_dedicated):
    async def main():
        server = Server(is_dedicated=is_dedicated)
        kind = type(server.make_connection())
        await server.stop()
        return kind

    assert asyncio.run(main()) is (WakefulConnection if is_dedicated else Connection)
