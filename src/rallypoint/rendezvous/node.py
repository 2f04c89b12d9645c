"""The node driver: takes one node into rounds, and reports when its round has changed.

A call of `next_round` writes the node's key as joining, waits for an assignment, confirms it by rewriting the key, and
returns when `state/round` says that the confirmed round is active. The node never decides about rounds: it follows
`state/` and its own `assign/` key. Of the keys of the algorithm it writes only its own (`node_session.py`), and
`config` and `state/closed` where a run may be made, replaced or closed (`run_config.py`). The rules by number are in
ARCHITECTURE.md, "Why it is safe".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend, Session
from rallypoint.errors import (
    BackendError,
    LeaseGone,
    OutcomeUnknown,
    Rejected,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    Unavailable,
    UnreadableState,
)
from rallypoint.events import Emitter
from rallypoint.kv.types import ModRevisionIs
from rallypoint.rendezvous.join_deadline import JoinDeadline
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import (
    Bootstrap,
    Cause,
    Identity,
    Joined,
    cause_of,
    claim_of,
    derived_cause,
    leave_reason,
)
from rallypoint.rendezvous.node_events import NodeEvents
from rallypoint.rendezvous.node_session import JoinAnew, NodeSession
from rallypoint.rendezvous.node_tasks import NodeTasks
from rallypoint.rendezvous.node_view import NodeView
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.rendezvous.records import (
    ClosedRecord,
    ConfigRecord,
    LeaveCause,
    NodePhase,
    NodeRecord,
    RosterMember,
    RoundPhase,
    encode,
)
from rallypoint.rendezvous.retry import Retry
from rallypoint.rendezvous.run_config import RunConfig, RunSnapshot, closed_error, closed_sentence, drain_sentence
from rallypoint.settings import Settings

_MEMBER, _FORMING, _ACTIVE = NodePhase.MEMBER, RoundPhase.FORMING, RoundPhase.ACTIVE  # as in `view.py`

REACH_S = 1.0
"""How long a node that was told of a close tries to reach a server that may know more."""
ChangeListener = Callable[[Cause, str], None]


class Node:
    """One node of one run on one backend. Lives on one event loop; one `next_round` at a time."""

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        identity: Identity,
        *,
        bootstrap: Bootstrap,
        emit: Emitter,
        rng: random.Random,
        wall: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.identity = identity
        self.keys = RunKeys(settings.etcd_prefix, settings.run_id)
        self.backend = backend
        self.current: Joined | None = None
        """The round that the node last returned from and has not left; its session may be lost."""
        self._last_joined: Joined | None = None
        """The last round that it returned from, also after leaving it; cleared when it opens a new session."""
        self._incarnation = ""
        """Of the run, when the node was in a round last."""
        self._listener: ChangeListener | None = None
        self.on_closed: Callable[[ClosedRecord], None] | None = None
        """Called once for each close of the run that the node is told of."""
        self._told_closed: ClosedRecord | None = None
        self._bootstrap = bootstrap
        self._node_events = NodeEvents(emit, settings.run_id, identity.name)
        self._rng = rng
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._run_config = RunConfig(
            backend, self.keys, settings, identity.name, lambda: f"{rng.getrandbits(64):016x}", wall
        )
        self._reachability = Reachability(emit, settings.run_id, identity.name)
        self._backoff = Backoff(rng)
        self._retry = Retry(settings, self._reachability, self._backoff)
        self._wake = asyncio.Event()
        self.view = NodeView(backend, self.keys, identity.id, rng, self._on_change, self._reachability)
        self._node_session = NodeSession(
            backend,
            self.keys,
            settings,
            identity,
            emit=emit,
            rng=rng,
            reachability=self._reachability,
            wall=wall,
            while_open=self._start_tasks,
            on_lost=self._on_change,
        )
        backend.on_reachability(self._on_reachability)
        backend.on_data_loss(self._make_claim)
        self._snapshot: RunSnapshot | None = None
        self._node_tasks = NodeTasks(
            backend,
            self.keys,
            identity,
            self._run_config,
            emit,
            rng,
            wall,
            self._config,
            self._reachability,
            self._tries_first,
        )
        self._node_tasks.on_elected = self._wake.set
        self._reported_cause: Cause | None = None
        self._reported_reason = ""
        self.gives_up_at: float | None = None
        """The deadline of the running call of `next_round`; None: it has none, as for a spare."""
        self.is_joining = False
        self._rewritten_for = 0
        self.left_because: str | None = None
        """Why the running call must end; None: it may go on."""

    # --- public methods -----------------------------------------------------------------------------------------------

    async def next_round(self, started_at: float | None = None, *, cause: LeaveCause | None = None) -> Joined:
        """Leave the current round, if any, and wait for a place in the next. Time counts from `started_at` (now).

        `cause`: why it leaves that round. None: because of the last change that it was told of.
        Raises RendezvousClosedError, RendezvousGracefulExitError (a spare of a closed run, or a drained node),
        RendezvousTimeoutError, RendezvousConnectionError, SettingsMismatchError, RendezvousStateError. After any of
        them, and after a cancellation, the session of the node has ended (rule 5).
        """
        if self.is_joining:
            raise RendezvousError("next_rendezvous is running already for this node: one call at a time")
        self.is_joining = True
        self._leave_round(cause)
        self._reachability.restart()
        deadline = JoinDeadline(self.settings, started_at)
        try:
            async with deadline.scope:
                return await self._join_until_admitted(deadline)
        except TimeoutError:
            if not deadline.scope.expired():  # not the deadline of this call: a time-out inside bootstrap, for example
                await self._node_session.end("its call was interrupted (TimeoutError)")
                raise
            raise await self._withdraw(
                deadline.error(self._reachability, self.view.reason(), self.settings.where)
            ) from None
        except RendezvousError as error:
            await self._withdraw(error)
            raise
        except BaseException as error:
            self.current = None
            await self._node_session.end(self.left_because or f"its call was interrupted ({type(error).__name__})")
            raise
        finally:
            self.is_joining = False
            self.left_because = None
            deadline.end()

    async def leave(self, why: str, *, cause: LeaveCause | None = None) -> None:
        """Leave the run without closing it. The node may join again. Bounded to a few seconds on every backend.

        `cause`: why it leaves its round, if it is in one. None: because of the last change that it was told of.
        A running call of `next_round` raises RendezvousError, which says that the node left.
        """
        self._leave_round(cause, why)
        if self.is_joining:
            self.left_because = why
            self._wake.set()
        if await self._node_session.end(why):
            self._node_events.left(why)

    def _leave_round(self, cause: LeaveCause | None, why: str = "") -> None:
        """The node is in no round from now on; its next record says why it left, if it was in one."""
        joined, self.current = self.current, None
        if joined is not None:
            cause = cause or derived_cause(
                self.identity.name,
                self._reported_cause,
                self._reported_reason,
                why,
                end=self.view.end_of(joined.number),
            )
            self._node_session.left = cause_of(joined, cause)

    async def close_run(self, why: str, started_at: float | None = None, *, outcome: int | None = None) -> None:
        """Close the run for all nodes. Raises RendezvousTimeoutError `close_timeout` after `started_at` (now).

        `outcome` is the exit code of a run that has ended.
        """
        if self.view.mark is not None and not (await self._look())[0]:
            return  # it is closed already, and nothing serves it
        if await self._retry(lambda: self._run_config.close(why, outcome=outcome), "closed", started_at):
            await self.view.wait_closed(is_closed=True)
            self._node_events.closed(why)

    async def reopen_run(self, why: str, started_at: float | None = None) -> bool:
        """Reopen a closed run; False if it is not closed. Time-out as in `close_run`."""
        reopened = await self._retry(lambda: self._run_config.reopen(why), "reopened", started_at)
        if reopened:
            await self.view.wait_closed(is_closed=False)
            self._node_events.reopened(why)
        return reopened

    async def stop(self) -> None:
        """Leave the run and stop all tasks of this node. Idempotent."""
        try:
            await self.leave("the node was shut down")
        finally:
            self.view.stop()

    def abandon(self) -> None:
        """Stop all tasks without writing anything, as a dead process does. The session ends when its lease does."""
        self.current = None
        self._node_session.abandon()
        self.view.stop()

    async def roster(self, joined: Joined) -> tuple[RosterMember, ...]:
        """The members of a round that this node returned from, in rank order. Reads the backend."""
        return await self.view.read_roster(
            joined, self._node_session.lost_reason if self._node_session.session else None
        )

    def observe(self) -> None:
        """Follow the run without joining it."""
        self.view.start()

    def listen(self, listener: ChangeListener) -> None:
        """Call `listener` when the node's current round changes, at once if it has already. Replaces the listener."""
        self._listener = listener
        if self.current is not None and self._reported_cause is not None:
            listener(self._reported_cause, self._reported_reason)

    def waiting_count(self) -> int:
        """The result of `num_nodes_waiting()`, from the last known values."""
        if self.current is not None and self._must_rejoin():
            return 1  # a caller that polls this must see a reason to join again
        if self.view.is_closed:
            return 0
        return self.view.count_waiting(self.settings.min_nodes)

    def _must_rejoin(self) -> bool:
        """Whether the current round cannot go on. In a closed run, `next_round` then says so."""
        if self._reported_cause in (Cause.SESSION_LOST, Cause.ROUND_OVER):
            return True
        if self.view.mark is not None:
            return bool(self.view.mark.state.outcome)  # the run has failed, for all its nodes
        return self._reported_cause is Cause.DRAIN

    # --- joining ------------------------------------------------------------------------------------------------------

    async def _join_until_admitted(self, deadline: JoinDeadline) -> Joined:
        announced = 0
        while True:
            self._raise_if_left()
            await self._raise_if_closed()
            deadline.end_spare()
            if (join := self._node_session.new_join()) != announced:
                announced = join
                self._node_events.join_started(join)
            try:
                session = await self._ensure_session()
                self._raise_if_left()
                await self._write_join()
                return await self._await_round(session, deadline)
            except JoinAnew:
                continue
            except (Unavailable, OutcomeUnknown) as error:
                self._reachability.failed(error)
                await self._backoff.sleep()
            except LeaseGone:
                await self._node_session.drop("its lease had ended")
            except UnreadableState:
                raise
            except Rejected as error:
                raise RendezvousConnectionError(f"{self.settings.where} refused this node: {error}") from error

    async def _raise_if_closed(self) -> None:
        """RendezvousClosedError if the node was told that the run is closed, and no server says within `REACH_S` that
        it may join."""
        if self.view.mark is None:
            return
        is_reached, snapshot = await self._look()
        settings = self.settings
        if is_reached and (snapshot is None or self._run_config.may_join(snapshot)):
            return
        if (closed := self.view.mark) is not None:  # it may have ended meanwhile
            if is_reached:
                mark("node.closed_still")
            else:
                mark("node.closed_unreached")
            raise closed_error(settings.run_id, closed.state, settings.reopen_after_s)

    async def _look(self) -> tuple[bool, RunSnapshot | None]:
        """Whether the backend answers within `REACH_S`, and the run as it is there."""
        if self._reachability.is_failing:
            return False, None
        try:
            async with asyncio.timeout(REACH_S):
                return True, await self._run_config.read()
        except Rejected:
            return True, None  # the join says why
        except (Unavailable, OutcomeUnknown, TimeoutError):
            return False, None

    async def _ensure_session(self) -> Session:
        """A live session; the first scan of the run runs at the same time."""
        self._snapshot = self._snapshot or self._run_config.guess(*self.view.snapshot())
        self.view.start()
        session = await self._node_session.ensure()
        if self._snapshot is None:
            await self.view.wait_seen()
        return session

    async def _write_join(self) -> None:
        """Write the node's key as joining, on a snapshot of the run that this node may join.

        The watched `config` and `state/closed` are tried first. If the write is refused, or they do not allow a join,
        the run is read, made or reopened (`RunConfig.check`) until a write succeeds.
        """
        snapshot = self._snapshot or self._run_config.guess(*self.view.snapshot())
        if snapshot is None and not self.backend.makes_run:
            await self._wait_for_run()
            snapshot = self._run_config.guess(*self.view.snapshot())
        while snapshot is None or not await self._join_with(snapshot):
            is_absent = snapshot is None and self.view.is_synced and None in self.view.snapshot()
            snapshot = await self._run_config.check(is_absent=is_absent)
            self._reachability.succeeded()

    async def _wait_for_run(self) -> None:
        """If the run does not exist, the coordinator or another process is about to make it: wait a moment for it."""
        backend, view = self.backend, self.view
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(*backend.make_run_delay_s)):
                while (
                    not (self._node_tasks.is_elected or backend.makes_run)
                    and view.is_synced
                    and None in view.snapshot()
                ):
                    self._wake.clear()
                    await self._wake.wait()

    async def _join_with(self, snapshot: RunSnapshot) -> bool:
        """Join, if `config` and `state/closed` still have the revisions of the snapshot (rule 8)."""
        self._snapshot = snapshot
        if snapshot.config.incarnation != self._incarnation:
            self._node_session.left = None  # it was a round of another life of the run
        compares = (
            ModRevisionIs(self.keys.config, snapshot.config_revision),
            ModRevisionIs(self.keys.closed, snapshot.closed_revision),
        )
        written = await self._node_session.write(NodePhase.JOINING, compares=compares)
        if written:
            self._node_tasks.joined.set()
        return written

    # --- waiting for a round ------------------------------------------------------------------------------------------

    async def _await_round(self, session: Session, deadline: JoinDeadline) -> Joined:
        while True:
            self._wake.clear()
            if session.lost.is_set() or session is not self._node_session.session:
                raise JoinAnew
            if (joined := await self._advance(deadline)) is not None:
                return joined
            if self._wake.is_set():
                continue  # something changed meanwhile, most often to active
            is_spare, in_attempt = self.view.standing(self._node_session.record)
            deadline.update(is_spare=is_spare, in_attempt=in_attempt)
            self.gives_up_at = deadline.scope.when()
            self._node_events.waiting(self.view.reason())
            self.view.raise_if_unreadable()  # again: `state/waiting` is decoded only by the lines above
            await self._wake.wait()

    async def _advance(self, deadline: JoinDeadline) -> Joined | None:
        """One step on the current view: the round if it can be entered, None after a confirmation or if nothing is due.

        Raises JoinAnew when this join is void, and the errors of `next_round` when the run is closed or the node is
        drained.
        """
        view, own, snapshot = self.view, self._node_session.record, self._snapshot
        assert own is not None
        assert snapshot is not None
        view.raise_if_unreadable()
        record, assign = view.round, view.assign
        if own.phase is _MEMBER and view.is_synced and self._is_forgotten(own.round):  # rule 9
            mark("node.forgotten")
            await self._node_session.drop("the run's state was lost")
            raise JoinAnew
        if view.has_vanished(snapshot.closed_revision):
            raise JoinAnew
        if assign is not None and assign.join != own.join:  # rule 2: it answers an earlier join
            assign = None
        if record is not None and assign is not None and record.number == assign.number:
            if own.phase is _MEMBER and own.round == record.number and record.phase is _ACTIVE:
                return self._enter(assign.rank)
            if record.phase is _FORMING and assign.number > own.round:
                await self._confirm(assign.number, assign.rank, record.size)
                deadline.confirmed()
                return None
        elif record is not None and assign is not None and own.round < assign.number < record.number:
            await self._rewrite_key(assign.number, own)
        if view.closed is not None and view.closed.closed and view.closed_revision > snapshot.closed_revision:
            mark("node.closed")
            run_id, reopen_after_s = self.settings.run_id, self.settings.reopen_after_s
            if deadline.is_spare:
                raise RendezvousGracefulExitError(closed_sentence(run_id, view.closed, reopen_after_s))
            raise closed_error(run_id, view.closed, reopen_after_s)
        if view.drain is not None:
            raise RendezvousGracefulExitError(drain_sentence(view.drain))
        return None

    def _is_forgotten(self, number: int) -> bool:
        """Whether the run no longer knows round `number`, which this node confirmed: the backend lost its data."""
        record, snapshot = self.view.round, self._snapshot
        if record is None or record.number < number:
            return True
        return snapshot is not None and record.incarnation != snapshot.config.incarnation

    async def _rewrite_key(self, number: int, own: NodeRecord) -> None:
        """Rewrite the key once after missing attempt `number`.

        The coordinator leaves a node that did not confirm in time out of further attempts until its key changes.
        """
        if self._rewritten_for < number:
            mark("node.showed_up")
            self._rewritten_for = number
            await self._node_session.write(own.phase, own.round, (own.addr0, own.port0))

    async def _confirm(self, number: int, rank: int, size: int) -> None:
        """Write the key as member of attempt `number`. Rank 0 runs its bootstrap first, and publishes the result."""
        bootstrap = await self._bootstrap(number, size) if rank == 0 else ("", 0)
        if await self._node_session.write(NodePhase.MEMBER, number, bootstrap):
            self._node_events.confirmed(number, rank)
        self._wake.set()

    def _enter(self, rank: int) -> Joined:
        """The node has confirmed the round in the view, and it is active."""
        record = self.view.round
        assert record is not None
        joined = Joined(
            number=record.number,
            rank=rank,
            size=record.size,
            addr=record.addr,
            port=record.port,
            own_revision=self._node_session.revision,
            data_lease=self._config().data_lease,
        )
        self.current = self._last_joined = joined
        self._reported_cause, self._reported_reason = None, ""
        self._node_session.left, self._incarnation = None, record.incarnation
        self._node_events.waiting_ended()
        self._node_events.entered(joined)
        # Later changes are reported after the caller has its result, which it gets in the next turn of the loop.
        self._loop.call_soon(self._loop.call_soon, self._node_session.entered)
        self._loop.call_soon(self._loop.call_soon, self._on_change)
        return joined

    # --- changes of the view ------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        """The view or the session changed: wake a waiting call. Report a change of the round once, again if graver."""
        self._wake.set()
        self._note_closed()
        if self.current is None:
            return
        lost = self._node_session.lost_reason
        cause, reason = self.view.what_changed(self.current, lost, self._is_forgotten(self.current.number))
        reported = self._reported_cause
        if cause is None or (reported is not None and list(Cause).index(cause) >= list(Cause).index(reported)):
            return
        self._reported_cause, self._reported_reason = cause, reason
        self._node_events.changed(self.current.number, cause, reason)
        if self._listener is not None:
            self._listener(cause, reason)

    def _note_closed(self) -> None:
        """Follow the view's mark: a node that was told of a close does not serve the run, either."""
        closed = self.view.mark
        self.backend.is_run_closed = closed is not None
        told, self._told_closed = self._told_closed, closed.state if closed is not None else None
        if self._told_closed is not None and self._told_closed != told and self.on_closed is not None:
            self.on_closed(self._told_closed)

    # --- while there is a session -------------------------------------------------------------------------------------

    def _start_tasks(self, session: Session) -> list[asyncio.Task[None]]:
        self._last_joined = None
        return self._node_tasks.start(session)

    def _tries_first(self) -> bool:
        """The members with the lowest ranks stand for election without a pause."""
        return self.current is not None and self.current.rank < 3

    def _config(self) -> ConfigRecord:
        assert self._snapshot is not None
        return self.view.config_since(self._snapshot.config, self._snapshot.config_revision)

    def _on_reachability(self, error: BackendError | None) -> None:
        if error is None:
            self._reachability.succeeded()
            self._wake.set()  # `backend.makes_run` may have become true
        else:
            self._reachability.failed(error)

    def _make_claim(self) -> bytes:
        floor, ttl_s = self._node_session.floor, self.settings.session_ttl_s
        return encode(claim_of(self.identity, self._last_joined, self.view.last_active, floor, ttl_s, self.view.mark))

    def _raise_if_left(self) -> None:
        if self.left_because is not None:
            raise RendezvousError(f"this node left the run while it was joining: {self.left_because}")

    async def _withdraw(self, error: RendezvousError) -> RendezvousError:
        """End the session because of an error and report it; returns the error, for `raise`."""
        await self._node_session.end(leave_reason(error))
        self._node_events.failed(error)
        return error
