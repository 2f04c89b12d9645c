"""A node's presence in the backend: its session and its one key.

The key is written under the session, and every write compares the key's revision (the first one: that there is none),
so that no write of the node's past can pass: a resent request, an earlier join, an earlier session. Giving up, leaving
and losing the session all *end the session*; the key is never deleted under a session that goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend, Begun, Sent, Session, Shortcut
from rallypoint.errors import BackendError, OutcomeUnknown, RendezvousStateError, Unavailable
from rallypoint.events import Emitter, RenewalMissed, SessionLost
from rallypoint.kv.types import Compare, GotItem, Item, ModRevisionIs, Put, Txn
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Identity
from rallypoint.rendezvous.reach import Reach
from rallypoint.rendezvous.records import NodePhase, NodeRecord, encode
from rallypoint.settings import Settings

WITHDRAW_S = 5.0
"""What is spent on saying goodbye at most; then the lease does it."""
MOST_PLEDGED = 32
"""So many confirmations that somebody else may have written are remembered: two for each attempt."""


class Ahead:
    """A confirmation that is sent before the node itself knows of it."""

    __slots__ = ("op", "record", "sent", "value")

    def __init__(self, record: NodeRecord, value: bytes, own_key: ModRevisionIs) -> None:
        self.record = record
        self.value = value
        self.op = Txn((own_key,), (Put(own_key.key, value, record.session),))
        self.sent: Sent | None = None


class JoinAnew(Exception):
    """The session, or what the node had confirmed under it, is gone: join again."""


class Presence:
    """Opened by `ensure`, ended by `end` (with a goodbye) or `drop` (without). `on_lost` is called when it is lost."""

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        settings: Settings,
        identity: Identity,
        *,
        emit: Emitter,
        rng: random.Random,
        reach: Reach,
        wall: Callable[[], float],
        while_open: Callable[[Session], Sequence[asyncio.Task[None]]],
        on_lost: Callable[[], None],
    ) -> None:
        self.session: Session | None = None
        self.record: NodeRecord | None = None
        """What the key holds, as far as this node has written it under the current session."""
        self.revision = 0
        self.join = 0
        self._sent_join = 0
        self.floor = 0
        """The highest number that this node ever confirmed, or tried to: that may have been executed unanswered."""
        self._backend = backend
        self._key = keys.node(identity.id)
        self._settings = settings
        self._identity = identity
        self._emit = emit
        self._reach = reach
        self._wall = wall
        self._asked_at = 0.0
        self._backoff = Backoff(rng)
        self._while_open = while_open
        self._on_lost = on_lost
        self._tasks: Sequence[asyncio.Task[None]] = ()
        self._had_leases: set[int] = set()
        self._ahead: Ahead | None = None
        self._pledged: dict[bytes, NodeRecord] = {}
        """What somebody else may have written there for this node, since it last knew: see `pledge`."""
        self._has_sent = False
        """Whether the key may hold something that was written under the current session."""

    @property
    def lost_reason(self) -> str | None:
        """Why there is no session to count on; None: there is one."""
        if self.session is None:
            return "the session ended"
        return self.session.lost.reason

    async def ensure(self) -> Session:
        """A session that is not known to be lost; a new one if need be."""
        session = self.session
        if session is not None and not session.lost.is_set():
            session.wait_for_word(True)
            return session
        if session is not None:
            await self.drop("it was lost")
        settings = self._settings
        return self._opened(
            await self._backend.open_session(
                settings.session_ttl_s,
                interval_s=settings.keep_alive_interval_s,
                renew_timeout_s=settings.heartbeat_timeout_s,
                on_missed=self._missed,
            )
        )

    def take_over(self, shortcut: Shortcut, begun: Begun, record: NodeRecord, pledged: Iterable[NodeRecord]) -> Session:
        """The session that a caller has opened by itself, and the key that it has written as joining, or may have."""
        settings = self._settings
        session = self._opened(
            shortcut.take_session(
                record.session,
                settings.session_ttl_s,
                begun.sent_at,
                interval_s=settings.keep_alive_interval_s,
                renew_timeout_s=settings.heartbeat_timeout_s,
                on_missed=self._missed,
            )
        )
        self.join = self._sent_join = record.join
        self._asked_at, self._has_sent = record.at, True
        if begun.revision:
            self._written(record, begun.revision)
        self.pledge(pledged)
        return session

    def took_place(self, record: NodeRecord, revision: int) -> None:
        """That caller has confirmed a place, too."""
        self.floor = record.floor
        self._written(record, revision)

    def _opened(self, session: Session) -> Session:
        self.session = session
        self._had_leases.add(session.lease)
        self.record, self.revision = None, 0
        session.wait_for_word(True)
        session.lost.add_callback(lambda why: self._lost(session, why))
        self._tasks = self._while_open(session)
        return session

    def _missed(self, why: str) -> None:
        self._emit(RenewalMissed(run_id=self._settings.run_id, by=self._identity.name, reason=why))

    def entered(self) -> None:
        """The node is in a round: from now on it has to notice by itself that it is lost."""
        if self.session is not None:
            self.session.wait_for_word(False)

    async def write(
        self,
        phase: NodePhase,
        number: int = 0,
        zero: tuple[str, int] = ("", 0),
        compares: Sequence[Compare] = (),
    ) -> bool:
        """Write the key; False if one of `compares` failed. Raises JoinAnew if the key or the session is gone.

        Sent again until the outcome is known: it compares the key's revision, so it is executed at most once.
        """
        session = self.session
        if session is None:
            raise JoinAnew  # the node left meanwhile
        record = self._make(session, phase, number, zero)
        self._has_sent = True
        self._sent_join = record.join
        self.floor = max(self.floor, record.floor)
        value = encode(record)
        ahead = self._ahead
        if ahead is not None and ahead.value != value:
            ahead = self._ahead = None
        while session is self.session and not session.lost.is_set():
            try:
                if ahead is not None and ahead.sent is not None:
                    answer, ahead = ahead.sent.result(), None
                    result = await answer
                    self._ahead = None
                else:
                    own_key = ModRevisionIs(self._key, self.revision)
                    result = await self._backend.txn((own_key, *compares), [Put(self._key, value, session.lease)])
            except (Unavailable, OutcomeUnknown) as error:
                self._ahead = None
                self._reach.failed(error)
                await self._backoff.sleep()
                continue
            self._backoff.reset()
            self._reach.succeeded()
            if result.committed:
                return self._written(record, result.revision)
            seen = result.results[0]
            assert isinstance(seen, GotItem)
            own = seen.item
            if own is not None and own.value == value and own.lease == session.lease:
                mark("presence.resent")
                return self._written(record, own.mod_revision)  # an earlier sending had been executed
            if (own.mod_revision if own is not None else 0) == self.revision:
                return False
            if self._is_pledged(own):
                mark("presence.confirmed_beforehand")
                if self.record is not None and self.record.join == record.join and phase is NodePhase.JOINING:
                    return True  # it has joined, and more
                continue
            if own is None or own.lease == session.lease:
                break
            if own.lease not in self._had_leases:
                raise RendezvousStateError(
                    f"{own.key} is this node's own key, and something else wrote there: remove the key", key=own.key
                )
            mark("presence.left_behind")
            await self._backend.revoke(own.lease)  # what an earlier session of this node left behind
        mark("presence.key_gone")
        await self.drop("the node's key is no longer what it wrote")
        raise JoinAnew

    def prepare_ahead(self, number: int, zero: tuple[str, int] = ("", 0)) -> Ahead | None:
        """What `write` would send to confirm an attempt; None: there is nothing to confirm with."""
        session = self.session
        if session is None:
            return None
        record = self._make(session, NodePhase.MEMBER, number, zero)
        return Ahead(record, encode(record), ModRevisionIs(self._key, self.revision))

    def pledge(self, records: Iterable[NodeRecord]) -> None:
        """The backend may write one of these for this node from now on, on top of the revision that it knows."""
        for record in records:
            self._pledged[encode(record)] = record
        while len(self._pledged) > MOST_PLEDGED:  # for attempts that are long over
            del self._pledged[next(iter(self._pledged))]

    async def find_out(self, number: int) -> NodeRecord | None:
        """What the backend has written for this node to confirm a place in that attempt; None: nothing.

        Asked again until it is known, as in `write`.
        """
        session = self.session
        while session is self.session and any(record.round == number for record in self._pledged.values()):
            try:
                own = (await self._backend.get(self._key)).item
            except (Unavailable, OutcomeUnknown) as error:
                self._reach.failed(error)
                await self._backoff.sleep()
                continue
            self._backoff.reset()
            if not self._is_pledged(own):
                return None
            mark("presence.found_out")
            return self.record
        return None

    def _is_pledged(self, own: Item | None) -> bool:
        """Whether the key holds what was written for this node; then it is this node's."""
        record = self._pledged.get(own.value) if own is not None else None
        if own is None or record is None or self.session is None or own.lease != self.session.lease:
            return False
        self.floor = max(self.floor, record.floor)
        return self._written(record, own.mod_revision)

    def foresee(self, lease: int) -> NodeRecord:
        """What is written to join, by a session that is yet to be opened; it is left behind if nobody takes it over."""
        self._had_leases.add(lease)
        return self._record(lease, self._sent_join + 1, NodePhase.JOINING)

    def foresee_no_more(self, lease: int) -> None:
        """Nobody has opened that session, nor will."""
        self._had_leases.discard(lease)

    def sent_ahead(self, ahead: Ahead) -> None:
        """It was sent; `write`, asked for the same, waits for its answer."""
        self._sent_join = ahead.record.join
        self.floor = ahead.record.floor
        self._ahead = ahead

    def confirmed_ahead(self, ahead: Ahead, revision: int) -> None:
        """What was sent is known to have been executed."""
        self._written(ahead.record, revision)
        self._ahead = None

    @property
    def sent(self) -> NodeRecord | None:
        """Something was sent whose answer nobody has taken: what."""
        return self._ahead.record if self._ahead is not None else None

    def new_join(self) -> int:
        """The join number to ask with: one that was never sent."""
        if self.join != self._sent_join + 1:
            self.join = self._sent_join + 1
            self._asked_at = self._wall()
        return self.join

    async def drop(self, why: str) -> None:
        """End the session without a goodbye: it, or what it stood for, is lost already."""
        session = self._forget()
        if session is not None:
            if not session.lost.is_set():
                self._emit(SessionLost(run_id=self._settings.run_id, by=self._identity.name, reason=why))
            await session.close()

    async def end(self, why: str) -> bool:
        """Say goodbye, with the reason, and end the session; bounded in time. False: there was none."""
        has_sent, revision = self._has_sent, self.revision
        self._sent_join = self.join
        session = self._forget()
        if session is None:
            return False
        try:
            async with asyncio.timeout(WITHDRAW_S):
                if has_sent and not session.lost.is_set():
                    goodbye = encode(self._make(session, NodePhase.LEFT, why=why))
                    await self._say_goodbye(Put(self._key, goodbye, session.lease), revision)
                await session.close()
        except TimeoutError:
            pass  # time ends the lease
        finally:
            session.abandon()
        return True

    async def _say_goodbye(self, goodbye: Put, revision: int) -> None:
        """Tried for half of the time there is: the end of the session says it too, only without the reason."""
        try:
            async with asyncio.timeout(WITHDRAW_S / 2):
                if revision > 0:
                    said = await self._backend.txn([ModRevisionIs(self._key, revision)], [goodbye])
                    seen = None if said.committed else said.results[0]
                    own = seen.item if isinstance(seen, GotItem) else None
                else:  # a goodbye never makes the key: no door has let it in
                    own = (await self._backend.get(self._key)).item
                if own is not None and own.lease == goodbye.lease:
                    # A write of this session had not been answered yet: most often, a confirmation.
                    await self._backend.txn([ModRevisionIs(self._key, own.mod_revision)], [goodbye])
        except (BackendError, TimeoutError):
            pass

    def abandon(self) -> None:
        """Stop everything without a word: what a dead process does."""
        session = self._forget()
        if session is not None:
            session.abandon()

    def _make(
        self, session: Session, phase: NodePhase, number: int = 0, zero: tuple[str, int] = ("", 0), why: str = ""
    ) -> NodeRecord:
        return self._record(session.lease, self.join, phase, number, zero, why)

    def _record(
        self,
        lease: int,
        join: int,
        phase: NodePhase,
        number: int = 0,
        zero: tuple[str, int] = ("", 0),
        why: str = "",
    ) -> NodeRecord:
        who = self._identity
        return NodeRecord(
            id=who.id,
            name=who.name,
            addr=who.addr,
            session=lease,
            join=join,
            phase=phase,
            pid=who.pid,
            local_id=who.local_id,
            labels=dict(who.labels),
            node_rank=who.node_rank,
            round=number,
            floor=max(self.floor, number),
            addr0=zero[0],
            port0=zero[1],
            why=why,
            at=self._asked_at,
        )

    def _written(self, record: NodeRecord, revision: int) -> bool:
        self.record, self.revision = record, revision
        if self._pledged:  # what is not over may be written on top of this: a join whose answer was not heard, too
            left = (one for one in self._pledged.values() if one.join == record.join and one.round > record.round)
            self._pledged = {encode(one): one for one in left}
        return True

    def _lost(self, session: Session, why: str) -> None:
        if session is not self.session:
            return
        self._emit(SessionLost(run_id=self._settings.run_id, by=self._identity.name, reason=why))
        self._cancel_tasks()
        self._on_lost()

    def _forget(self) -> Session | None:
        session, self.session = self.session, None
        self.record, self.revision, self._ahead, self._has_sent = None, 0, None, False
        self._pledged = {}
        self._cancel_tasks()
        return session

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = ()
