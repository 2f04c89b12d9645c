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
from rallypoint.rendezvous.duties import Duties
from rallypoint.rendezvous.entry import Door, Entry, closed_sentence, drain_sentence
from rallypoint.rendezvous.insist import Insistence
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Bootstrap, Cause, Identity, Joined, claim_of, goodbye
from rallypoint.rendezvous.patience import Patience
from rallypoint.rendezvous.presence import JoinAnew, Presence
from rallypoint.rendezvous.reach import Reach
from rallypoint.rendezvous.records import ConfigRecord, NodePhase, NodeRecord, RosterMember, RoundPhase, encode
from rallypoint.rendezvous.sight import Sight
from rallypoint.rendezvous.voice import Voice
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
        self._voice = Voice(emit, settings.run_id, identity.name)
        self._rng = rng
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._entry = Entry(backend, self.keys, settings, identity.name, lambda: f"{rng.getrandbits(64):016x}", wall)
        self._reach = Reach(emit, settings.run_id, identity.name)
        self._backoff = Backoff(rng)
        self._insist = Insistence(settings, self._reach, self._backoff)
        self._wake = asyncio.Event()
        self.sight = Sight(backend, self.keys, identity.id, rng, self._look_up, self._reach)
        self._presence = Presence(
            backend,
            self.keys,
            settings,
            identity,
            emit=emit,
            rng=rng,
            reach=self._reach,
            wall=wall,
            while_open=self._opened,
            on_lost=self._look_up,
        )
        backend.listen(self._reached)
        backend.claim_by(self._claim)
        self._door: Door | None = None
        self._duties = Duties(
            backend, self.keys, identity, self._entry, emit, rng, wall, self._config, self._reach, self._first_in_line
        )
        self._duties.on_elected = self._wake.set
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
        self._reach.restart()
        patience = Patience(self.settings, started_at)
        try:
            async with patience.scope:
                return await self._join_until_in(patience)
        except TimeoutError:
            if not patience.scope.expired():  # not ours: something that the call used has given up
                await self._presence.end("its call was interrupted (TimeoutError)")
                raise
            raise await self._failed(patience.error(self._reach, self.sight.reason(), self.settings.where)) from None
        except RendezvousError as error:
            await self._failed(error)
            raise
        except BaseException as error:
            self.current = None
            await self._presence.end(self.left_because or f"its call was interrupted ({type(error).__name__})")
            raise
        finally:
            self.is_joining = False
            self.left_because = None
            patience.end()

    async def leave(self, why: str) -> None:
        """Go, without closing the run. The node may join again. Takes at most a few seconds, whatever the backend.

        A call of `next_round` that is under way ends with an error that says so.
        """
        self.current = None
        if self.is_joining:
            self.left_because = why
            self._wake.set()
        if await self._presence.end(why):
            self._voice.left(why)

    async def close_run(self, why: str, started_at: float | None = None) -> None:
        """Close the run for everybody. RendezvousTimeoutError `close_timeout` after `started_at` (now)."""
        if await self._insist(lambda: self._entry.close(why), "closed", started_at):
            await self.sight.wait_door(is_closed=True)
            self._voice.closed(why)

    async def reopen_run(self, why: str, started_at: float | None = None) -> bool:
        """Reopen a closed run; False if it is not closed. Time-out as in `close_run`."""
        reopened = await self._insist(lambda: self._entry.reopen(why), "reopened", started_at)
        if reopened:
            await self.sight.wait_door(is_closed=False)
            self._voice.reopened(why)
        return reopened

    async def stop(self) -> None:
        """End the session if there is one, and everything that runs for this node. Idempotent."""
        try:
            await self.leave("the process let go of it")
        finally:
            self.sight.stop()

    def abandon(self) -> None:
        """Stop everything without a word: what a dead process does. The backend learns of it by time alone."""
        self.current = None
        self._presence.abandon()
        self.sight.stop()

    async def roster(self, joined: Joined) -> tuple[RosterMember, ...]:
        """The members of a round that this node returned from, in rank order. Read when asked for."""
        return await self.sight.read_roster(joined, self._presence.lost_reason if self._presence.session else None)

    def observe(self) -> None:
        """Begin to follow the run without joining it."""
        self.sight.start()

    def listen(self, listener: ChangeListener) -> None:
        """Call when the round that the node is in changes, and at once if it has. One listener; the last one counts."""
        self._listener = listener
        if self.current is not None and self._told_cause is not None:
            listener(self._told_cause, self._told_reason)

    def waiting_count(self) -> int:
        """What `num_nodes_waiting()` answers, from what was pushed last."""
        if self.sight.is_closed:
            return 0
        if self.current is not None and self._told_cause in (Cause.SESSION_LOST, Cause.ROUND_OVER, Cause.DRAIN):
            return 1  # whoever polls this has to join again to learn more
        return self.sight.count_waiting(self.settings.min_nodes)

    # --- joining ------------------------------------------------------------------------------------------------------

    async def _join_until_in(self, patience: Patience) -> Joined:
        asked = 0
        while True:
            self._raise_if_left()
            patience.is_spare_no_more()
            if (join := self._presence.new_join()) != asked:
                asked = join
                self._voice.joins(join)
            try:
                session = await self._come()
                self._raise_if_left()
                await self._write_join()
                return await self._await_round(session, patience)
            except JoinAnew:
                continue
            except (Unavailable, OutcomeUnknown) as error:
                self._reach.failed(error)
                await self._backoff.sleep()
            except LeaseGone:
                await self._presence.drop("its lease had ended")
            except UnreadableState:
                raise
            except Rejected as error:
                raise RendezvousConnectionError(f"{self.settings.where} refused this node: {error}") from error

    async def _come(self) -> Session:
        """A session; meanwhile, the run is looked at."""
        self._door = self._door or self._entry.guess(*self.sight.door())
        self.sight.start()
        session = await self._presence.ensure()
        if self._door is None:
            await self.sight.wait_seen()
        return session

    async def _write_join(self) -> None:
        """Write the node's key as joining, through a door that is as it was checked, or as it seems to be."""
        door = self._door or self._entry.guess(*self.sight.door())
        if door is None and not self.backend.makes_run:
            await self._give_way()
            door = self._entry.guess(*self.sight.door())
        while door is None or not await self._enter_by(door):
            door = await self._entry.check()
            self._reach.succeeded()

    async def _give_way(self) -> None:
        """If the run does not exist, somebody else, or the coordinator, is about to make it: wait a moment for it."""
        backend, sight = self.backend, self.sight
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(*backend.gives_way_s)):
                while not (self._duties.is_elected or backend.makes_run) and sight.is_synced and None in sight.door():
                    self._wake.clear()
                    await self._wake.wait()

    async def _enter_by(self, door: Door) -> bool:
        """Join if the door is still as it was checked."""
        self._door = door
        compares = (
            ModRevisionIs(self.keys.config, door.config_revision),
            ModRevisionIs(self.keys.closed, door.closed_revision),
        )
        written = await self._presence.write(NodePhase.JOINING, compares=compares)
        if written:
            self._duties.joined.set()
        return written

    # --- waiting for a round ------------------------------------------------------------------------------------------

    async def _await_round(self, session: Session, patience: Patience) -> Joined:
        while True:
            self._wake.clear()
            if session.lost.is_set() or session is not self._presence.session:
                raise JoinAnew
            if (joined := await self._advance(patience)) is not None:
                return joined
            if self._wake.is_set():
                continue  # there is more to see: most often the end
            is_spare, in_attempt = self.sight.standing(self._presence.record)
            patience.update(is_spare=is_spare, in_attempt=in_attempt)
            self._voice.waits(self.sight.reason())
            self.sight.raise_if_unreadable()  # what is only read to be said
            await self._wake.wait()

    async def _advance(self, patience: Patience) -> Joined | None:
        """Do what is to be done on what is seen now: return, confirm, give up, or nothing."""
        sight, own, door = self.sight, self._presence.record, self._door
        assert own is not None
        assert door is not None
        sight.raise_if_unreadable()
        record, assign = sight.round, sight.assign
        if own.phase is _MEMBER and sight.is_synced and self._is_forgotten(own.round):
            mark("node.forgotten")
            await self._presence.drop("the run's state was lost")
            raise JoinAnew
        if sight.has_vanished(door.closed_revision):
            raise JoinAnew
        if assign is not None and assign.join != own.join:
            assign = None
        if record is not None and assign is not None and record.number == assign.number:
            if own.phase is _MEMBER and own.round == record.number and record.phase is _ACTIVE:
                return self._enter(assign.rank)
            if record.phase is _FORMING and assign.number > own.round:
                await self._confirm(assign.number, assign.rank, record.size)
                patience.confirmed()
                return None
        elif record is not None and assign is not None and own.round < assign.number < record.number:
            await self._show_up(assign.number, own)
        if sight.closed is not None and sight.closed.closed and sight.closed_revision > door.closed_revision:
            mark("node.closed")
            text = closed_sentence(self.settings.run_id, sight.closed, self.settings.reopen_after_s)
            raise RendezvousGracefulExitError(text) if patience.is_spare else RendezvousClosedError(text)
        if sight.drain is not None:
            raise RendezvousGracefulExitError(drain_sentence(sight.drain))
        return None

    def _is_forgotten(self, number: int) -> bool:
        """Whether the run no longer knows a round that this node confirmed: the backend lost its memory."""
        record, door = self.sight.round, self._door
        if record is None or record.number < number:
            return True
        return door is not None and record.incarnation != door.config.incarnation

    async def _show_up(self, number: int, own: NodeRecord) -> None:
        """The node missed its place in an attempt that is over, and was left out: it writes its key, to count again."""
        if self._shown_up_for < number:
            mark("node.showed_up")
            self._shown_up_for = number
            await self._presence.write(own.phase, own.round, (own.addr0, own.port0))

    async def _confirm(self, number: int, rank: int, size: int) -> None:
        zero = await self._bootstrap(number, size) if rank == 0 else ("", 0)
        if await self._presence.write(NodePhase.MEMBER, number, zero):
            self._voice.confirmed(number, rank)
        self._wake.set()

    def _enter(self, rank: int) -> Joined:
        record = self.sight.round
        assert record is not None
        joined = Joined(
            number=record.number,
            rank=rank,
            size=record.size,
            addr=record.addr,
            port=record.port,
            own_revision=self._presence.revision,
            data_lease=self._config().data_lease,
        )
        self.current = self._was_in = joined
        self._told_cause = None
        self._voice.waits_no_more()
        self._voice.entered(joined)
        # What is new since is said when the caller has its place, which it has in the next turn.
        self._loop.call_soon(self._loop.call_soon, self._presence.entered)
        self._loop.call_soon(self._loop.call_soon, self._look_up)
        return joined

    # --- what is pushed -----------------------------------------------------------------------------------------------

    def _look_up(self) -> None:
        """Something was pushed: wake whoever waits, and tell a member once what changed (again if it gets worse)."""
        self._wake.set()
        if self.current is None:
            return
        lost = self._presence.lost_reason
        cause, reason = self.sight.what_changed(self.current, lost, self._is_forgotten(self.current.number))
        told = self._told_cause
        if cause is None or (told is not None and list(Cause).index(cause) >= list(Cause).index(told)):
            return
        self._told_cause, self._told_reason = cause, reason
        self._voice.changed(self.current.number, cause, reason)
        if self._listener is not None:
            self._listener(cause, reason)

    # --- while there is a session -------------------------------------------------------------------------------------

    def _opened(self, session: Session) -> list[asyncio.Task[None]]:
        self._was_in = None
        return self._duties.start(session)

    def _first_in_line(self) -> bool:
        return self.current is not None and self.current.rank < 3

    def _config(self) -> ConfigRecord:
        assert self._door is not None
        return self.sight.config_since(self._door.config, self._door.config_revision)

    def _reached(self, error: BackendError | None) -> None:
        if error is None:
            self._reach.succeeded()
            self._wake.set()  # it may have said that the run is to be made
        else:
            self._reach.failed(error)

    def _claim(self) -> bytes:
        floor, ttl_s = self._presence.floor, self.settings.session_ttl_s
        return encode(claim_of(self.identity, self._was_in, self.sight.last_active, floor, ttl_s))

    def _raise_if_left(self) -> None:
        if self.left_because is not None:
            raise RendezvousError(f"this node left the run while it was joining: {self.left_because}")

    async def _failed(self, error: RendezvousError) -> RendezvousError:
        """Withdraw because of an error, and say so; the error, to be raised."""
        await self._presence.end(goodbye(error))
        self._voice.failed(error)
        return error
