"""The restart budget: one number for the run, counted once a round, whoever counts."""

import asyncio
import time

import pytest

from rallypoint.backends.contract import Backend
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import OutcomeUnknown, RendezvousError, Unavailable
from rallypoint.launcher.book import Book
from rallypoint.launcher.policy import BUDGET_USED_UP
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings

KEYS = RunKeys("rallypoint", "job")


class Desk:
    """A run on a memory backend, and launchers that write into its book."""

    def __init__(self, **options: object) -> None:
        self.settings = Settings.build(scheme="memory", run_id="job", min_nodes=1, **options)
        self.backend: Backend = MemoryBackend(MemoryServer(), "")
        self.numbers = iter(range(1000))

    def entry(self, backend: Backend, name: str = "a") -> RunConfig:
        return RunConfig(backend, KEYS, self.settings, name, lambda: f"life-{next(self.numbers)}", time.time)

    def book(self, name: str, limit: int = 2) -> Book:
        return Book(
            lambda: self.backend,
            KEYS,
            lambda backend: self.entry(backend, name),
            by=name,
            limit=limit,
            closes=True,
            wall=time.time,
        )

    async def open(self) -> None:
        await self.entry(self.backend).find_or_make()


def test_round_is_counted_once_whoever_counts_it():
    async def case() -> None:
        desk = Desk()
        await desk.open()
        a, b = desk.book("a"), desk.book("b", limit=9)
        assert (await a.begin()).used == 0
        first = await asyncio.gather(a.spend(1, "a failed", 3), b.spend(1, "b failed", 4), a.spend(1, "a failed", 3))
        assert all(verdict.allowed for verdict in first)
        record = await b.begin()
        assert (record.used, record.limit, record.round) == (1, 2, 1), "and the limit is that of the first"
        assert "restart 1 of 2" in record.why

    asyncio.run(case())


def test_run_whose_restarts_are_used_up_is_closed_in_the_same_step():
    async def case() -> None:
        desk = Desk()
        await desk.open()
        a, b = desk.book("a"), desk.book("b")
        assert (await a.spend(1, "x", 3)).allowed
        assert (await b.spend(4, "x", 3)).allowed
        last = await a.spend(5, "a: the worker of rank 0 exited with 3", 3)
        assert (last.allowed, last.code) == (False, BUDGET_USED_UP)
        assert "has used its 2 restarts" in last.why
        door = await desk.entry(desk.backend).read()
        assert door is not None
        assert (door.closed.closed, door.closed.by, door.closed.why) == (True, "a", last.why)
        assert await b.spend(5, "b failed too", 9) == last, "everybody gets the same answer"
        ended = await b.outcome()
        assert ended is not None
        assert ended.outcome == BUDGET_USED_UP

    asyncio.run(case())


def test_run_without_restarts_ends_with_the_code_of_the_worker():
    async def case() -> None:
        desk = Desk()
        await desk.open()
        verdict = await desk.book("a", limit=0).spend(1, "x", 7)
        assert (verdict.allowed, verdict.code) == (False, 7)

    asyncio.run(case())


def test_run_that_was_reopened_begins_with_a_whole_budget():
    async def case() -> None:
        desk = Desk()
        await desk.open()
        book = desk.book("a")
        await book.spend(1, "x", 3)
        await book.finish()
        await book.finish()
        ended = await book.outcome()
        assert ended is not None
        assert (ended.outcome, ended.used) == (0, 1)
        assert await desk.entry(desk.backend).reopen("again")
        fresh = await book.begin()
        assert (fresh.used, fresh.outcome) == (0, None)

    asyncio.run(case())


def test_budget_of_another_life_of_the_run_does_not_count():
    async def case() -> None:
        desk = Desk()
        await desk.open()
        await desk.book("a").spend(1, "x", 3)
        other = Desk(max_nodes=2)
        other.backend, other.numbers = desk.backend, desk.numbers
        await other.entry(other.backend).check()  # nobody is in it: its settings may change, and it is a new one
        assert (await other.book("b").begin()).used == 0

    asyncio.run(case())


class Shaky(MemoryBackend):
    """Of its transactions some are not executed, and some are without a word."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server, "")
        self.asked = 0

    async def txn(self, compares, then, otherwise=()):
        self.asked += 1
        if self.asked % 3 == 0:
            raise Unavailable("not executed")
        result = await super().txn(compares, then, otherwise)
        if self.asked % 2 == 0:
            raise OutcomeUnknown("executed, and nobody says so")
        return result


def test_restart_is_counted_once_when_the_outcome_of_the_writing_is_not_known():
    async def case() -> None:
        desk = Desk()
        desk.backend = Shaky(MemoryServer())
        async with asyncio.timeout(30):
            while True:
                try:
                    await desk.open()
                    break
                except (Unavailable, OutcomeUnknown):
                    continue
            book = desk.book("a", limit=5)
            for number in range(1, 5):
                assert (await book.spend(number, "x", 3)).allowed
            assert (await book.begin()).used == 4

    asyncio.run(case())


def test_run_that_is_gone_is_an_error():
    async def case() -> None:
        await Desk().book("a").begin()

    with pytest.raises(RendezvousError, match="does not exist any more"):
        asyncio.run(case())
