"""A node's session and its one key, `nodes/{id}`, which is written under that session.

Every write compares the key's revision (the first one: that the key does not exist), so that no earlier write of the
same node can pass: a resent request, a write of an earlier join or of an earlier session (rule 4). Giving up, leaving
and losing the session all *end the session*: the key is never deleted under a session that goes on (rule 5).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend, Session
from rallypoint.errors import BackendError, OutcomeUnknown, RendezvousStateError, Unavailable
from rallypoint.events import Emitter, RenewalMissed, SessionLost
from rallypoint.kv.types import Compare, GotItem, ModRevisionIs, Put
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Identity
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.rendezvous.records import LeaveCause, NodePhase, NodeRecord, encode
from rallypoint.settings import Settings

WITHDRAW_S = 5.0
"""Time limit for leaving in order. After that the session ends with its lease."""


class JoinAnew(Exception):
    """The session, or the state that the node had under it, is gone: it must join again."""


class NodeSession:
    """Opened by `ensure`, ended by `end` (writes that the node left) or `drop` (does not).

    `while_open` starts the tasks that run as long as a session; `on_lost` is called when a session is lost.
    """

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        settings: Settings,
        identity: Identity,
        *,
        emit: Emitter,
        rng: random.Random,
        reachability: Reachability,
        wall: Callable[[], float],
        while_open: Callable[[Session], Sequence[asyncio.Task[None]]],
        on_lost: Callable[[], None],
    ) -> None:
        self.session: Session | None = None
        self.record: NodeRecord | None = None
        """The key's last content that this node wrote under the current session; None: it has written nothing."""
        self.revision = 0
        self.join = 0
        self._sent_join = 0
        self.floor = 0
        """The highest number that this node confirmed or tried to: an unanswered write may have been executed."""
        self.left: LeaveCause | None = None
        """Why the node left the last round that it was in; None: it is in a round, or was in none."""
        self._backend = backend
        self._key = keys.node(identity.id)
        self._settings = settings
        self._identity = identity
        self._emit = emit
        self._reachability = reachability
        self._wall = wall
        self._asked_at = 0.0
        self._backoff = Backoff(rng)
        self._while_open = while_open
        self._on_lost = on_lost
        self._tasks: Sequence[asyncio.Task[None]] = ()
        self._own_leases: set[int] = set()
        self._has_sent = False
        """Whether a write was sent under the current session, so that the key may hold it."""

    @property
    def lost_reason(self) -> str | None:
        """Why the session is lost or closed; None: it is open."""
        if self.session is None:
            return "the session ended"
        return self.session.lost.reason

    async def ensure(self) -> Session:
        """A session that is not known to be lost; opens a new one if necessary."""
        session = self.session
        if session is not None and not session.lost.is_set():
            session.set_local_expiry(False)
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

    def _opened(self, session: Session) -> Session:
        self.session = session
        self._own_leases.add(session.lease)
        self.record, self.revision = None, 0
        session.set_local_expiry(False)
        session.lost.add_callback(lambda why: self._lost(session, why))
        self._tasks = self._while_open(session)
        return session

    def _missed(self, why: str) -> None:
        self._emit(RenewalMissed(run_id=self._settings.run_id, by=self._identity.name, reason=why))

    def entered(self) -> None:
        """The node is in a round: from now on it must notice a lost session by its own clock."""
        if self.session is not None:
            self.session.set_local_expiry(True)

    async def write(
        self,
        phase: NodePhase,
        number: int = 0,
        bootstrap: tuple[str, int] = ("", 0),
        compares: Sequence[Compare] = (),
    ) -> bool:
        """Write the key; False if one of `compares` failed. Raises JoinAnew if the key or the session is gone.

        `bootstrap` is the address and port that rank 0 publishes. The write is repeated until its outcome is
        known; it compares the key's revision, so it is executed at most once (rule 4).
        """
        session = self.session
        if session is None:
            raise JoinAnew  # the node left meanwhile
        record = self._make(session, phase, number, bootstrap)
        self._has_sent = True
        self._sent_join = record.join
        self.floor = max(self.floor, record.floor)
        value = encode(record)
        while session is self.session and not session.lost.is_set():
            try:
                own_key = ModRevisionIs(self._key, self.revision)
                result = await self._backend.txn((own_key, *compares), [Put(self._key, value, session.lease)])
            except (Unavailable, OutcomeUnknown) as error:
                self._reachability.failed(error)
                await self._backoff.sleep()
                continue
            self._backoff.reset()
            self._reachability.succeeded()
            if result.committed:
                return self._written(record, result.revision)
            found = result.results[0]
            assert isinstance(found, GotItem)
            own = found.item
            if own is not None and own.value == value and own.lease == session.lease:
                mark("node_session.resent")
                return self._written(record, own.mod_revision)  # an earlier request was executed without an answer
            if (own.mod_revision if own is not None else 0) == self.revision:
                return False
            if own is None or own.lease == session.lease:
                break
            if own.lease not in self._own_leases:
                raise RendezvousStateError(
                    f"{own.key} is this node's own key, and another program wrote there: remove the key", key=own.key
                )
            mark("node_session.left_behind")
            await self._backend.revoke(own.lease)  # the key of an earlier session of this node
        mark("node_session.key_gone")
        await self.drop("the node's key is no longer what it wrote")
        raise JoinAnew

    def new_join(self) -> int:
        """The number of the next join: one that was never sent before (rule 2)."""
        if self.join != self._sent_join + 1:
            self.join = self._sent_join + 1
            self._asked_at = self._wall()
        return self.join

    async def drop(self, why: str) -> None:
        """End the session without writing anything: it, or the state under it, is already lost."""
        session = self._forget()
        if session is not None:
            if not session.lost.is_set():
                self._emit(SessionLost(run_id=self._settings.run_id, by=self._identity.name, reason=why))
            await session.close()

    async def end(self, why: str) -> bool:
        """Write that the node left, and why, and end the session. Bounded in time. False: no session was open."""
        has_sent, revision = self._has_sent, self.revision
        self._sent_join = self.join
        session = self._forget()
        if session is None:
            return False
        try:
            async with asyncio.timeout(WITHDRAW_S):
                if has_sent and not session.lost.is_set():
                    left = encode(self._make(session, NodePhase.LEFT, why=why))
                    await self._write_left(Put(self._key, left, session.lease), revision)
                await session.close()
        except TimeoutError:
            pass  # the lease ends by time
        finally:
            session.abandon()
        return True

    async def _write_left(self, left: Put, revision: int) -> None:
        """Write the record, for at most half of the time limit: ending the session matters more than the reason."""
        try:
            async with asyncio.timeout(WITHDRAW_S / 2):
                if revision > 0:
                    result = await self._backend.txn([ModRevisionIs(self._key, revision)], [left])
                    found = None if result.committed else result.results[0]
                    own = found.item if isinstance(found, GotItem) else None
                else:  # the key must not be created here: no snapshot was compared
                    own = (await self._backend.get(self._key)).item
                if own is not None and own.lease == left.lease:
                    # An unanswered write of this session was executed, most often a confirmation.
                    await self._backend.txn([ModRevisionIs(self._key, own.mod_revision)], [left])
        except (BackendError, TimeoutError):
            pass

    def abandon(self) -> None:
        """Stop all tasks without writing anything, as a dead process does."""
        session = self._forget()
        if session is not None:
            session.abandon()

    def _make(
        self, session: Session, phase: NodePhase, number: int = 0, bootstrap: tuple[str, int] = ("", 0), why: str = ""
    ) -> NodeRecord:
        identity = self._identity
        return NodeRecord(
            id=identity.id,
            name=identity.name,
            addr=identity.addr,
            session=session.lease,
            join=self.join,
            phase=phase,
            pid=identity.pid,
            local_id=identity.local_id,
            labels=dict(identity.labels),
            node_rank=identity.node_rank,
            round=number,
            floor=max(self.floor, number),
            addr0=bootstrap[0],
            port0=bootstrap[1],
            why=why,
            left=None if phase is NodePhase.MEMBER else self.left,
            at=self._asked_at,
        )

    def _written(self, record: NodeRecord, revision: int) -> bool:
        self.record, self.revision = record, revision
        return True

    def _lost(self, session: Session, why: str) -> None:
        if session is not self.session:
            return
        self._emit(SessionLost(run_id=self._settings.run_id, by=self._identity.name, reason=why))
        self._cancel_tasks()
        self._on_lost()

    def _forget(self) -> Session | None:
        session, self.session = self.session, None
        self.record, self.revision, self._has_sent = None, 0, False
        self._cancel_tasks()
        return session

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = ()
