"""When answers that can wait for a push go out without one."""

from __future__ import annotations

import asyncio

from rallypoint.server.soon import MOST_QUIET_S, MOST_WAIT_S, QUIET_S, Soon
from rallypoint.testing.loop import VirtualTimeLoop, run


class Sender:
    """Notes when it was told to send."""

    def __init__(self) -> None:
        self.flushed_at: list[float] = []

    def flush_soon(self) -> None:
        self.flushed_at.append(asyncio.get_running_loop().time())


def test_an_answer_goes_out_when_nobody_has_asked_for_a_moment() -> None:
    async def story() -> None:
        soon, sender, begun = Soon(), Sender(), asyncio.get_running_loop().time()
        soon.add(sender, connections=1)
        await asyncio.sleep(1.0)
        assert [at - begun for at in sender.flushed_at] == [QUIET_S]

    run(story())


def test_an_answer_waits_while_others_keep_asking() -> None:
    async def story() -> None:
        soon, first, begun = Soon(), Sender(), asyncio.get_running_loop().time()
        soon.add(first, connections=1)
        others = [Sender() for _ in range(100)]
        for other in others:
            await asyncio.sleep(QUIET_S / 2)
            soon.add(other, connections=1)
        asked_until = asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)
        assert first.flushed_at[0] >= asked_until > begun + 10 * QUIET_S
        assert {other.flushed_at[0] for other in others} == set(first.flushed_at)

    run(story())


def test_no_answer_waits_longer_than_it_may() -> None:
    async def story() -> None:
        soon, first, begun = Soon(), Sender(), asyncio.get_running_loop().time()
        soon.add(first, connections=1)
        while not first.flushed_at:
            await asyncio.sleep(QUIET_S / 2)
            soon.asked()
        assert first.flushed_at[0] - begun <= MOST_WAIT_S + QUIET_S

    run(story())


def test_many_connections_wait_longer_and_not_for_long() -> None:
    async def story() -> None:
        soon, sender, begun = Soon(), Sender(), asyncio.get_running_loop().time()
        soon.add(sender, connections=1_000_000)
        await asyncio.sleep(1.0)
        assert [round(at - begun, 9) for at in sender.flushed_at] == [MOST_QUIET_S]

    run(story())


def test_server_that_stood_still_reads_before_it_answers() -> None:
    async def story() -> None:
        loop, soon, sender = asyncio.get_running_loop(), Soon(), Sender()
        assert isinstance(loop, VirtualTimeLoop)
        begun = loop.time()
        soon.add(sender, connections=1)
        loop.pause(1.0)
        await asyncio.sleep(1.0)
        assert [round(at - begun, 9) for at in sender.flushed_at] == [1.0 + QUIET_S]

    run(story())


def test_one_that_is_flushed_can_be_added_again() -> None:
    async def story() -> None:
        soon, sender = Soon(), Sender()
        for _ in range(3):
            soon.add(sender, connections=1)
            await asyncio.sleep(1.0)
        assert len(sender.flushed_at) == 3

    run(story())
