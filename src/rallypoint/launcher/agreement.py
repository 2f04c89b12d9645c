"""One launcher's part in the agreement of a round's launchers: its outcome, and whose fault a worker's failure is.

An `Agreement` belongs to one round. Its coroutines carry out the policy's instructions about the outcome; the
supervisor runs each of them as a task of that round. Results are posted as events. What is decided, and in which order,
is in `policy`; the keys are in `round_outcome`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from rallypoint.aio import AsyncWorld
from rallypoint.errors import BackendError, RendezvousError, StoreError, StoreTimeoutError
from rallypoint.kv.types import ModRevisionIs
from rallypoint.launcher import policy, round_outcome
from rallypoint.launcher.console import Console, Limit
from rallypoint.launcher.failure import Evidence, Failure, describe, worker_name
from rallypoint.launcher.policy import RoundOutcome
from rallypoint.launcher.restart_budget import RestartBudget
from rallypoint.launcher.round_outcome import Proposal
from rallypoint.launcher.worker_group import WorkerGroup
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.records import LeaveCause, LeaveKind
from rallypoint.sentences import listed
from rallypoint.settings import Settings

LAST_PROPOSAL_S = 1.0
READ_OUTCOME_S = 1.0
NAME_MISSING_S = 5.0
"""How often the nodes that are missing at the exit barrier are named."""
ECHO_S = 0.2
"""How much later a failure is reported that may be the echo of another one."""
SETTLE_S = 1.0
"""How long a signal to all processes of a node may take to reach its launcher, after it has ended a worker."""
NAME_SILENT_S = 1.0
"""How often the nodes that have not answered a failure report are named."""
LOSS_MARGIN_S = 2.0
"""How much longer than its time to live the session of a dead process may seem to live."""
EVIDENCE_S = 2.0
"""The time limit for reading what a failed worker left behind."""


class Agreement:
    """`on_explained` is called once, when the failure that ends the round is known."""

    def __init__(
        self,
        world: AsyncWorld,
        settings: Settings,
        name: str,
        budget: RestartBudget,
        console: Console,
        *,
        wait_for: Callable[..., None],
        post: Callable[[policy.Event], None],
        on_explained: Callable[[], None],
    ) -> None:
        self.world = world
        self._settings = settings
        self._name = name
        self._budget = budget
        self._console = console
        self._wait_for = wait_for
        self._post = post
        self._on_explained = on_explained
        self._report: Proposal | None = None
        """The report of a failure that is in force."""
        self._is_explained = False
        self.workers: WorkerGroup | None = None
        """This node's workers, also after they have ended."""
        self.start_error = ""
        """Why no worker could be started."""

    async def follow(self) -> None:
        """Pass on the outcome in force, and every change of it. Ends with the store."""
        with suppress(StoreError):
            async for held in round_outcome.follow(self.world.store):
                self._decided(held)

    async def read(self) -> None:
        """Pass on the outcome that is in force now, if there is one and a server."""
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(READ_OUTCOME_S):
                if (held := await round_outcome.read(self.world.store)) is not None:
                    self._decided(held)

    async def fail(self, why: str, code: int) -> None:
        """The run has failed: it is closed before the outcome of its last round says so."""
        await self.read()
        cause = LeaveCause(kind=LeaveKind.WORKER_FAILED, why=why, round=self.world.round)
        held = self._report or Proposal(outcome=RoundOutcome.FAILED, cause=cause, by=self.world.rank)
        cause = msgspec.structs.replace(held.cause, why=why)
        self._decided(msgspec.structs.replace(held, outcome=RoundOutcome.FAILED, cause=cause, code=code))

    def _decided(self, held: Proposal) -> None:
        """This outcome is in force."""
        world, failure = self.world, held.failure
        if held.outcome is RoundOutcome.FAILURE and self._report is None:
            self._report = held
        if failure is not None and held.outcome is not RoundOutcome.FAILURE and not self._is_explained:
            self._is_explained = True
            self._on_explained()
            self._wait_for(None)
            self._console.say(f"root cause of the end of round {world.round}: {held.cause.why}")
            for line in failure.trace:
                self._console.say(f"  | {line}")
        name = worker_name(failure.rank, failure.node) if failure is not None else ""
        is_own = held.by == world.rank
        self._post(policy.OutcomeDecided(world.round, held.outcome, held.cause, held.code, name, is_own))

    def _round_over(self, why: str) -> None:
        self._post(policy.RoundChanged(self.world.round, Cause.ROUND_OVER, why))

    # --- proposals ----------------------------------------------------------------------------------------------------

    async def propose(self, outcome: RoundOutcome, cause: LeaveCause) -> None:
        try:
            proposal = Proposal(outcome=outcome, cause=cause, by=self.world.rank)
            held = await round_outcome.propose(self.world.store, proposal)
        except StoreError as error:
            self._round_over(str(error))
        else:
            self._decided(held)

    async def propose_restart(self, why: str) -> None:
        """Tell the other members why this node leaves the round. If that fails, they notice that it has left."""
        cause = LeaveCause(kind=LeaveKind.ROUND_OVER, why=f"{self._name} leaves: {why}", round=self.world.round)
        proposal = Proposal(outcome=RoundOutcome.RESTART, cause=cause, by=self.world.rank)
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LAST_PROPOSAL_S):
                await round_outcome.overrule(self.world.store, proposal)

    # --- a worker's failure, which is reported, attributed, and only then counted -------------------------------------

    async def settle_signals(self) -> None:
        await asyncio.sleep(SETTLE_S)
        self._post(policy.SignalsSettled(self.world.round))

    async def report(self, failed: policy.Exited | policy.Stalled, *, is_alone: bool) -> None:
        """Report the failure. Without a server: once there is one, or until this node's own session is lost.

        `is_alone`: the world has no other worker.
        """
        world = self.world
        failure = await self._describe(failed)
        if failure.may_be_echo and not is_alone:
            await asyncio.sleep(ECHO_S)
            failure = await self._describe(failed)
        cause = LeaveCause(kind=failure.kind, why=failure.sentence, round=world.round, rank=failure.rank)
        proposal = Proposal(
            outcome=RoundOutcome.FAILURE, cause=cause, by=world.rank, code=failure.code, failure=failure
        )
        self._wait_for(
            f"an answer from {self._settings.where}, to tell whether a lost node is the reason for this: "
            f"{failure.sentence}"
        )
        try:
            while True:
                with suppress(StoreTimeoutError):
                    held = await round_outcome.overrule(world.store, proposal)
                    break
        except StoreError as error:
            self._round_over(str(error))
            return
        self._wait_for(None)
        self._decided(held)

    async def _describe(self, failed: policy.Exited | policy.Stalled) -> Failure:
        """The first failure of this node's workers that is no echo, from what they left behind; else the reported one.

        A worker that has failed may still be ending when the connections that it has closed have made others fail.
        """
        if isinstance(failed, policy.Stalled):
            code = policy.BUDGET_USED_UP
            return Failure(rank=failed.rank, local_rank=0, node=failed.node, code=code, stalled=failed.why)
        found: list[tuple[Failure, float]] = []
        if self.workers is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVIDENCE_S):
                    evidence = await self.workers.evidence()
                    found = [known for one in evidence if (known := describe(one, self._name)) is not None]
        if not found:
            unread = Evidence(failed.rank, failed.local_rank, failed.code, stderr=self.start_error.encode())
            found = [known for known in [describe(unread, self._name)] if known is not None]
        return min(found, key=lambda known: (known[0].may_be_echo, -known[1]))[0]

    @property
    def _reported(self) -> Proposal:
        """The report in force; there is one."""
        assert self._report is not None
        return self._report

    async def answer(self) -> None:
        """Answer the report of another launcher."""
        why = self._reported.cause.why
        self._wait_for(f"{why}. Is a lost node the reason? That is known once all nodes have answered")
        with suppress(StoreError):  # the session was lost: the change of the round is on its way
            await round_outcome.answer(self.world.store)

    async def await_answers(self) -> None:
        """Wait until the other launchers have answered. A dead one cannot: then the round changes first.

        A silent one whose session has outlived the time that a dead one's can last is alive. The time is twice the time
        to live, because a server that restarts gives all sessions their full time again.
        """
        world, why = self.world, self._reported.cause.why
        loop, ttl_s = asyncio.get_running_loop(), self._settings.session_ttl_s
        deadline = loop.time() + 2 * ttl_s + LOSS_MARGIN_S
        question = f"{why}. Is a lost node the reason? The session of a dead node ends within {ttl_s:g} s"
        self._wait_for(question)
        names: list[str] = []
        silent = [rank for rank in range(world.world_size) if rank != world.rank]
        try:
            while silent and (silent := await round_outcome.wait_answers(world.store, silent, NAME_SILENT_S)):
                is_late = loop.time() >= deadline
                if is_late or not names:
                    with suppress(RendezvousError):
                        names = [member.name for member in await world.members()]
                        if is_late:
                            break  # there is a server, and it has not declared the silent ones lost
                self._wait_for(f"{question}; no answer yet from {listed([_named(names, rank) for rank in silent])}")
        except StoreError as error:
            self._round_over(str(error))
            return
        self._wait_for(None)
        self._post(policy.AllAnswered(world.round))

    async def spend_restart(self) -> None:
        """Count the restart, then tell the others before this node leaves: that is faster than noticing a loss.

        The run never ends because a restart could not be counted: then this node joins again, and nothing is counted.
        """
        world, held = self.world, self._reported
        member = ModRevisionIs(world.store.keys.node(world.store.node_id), world.store.joined.own_revision)
        limit_s = self._settings.join_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                verdict = await self._budget.spend(world.round, held.cause.why, held.code, member)
        except (TimeoutError, RendezvousError, BackendError) as error:
            trouble = str(error) or f"no answer within {limit_s:g} s"
            self._round_over(f"{held.cause.why}, and a restart could not be counted: {trouble}")
            return
        outcome = RoundOutcome.RESTART if verdict.allowed else RoundOutcome.FAILED
        cause = msgspec.structs.replace(held.cause, why=verdict.why)
        proposal = msgspec.structs.replace(held, outcome=outcome, cause=cause, code=verdict.code)
        with suppress(StoreError):  # this node is no longer a member, and the others know it
            proposal = await round_outcome.overrule(world.store, proposal)
        self._decided(proposal)

    # --- the exit barrier ---------------------------------------------------------------------------------------------

    async def await_others(self, limit_s: float) -> None:
        """Wait until all nodes have finished. Names the missing ones meanwhile, and again when it gives up."""
        world, loop = self.world, asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        names: list[str] = []
        while True:
            left_s = deadline - loop.time()
            try:
                await world.store.barrier("rallypoint.run/exit", max(0.05, min(NAME_MISSING_S, left_s)))
                self._post(policy.AllFinished(world.round))
                return
            except StoreTimeoutError as error:
                with suppress(RendezvousError):
                    names = names or [member.name for member in await world.members()]
                missing = listed([_named(names, rank) for rank in error.missing if isinstance(rank, int)])
                if loop.time() >= deadline:
                    why = f"this node has finished; not finished within {limit_s:g} s: {missing or error}"
                    self._post(policy.OthersUnfinished(world.round, why))
                    return
                limit = Limit("--exit-timeout", deadline - loop.time())
                self._wait_for(f"this node has finished; not finished yet: {missing or error}", limit)
            except StoreError as error:
                self._round_over(str(error))
                return


def _named(names: list[str], rank: int) -> str:
    """A node of the round, by its name if that is known and by its rank."""
    return f"{names[rank]} (node {rank})" if rank < len(names) else f"node {rank}"
