"""Events that are told a moment later: all of them, once, in order."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.events import Event, RoundActive, RoundForming, ServerTrouble
from rallypoint.server.later import LATER_S, Later
from rallypoint.testing.loop import run


def happened(number: int) -> Event:
    return RoundForming(run_id="r", by="c", round=number, size=1, reason="")


def test_events_are_told_in_order_a_moment_later_and_again_after_that() -> None:
    async def story() -> None:
        told: list[Event] = []
        later, events = Later(told.append), [happened(number) for number in range(4)]
        later(events[0])
        await asyncio.sleep(LATER_S / 2)
        later(events[1])
        assert told == []
        await asyncio.sleep(LATER_S)
        assert told == events[:2]
        later(events[2])
        later(events[3])
        await asyncio.sleep(2 * LATER_S)
        assert told == events

    run(story())


def test_warning_is_told_at_once_behind_what_happened_before() -> None:
    async def story() -> None:
        told: list[Event] = []
        later, before, warning = Later(told.append), happened(1), ServerTrouble(run_id="", by="s", reason="disk")
        later(before)
        later(warning)
        assert told == [before, warning]
        await asyncio.sleep(2 * LATER_S)
        assert told == [before, warning]

    run(story())


def test_what_is_left_is_told_at_the_end_even_if_that_is_a_failure() -> None:
    async def story() -> None:
        told: list[Event] = []
        event = happened(1)

        def ends() -> None:
            with Later(told.append) as later:
                later(event)
                raise RuntimeError("over")

        with pytest.raises(RuntimeError, match="over"):
            ends()
        assert told == [event]

    run(story())


def test_sink_that_fails_is_told_of_what_happens_next() -> None:
    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        told: list[Event] = []

        def sink(event: Event) -> None:
            told.append(event)
            if len(told) == 1:
                raise RuntimeError("once")

        later, first, second = Later(sink), happened(1), happened(2)
        later(first)
        await asyncio.sleep(2 * LATER_S)
        later(second)
        await asyncio.sleep(2 * LATER_S)
        assert told == [first, second]

    run(story())


def test_that_a_round_is_active_is_no_warning() -> None:
    assert RoundActive.level < ServerTrouble.level
