"""Does what the policy says: joins, starts and stops workers, counts restarts, waits for the others, ends.

One task takes the events, one after another, and does what follows from each. Whatever takes long is a task of its own
that reports by an event, so that a signal or a loss is never kept waiting.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rallypoint import events
from rallypoint.aio import AsyncWorld
from rallypoint.backends.contract import Backend
from rallypoint.backends.schemes import backend_opener
from rallypoint.errors import (
    BackendError,
    Rejected,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
    StoreError,
    StoreTimeoutError,
)
from rallypoint.launcher import fate, guard, policy
from rallypoint.launcher.book import Book, Verdict
from rallypoint.launcher.crew import Crew, Worker
from rallypoint.launcher.environment import Surroundings, worker_environment
from rallypoint.launcher.logs import NOWHERE, Choice, Logs
from rallypoint.launcher.outage import nobody_serves, wait_for_somebody
from rallypoint.launcher.output import Console
from rallypoint.launcher.plan import Plan, Share, agree
from rallypoint.launcher.policy import Fate, NoEntry, Why
from rallypoint.launcher.preflight import wait_until_fit
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings
from rallypoint.static import SCHEME as STATIC
from rallypoint.static import handler_for

LEAVE_S = 3.0
"""What is spent on leaving before the workers are stopped; then the lease does it."""
GOODBYE_S = 1.0
NAME_THEM_S = 5.0
"""How often those who are waited for at the end are named."""
NAMED = 5
_WHATS = {Cause.DRAIN: Why.DRAIN, Cause.WAITING: Why.WAITING}


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run on this node, whatever the run is."""

    argv: tuple[str, ...]
    workers: int
    max_restarts: int
    role: str = "default"
    grace_s: float = 15.0
    exit_timeout_s: float = 1800.0
    preflight: str | None = None
    preflight_timeout_s: float = 300.0
    log_dir: Path | None = None
    redirects: Choice = NOWHERE
    tee: Choice = NOWHERE


