"""The restart budget: one number for the run, counted once a round, whichever launcher counts."""

import asyncio
import time

import pytest

from rallypoint.backends.contract import Backend
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import OutcomeUnknown, RendezvousError, Unavailable
from rallypoint.kv.types import ModRevisionIs, Put
from rallypoint.launcher.policy import BUDGET_USED_UP
from rallypoint.launcher.restart_budget import RestartBudget
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings

KEYS = RunKeys("rallypoint", "job")


class SharedRun:
    """A run on a memory backend, and the budgets of its launchers."""

    def __init__(self, **options: object) -> None:
        self.settings = Settings.build(scheme="memory", run_id="job", min_nodes=1, **options)
        self.backend: Backend = MemoryBackend(MemoryServer(), "")
        self.numbers = iter(range(1000))
        self.member = ModRevisionIs("nodes/a", 0)
        """That the caller is still a member of its round; here, it always is."""

    def config(self, backend: Backend, name: str = "a") -> RunConfig:
        return RunConfig(backend, KEYS, self.settings, name, lambda: f"life-{next(self.numbers)}", time.time)

    def budget(self, name: str, limit: int = 2) -> RestartBudget:
        return RestartBudget(
            lambda: self.backend,
            KEYS,
            lambda backend: self.config(backend, name),
            by=name,
            limit=limit,
            closes=True,
            wall=time.time,
        )

    async def open(self) -> None:
        await self.config(self.backend).find_or_make()


def test_round_is_counted_once_whichever_launcher_counts_it():
    async def case() -> None:
        run = SharedRun()
        await run.open()
        a, b = run.budget("a"), run.budget("b", limit=9)
        assert (await a.begin()).used == 0
        first = await asyncio.gather(
            a.spend(1, "a failed", 3, run.member),
            b.spend(1, "b failed", 4, run.member),
            a.spend(1, "a failed", 3, run.member),
        )
        assert all(verdict.allowed for verdict in first)
        record = await b.begin()
        assert (record.used, record.limit, record.round) == (1, 2, 1), "the limit is that of the first launcher"
        assert "restart" not in record.why, "the counts are beside it"

    asyncio.run(case())


def test_run_whose_restarts_are_used_up_is_closed_in_the_same_step():
    async def case() -> None:
        run = SharedRun()
        await run.open()
        a, b = run.budget("a"), run.budget("b")
        assert (await a.spend(1, "x", 3, run.member)).allowed
        assert (await b.spend(4, "x", 3, run.member)).allowed
        last = await a.spend(5, "rank 0 on a exited with 3", 3, run.member)
        assert (last.allowed, last.code) == (False, BUDGET_USED_UP)
        assert "has used its 2 restarts" in last.why
        snapshot = await run.config(run.backend).read()
        assert snapshot is not None
        assert (snapshot.closed.closed, snapshot.closed.by, snapshot.closed.why) == (True, "a", last.why)
        assert await b.spend(5, "b failed too", 9, run.member) == last, "all launchers get the same answer"
        assert snapshot.closed.outcome == BUDGET_USED_UP, "nodes that keep the close keep the run's exit code"

    asyncio.run(case())


def test_launcher_that_is_no_longer_a_member_counts_nothing():
    async def case() -> None:
        run = SharedRun()
        await run.open()
        budget = run.budget("a")
        before = await budget.begin()
        await run.backend.txn([], [Put("nodes/a", b"another join")])
        with pytest.raises(RendezvousError, match="no longer a member"):
            await budget.spend(1, "x", 3, run.member)
        assert await budget.begin() == before

    asyncio.run(case())


def test_run_without_restarts_ends_with_the_code_of_the_worker():
    async def case() -> None:
        run = SharedRun()
        await run.open()
        verdict = await run.budget("a", limit=0).spend(1, "x", 7, run.member)
        assert (verdict.allowed, verdict.code) == (False, 7)

    asyncio.run(case())


def test_run_that_was_reopened_starts_with_a_full_budget():
    async def case() -> None:
        run = SharedRun()
        await run.open()
        budget = run.budget("a")
        await budget.spend(1, "x", 3, run.member)
        await budget.finish()
        await budget.finish()
        ended = await run.config(run.backend).read()
        assert ended is not None
        assert (ended.closed.outcome, ended.closed.why) == (0, "all workers have finished")
        assert await run.config(run.backend).reopen("again")
        fresh = await budget.begin()
        assert (fresh.used, fresh.outcome) == (0, None)

    asyncio.run(case())


def test_budget_of_an_earlier_incarnation_does_not_count():
    async def case() -> None:
        run = SharedRun()
        await run.open()
        await run.budget("a").spend(1, "x", 3, run.member)
        other = SharedRun(max_nodes=2)
        other.backend, other.numbers = run.backend, run.numbers
        await other.config(other.backend).check()  # the run has no nodes: other settings make a new incarnation
        assert (await other.budget("b").begin()).used == 0

    asyncio.run(case())


class Unreliable(MemoryBackend):
    """Does not execute some of its transactions, and executes others without saying so."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server, "")
        self.asked = 0

    async def txn(self, compares, then, otherwise=()):
        self.asked += 1
        if self.asked % 3 == 0:
            raise Unavailable("not executed")
        result = await super().txn(compares, then, otherwise)
        if self.asked % 2 == 0:
            raise OutcomeUnknown("executed, but reported as unknown")
        return result


def test_restart_is_counted_once_if_the_outcome_of_the_write_is_unknown():
    async def case() -> None:
        run = SharedRun()
        run.backend = Unreliable(MemoryServer())
        async with asyncio.timeout(30):
            while True:
                try:
                    await run.open()
                    break
                except (Unavailable, OutcomeUnknown):
                    continue
            budget = run.budget("a", limit=5)
            for number in range(1, 5):
                assert (await budget.spend(number, "x", 3, run.member)).allowed
            assert (await budget.begin()).used == 4

    asyncio.run(case())


def test_budget_of_a_run_that_does_not_exist_is_an_error():
    async def case() -> None:
        await SharedRun().budget("a").begin()

    with pytest.raises(RendezvousError, match="no longer exists"):
        asyncio.run(case())
