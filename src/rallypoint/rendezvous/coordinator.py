"""The coordinator of a run: looks, decides (`decide`), writes, and looks again. One at a time, fenced.

Its view is one scan made after its election and then a watch on the control keys. Each write compares the create
revision of the `coordinator` key (its term) and the revision of `state/round` that it decided on; writes of
`state/round` compare `state/closed` as well. A refused write means only that the view was old: scan, decide again.

Order within an attempt: the roster whole, then `state/round` forming, then the assignments; when all have confirmed,
`state/round` active, in one transaction with the compare that every member's key is still the confirmation that was
seen (as far as the backend's limit on compares allows).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend
from rallypoint.errors import BackendError, RendezvousStateError
from rallypoint.events import (
    Emitter,
    NodeHeldBack,
    NodeLost,
    RecordUnreadable,
    RoundActive,
    RoundForming,
    RoundGivenUp,
    RoundOver,
)
from rallypoint.kv.types import BranchOp, Compare, Delete, DeleteRange, ModRevisionIs, Put, TxnResult
from rallypoint.rendezvous.attempt import (
    Leases,
    active,
    active_words,
    attempt,
    becomes_active,
    forming_words,
    forms,
)
from rallypoint.rendezvous.decide import (
    Activate,
    Decision,
    Forgive,
    Form,
    GiveUp,
    Hold,
    Wait,
    decide,
    summarise,
)
from rallypoint.rendezvous.fenced_writer import OTHER_COMPARES, Deposed, FencedWriter, LookAgain, Writes
from rallypoint.rendezvous.history import Reports
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import (
    RosterMember,
    RosterRecord,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
    encode,
    join_roster,
)
from rallypoint.rendezvous.returning_nodes import ReturningNodes
from rallypoint.rendezvous.view import Departure, View
from rallypoint.rendezvous.watch_reader import WatchReader

TELL_EVERY_S = 0.25
RETELL_EVERY_S = 1.0
"""How often the nodes may be told at most: that a count changed, and that only the sentence changed."""
MANY_NODES = 1_000
"""From so many nodes on they are told less often, a loss excepted."""
MOST_COLLECTED = 100
"""Old rounds whose data is removed at a time; what is left of more goes with its lease."""
CATCH_UP_S = 5.0
"""A watch that is silent for so long after our own write is given up."""


class Coordinator:
    """Decides the rounds of one run for one term. `run()` returns why the term ended; it may be cancelled anywhere."""

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        term: int,
        name: str,
        emit: Emitter,
        backoff: Backoff,
        wall: Callable[[], float],
        returning: ReturningNodes | None = None,
    ) -> None:
        self._backend = backend
        self._keys = keys
        self._term = term
        self._name = name
        self._emit = emit
        self._backoff = backoff
        self._reports = Reports(wall)
        self._loop = asyncio.get_running_loop()
        self._view = View(keys, self._loop.time())
        self._view.returning = returning
        self._feed: WatchReader | None = None
        self._writer = FencedWriter(backend, keys, term)
        self._told: WaitingRecord | None = None
        self._told_revision = 0
        self._told_at = float("-inf")
        self._noticed_end_of = 0
        self._announced = 0
        self._knows_the_past = False

    @property
    def view(self) -> View:
        """What it knows of the run, to be read and not kept."""
        return self._view

    async def run(self) -> str:
        """Lead until deposed."""
        stale = True
        refusals = 0
        try:
            while True:
                try:
                    if stale:
                        await self._look()
                        stale = False
                    await self._step()
                    self._backoff.reset()
                    refusals = 0
                except LookAgain:
                    stale = True
                    refusals += 1
                    if refusals > 1:  # not a view that was just old: do not ask in a loop
                        await self._backoff.sleep()
                except BackendError:
                    mark("coordinator.lost_backend")
                    stale = True
                    await self._backoff.sleep()
        except Deposed as why:
            return str(why)
        finally:
            self._stop_watching()

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Scan everything, then watch from there."""
        self._stop_watching()
        scanned = await self._backend.scan(self._keys.control)
        self._view.load(scanned.items, scanned.revision, self._loop.time())
        watch = self._backend.watch(self._keys.control, scanned.revision)
        self._feed = WatchReader(watch, f"coordinator watch of {self._keys.run_id}")
        await self._load_roster()
        self._announce(self._view.round)
        if not self._knows_the_past:
            self._reports.load((await self._backend.scan(self._keys.histories)).items)
            self._knows_the_past = True

    def _announce(self, record: RoundRecord | None) -> None:
        """Say that a round of this term is active, once, however this coordinator learned that its write was done."""
        if record is None or record.phase is not RoundPhase.ACTIVE or record.term != self._term:
            return
        if record.number > self._announced:
            self._announced = record.number
            report = self._reports.of(record.number)
            self._emit(
                RoundActive(
                    run_id=self._keys.run_id,
                    by=self._name,
                    round=record.number,
                    size=record.size,
                    reason=record.why,
                    gather_s=report.gather_s if report else None,
                    last_call_s=report.last_call_s if report else None,
                    confirm_s=report.confirm_s if report else None,
                )
            )

    async def _load_roster(self) -> None:
        """The members of the last active round of this incarnation, if they are not known yet."""
        view, record = self._view, self._view.round
        if record is None or not view.ever_active:
            return
        number = record.number if view.is_active else record.last_active
        if number == view.roster_number:
            return
        items = (await self._backend.scan(self._keys.roster(number))).items
        try:
            if view.is_active:
                members = join_roster(record, items)
            else:  # only for sticky ranks: the digest in state/round is that of the attempt
                members = tuple(member for item in items for member in decode(RosterRecord, item).members)
        except RendezvousStateError as error:
            self._emit(RecordUnreadable(run_id=self._keys.run_id, by=self._name, key=str(error.key), reason=str(error)))
            members = ()
        view.set_roster(number, members)

    def _stop_watching(self) -> None:
        if self._feed is not None:
            self._feed.stop()
            self._feed = None

    def _take_in(self) -> None:
        """All batches that are here already. The view changes only here: never while a decision is carried out."""
        assert self._feed is not None
        while (batch := self._feed.ready()) is not None:
            self._view.apply(batch.changes, batch.revision, self._loop.time())

    async def _await_change(self, until: float | None) -> None:
        """Until there is a batch to take in, or a moment."""
        assert self._feed is not None
        await self._feed.wait(until)

    # --- deciding and acting ------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        self._take_in()
        now = self._loop.time()
        view = self._view
        if view.coordinator_revision != self._term:
            raise Deposed("its key is gone or another's: its session ended")
        view.tick(now)
        decision = decide(view, now)
        self._narrate()
        await self._note_end_of_round(now)
        match decision:
            case Form():
                await self._form(decision, now)
            case Activate():
                await self._activate(decision, now)
            case GiveUp(late, why):
                number = view.plan.number if view.plan else 0
                self._emit(RoundGivenUp(run_id=self._keys.run_id, by=self._name, round=number, reason=why))
                view.give_up(late, now)
            case Hold(record):
                await self._write(Put(self._keys.health(record.name), encode(record), self._data_lease))
                self._emit(
                    NodeHeldBack(
                        run_id=self._keys.run_id,
                        by=self._name,
                        node=record.name,
                        hold_s=record.hold_s,
                        reason=record.why,
                    )
                )
                view.hold_back.note_record(record, view.rules.timing if view.rules else None, now)
            case Forgive(name):
                await self._write(Delete(self._keys.health(name)))
                view.hold_back.note_gone(name)
            case Wait(_, until):
                tell_at = await self._tell(decision, now)
                moments = [at for at in (until, tell_at) if at is not None]
                await self._await_change(min(moments, default=None))

    async def _form(self, decision: Form, now: float) -> None:
        view, keys = self._view, self._keys
        new = attempt(view, decision, self._term)
        waiting = forming_words(new.record)
        writes = forms(keys, new, waiting, view, self._leases)

        def formed(revision: int) -> None:  # when the nodes know: they wait for what comes before this
            plan = new.plan(now)
            view.start_plan(plan)
            self._reports.formed(plan, view)
            self._formed(new.record, waiting, revision)

        try:
            await self._write_round(writes, formed)
        except BaseException:
            mark("coordinator.burnt")
            if view.plan is not None:
                why = "not all of its members could be told of their places"
                self._emit(RoundGivenUp(run_id=keys.run_id, by=self._name, round=decision.number, reason=why))
            view.plan = None  # this number is burnt
            raise
        assert view.plan is not None
        view.plan.started_at = self._loop.time()
        await self._catch_up()

    def _formed(self, record: RoundRecord, waiting: WaitingRecord, revision: int) -> None:
        """The attempt is committed (its assignments may still be on their way)."""
        self._note_told(waiting, revision)
        self._emit(
            RoundForming(
                run_id=self._keys.run_id, by=self._name, round=record.number, size=record.size, reason=record.why
            )
        )

    async def _activate(self, decision: Activate, now: float) -> None:
        view, keys = self._view, self._keys
        plan, forming = view.plan, view.round
        assert plan is not None
        assert forming is not None
        confirmed = [(node_id, view.nodes[node_id]) for node_id in plan.ranks]
        record, waiting = active(forming, confirmed[0][1].record, decision.why), active_words(view, forming)
        report = self._reports.activated(plan, record, now)
        room = self._backend.limits.max_txn_ops - OTHER_COMPARES  # as many confirmations as there is room for
        still_confirmed: list[Compare] = [
            ModRevisionIs(keys.node(node_id), node.mod_revision) for node_id, node in confirmed
        ]

        def activated(revision: int) -> None:
            members = [RosterMember(i, plan.ranks[i][0], node.record.name, node.record.addr) for i, node in confirmed]
            self._activated(record, members, waiting, revision)

        writes = becomes_active(keys, record, waiting, report, self._leases)
        writes.compares = still_confirmed[:room]
        await self._write_round(writes, activated)
        await self._catch_up()
        await self._collect(forming)

    def _activated(
        self, record: RoundRecord, members: Sequence[RosterMember], waiting: WaitingRecord, revision: int
    ) -> None:
        self._view.set_roster(record.number, members)
        self._note_told(waiting, revision)
        self._announce(record)

    async def _collect(self, forming: RoundRecord) -> None:
        """Remove what rounds before the previous active one left behind. Their members have been gone for a round."""
        room = min(self._backend.limits.max_txn_ops // 3, MOST_COLLECTED)
        old = list(islice((n for n in range(forming.kept_from, forming.number) if n != forming.last_active), room))
        ops: list[BranchOp] = []
        for n in old:
            ops += [DeleteRange(self._keys.store(n)), DeleteRange(self._keys.roster(n))]
        ops += [Delete(self._keys.history(n)) for n in self._reports.surplus()][:room]
        if ops:
            await self._write(*ops)

    async def _catch_up(self) -> None:
        """Until our own write of `state/round` has come back through the watch."""
        before = self._view.round_revision
        give_up_at = self._loop.time() + CATCH_UP_S
        while self._view.round_revision == before:
            if self._loop.time() >= give_up_at:
                mark("coordinator.silent_watch")
                raise LookAgain
            await self._await_change(give_up_at)
            self._take_in()

    async def _note_end_of_round(self, now: float) -> None:
        view = self._view
        if not view.is_active or view.round is None or view.members or self._noticed_end_of == view.round.number:
            return
        if not view.ever_active:
            return  # the round of an earlier life of the run
        number = view.round.number
        report, why = self._reports.ended(number, view, now)
        if report is not None:
            await self._write(Put(self._keys.history(number), encode(report), self._data_lease))
            self._reports.keep(report)
        self._noticed_end_of = number
        lasted_s = report.lasted_s if report is not None else None
        self._emit(RoundOver(run_id=self._keys.run_id, by=self._name, round=number, reason=why, lasted_s=lasted_s))

    # --- telling ------------------------------------------------------------------------------------------------------

    async def _tell(self, decision: Decision, now: float) -> float | None:
        """Write `state/waiting` if it changed and may be written now; else when it may be, if it has to."""
        if self._view.config is None or self._view.unreadable:
            return None
        record = summarise(self._view, decision, now)
        if self._view.told_revision > self._told_revision:  # another term's, or one of ours that was executed late
            self._told, self._told_revision = self._view.told, self._view.told_revision
        if record == self._told:
            return None
        may_at = self._told_at + self._pause_s(record)
        if now < may_at:
            return may_at
        written = await self._write(Put(self._keys.waiting, encode(record), self._run_lease))
        self._note_told(record, written.revision)
        return None

    def _pause_s(self, record: WaitingRecord) -> float:
        """How long to wait after the last telling: everybody is told, so the more there are the longer."""
        told = self._told
        if told is None or record.lost != told.lost or record.number != told.number:
            return TELL_EVERY_S
        only_words = _counts(record) == _counts(told)
        return (RETELL_EVERY_S if only_words else TELL_EVERY_S) * max(1.0, len(self._view.nodes) / MANY_NODES)

    def _note_told(self, record: WaitingRecord, revision: int) -> None:
        self._told = record
        self._told_revision = revision
        self._told_at = self._loop.time()

    def _narrate(self) -> None:
        facts, self._view.facts = self._view.facts, []
        for fact in facts:
            if isinstance(fact, Departure):
                if not fact.left:
                    self._emit(
                        NodeLost(
                            run_id=self._keys.run_id, by=self._name, node=fact.name, round=fact.round, reason=fact.why
                        )
                    )
            else:
                self._emit(RecordUnreadable(run_id=self._keys.run_id, by=self._name, key=fact.key, reason=fact.why))

    # --- writing ------------------------------------------------------------------------------------------------------

    @property
    def _leases(self) -> Leases:
        return Leases(self._run_lease, self._data_lease)

    @property
    def _run_lease(self) -> int:
        return self._view.config.run_lease if self._view.config else 0

    @property
    def _data_lease(self) -> int:
        return self._view.config.data_lease if self._view.config else 0

    async def _write_round(self, writes: Writes, on_marker: Callable[[int], None]) -> None:
        view = self._view
        await self._writer.write_round(view.round_revision, view.closed_revision, writes, on_marker)

    async def _write(self, *ops: BranchOp) -> TxnResult:
        return await self._writer.write(self._view.round_revision, ops)


def _counts(record: WaitingRecord) -> tuple[int, ...]:
    return (record.number, record.waiting, record.spare, record.held_back, record.lost, record.open_places)
