"""The restart budget of a run, shared by its launchers: how many restarts the run has used, and how it ended.

The budget is one key, `budget`, written by transaction, so it is one number for the whole run: leaving and re-joining
does not reset it. Each round is counted at most once. The record belongs to one incarnation of the run. A new
incarnation starts at zero, and so does a run that ended and was reopened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.backends.contract import Backend
from rallypoint.errors import LeaseGone, OutcomeUnknown, RendezvousError, Unavailable
from rallypoint.kv.types import BranchOp, Compare, GotItem, ModRevisionIs, Put
from rallypoint.launcher.policy import BUDGET_USED_UP
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import BudgetRecord, ClosedRecord, decode, encode
from rallypoint.rendezvous.run_config import RunConfig, RunSnapshot

RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the run may restart after a failure; if not, `code` is its exit code. All launchers show `why`."""

    allowed: bool
    code: int
    why: str


class RestartBudget:
    """The budget of one run, for one launcher. Every call retries until the backend answers: the caller sets a limit.

    `closes`: whether the end of the run also closes it.
    """

    def __init__(
        self,
        backend: Callable[[], Backend],
        keys: RunKeys,
        entry: Callable[[Backend], RunConfig],
        *,
        by: str,
        limit: int,
        closes: bool,
        wall: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._keys = keys
        self._run_config = entry
        self._by = by
        self._limit = limit
        self._closes = closes
        self._wall = wall

    async def begin(self) -> BudgetRecord:
        """The current record. Creates it if there is none, or if the existing one belongs to a run that has ended."""
        while True:
            run, record, revision = await self._read()
            if record is not None and record.outcome is None:
                return record
            fresh = self._fresh(run)
            if await self._write(run, revision, fresh):
                return fresh

    async def spend(self, round: int, why: str, code: int, member: ModRevisionIs) -> Verdict:
        """Count a restart for a failure in a round. A round that was counted before is allowed and not counted again.

        `member`: that the caller is still a member of the round; RendezvousError if it is not, and nothing is counted.
        If no restart is left, the same transaction records the outcome and closes the run.
        """
        while True:
            run, found, revision = await self._read()
            record = found or self._fresh(run)
            if record.outcome is not None:
                return Verdict(False, record.outcome, record.why)
            if record.round >= round:
                return _allowed(record)
            if record.used < record.limit:
                spent = self._changed(record, used=record.used + 1, round=round, why=why)
                if await self._write(run, revision, spent, member=member):
                    return _allowed(spent)
                continue
            outcome = code if record.limit == 0 else BUDGET_USED_UP
            text = f"{why}, and {_used_up(record.limit)}"
            failed = self._changed(record, round=round, why=text, outcome=outcome)
            if await self._write(run, revision, failed, close=text, member=member):
                return Verdict(False, outcome, text)

    async def finish(self) -> None:
        """Record that the run has finished, and close it. Idempotent."""
        while True:
            run, found, revision = await self._read()
            record = found or self._fresh(run)
            if record.outcome is not None:
                return
            text = "all workers have finished"
            if await self._write(run, revision, self._changed(record, outcome=0, why=text), close=text):
                return

    # --- one read, one write ------------------------------------------------------------------------------------------

    def _fresh(self, run: RunSnapshot) -> BudgetRecord:
        return BudgetRecord(incarnation=run.config.incarnation, used=0, limit=self._limit, by=self._by)

    def _changed(
        self,
        record: BudgetRecord,
        *,
        used: int | None = None,
        round: int | None = None,
        why: str,
        outcome: int | None = None,
    ) -> BudgetRecord:
        return BudgetRecord(
            incarnation=record.incarnation,
            used=record.used if used is None else used,
            limit=record.limit,
            round=record.round if round is None else round,
            by=self._by,
            why=why,
            outcome=outcome,
        )

    async def _read(self) -> tuple[RunSnapshot, BudgetRecord | None, int]:
        """The run, the record if it belongs to this incarnation, and the key's revision (0: no key)."""
        while True:
            try:
                backend = self._backend()
                run = await self._run_config(backend).read()
                item = (await backend.get(self._keys.budget)).item
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(RETRY_S)
                continue
            if run is None:
                raise RendezvousError(f"run {self._keys.run_id!r} no longer exists")
            record = decode(BudgetRecord, item) if item is not None else None
            if record is not None and record.incarnation != run.config.incarnation:
                record = None
            return run, record, item.mod_revision if item is not None else 0

    async def _write(
        self,
        run: RunSnapshot,
        revision: int,
        record: BudgetRecord,
        close: str | None = None,
        member: ModRevisionIs | None = None,
    ) -> bool:
        """Whether the record was written. On False the caller reads again; an unknown outcome also returns False.

        That is safe because a round is counted once.
        """
        lease = run.config.run_lease
        compares: list[Compare] = [
            ModRevisionIs(self._keys.budget, revision),
            ModRevisionIs(self._keys.config, run.config_revision),
        ]
        ops: list[BranchOp] = [Put(self._keys.budget, encode(record), lease)]
        if close is not None and self._closes and not run.closed.closed:
            compares.append(ModRevisionIs(self._keys.closed, run.closed_revision))
            closed = ClosedRecord(closed=True, by=self._by, why=close, at=self._wall(), outcome=record.outcome)
            ops.append(Put(self._keys.closed, encode(closed), lease))
        if member is not None:
            compares.append(member)
        try:
            result = await self._backend().txn(compares, ops)
            if not result.committed and member is not None:
                own = result.results[-1]
                assert isinstance(own, GotItem)
                if (own.item.mod_revision if own.item is not None else 0) != member.revision:
                    raise RendezvousError("this node is no longer a member of the round")
            return result.committed
        except LeaseGone:
            return False
        except (Unavailable, OutcomeUnknown):
            await asyncio.sleep(RETRY_S)
            return False


def _allowed(record: BudgetRecord) -> Verdict:
    return Verdict(True, 0, f"{record.why} (restart {record.used} of {record.limit})")


def _used_up(limit: int) -> str:
    if limit == 0:
        return "the run has no restarts (--max-restarts 0)"
    return f"the run has used its {limit} restart{'s' * (limit != 1)} (--max-restarts)"
