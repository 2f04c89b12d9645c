"""What the launchers of a run agree on, in the run itself: how many restarts it has used, and how it ended.

One key, `budget`, written by transaction: it is one number for the whole run, whichever node counts and however often
nodes come and go. A round is counted once. The record belongs to an incarnation of the run; what an earlier one left,
or one that had ended and was reopened, counts from nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.backends.contract import Backend
from rallypoint.errors import LeaseGone, OutcomeUnknown, RendezvousError, Unavailable
from rallypoint.kv.types import BranchOp, Compare, ModRevisionIs, Put
from rallypoint.launcher.policy import BUDGET_USED_UP
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import ClosedRecord, Record, decode, encode
from rallypoint.rendezvous.run_config import RunConfig, RunSnapshot

RETRY_S = 0.2


class BudgetRecord(Record, frozen=True, kw_only=True):
    """Restarts of a run. `round` is the last that was counted; `outcome` the run's exit code, once it has ended."""

    incarnation: str
    used: int
    limit: int
    round: int = 0
    by: str = ""
    why: str = ""
    outcome: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the run may go on after a failure; if not, its exit code. `why` is for everybody."""

    allowed: bool
    code: int
    why: str


class Book:
    """The budget of one run, for one launcher. Calls are repeated until the backend answers: the caller limits them."""

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
        """The record of the run as it goes on: made, or begun anew after another life of the run."""
        while True:
            door, record, revision = await self._read()
            if record is not None and record.outcome is None:
                return record
            fresh = self._fresh(door)
            if await self._write(door, revision, fresh):
                return fresh

    async def spend(self, round: int, why: str, code: int) -> Verdict:
        """Count a restart because of a failure in a round; one that was counted already is allowed again.

        When none is left, the run is closed with its outcome, in the same transaction.
        """
        while True:
            door, found, revision = await self._read()
            record = found or self._fresh(door)
            if record.outcome is not None:
                return Verdict(False, record.outcome, record.why)
            if record.round >= round:
                return Verdict(True, 0, record.why)
            if record.used < record.limit:
                text = f"{why} (restart {record.used + 1} of {record.limit})"
                spent = self._changed(record, used=record.used + 1, round=round, why=text)
                if await self._write(door, revision, spent):
                    return Verdict(True, 0, text)
                continue
            outcome = code if record.limit == 0 else BUDGET_USED_UP
            text = f"{why}, and {_no_more(record.limit)}"
            failed = self._changed(record, round=round, why=text, outcome=outcome)
            if await self._write(door, revision, failed, close=text):
                return Verdict(False, outcome, text)

    async def finish(self) -> None:
        """Close the run as finished; fine if that was done already."""
        while True:
            door, found, revision = await self._read()
            record = found or self._fresh(door)
            if record.outcome is not None:
                return
            text = "all workers have finished"
            if await self._write(door, revision, self._changed(record, outcome=0, why=text), close=text):
                return

    async def outcome(self) -> BudgetRecord | None:
        """How the run ended; None: it has not, or nobody said."""
        _, record, _ = await self._read()
        return record if record is not None and record.outcome is not None else None

    # --- one read, one write ------------------------------------------------------------------------------------------

    def _fresh(self, door: RunSnapshot) -> BudgetRecord:
        return BudgetRecord(incarnation=door.config.incarnation, used=0, limit=self._limit, by=self._by)

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
        """The run, the record if it is of this life of it, and the key's revision."""
        while True:
            try:
                backend = self._backend()
                door = await self._run_config(backend).read()
                item = (await backend.get(self._keys.budget)).item
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(RETRY_S)
                continue
            if door is None:
                raise RendezvousError(f"run {self._keys.run_id!r} does not exist any more")
            record = decode(BudgetRecord, item) if item is not None else None
            if record is not None and record.incarnation != door.config.incarnation:
                record = None
            return door, record, item.mod_revision if item is not None else 0

    async def _write(self, door: RunSnapshot, revision: int, record: BudgetRecord, close: str | None = None) -> bool:
        """Whether it is written. If not, or if that is not known: read again, a round is counted once."""
        lease = door.config.run_lease
        compares: list[Compare] = [
            ModRevisionIs(self._keys.budget, revision),
            ModRevisionIs(self._keys.config, door.config_revision),
        ]
        ops: list[BranchOp] = [Put(self._keys.budget, encode(record), lease)]
        if close is not None and self._closes and not door.closed.closed:
            compares.append(ModRevisionIs(self._keys.closed, door.closed_revision))
            closed = ClosedRecord(closed=True, by=self._by, why=close, at=self._wall())
            ops.append(Put(self._keys.closed, encode(closed), lease))
        try:
            return (await self._backend().txn(compares, ops)).committed
        except LeaseGone:
            return False
        except (Unavailable, OutcomeUnknown):
            await asyncio.sleep(RETRY_S)
            return False


def _no_more(limit: int) -> str:
    if limit == 0:
        return "the run has no restarts (--max-restarts 0)"
    return f"the run has used its {limit} restart{'s' * (limit != 1)} (--max-restarts)"
