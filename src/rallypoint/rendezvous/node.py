"""The node driver: gets one node into rounds and tells it when its round is no longer what it was.

It writes one key, its own, and compares that key's revision each time, so that no write of its past (an earlier join,
a request sent again, an earlier session) can pass. It decides nothing about rounds: it follows `state/` and its own
`assign/` key, confirms, and returns when its confirmed round is active.
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
    RendezvousClosedError,
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
from rallypoint.rendezvous.membership import Bootstrap, Cause, Identity, Joined, claim_of, goodbye
from rallypoint.rendezvous.node_events import NodeEvents
from rallypoint.rendezvous.node_session import JoinAnew, NodeSession
from rallypoint.rendezvous.node_tasks import NodeTasks
from rallypoint.rendezvous.node_view import NodeView
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.rendezvous.records import ConfigRecord, NodePhase, NodeRecord, RosterMember, RoundPhase, encode
from rallypoint.rendezvous.retry import Retry
from rallypoint.rendezvous.run_config import RunConfig, RunSnapshot, closed_sentence, drain_sentence
from rallypoint.settings import Settings

_MEMBER, _FORMING, _ACTIVE = NodePhase.MEMBER, RoundPhase.FORMING, RoundPhase.ACTIVE  # as in `view.py`

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
        self._was_in: Joined | None = None
        """The same, also when it has left it since: until it opens another session, and so enters another life."""
        self._listener: ChangeListener | None = None
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
        self.view = NodeView(backend, self.keys, identity.id, rng, self._look_up, self._reachability)
        self._node_session = NodeSession(
            backend,
            self.keys,
            settings,
            identity,
            emit=emit,
            rng=rng,
            reachability=self._reachability,
            wall=wall,
            while_open=self._opened,
            on_lost=self._look_up,
        )
        backend.on_reachability(self._reached)
        backend.on_data_loss(self._claim)
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
            self._first_in_line,
        )
        self._node_tasks.on_elected = self._wake.set
        self._told_cause: Cause | None = None
        self._told_reason = ""
        self.is_joining = False
        self._shown_up_for = 0
        self.left_because: str | None = None
        """Why a call that is under way is to end, if somebody has said so."""

    # --- the public verbs ---------------------------------------------------------------------------------------------

    async def next_round(self, started_at: float | None = None) -> Joined:
        """Leave the current round, if any, and wait for a place in the next, from `started_at` (now) on.

        Raises RendezvousClosedError, RendezvousGracefulExitError (a spare of a closed run, or asked to go),
        RendezvousTimeoutError, RendezvousConnectionError, SettingsMismatchError, RendezvousStateError. After any of
        them, and when it is cancelled, the node has withdrawn.
        """
        if self.is_joining:
            raise RendezvousError("next_rendezvous is running already for this node: one call at a time")
        self.is_joining = True
        self.current = None
        self._reachability.restart()
        deadline = JoinDeadline(self.settings, started_at)
        try:
            async with deadline.scope:
                return await self._join_until_in(deadline)
        except TimeoutError:
            if not deadline.scope.expired():  # not ours: something that the call used has given up
                await self._node_session.end("its call was interrupted (TimeoutError)")
                raise
            raise await self._failed(
                deadline.error(self._reachability, self.view.reason(), self.settings.where)
            ) from None
        except RendezvousError as error:
            await self._failed(error)
            raise
        except BaseException as error:
            self.current = None
            await self._node_session.end(self.left_because or f"its call was interrupted ({type(error).__name__})")
            raise
        finally:
            self.is_joining = False
            self.left_because = None
            deadline.end()

    async def leave(self, why: str) -> None:
        """Go, without closing the run. The node may join again. Takes at most a few seconds, whatever the backend.

        A call of `next_round` that is under way ends with an error that says so.
        """
        self.current = None
        if self.is_joining:
            self.left_because = why
            self._wake.set()
        if await self._node_session.end(why):
            self._node_events.left(why)

    async def close_run(self, why: str, started_at: float | None = None) -> None:
        """Close the run for everybody. RendezvousTimeoutError `close_timeout` after `started_at` (now)."""
        if await self._retry(lambda: self._run_config.close(why), "closed", started_at):
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
        """End the session if there is one, and everything that runs for this node. Idempotent."""
        try:
            await self.leave("the process let go of it")
        finally:
            self.view.stop()

    def abandon(self) -> None:
        """Stop everything without a word: what a dead process does. The backend learns of it by time alone."""
        self.current = None
        self._node_session.abandon()
        self.view.stop()

    async def roster(self, joined: Joined) -> tuple[RosterMember, ...]:
        """The members of a round that this node returned from, in rank order. Read when asked for."""
        return await self.view.read_roster(
            joined, self._node_session.lost_reason if self._node_session.session else None
        )

    def observe(self) -> None:
        """Begin to follow the run without joining it."""
        self.view.start()

    def listen(self, listener: ChangeListener) -> None:
        """Call when the round that the node is in changes, and at once if it has. One listener; the last one counts."""
        self._listener = listener
        if self.current is not None and self._told_cause is not None:
            listener(self._told_cause, self._told_reason)

    def waiting_count(self) -> int:
        """What `num_nodes_waiting()` answers, from what was pushed last."""
        if self.view.is_closed:
            return 0
        if self.current is not None and self._told_cause in (Cause.SESSION_LOST, Cause.ROUND_OVER, Cause.DRAIN):
            return 1  # whoever polls this has to join again to learn more
        return self.view.count_waiting(self.settings.min_nodes)

    # --- joining ------------------------------------------------------------------------------------------------------

    async def _join_until_in(self, deadline: JoinDeadline) -> Joined:
        asked = 0
        while True:
            self._raise_if_left()
            deadline.is_spare_no_more()
            if (join := self._node_session.new_join()) != asked:
                asked = join
                self._node_events.joins(join)
            try:
                session = await self._come()
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

    async def _come(self) -> Session:
        """A session; meanwhile, the run is looked at."""
        self._snapshot = self._snapshot or self._run_config.guess(*self.view.snapshot())
        self.view.start()
        session = await self._node_session.ensure()
        if self._snapshot is None:
            await self.view.wait_seen()
        return session

    async def _write_join(self) -> None:
        """Write the node's key as joining, through a snapshot that is as it was checked, or as it seems to be."""
        snapshot = self._snapshot or self._run_config.guess(*self.view.snapshot())
        if snapshot is None and not self.backend.makes_run:
            await self._give_way()
            snapshot = self._run_config.guess(*self.view.snapshot())
        while snapshot is None or not await self._enter_by(snapshot):
            snapshot = await self._run_config.check()
            self._reachability.succeeded()

    async def _give_way(self) -> None:
        """If the run does not exist, somebody else, or the coordinator, is about to make it: wait a moment for it."""
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

    async def _enter_by(self, snapshot: RunSnapshot) -> bool:
        """Join if the snapshot is still as it was checked."""
        self._snapshot = snapshot
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
                continue  # there is more to see: most often the end
            is_spare, in_attempt = self.view.standing(self._node_session.record)
            deadline.update(is_spare=is_spare, in_attempt=in_attempt)
            self._node_events.waits(self.view.reason())
            self.view.raise_if_unreadable()  # what is only read to be said
            await self._wake.wait()

    async def _advance(self, deadline: JoinDeadline) -> Joined | None:
        """Do what is to be done on what is seen now: return, confirm, give up, or nothing."""
        view, own, snapshot = self.view, self._node_session.record, self._snapshot
        assert own is not None
        assert snapshot is not None
        view.raise_if_unreadable()
        record, assign = view.round, view.assign
        if own.phase is _MEMBER and view.is_synced and self._is_forgotten(own.round):
            mark("node.forgotten")
            await self._node_session.drop("the run's state was lost")
            raise JoinAnew
        if view.has_vanished(snapshot.closed_revision):
            raise JoinAnew
        if assign is not None and assign.join != own.join:
            assign = None
        if record is not None and assign is not None and record.number == assign.number:
            if own.phase is _MEMBER and own.round == record.number and record.phase is _ACTIVE:
                return self._enter(assign.rank)
            if record.phase is _FORMING and assign.number > own.round:
                await self._confirm(assign.number, assign.rank, record.size)
                deadline.confirmed()
                return None
        elif record is not None and assign is not None and own.round < assign.number < record.number:
            await self._show_up(assign.number, own)
        if view.closed is not None and view.closed.closed and view.closed_revision > snapshot.closed_revision:
            mark("node.closed")
            text = closed_sentence(self.settings.run_id, view.closed, self.settings.reopen_after_s)
            raise RendezvousGracefulExitError(text) if deadline.is_spare else RendezvousClosedError(text)
        if view.drain is not None:
            raise RendezvousGracefulExitError(drain_sentence(view.drain))
        return None

    def _is_forgotten(self, number: int) -> bool:
        """Whether the run no longer knows a round that this node confirmed: the backend lost its memory."""
        record, snapshot = self.view.round, self._snapshot
        if record is None or record.number < number:
            return True
        return snapshot is not None and record.incarnation != snapshot.config.incarnation

    async def _show_up(self, number: int, own: NodeRecord) -> None:
        """The node missed its place in an attempt that is over, and was left out: it writes its key, to count again."""
        if self._shown_up_for < number:
            mark("node.showed_up")
            self._shown_up_for = number
            await self._node_session.write(own.phase, own.round, (own.addr0, own.port0))

    async def _confirm(self, number: int, rank: int, size: int) -> None:
        zero = await self._bootstrap(number, size) if rank == 0 else ("", 0)
        if await self._node_session.write(NodePhase.MEMBER, number, zero):
            self._node_events.confirmed(number, rank)
        self._wake.set()

    def _enter(self, rank: int) -> Joined:
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
        self.current = self._was_in = joined
        self._told_cause = None
        self._node_events.waits_no_more()
        self._node_events.entered(joined)
        # What is new since is said when the caller has its place, which it has in the next turn.
        self._loop.call_soon(self._loop.call_soon, self._node_session.entered)
        self._loop.call_soon(self._loop.call_soon, self._look_up)
        return joined

    # --- what is pushed -----------------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        """Something was pushed: wake whoever waits, and tell a member once what changed (again if it gets worse)."""
        self._wake.set()
        if self.current is None:
            return
        lost = self._node_session.lost_reason
        cause, reason = self.view.what_changed(self.current, lost, self._is_forgotten(self.current.number))
        told = self._told_cause
        if cause is None or (told is not None and list(Cause).index(cause) >= list(Cause).index(told)):
            return
        self._told_cause, self._told_reason = cause, reason
        self._node_events.changed(self.current.number, cause, reason)
        if self._listener is not None:
            self._listener(cause, reason)

    # --- while there is a session -------------------------------------------------------------------------------------

    def _opened(self, session: Session) -> list[asyncio.Task[None]]:
        self._was_in = None
        return self._node_tasks.start(session)

    def _first_in_line(self) -> bool:
        return self.current is not None and self.current.rank < 3

    def _config(self) -> ConfigRecord:
        assert self._snapshot is not None
        return self.view.config_since(self._snapshot.config, self._snapshot.config_revision)

    def _reached(self, error: BackendError | None) -> None:
        if error is None:
            self._reachability.succeeded()
            self._wake.set()  # it may have said that the run is to be made
        else:
            self._reachability.failed(error)

    def _claim(self) -> bytes:
        floor, ttl_s = self._node_session.floor, self.settings.session_ttl_s
        return encode(claim_of(self.identity, self._was_in, self.view.last_active, floor, ttl_s))

    def _raise_if_left(self) -> None:
        if self.left_because is not None:
            raise RendezvousError(f"this node left the run while it was joining: {self.left_because}")

    async def _failed(self, error: RendezvousError) -> RendezvousError:
        """Withdraw because of an error, and say so; the error, to be raised."""
        await self._node_session.end(goodbye(error))
        self._node_events.failed(error)
        return error
