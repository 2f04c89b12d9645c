"""One launcher, and a member that is none: it dies, never answers a failure report, or reports one itself."""

import asyncio
import os
import signal
from pathlib import Path

from rallypoint.aio import AsyncHandler, AsyncWorld, create_handler
from rallypoint.launcher import agreement
from rallypoint.launcher.console import Console
from rallypoint.launcher.failure import Failure
from rallypoint.launcher.policy import RoundOutcome
from rallypoint.launcher.round_outcome import Proposal, overrule, wait_answers
from rallypoint.launcher.supervisor import Job, Supervisor
from rallypoint.launcher.worker_ranks import NodeShare, agree
from rallypoint.rendezvous.records import LeaveCause
from rallypoint.settings import Settings
from tests.patience import PATIENCE_S

FAILS = Job(("sh", "-c", "echo out of luck >&2; exit 7"), 1, 0)
WORKS = Job(("sleep", str(PATIENCE_S)), 1, 0)


def settings(name: str, run_id: str) -> Settings:
    return Settings.build(
        scheme="memory",
        endpoints="silent-member",
        run_id=run_id,
        min_nodes=1,
        max_nodes=2,
        name=name,
        last_call_timeout=PATIENCE_S,
        keep_alive_interval=0.2,
        keep_alive_max_attempt=3,
    )


async def member(run_id: str) -> tuple[AsyncWorld, AsyncHandler]:
    """A node that takes part in the round as a launcher does, and does not follow its outcome."""
    handler = create_handler(settings("b", run_id))
    world = await handler.next_rendezvous()
    await agree(world.store, NodeShare(1, "default"), 0, 0, PATIENCE_S)
    return world, handler


def said(run_id: str, tmp_path: Path, scenario, job: Job = FAILS) -> tuple[int, str]:
    """The exit code of the launcher, and what it said."""

    async def main() -> int:
        async with asyncio.timeout(PATIENCE_S):
            launcher = Supervisor(settings("a", run_id), job, console)
            running = asyncio.create_task(launcher.run())
            world, handler = await member(run_id)
            await scenario(running, world, handler)
            code = await running
            await handler.aclose()
            return code

    path = tmp_path / "console"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    console = Console(fd, fd)
    try:
        code = asyncio.run(main())
    finally:
        console.close()
        os.close(fd)
    return code, path.read_text()


def test_member_that_is_silent_although_its_session_lives_is_not_waited_for_without_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "LOSS_MARGIN_S", 0.1)

    async def silent(running, world, handler) -> None:
        await asyncio.wait({running})

    code, text = said("alive", tmp_path, silent)
    assert code == 7
    assert "exiting with code 7: rank" in text
    assert "on a exited with 7: out of luck, and the run has no restarts" in text


def test_member_that_dies_after_the_report_explains_the_failure(tmp_path):
    async def dies(running, world, handler) -> None:
        async for value in world.store.watch("rallypoint.run/outcome"):
            if value is not None:
                break
        await handler.abandon()
        while "is taken for its echo" not in (tmp_path / "console").read_text():  # noqa: ASYNC110 - another thread's
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    code, text = said("dead", tmp_path, dies)
    assert code in (7, 143), "it went on alone: its worker failed again, by itself, or was stopped before"
    assert "rank 0 on a" in text or "rank 1 on a" in text
    assert "no restart is counted" in text


def test_run_that_is_closed_before_its_outcome_is_known_ends_with_the_root_cause(tmp_path):
    failure = Failure(
        rank=1, local_rank=0, node="b", code=3, stalled="rank 1 on b said nothing", trace=("at train.py",)
    )

    async def fails(running, world, handler) -> None:
        cause = LeaveCause(kind=failure.kind, why=failure.sentence, round=world.round)
        report = Proposal(outcome=RoundOutcome.FAILURE, cause=cause, by=world.rank, code=3, failure=failure)
        await overrule(world.store, report)
        assert await wait_answers(world.store, [1 - world.rank], PATIENCE_S) == []
        await handler.set_closed("rank 1 on b said nothing, and no restart is left", outcome=3)
        await asyncio.wait({running})

    code, text = said("closed", tmp_path, fails, WORKS)
    assert code == 3
    assert "root cause of the end of round 1: rank 1 on b said nothing, and no restart is left" in text
    assert "  | at train.py" in text
    assert "exiting with code 3: rank 1 on b said nothing, and no restart is left" in text
