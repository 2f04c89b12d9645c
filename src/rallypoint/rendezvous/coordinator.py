"""The coordinator of a run: a loop that updates its view, asks `decide` for the next step, and writes it.

Its view is one scan, made after its election, and then a watch on the control keys (rule 6). Each write compares the
create revision of the `coordinator` key (its term) and the revision of `state/round` that it was decided on (rule 3);
writes of `state/round` compare `state/closed` as well (rule 7). A refused write means only that the view was out of
date: scan, decide again. A coordinator never continues an attempt of another term (rule 1), and never writes a node's
key. (The rules by number are in ARCHITECTURE.md, "Why it is safe".)

Order within an attempt (rule 10): the complete roster, then `state/round` = forming, then the assignments. When all
members have confirmed, `state/round` = active, in one transaction that compares that each member's key is still the
confirmation that was seen (as far as the backend's limit on compares allows).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend
from rallypoint.errors import BackendError, RendezvousStateError
from rallypoint.events import (
    CoordinatorElected,
    Emitter,
    Event,
    JoinStarted,
    NodeGone,
    NodeHeldBack,
    NodeLeft,
    NodeLost,
    RecordUnreadable,
    RoundActive,
    RoundForming,
    RoundGivenUp,
    RoundOver,
)
from rallypoint.kv.types import BranchOp, Compare, Delete, DeleteRange, GotRange, ModRevisionIs, Put, Range, TxnResult
from rallypoint.rendezvous.attempt import (
    Leases,
    Writes,
    activation_writes,
    active_record,
    active_status,
    forming_status,
    forming_writes,
    new_attempt,
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
from rallypoint.rendezvous.fenced_writer import OTHER_COMPARES, Deposed, FencedWriter, LookAgain
from rallypoint.rendezvous.history import Reports
from rallypoint.rendezvous.kept_events import MOST_NAMES, KeptEvents
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
from rallypoint.rendezvous.round_end import unknown
from rallypoint.rendezvous.view import Arrival, Departure, Unreadable, View
from rallypoint.rendezvous.watch_reader import WatchReader

STATUS_EVERY_S = 0.25
REASON_EVERY_S = 1.0
"""Shortest time between two writes of `state/waiting`: when a count has changed, and when only the sentence has."""
MANY_NODES = 1_000
"""From so many nodes on these times grow with the number of nodes, except for a loss."""
MAX_COLLECTED = 100
"""Old rounds whose data is deleted at a time. The data of the rest is deleted when its lease ends."""
CATCH_UP_S = 5.0
"""If the watch does not deliver a write of our own within this time, it is cancelled and the run scanned again."""


class Coordinator:
    """Decides the rounds of one run for one term. `run()` returns why the term ended; cancelling it is safe."""

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
        self._kept = KeptEvents(keys, name, wall)
        self._loop = asyncio.get_running_loop()
        self._view = View(keys, self._loop.time())
        self._view.returning = returning
        self._reader: WatchReader | None = None
        self._writer = FencedWriter(backend, keys, term)
        self._status: WaitingRecord | None = None
        """`state/waiting` as it was last written."""
        self._status_revision = 0
        self._status_at = float("-inf")
        self._ended_round = 0
        """The last round whose end was reported."""
        self._announced_round = 0
        """The last round that was reported as active."""
        self._has_history = False

    @property
    def view(self) -> View:
        """The coordinator's view of the run. Read it at once: it changes with every batch."""
        return self._view

    async def run(self) -> str:
        """Coordinate until deposed; returns the reason."""
        is_stale = True
        refusals = 0
        try:
            while True:
                try:
                    if is_stale:
                        await self._scan()
                        is_stale = False
                    await self._step()
                    self._backoff.reset()
                    refusals = 0
                except LookAgain:
                    is_stale = True
                    refusals += 1
                    if refusals > 1:  # more than an outdated view: do not repeat without a pause
                        await self._backoff.sleep()
                except BackendError:
                    mark("coordinator.lost_backend")
                    is_stale = True
                    await self._backoff.sleep()
        except Deposed as why:
            return str(why)
        finally:
            self._stop_watching()

    # --- the view -----------------------------------------------------------------------------------------------------

    async def _scan(self) -> None:
        """Scan all control keys, then watch from that revision (rule 6)."""
        self._stop_watching()
        scanned = await self._backend.scan(self._keys.control)
        self._view.load(scanned.items, scanned.revision, self._loop.time())
        watch = self._backend.watch(self._keys.control, scanned.revision)
        self._reader = WatchReader(watch, f"coordinator watch of {self._keys.run_id}")
        await self._load_roster()
        if not self._has_history:
            both = await self._backend.txn((), [Range(self._keys.histories), Range(self._keys.events)])
            histories, events = [found.items for found in both.results if isinstance(found, GotRange)]
            self._reports.load(histories)
            self._kept.begin(self._view.config.incarnation if self._view.config is not None else "")
            self._kept.load(events)
            self._has_history = True
            self._view.inherit_end()
            self._take_over()
        if (key := self._kept.in_doubt) is not None:
            self._kept.settle((await self._backend.get(key)).item, self._loop.time())
        self._announce(self._view.round)

    def _take_over(self) -> None:
        """Note what earlier coordinators of the run did not keep, as far as its keys show it."""
        view, now = self._view, self._loop.time()
        record = view.round
        if view.is_active and view.ever_active and record is not None and record.term != self._term:
            report = self._reports.of(record.number)
            self._note_active(self._active_event(record), at=report.formed_at if report is not None else None)
        self._kept.note(CoordinatorElected(run_id=self._keys.run_id, by=self._name, term=self._term), now)
        arrivals = [fact for fact in view.facts if isinstance(fact, Arrival)]
        view.facts = [fact for fact in view.facts if not isinstance(fact, Arrival)]
        for one in arrivals:
            self._kept.note_present(self._join_event(one), now)

    def _announce(self, record: RoundRecord | None) -> None:
        """Report once that a round of this term is active, also if the scan after an unknown outcome shows it."""
        if record is None or record.phase is not RoundPhase.ACTIVE or record.term != self._term:
            return
        if record.number > self._announced_round:
            self._announced_round = record.number
            event = self._active_event(record)
            self._emit(event)
            self._note_active(event)

    def _active_event(self, record: RoundRecord) -> RoundActive:
        report = self._reports.of(record.number)
        return RoundActive(
            run_id=self._keys.run_id,
            by=self._name,
            round=record.number,
            size=record.size,
            reason=record.why,
            gather_s=report.gather_s if report else None,
            last_call_s=report.last_call_s if report else None,
            confirm_s=report.confirm_s if report else None,
        )

    def _note_active(self, event: RoundActive, at: float | None = None) -> None:
        names = [member.name for member in islice(self._view.roster.values(), MOST_NAMES)]
        self._kept.note(event, self._loop.time(), names, at)

    async def _load_roster(self) -> None:
        """Read the members of the last active round of this incarnation, if they are not known yet."""
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
            else:  # only for sticky ranks, and unchecked: the digest in state/round is that of the later attempt
                members = tuple(member for item in items for member in decode(RosterRecord, item).members)
        except RendezvousStateError as error:
            self._emit(RecordUnreadable(run_id=self._keys.run_id, by=self._name, key=str(error.key), reason=str(error)))
            members = ()
        view.set_roster(number, members)

    def _stop_watching(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None

    def _apply_batches(self) -> None:
        """Apply all batches that have arrived. The view changes only here, never while a decision is carried out."""
        assert self._reader is not None
        while (batch := self._reader.ready()) is not None:
            self._view.apply(batch.changes, batch.revision, self._loop.time())

    async def _await_change(self, until: float | None) -> None:
        """Wait for a batch, or until the instant `until`."""
        assert self._reader is not None
        await self._reader.wait(until)

    # --- deciding and acting ------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        self._apply_batches()
        now = self._loop.time()
        view = self._view
        if view.coordinator_revision != self._term:
            raise Deposed("its key is gone or of another term: its session ended")
        view.tick(now)
        if view.config is not None and view.config.incarnation != self._kept.incarnation:
            self._kept.begin(view.config.incarnation)
        self._emit_facts()
        await self._note_end_of_round(now)
        decision = decide(view, now)
        match decision:
            case Form():
                await self._form(decision, now)
            case Activate():
                await self._activate(decision, now)
            case GiveUp(late, why):
                number = view.plan.number if view.plan else 0
                self._tell(RoundGivenUp(run_id=self._keys.run_id, by=self._name, round=number, reason=why))
                view.give_up(late, now)
            case Hold(record):
                await self._write(Put(self._keys.health(record.name), encode(record), self._data_lease))
                self._tell(
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
                status_at = await self._update_status(decision, now)
                kept_at = await self._keep_events(now)
                instants = [at for at in (until, status_at, kept_at) if at is not None]
                await self._await_change(min(instants, default=None))

    async def _form(self, decision: Form, now: float) -> None:
        view, keys = self._view, self._keys
        attempt = new_attempt(view, decision, self._term)
        status = forming_status(attempt.record, view)
        writes = forming_writes(keys, attempt, status, view, self._leases)

        def on_formed(revision: int) -> None:  # after the commit: the nodes wait for the write, not for this
            plan = attempt.plan(now)
            view.start_plan(plan)
            self._reports.formed(plan, view)
            self._report_formed(attempt.record, status, revision)

        try:
            await self._write_round(writes, on_formed)
        except BaseException:
            mark("coordinator.burnt")
            if view.plan is not None:
                why = "not all assignments could be written"
                self._tell(RoundGivenUp(run_id=keys.run_id, by=self._name, round=decision.number, reason=why))
            view.plan = None  # the number is never used again (rule 1)
            raise
        assert view.plan is not None
        view.plan.started_at = self._loop.time()
        await self._catch_up()

    def _report_formed(self, record: RoundRecord, status: WaitingRecord, revision: int) -> None:
        """The attempt is committed. Its assignments may follow in further transactions."""
        self._note_status(status, revision)
        self._tell(
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
        record, status = active_record(forming, confirmed[0][1].record, decision.why), active_status(view, forming)
        report = self._reports.activated(plan, record, now)
        room = self._backend.limits.max_txn_ops - OTHER_COMPARES  # compares of confirmations that fit into one request
        still_confirmed: list[Compare] = [
            ModRevisionIs(keys.node(node_id), node.mod_revision) for node_id, node in confirmed
        ]

        def on_activated(revision: int) -> None:
            members = [RosterMember(i, plan.ranks[i][0], node.record.name, node.record.addr) for i, node in confirmed]
            self._report_activated(record, members, status, revision)

        writes = activation_writes(keys, record, status, report, self._leases)
        writes.compares = still_confirmed[:room]
        await self._write_round(writes, on_activated)
        await self._catch_up()
        await self._collect(forming)

    def _report_activated(
        self, record: RoundRecord, members: Sequence[RosterMember], status: WaitingRecord, revision: int
    ) -> None:
        self._view.set_roster(record.number, members)
        self._note_status(status, revision)
        self._announce(record)

    async def _collect(self, forming: RoundRecord) -> None:
        """Delete stores and rosters of rounds before the previous active one: no node of those is a member any more."""
        room = min(self._backend.limits.max_txn_ops // 3, MAX_COLLECTED)
        old = list(islice((n for n in range(forming.kept_from, forming.number) if n != forming.last_active), room))
        ops: list[BranchOp] = []
        for n in old:
            ops += [DeleteRange(self._keys.store(n)), DeleteRange(self._keys.roster(n))]
        ops += [Delete(self._keys.history(n)) for n in self._reports.drop_surplus()][:room]
        if ops:
            await self._write(*ops)

    async def _catch_up(self) -> None:
        """Wait until our own write of `state/round` has come back through the watch."""
        before = self._view.round_revision
        give_up_at = self._loop.time() + CATCH_UP_S
        while self._view.round_revision == before:
            if self._loop.time() >= give_up_at:
                mark("coordinator.silent_watch")
                raise LookAgain
            await self._await_change(give_up_at)
            self._apply_batches()

    async def _note_end_of_round(self, now: float) -> None:
        view = self._view
        if not view.is_active or view.round is None or view.members or self._ended_round == view.round.number:
            return
        if not view.ever_active:
            return  # a round of an earlier incarnation
        number = view.round.number
        if (known := self._reports.end_of(number)) is not None:
            mark("coordinator.end_known")
            view.last_end = known  # an earlier coordinator has reported it
            self._ended_round = number
            return
        end = view.root_cause() or unknown(number)
        end = msgspec.structs.replace(end, lasted_s=self._reports.lasted_s(number, now))
        report = self._reports.ended(end)
        if report is not None:
            await self._write(Put(self._keys.history(number), encode(report), self._data_lease))
            self._reports.keep(report)
        view.last_end = end
        self._ended_round = number
        self._tell(
            RoundOver(
                run_id=self._keys.run_id,
                by=self._name,
                round=number,
                kind=end.kind.value,
                reason=end.why,
                lasted_s=end.lasted_s,
            )
        )

    # --- status and events --------------------------------------------------------------------------------------------

    async def _update_status(self, decision: Decision, now: float) -> float | None:
        """Write `state/waiting` if it has changed. If it is too early for that, returns when; else None."""
        if self._view.config is None or self._view.unreadable:
            return None
        record = summarise(self._view, decision, now)
        if self._view.waiting_revision > self._status_revision:  # of another term, or a write of unknown outcome
            self._status, self._status_revision = self._view.waiting, self._view.waiting_revision
        if record == self._status:
            return None
        allowed_at = self._status_at + self._status_pause_s(record)
        if now < allowed_at:
            return allowed_at
        written = await self._write(Put(self._keys.waiting, encode(record), self._run_lease))
        self._note_status(record, written.revision)
        return None

    def _status_pause_s(self, record: WaitingRecord) -> float:
        """The pause between two writes of `state/waiting`: every node receives each, so it grows with their number."""
        last = self._status
        if last is None or record.lost != last.lost or record.number != last.number:
            return STATUS_EVERY_S
        only_reason = _counts(record) == _counts(last)
        return (REASON_EVERY_S if only_reason else STATUS_EVERY_S) * max(1.0, len(self._view.nodes) / MANY_NODES)

    def _note_status(self, record: WaitingRecord, revision: int) -> None:
        self._status = record
        self._status_revision = revision
        self._status_at = self._loop.time()

    async def _keep_events(self, now: float) -> float | None:
        """Write the noted events if they are due, but not while a round forms. If it is too early, returns when."""
        due_at = self._kept.due_at
        if due_at is None or self._view.plan is not None or self._view.config is None:
            return None
        if now < due_at:
            return due_at
        await self._write()
        return None

    def _tell(self, event: Event) -> None:
        """Emit an event of the run, and keep it."""
        self._emit(event)
        self._kept.note(event, self._loop.time())

    def _emit_facts(self) -> None:
        """Emit the events of what the view has noticed. What a node itself emits is only kept."""
        facts, self._view.facts = self._view.facts, []
        run, now = self._keys.run_id, self._loop.time()
        for fact in facts:
            match fact:
                case Arrival():
                    self._kept.note(self._join_event(fact), now)
                case Departure(left=True):
                    self._kept.note(NodeLeft(run_id=run, by=fact.name, reason=fact.why), now)
                case Departure():
                    lost = NodeLost(run_id=run, by=self._name, node=fact.name, round=fact.round, reason=fact.why)
                    self._emit(lost)
                    gone = NodeGone(run_id=run, by=self._name, node=fact.name, round=fact.round, reason=fact.why)
                    self._kept.note(lost if fact.left is False else gone, now)
                case Unreadable():
                    self._tell(RecordUnreadable(run_id=run, by=self._name, key=fact.key, reason=fact.why))

    def _join_event(self, arrival: Arrival) -> JoinStarted:
        return JoinStarted(run_id=self._keys.run_id, by=arrival.name, join=arrival.join)

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
        """One transaction, which takes along the noted events."""
        kept = self._kept.writes(self._data_lease, self._backend.limits.max_txn_ops - len(ops))
        result = await self._writer.write(self._view.round_revision, (*ops, *kept.ops), kept.compares)
        self._kept.written(kept, self._loop.time())
        return result


def _counts(record: WaitingRecord) -> tuple[int, ...]:
    return (record.number, record.waiting, record.spare, record.held_back, record.lost, record.open_places)