class Supervisor:
    """One launcher. `run()` once."""

    def __init__(self, settings: Settings, job: Job, console: Console, sinks: Sequence[events.Sink] = ()) -> None:
        self._settings = settings
        self._job = job
        self._console = console
        self._policy = policy.Policy()
        self._events: asyncio.Queue[policy.Event] = asyncio.Queue()
        self._backend: Backend | None = None
        self.handler = handler_for(settings, sinks=[self._hear, *sinks], opener=self._open)
        self._name = self.handler.name
        keys = RunKeys(settings.etcd_prefix, settings.run_id)
        self._book = Book(
            self._reachability,
            keys,
            lambda backend: RunConfig(backend, keys, settings, self._name, lambda: secrets.token_hex(8), time.time),
            by=self._name,
            limit=job.max_restarts,
            closes=settings.scheme != STATIC,
            wall=time.time,
        )
        self._world: AsyncWorld | None = None
        self._crew: Crew | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._had_part = False
        """Whether this launcher was ever in the run, or waited for a place in it."""
        self._waits_for: str | None = None
        self._has_warned = False
        self._was_told = False

    async def run(self) -> int:
        """The exit code, once everything has ended and nothing is left of it."""
        guard.prctl(guard.PR_SET_CHILD_SUBREAPER, 1)
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._tell, number)
        try:
            code = await self._unfit()
            return await self._obey() if code is None else code
        finally:
            await self._let_go()
            for number in numbers:
                loop.remove_signal_handler(number)

    async def _unfit(self) -> int | None:
        """The exit code if this node may not join."""
        if self._job.preflight is None:
            return None
        env = {**os.environ, "RALLYPOINT_RUN_ID": self._settings.run_id, "RALLYPOINT_NODE": self._name}
        limit_s = self._job.preflight_timeout_s
        checking = asyncio.create_task(
            wait_until_fit(self._job.preflight, self._settings, self._name, env, limit_s, self._console),
            name="preflight",
        )
        told = asyncio.create_task(self._events.get(), name="signal")
        await asyncio.wait({checking, told}, return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            checking.cancel()
            with suppress(asyncio.CancelledError):
                await checking
            event = told.result()
            assert isinstance(event, policy.Told)
            return 128 + event.number
        told.cancel()
        why = checking.result()
        if why is None:
            return None
        self._console.say(f"this node did not join: {why}")
        return policy.HELD_BACK

    async def _obey(self) -> int:
        instructions = self._policy.begin()
        while True:
            for instruction in instructions:
                if isinstance(instruction, policy.End):
                    self._console.wait_for(None)
                    self._console.say(f"ends with code {instruction.code}: {instruction.why}")
                    return instruction.code
                await self._do(instruction)
            instructions = self._policy.handle(await self._events.get())

    async def _do(self, instruction: policy.Instruction) -> None:
        match instruction:
            case policy.Join():
                self._task(self._join(), "join")
            case policy.Start(round=number):
                self._starting = self._task(self._start(number), "start")
            case policy.Stop(round=number, why=why, gently=gently):
                await self._stop(number, why, gently)
            case policy.Spend():
                self._task(self._spend(instruction), "spend")
            case policy.Propose(round=number, fate=wanted, why=why):
                self._task(self._propose(number, fate.Word(fate=wanted, why=f"{self._name}: {why}")), "propose")
            case policy.AwaitOthers(round=number):
                self._task(self._await_others(number), "exit barrier")
            case policy.CloseFinished():
                await self._within(self._settings.close_timeout_s, self._book.finish(), "the run could not be closed")
            case policy.Leave(why=why, early=early):
                if early and self._world is not None:
                    await self._say_goodbye(self._world, why)
                await self._within(LEAVE_S, self.handler.leave(why), "the others could not be told")

    # --- joining ------------------------------------------------------------------------------------------------------

    async def _join(self) -> None:
        self._cancel_round()
        self._world = None
        self._wait_for(f"an answer from {self._settings.where}")
        try:
            world = await self.handler.next_rendezvous()
        except RendezvousError as error:
            self._wait_for(None)
            self._post(await self._not_in(error))
            return
        self._wait_for(None)
        self._had_part = True
        self._world = world
        self._post(policy.Entered(world.round, self._job.workers))
        world.changed.add_listener(lambda cause, why: self._changed(world.round, cause, why))

    async def _not_in(self, error: RendezvousError) -> policy.JoinEnded:
        why = str(error)
        match error:
            case RendezvousClosedError():
                ended = None
                if self._had_part:
                    with suppress(RendezvousError, BackendError, TimeoutError):
                        async with asyncio.timeout(self._settings.close_timeout_s):
                            ended = await self._book.outcome()
                if ended is not None:
                    return policy.JoinEnded(NoEntry.CLOSED, f"the run has ended: {ended.why}", ended.outcome)
                return policy.JoinEnded(NoEntry.CLOSED, why)
            case RendezvousGracefulExitError():
                return policy.JoinEnded(NoEntry.LET_GO, why)
            case RendezvousTimeoutError():
                return policy.JoinEnded(NoEntry.TIMED_OUT, why)
            case RendezvousConnectionError():
                is_refused = isinstance(error.__cause__, Rejected)
                return policy.JoinEnded(NoEntry.REFUSED if is_refused else NoEntry.NOT_REACHED, why)
            case _:
                return policy.JoinEnded(NoEntry.REFUSED, why)

    def _changed(self, number: int, cause: Cause, why: str) -> None:
        event = policy.Changed(number, _WHATS.get(cause, Why.GONE), why)
        if cause is Cause.SESSION_LOST:
            self._task(self._after_outage(event), "outage")
        else:
            self._post(event)

    async def _after_outage(self, event: policy.Changed) -> None:
        """Losing the control plane stops no running job: as long as nobody decides, the workers go on."""
        if await nobody_serves(self._settings):
            self._console.say(f"nobody serves {self._settings.where}: the workers go on until somebody does")
            await wait_for_somebody(self._settings)
        self._post(event)

    # --- workers ------------------------------------------------------------------------------------------------------

    async def _start(self, number: int) -> None:
        world = self._world
        assert world is not None
        try:
            plan = await self._agree(world)
        except (StoreError, BackendError, RendezvousError) as error:
            self._post(policy.StartFailed(number, str(error)))
            return
        crew = self._crew = self._make_crew(world, plan)
        self._follow_fate(world)
        try:
            await crew.start()
        except OSError as error:
            self._crew = None
            self._console.say(f"no worker could be started: {error}")
            self._post(policy.Exited(number, 0, plan.place(world.rank).rank, guard.NOT_EXECUTABLE))

    async def _agree(self, world: AsyncWorld) -> Plan:
        used, limit = 0, self._job.max_restarts
        if world.rank == 0:
            record = await self._book.begin()
            used, limit = record.used, record.limit
        share = Share(self._job.workers, self._job.role)
        plan = await agree(world.store, share, used, limit, self._settings.read_timeout_s)
        if plan.max_restarts != self._job.max_restarts and not self._has_warned:
            self._has_warned = True
            self._console.say(
                f"the run has {plan.max_restarts} restarts, as the node that began it said; "
                f"--max-restarts {self._job.max_restarts} of this node does not count"
            )
        return plan

    def _make_crew(self, world: AsyncWorld, plan: Plan) -> Crew:
        settings, job, number = self._settings, self._job, world.round
        around = Surroundings(
            run_id=settings.run_id,
            run_url=f"{settings.where}/{quote(settings.run_id, safe='')}",
            node_name=self._name,
            node_rank=world.rank,
            nodes=world.world_size,
            round=number,
            role=job.role,
            master_addr=world.bootstrap_store_info.master_addr,
            master_port=world.bootstrap_store_info.master_port,
            plan=plan,
        )
        first = plan.place(world.rank).rank
        workers = [
            Worker(local, first + local, job.argv, worker_environment(os.environ, around, local))
            for local in range(job.workers)
        ]
        last = first + job.workers - 1
        ranks = f"rank {first}" if last == first else f"ranks {first} to {last}"
        self._console.say(f"round {number}: node {world.rank} of {world.world_size}, {ranks} of {plan.world_size}")
        directory = None
        if job.log_dir is not None:
            directory = job.log_dir / quote(settings.run_id, safe="") / quote(self._name, safe="") / f"round_{number}"
        return Crew(
            workers,
            self._console,
            Logs(directory, job.redirects, job.tee),
            on_exit=lambda local, code: self._post(policy.Exited(number, local, first + local, code)),
            on_empty=lambda: self._emptied(number),
        )

    def _emptied(self, number: int) -> None:
        self._crew = None
        self._post(policy.Stopped(number))

    async def _stop(self, number: int, why: str, gently: bool) -> None:
        if self._crew is None and self._starting is not None:
            self._starting.cancel()
        if self._starting is not None:
            with suppress(asyncio.CancelledError):
                await self._starting
            self._starting = None
        if self._crew is None:
            self._post(policy.Stopped(number))
        elif gently:
            if why != policy.FINISHED:
                self._console.say(f"stops the workers: {why}")
            self._crew.stop(self._job.grace_s)
        else:
            self._crew.kill()

    # --- what the launchers of a round tell each other ----------------------------------------------------------------

    def _follow_fate(self, world: AsyncWorld) -> None:
        async def follow() -> None:
            with suppress(StoreError):
                async for word in fate.words(world.store):
                    self._post(policy.Fated(world.round, word.fate, word.why, word.code))

        self._task(follow(), f"fate of round {world.round}")

    async def _propose(self, number: int, word: fate.Word) -> None:
        world = self._world
        assert world is not None
        try:
            held = await fate.propose(world.store, word)
        except StoreError as error:
            self._post(policy.Changed(number, Why.GONE, str(error)))
        else:
            self._post(policy.Fated(number, held.fate, held.why, held.code))

    async def _spend(self, spend: policy.Spend) -> None:
        """Count it, then tell the others before this node leaves the round: that is faster than noticing a loss."""
        world = self._world
        assert world is not None
        limit_s = self._settings.join_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                verdict = await self._book.spend(spend.round, f"{self._name}: {spend.why}", spend.code)
                wanted = Fate.AGAIN if verdict.allowed else Fate.FAILED
                with suppress(StoreError):  # no member any more: then the others know that, too
                    await fate.overrule(world.store, fate.Word(fate=wanted, why=verdict.why, code=verdict.code))
        except (TimeoutError, RendezvousError, BackendError) as error:
            trouble = str(error) or f"no answer within {limit_s:g} s"
            verdict = Verdict(False, policy.NOT_REACHED, f"{spend.why}, and a restart could not be counted: {trouble}")
        self._post(policy.Spent(spend.round, verdict.allowed, verdict.code, verdict.why))

    async def _say_goodbye(self, world: AsyncWorld, why: str) -> None:
        """Tell the others of the round why this node leaves it. If that cannot be, they see that it is gone."""
        word = fate.Word(fate=Fate.AGAIN, why=f"{self._name} leaves: {why}")
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await fate.overrule(world.store, word)

    async def _await_others(self, number: int) -> None:
        """The exit barrier. Whoever is missing is named meanwhile, and at the end of the patience."""
        world = self._world
        assert world is not None
        loop, limit_s = asyncio.get_running_loop(), self._job.exit_timeout_s
        deadline = loop.time() + limit_s
        names: list[str] = []
        while True:
            left_s = deadline - loop.time()
            try:
                await world.store.barrier("rallypoint.run/exit", max(0.05, min(NAME_THEM_S, left_s)))
                self._post(policy.AllFinished(number))
                return
            except StoreTimeoutError as error:
                with suppress(RendezvousError):
                    names = names or [member.name for member in await world.members()]
                who = _listed([_named(names, rank) for rank in error.missing if isinstance(rank, int)])
                if loop.time() >= deadline:
                    why = f"this node has finished; not within {limit_s:g} s: {who or error}"
                    self._post(policy.Unfinished(number, why))
                    return
                self._wait_for(f"this node has finished, and waits for {who or error}")
            except StoreError as error:
                self._post(policy.Changed(number, Why.GONE, str(error)))
                return

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _post(self, event: policy.Event) -> None:
        self._events.put_nowait(event)

    def _tell(self, number: signal.Signals) -> None:
        self._was_told = True
        self._post(policy.Told(int(number), number.name))

    async def _open(self, settings: Settings) -> Backend:
        self._backend = await backend_opener(settings.scheme)(settings)
        return self._backend

    def _reachability(self) -> Backend:
        if self._backend is None:
            raise RendezvousError(f"{self._settings.where} was not opened")
        return self._backend

    def _hear(self, event: events.Event) -> None:
        match event:
            case events.WaitingFor(reason=reason):
                self._had_part = True
                self._wait_for(reason)
            case events.JoinFailed():
                pass  # said at the end
            case events.BackendUnreachable():
                self._console.wait_for(event.text())
            case events.BackendReachable():
                self._console.wait_for(self._waits_for)
            case _ if event.level >= events.SessionLost.level:
                self._console.say(event.text())

    def _wait_for(self, what: str | None) -> None:
        """What the run waits for; an outage is shown instead, as long as it lasts."""
        self._waits_for = what
        self._console.wait_for(what)

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"the launcher's task {task.get_name()!r} failed", "exception": error, "task": task}
            )
            self._post(policy.Told(1, f"a fault in the launcher ({error!r})"))

    def _cancel_round(self) -> None:
        """Whatever belongs to the round before."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def _within(self, limit_s: float, work: Coroutine[Any, Any, Any], trouble: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await work
        except (TimeoutError, RendezvousError, BackendError) as error:
            self._console.say(f"{trouble}: {str(error) or f'no answer within {limit_s:g} s'}")

    async def _let_go(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._crew is not None:
            self._crew.kill()
            await self._crew.wait_empty()
        # A node that serves the run itself stays until the others have gone; one that was told to go, not so long.
        # Whoever is told once more goes at once.
        limit_s = self._job.grace_s if self._was_told else self._settings.close_timeout_s + LEAVE_S
        closing = asyncio.create_task(self.handler.aclose(), name="close")
        told = asyncio.create_task(self._hear_signal(), name="signal")
        await asyncio.wait({closing, told}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing

    async def _hear_signal(self) -> None:
        while not isinstance(await self._events.get(), policy.Told):
            pass


def _named(names: list[str], rank: int) -> str:
    """A node of the round; its rank has to do where the names could not be read."""
    return f"{names[rank]} (node {rank})" if rank < len(names) else f"node {rank}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
