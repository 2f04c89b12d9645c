"""Carries out the policy's instructions: joins, starts and stops workers, counts restarts, waits for other nodes, ends.

One task handles the events in order and carries out the instructions that follow from each. Whatever takes long runs in
a task of its own and reports its result as an event, so that a signal or a loss is handled at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
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
)
from rallypoint.launcher import policy, worker_guardian
from rallypoint.launcher.agreement import Agreement
from rallypoint.launcher.console import Console, Limit
from rallypoint.launcher.crash_backoff import CrashBackoff
from rallypoint.launcher.environment import RoundContext, worker_environment
from rallypoint.launcher.hang_watch import HangWatch
from rallypoint.launcher.logs import NO_STREAMS, PrivateDirectory, StreamChoice, WorkerLogs
from rallypoint.launcher.outage import endpoint_is_down, wait_while_endpoint_is_down
from rallypoint.launcher.policy import JoinEndReason, Phase
from rallypoint.launcher.preflight import wait_until_passed, write_note
from rallypoint.launcher.program_check import find_missing
from rallypoint.launcher.restart_budget import RestartBudget
from rallypoint.launcher.worker_group import Worker, WorkerGroup
from rallypoint.launcher.worker_ranks import NodeShare, RankPlan, agree
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.records import ClosedRecord, LeaveCause, LeaveKind
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings
from rallypoint.static import SCHEME as STATIC
from rallypoint.static import handler_for
from rallypoint.urls import DEFAULT_PORTS, parse_endpoint

LEAVE_S = 3.0
"""The time limit for leaving before the workers are stopped. Beyond it, the others notice when the lease ends."""
MISSING_NOTE_S = 1.0
"""The time limit for telling the run that this node lacks the program."""


@dataclass(frozen=True, slots=True)
class Job:
    """The program to run on this node, and how."""

    argv: tuple[str, ...]
    workers: int
    max_restarts: int
    role: str = "default"
    grace_s: float = 15.0
    exit_timeout_s: float = 1800.0
    finished_timeout_s: float = 120.0
    stall_timeout_s: float | None = None
    preflight: str | None = None
    preflight_timeout_s: float = 300.0
    log_dir: Path | None = None
    redirects: StreamChoice = NO_STREAMS
    tee: StreamChoice = NO_STREAMS


class Supervisor:
    """One launcher. Call `run()` once."""

    def __init__(self, settings: Settings, job: Job, console: Console, sinks: Sequence[events.Sink] = ()) -> None:
        self._settings = settings
        self._job = job
        self._console = console
        self._events: asyncio.Queue[policy.Event] = asyncio.Queue()
        self._backend: Backend | None = None
        self.handler = handler_for(settings, sinks=[self._on_event, *sinks], opener=self._open)
        self._name = self.handler.name
        self.handler.on_closed = self._told_closed
        self._policy = policy.Policy(self._name)
        keys = RunKeys(settings.etcd_prefix, settings.run_id)
        self._budget = RestartBudget(
            self._opened_backend,
            keys,
            lambda backend: RunConfig(backend, keys, settings, self._name, lambda: secrets.token_hex(8), time.time),
            by=self._name,
            limit=job.max_restarts,
            closes=settings.scheme != STATIC,
            wall=time.time,
        )
        self._joined: Agreement | None = None
        """The current round."""
        self._workers: WorkerGroup | None = None
        self._private = PrivateDirectory()
        self._hangs: HangWatch | None = None
        self._crashes = CrashBackoff()
        self._finished: int | None = None
        """The round in which all workers of this node have finished, until it is a member of another round."""
        self._join_until = math.inf
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._took_part = False
        """Whether this node was ever a member of the run, or waited for a place in it."""
        self._waits_for: str | None = None
        self._has_warned = False
        self._was_signalled = False

    async def run(self) -> int:
        """Run to the end. Returns the exit code once no process is left."""
        worker_guardian.prctl(worker_guardian.PR_SET_CHILD_SUBREAPER, 1)
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            code = await self._preflight()
            return await self._follow_policy() if code is None else code
        finally:
            await self._shut_down()
            for number in numbers:
                loop.remove_signal_handler(number)

    async def _preflight(self) -> int | None:
        """Look for the program, and run the preflight check. Returns the exit code if this node must not join."""
        if (missing := find_missing(self._job.argv)) is not None:
            self._console.say(f"this node did not join: {missing.why}")
            with suppress(TimeoutError):
                async with asyncio.timeout(MISSING_NOTE_S):
                    await write_note(self._settings, self._name, missing.why)
            return missing.code
        if self._job.preflight is None:
            return None
        env = {**os.environ, "RALLYPOINT_RUN_ID": self._settings.run_id, "RALLYPOINT_NODE": self._name}
        limit_s = self._job.preflight_timeout_s
        checking = asyncio.create_task(
            wait_until_passed(self._job.preflight, self._settings, self._name, env, limit_s, self._console),
            name="preflight",
        )
        signalled = asyncio.create_task(self._events.get(), name="signal")
        await asyncio.wait({checking, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            checking.cancel()
            with suppress(asyncio.CancelledError):
                await checking
            event = signalled.result()
            assert isinstance(event, policy.SignalReceived)
            return 128 + event.number
        signalled.cancel()
        why = checking.result()
        if why is None:
            return None
        self._console.say(f"this node did not join: {why}")
        return policy.HELD_BACK

    async def _follow_policy(self) -> int:
        """Handle events until the policy ends. Returns the exit code."""
        instructions = self._policy.begin()
        while True:
            for instruction in instructions:
                if isinstance(instruction, policy.End):
                    self._console.wait_for(None)
                    self._console.say(f"exiting with code {instruction.code}: {instruction.why}")
                    return instruction.code
                await self._carry_out(instruction)
            instructions = self._policy.handle(await self._events.get())

    async def _carry_out(self, instruction: policy.Instruction) -> None:
        match instruction:
            case policy.Join(cause=cause):
                self._task(self._join(cause), "join")
            case policy.Start(round=number):
                self._starting = self._task(self._start(number), "start")
            case policy.Stop(round=number, why=why, gently=gently):
                await self._stop(number, why, gently)
            case policy.SettleSignals():
                self._task(self._agreement.settle_signals(), "settle signals")
            case policy.Report(failed=failed):
                is_alone = self._job.workers == 1 and self._agreement.world.world_size == 1
                self._task(self._agreement.report(failed, is_alone=is_alone), "report")
            case policy.Answer():
                self._task(self._agreement.answer(), "answer")
            case policy.AwaitAnswers():
                self._task(self._agreement.await_answers(), "answers")
            case policy.SpendRestart():
                self._task(self._agreement.spend_restart(), "spend")
            case policy.Propose(outcome=outcome, cause=cause):
                self._task(self._agreement.propose(outcome, cause), "propose")
            case policy.AwaitOthers(round=number):
                self._finished = number
                self._private.remove()  # the guardian, which would do it after a kill of this process, has ended
                self._task(self._agreement.await_others(self._job.exit_timeout_s), "exit barrier")
            case policy.CloseFinished():
                limit_s = self._settings.close_timeout_s
                self._wait_for("the run to be closed", Limit("close_timeout", limit_s))
                await self._within(limit_s, self._budget.finish(), "the run could not be closed")
            case policy.Leave(why=why, kind=kind, early=early):
                if early and self._joined is not None:
                    await self._joined.propose_restart(why)
                is_named = kind not in (LeaveKind.DRAIN, LeaveKind.STOPPED)
                cause = LeaveCause(kind=kind, why=why if is_named else f"{self._name} was {why}")
                await self._within(LEAVE_S, self.handler.leave(why, cause=cause), "leaving the run failed")
            case policy.Tell(text=text):
                self._console.say(text)

    # --- joining ------------------------------------------------------------------------------------------------------

    async def _join(self, cause: LeaveCause | None) -> None:
        self._cancel_round()
        self._private.remove()
        self._joined = None
        self._crashes.round_ended(self._now())
        if pause_s := self._crashes.pause_s(random.random()):
            self._console.say(self._crashes.why(pause_s))
            await asyncio.sleep(pause_s)
        self._wait_for(f"an answer from {self._settings.where}", Limit("join_timeout", self._settings.join_timeout_s))
        limit_s = None if self._finished is None else self._job.finished_timeout_s
        self._join_until = math.inf if limit_s is None else self._now() + limit_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                world = await self.handler.next_rendezvous(cause=cause)
        except TimeoutError:
            if not limit.expired():
                raise
            why = f"this node's workers finished in round {self._finished}, which then ended before all had finished; "
            why += f"no new round within {limit_s:g} s (--finished-timeout): {self._waits_for}"
            self._wait_for(None)
            self._post(policy.JoinEnded(JoinEndReason.TIMED_OUT, why))
            return
        except RendezvousError as error:
            self._wait_for(None)
            self._post(self._join_ended(error))
            return
        self._wait_for(None)
        self._took_part = True
        self._finished = None
        self._joined = Agreement(
            world,
            self._settings,
            self._name,
            self._budget,
            self._console,
            wait_for=self._wait_for,
            post=self._post,
            on_explained=lambda: self._crashes.failed(self._now()),
        )
        self._post(policy.Entered(world.round, self._job.workers))
        world.changed.add_listener(lambda cause, why: self._changed(world.round, cause, why))

    def _join_ended(self, error: RendezvousError) -> policy.JoinEnded:
        why = str(error)
        match error:
            case RendezvousClosedError(outcome=int(outcome)) if self._took_part:
                return policy.JoinEnded(JoinEndReason.CLOSED, f"the run has ended: {error.why}", outcome)
            case RendezvousClosedError():
                return policy.JoinEnded(JoinEndReason.CLOSED, why)
            case RendezvousGracefulExitError():
                return policy.JoinEnded(JoinEndReason.RELEASED, why)
            case RendezvousTimeoutError():
                return policy.JoinEnded(JoinEndReason.TIMED_OUT, why)
            case RendezvousConnectionError():
                is_refused = isinstance(error.__cause__, Rejected)
                return policy.JoinEnded(JoinEndReason.REFUSED if is_refused else JoinEndReason.NOT_REACHED, why)
            case _:
                return policy.JoinEnded(JoinEndReason.REFUSED, why)

    def _changed(self, number: int, cause: Cause, why: str) -> None:
        event = policy.RoundChanged(number, cause, why)
        if cause is Cause.SESSION_LOST:
            self._task(self._after_outage(event), "outage")
        elif cause is Cause.LOSS:
            self._task(self._after_loss(event), "loss")
        else:
            self._post(event)

    def _told_closed(self, closed: ClosedRecord) -> None:
        """If the run has failed, its workers need not wait until the launcher that closed it has said so."""
        if closed.outcome and self._joined is not None:
            self._task(self._joined.fail(closed.why, closed.outcome), "close")

    async def _after_outage(self, event: policy.RoundChanged) -> None:
        """Losing the control plane stops no running job: while no server runs, the workers go on."""
        if self._goes_on() and await endpoint_is_down(self._settings):
            self._console.say(f"no server is running at {self._settings.where}: the workers go on until one is")
            await wait_while_endpoint_is_down(self._settings, lambda: not self._goes_on())
        self._post(event)

    def _goes_on(self) -> bool:
        """Whether this node's part in the round is worth keeping without a server.

        It is not once a worker has failed, or if the run is closed, and has ended or has no workers here.
        """
        closed = self.handler.closed
        has_ended = closed is not None and (closed.outcome is not None or self._workers is None)
        return not has_ended and self._policy.phase is not Phase.ATTRIBUTING

    async def _after_loss(self, event: policy.RoundChanged) -> None:
        """Post the loss after the round's outcome: a member that left because of the outcome counts as lost, too."""
        joined = self._joined
        if joined is not None and joined.world.round == event.round:
            await joined.read()
            self._post(event)

    # --- workers ------------------------------------------------------------------------------------------------------

    async def _start(self, number: int) -> None:
        agreement, world = self._agreement, self._agreement.world
        self._task(agreement.follow(), f"outcome of round {number}")
        try:
            plan = await self._agree(world)
        except (StoreError, BackendError, RendezvousError) as error:
            self._post(policy.StartFailed(number, str(error)))
            return
        try:
            hangs = self._hangs = self._watch_hangs(world, plan)
            workers = self._workers = agreement.workers = self._make_workers(world, plan, hangs)
            await workers.start()
            self._crashes.started(self._now())
            self._task(hangs.run(), f"hangs in round {number}")
        except OSError as error:
            self._workers = agreement.workers = None
            agreement.start_error = str(error)
            self._close_hangs()
            self._console.say(f"no worker could be started: {error}")
            self._post(policy.Exited(number, 0, plan.ranks_of(world.rank).rank, worker_guardian.NOT_EXECUTABLE))

    async def _agree(self, world: AsyncWorld) -> RankPlan:
        used, limit = 0, self._job.max_restarts
        if world.rank == 0:
            record = await self._budget.begin()
            used, limit = record.used, record.limit
        share = NodeShare(self._job.workers, self._job.role)
        plan = await agree(world.store, share, used, limit, self._settings.read_timeout_s)
        if plan.max_restarts != self._job.max_restarts and not self._has_warned:
            self._has_warned = True
            self._console.say(
                f"--max-restarts {self._job.max_restarts} of this node is ignored: the node that started the run set "
                f"{plan.max_restarts}"
            )
        return plan

    def _watch_hangs(self, world: AsyncWorld, plan: RankPlan) -> HangWatch:
        job, number = self._job, world.round
        directory = None
        if job.log_dir is not None:
            run_id, name = quote(self._settings.run_id, safe=""), quote(self._name, safe="")
            directory = job.log_dir / run_id / name / f"round_{number}"
        return HangWatch(
            world.store,
            self._private.path,
            self._name,
            plan.ranks_of(world.rank).rank,
            job.workers,
            limit_s=job.stall_timeout_s,
            logs=directory,
            console=self._console,
            on_stall=lambda found: self._post(policy.Stalled(number, found.rank, found.node, found.why)),
        )

    def _close_hangs(self) -> None:
        if self._hangs is not None:
            self._hangs.close()

    def _make_workers(self, world: AsyncWorld, plan: RankPlan, hangs: HangWatch) -> WorkerGroup:
        settings, job, number = self._settings, self._job, world.round
        context = RoundContext(
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
        first = plan.ranks_of(world.rank).rank
        last = first + job.workers - 1
        ranks = f"rank {first}" if last == first else f"ranks {first} to {last}"
        self._console.say(f"round {number}: node {world.rank} of {world.world_size}, {ranks} of {plan.world_size}")
        logs = WorkerLogs(hangs.logs, job.redirects, job.tee, self._private)
        workers = [
            Worker(
                local,
                first + local,
                job.argv,
                worker_environment(os.environ, context, local, logs.error_file(local)) | hangs.environment(),
            )
            for local in range(job.workers)
        ]
        return WorkerGroup(
            workers,
            self._console,
            logs,
            on_exit=lambda local, code: self._post(policy.Exited(number, local, first + local, code)),
            on_empty=lambda: self._emptied(number),
            hangs=hangs,
            private=str(self._private.path),
        )

    def _emptied(self, number: int) -> None:
        self._workers = None
        self._wait_for(None)
        self._post(policy.Stopped(number))

    async def _stop(self, number: int, why: str, gently: bool) -> None:
        if self._hangs is not None:
            self._hangs.stop()
        if self._workers is None and self._starting is not None:
            self._starting.cancel()
        if self._starting is not None:
            with suppress(asyncio.CancelledError):
                await self._starting
            self._starting = None
        if self._workers is None:
            self._post(policy.Stopped(number))
        elif gently:
            if why != policy.FINISHED:
                self._console.say(f"stopping the workers: {why}")
            self._wait_for("the workers to end", Limit("--grace-period", self._job.grace_s, "they are killed"))
            self._workers.stop(self._job.grace_s)
        else:
            self._workers.kill()

    # --- helpers ------------------------------------------------------------------------------------------------------

    @property
    def _agreement(self) -> Agreement:
        """That of the current round; there is one."""
        assert self._joined is not None
        return self._joined

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _post(self, event: policy.Event) -> None:
        self._events.put_nowait(event)

    def _on_signal(self, number: signal.Signals) -> None:
        self._was_signalled = True
        self._post(policy.SignalReceived(int(number), number.name))

    async def _open(self, settings: Settings) -> Backend:
        self._backend = await backend_opener(settings.scheme)(settings)
        return self._backend

    def _opened_backend(self) -> Backend:
        if self._backend is None:
            raise RendezvousError(f"{self._settings.where} was not opened")
        return self._backend

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.WaitingFor(reason=reason):
                self._took_part = True
                self._wait_for(reason + self._hint(), self._join_limit())
            case events.JoinFailed():
                pass  # the exit message has the reason
            case events.BackendUnreachable():
                self._console.wait_for(event.text())
            case events.BackendReachable():
                self._console.wait_for(self._waits_for, self._join_limit())
            case _ if event.level >= events.SessionLost.level:
                self._console.say(event.text())

    def _hint(self) -> str:
        """A likely mistake, as long as this node has not been in a round."""
        scheme, host = self._settings.scheme, ""
        if scheme in ("tcp", "static") and self._settings.max_nodes > 1 and self._policy.round == 0:
            host, _ = parse_endpoint(self._settings.endpoints[0], DEFAULT_PORTS[scheme])
        if host != "localhost" and not host.startswith("127.") and host != "::1":
            return ""
        return f" (the endpoint {host} is this machine: nodes on other machines need its name or address instead)"

    def _join_limit(self) -> Limit | None:
        """The deadline of the join that is running, if it has one."""
        at = self.handler.gives_up_at
        if self._join_until < (math.inf if at is None else at):
            return Limit("--finished-timeout", self._join_until - self._now())
        return None if at is None else Limit("join_timeout", at - self._now())

    def _wait_for(self, reason: str | None, limit: Limit | None = None) -> None:
        """Show what the run waits for. During an outage, `_on_event` shows the outage instead."""
        self._waits_for = reason
        self._console.wait_for(reason, limit)

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
            self._post(policy.SignalReceived(1, f"a defect in the launcher ({error!r})"))

    def _cancel_round(self) -> None:
        """Cancel all tasks of the previous round."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def _within(self, limit_s: float, work: Coroutine[Any, Any, Any], trouble: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await work
        except (TimeoutError, RendezvousError, BackendError) as error:
            self._console.say(f"{trouble}: {str(error) or f'no answer within {limit_s:g} s'}")

    async def _shut_down(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._workers is not None:
            self._workers.kill()
            await self._workers.wait_empty()
        self._close_hangs()
        self._private.remove()
        # If the run is not closed, closing the handler of a node that hosts its server waits until the others have
        # gone. After a signal, the limit for that is shorter, and another signal ends it at once.
        limit_s = self._job.grace_s if self._was_signalled else self._settings.close_timeout_s + LEAVE_S
        limit_name = "--grace-period" if self._was_signalled else "close_timeout"
        self._wait_for("the other nodes to leave the server of this node", Limit(limit_name, limit_s, "it ends"))
        closing = asyncio.create_task(self.handler.aclose(), name="close")
        signalled = asyncio.create_task(self._wait_signal(), name="signal")
        await asyncio.wait({closing, signalled}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing
        self._wait_for(None)

    async def _wait_signal(self) -> None:
        while not isinstance(await self._events.get(), policy.SignalReceived):
            pass
