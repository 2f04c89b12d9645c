"""A head start: a join that is made ready while a node only looks at its run, for a caller to send by itself.

Whoever is about to block in a call need not wait for the event loop to wake up and join for it: what is to be sent is
known as soon as the run's door is. It is the same join, with the same compares: if the door has moved since, it is
refused, and the node goes on in the ordinary way. What the caller has done is taken over by the node afterwards
(`Node.next_round`); each step of that finds out by itself whether it was done, as after a lost connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from random import Random

import msgspec

from rallypoint._marks import mark
from rallypoint.backends.contract import Begun, Lane, Session, Shortcut
from rallypoint.backends.session import draw_lease
from rallypoint.errors import RendezvousError, RendezvousStateError
from rallypoint.kv.types import ModRevisionIs, Put, Txn
from rallypoint.rendezvous.entry import Door, Entry
from rallypoint.rendezvous.express import joined_at
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import HeldZero, Joined
from rallypoint.rendezvous.presence import Presence
from rallypoint.rendezvous.reach import Reach
from rallypoint.rendezvous.records import NodePhase, NodeRecord, encode
from rallypoint.rendezvous.sight import Sight
from rallypoint.settings import Settings


class HeadStart:
    """One join. Made on the loop, used by the thread that takes it (`contract.Start`)."""

    def __init__(
        self,
        keys: RunKeys,
        settings: Settings,
        record: NodeRecord,
        door: Door,
        number: int,
        held_s: float,
        zero: HeldZero | None,
        wall: Callable[[], float],
    ) -> None:
        self.record = record
        """As it joins."""
        self.door = door
        self.lease = record.session
        self.ttl_s = settings.session_ttl_s
        self.join_timeout_s = settings.join_timeout_s
        self.number = number
        self.join = record.join
        self.incarnation = door.config.incarnation
        self.held_s = held_s
        self._key = keys.node(record.id)
        self._door = ModRevisionIs(keys.config, door.config_revision), ModRevisionIs(keys.closed, door.closed_revision)
        self._members: dict[bool, NodeRecord] = {}
        """As it confirms a place, as rank 0 and otherwise: made once, since it may have been said."""
        self._zero = zero
        self._wall = wall

    def joins(self) -> Txn:
        self.record = msgspec.structs.replace(self.record, at=self._wall())
        return Txn((ModRevisionIs(self._key, 0), *self._door), (Put(self._key, encode(self.record), self.lease),))

    def pledges(self) -> tuple[bytes, bytes]:
        member, zero = self.member(1), self.member(0)
        assert member is not None
        return encode(member), encode(zero) if zero is not None else b""

    def confirms(self, rank: int, revision: int) -> Txn | None:
        member = self.member(rank)
        if member is None:
            return None
        return Txn((ModRevisionIs(self._key, revision),), (Put(self._key, encode(member), self.lease),))

    def member(self, rank: int) -> NodeRecord | None:
        """As it confirms a place; None: it cannot."""
        known = self._members.get(rank == 0)
        if known is not None:
            return known
        zero = ("", 0)
        if rank == 0:
            if self._zero is None:
                return None
            try:
                zero = self._zero.hold()
            except OSError:  # no port, or no file left for it: the ordinary way says so
                return None
        member = self._members[rank == 0] = msgspec.structs.replace(
            self.record,
            phase=NodePhase.MEMBER,
            round=self.number,
            floor=max(self.record.floor, self.number),
            addr0=zero[0],
            port0=zero[1],
        )
        return member

    @property
    def members(self) -> Iterable[NodeRecord]:
        """As it may have confirmed a place."""
        return self._members.values()

    def entered(self, rank: int) -> None:
        """The caller is in."""
        if rank == 0 and self._zero is not None:
            self._zero.let_go()


class HeadStarts:
    """Keeps one ready for a node that looks at its run and has not joined it; nothing before it is asked to."""

    def __init__(
        self,
        shortcut: Shortcut | None,
        keys: RunKeys,
        settings: Settings,
        presence: Presence,
        entry: Entry,
        sight: Sight,
        reach: Reach,
        zero: HeldZero | None,
        rng: Random,
        wall: Callable[[], float],
    ) -> None:
        self._shortcut = shortcut
        self._keys = keys
        self._settings = settings
        self._presence = presence
        self._entry = entry
        self._sight = sight
        self._reach = reach
        self._zero = zero
        self._rng = rng
        self._wall = wall
        self._is_wanted = False
        self._seen: tuple[int, int, int] | None = None
        """What the one that is ready was made for: the revisions of the door, and the round."""
        self._ready: list[HeadStart] = []
        """Whoever takes it out of here uses it. Another thread may."""

    def stand_by(self, node_id: str) -> Lane | None:
        """Keep one ready from now on; where it is to be used."""
        lane = self._shortcut.lane(node_id) if self._shortcut is not None else None
        self._is_wanted = lane is not None
        self.refresh()
        return lane

    def take(self) -> HeadStart | None:
        """The one that is ready, for this thread and for nobody else. From any thread."""
        try:
            return self._ready.pop()
        except IndexError:
            return None

    @staticmethod
    def door_of(begun: Begun) -> Door:
        """The one that the caller has joined by, or has tried to."""
        assert isinstance(begun.start, HeadStart)
        return begun.start.door

    async def take_over(
        self,
        begun: Begun,
        write_join: Callable[[], Awaitable[None]],
        write_confirmation: Callable[[int, int, tuple[str, int]], Awaitable[None]],
    ) -> tuple[Session, Joined | None]:
        """Go on with what a caller has begun: its session, and where it is, if it is in. Then nothing is waited for."""
        start, done, presence, shortcut = begun.start, begun.done, self._presence, self._shortcut
        assert isinstance(start, HeadStart)
        assert shortcut is not None
        session = presence.take_over(shortcut, begun, start.record, start.members)
        if begun.is_given_up:
            raise RendezvousError("its call was interrupted")
        begun.is_taken_over = True
        if begun.revision:
            self._reach.succeeded()
        member = start.member(done.rank) if done is not None else None
        if done is not None and done.revision:
            mark("node.began_and_entered")
            assert member is not None
            presence.took_place(member, done.revision)
            config = self._sight.config_since(start.door.config, start.door.config_revision)
            return session, joined_at(done, config.data_lease)
        mark("node.began")
        if not begun.revision:
            mark("node.began_unheard")
            await write_join()
        if done is not None:
            mark("node.began_and_confirmed")
            assert member is not None
            await write_confirmation(start.number, done.rank, (member.addr0, member.port0))
        return session, None

    def stop(self) -> None:
        """None is wanted: the node joins by itself, or goes."""
        self._is_wanted, self._seen = False, None
        self._withdraw()

    def end(self) -> None:
        """Nobody joins any more."""
        self.stop()
        if self._zero is not None:
            self._zero.let_go()

    def _withdraw(self) -> None:
        """The one that is ready, if nobody has taken it, is not used."""
        start = self.take()
        if start is not None:
            self._presence.foresee_no_more(start.lease)

    def refresh(self) -> None:
        """Something was seen: what is ready is to fit it."""
        if not self._is_wanted or self._shortcut is None or self._presence.session is not None:
            return
        sight = self._sight
        config, closed = sight.door()
        number = sight.round.number + 1 if sight.round is not None else 1
        seen = (config.mod_revision if config else 0, closed.mod_revision if closed else 0, number)
        if seen == self._seen and sight.drain is None:
            return
        self._withdraw()
        self._seen = seen
        try:
            door = self._entry.guess(config, closed)
        except RendezvousStateError:
            return  # whoever joins is told
        if door is not None and sight.drain is None:
            record = self._presence.foresee(draw_lease(self._rng))
            held_s = 2 * self._shortcut.held_s
            if self._zero is not None:
                with suppress(OSError):  # no port, or no file left for it: whoever begins tries again
                    self._zero.hold()
            self._ready.append(
                HeadStart(self._keys, self._settings, record, door, number, held_s, self._zero, self._wall)
            )
