"""The shortest way into a round, for a node whose caller waits on another thread.

Two pushes bring a waiting node into a round: its place in an attempt, which it confirms, and the word that the attempt
is active, on which its call returns. Both are answered here before anything else is done about them, where nothing else
is to be seen in them; whatever is different goes the ordinary way, in `node.py`, which also does the rest of the work
when the caller is gone. The conditions here are those of `Node._advance`, and stricter ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from rallypoint._marks import mark
from rallypoint.backends.contract import Done, Lane, Seat, Session, Shortcut, Terms
from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import Batch, Item, TxnResult
from rallypoint.rendezvous.entry import Door
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import HeldZero, Joined
from rallypoint.rendezvous.patience import Patience
from rallypoint.rendezvous.presence import Ahead, Presence
from rallypoint.rendezvous.records import AssignRecord, NodePhase, NodeRecord, RoundPhase, RoundRecord, decode

_JOINING, _FORMING, _ACTIVE = NodePhase.JOINING, RoundPhase.FORMING, RoundPhase.ACTIVE  # as in `view.py`


class Released(Protocol):
    """Somebody who waits elsewhere for a node's place."""

    def prepare(self) -> None:
        """There is time now for all that can be done before there is a place. Perhaps not for the first time."""

    def __call__(self, joined: Joined) -> None:
        """This is the place."""

    def lend(self, lane: Lane) -> None:
        """It may find its place by itself, on this."""

    def enter(self, joined: Joined) -> object:
        """It has: on its own thread. What it goes on with."""


class _Waiter(NamedTuple):
    """A node that waits for a place, and has seen nothing that asks for anything else."""

    own: NodeRecord
    session: Session
    incarnation: str
    data_lease: int
    task: asyncio.Task[object]
    deadline: float


def joined_at(seat: Seat, data_lease: int) -> Joined:
    """The same, in a node's words."""
    return Joined(seat.number, seat.rank, seat.size, seat.addr, seat.port, seat.revision, data_lease)


class Express:
    """Of one node. It is open while the node sleeps; `enter` is called when the node is in."""

    def __init__(
        self,
        shortcut: Shortcut | None,
        keys: RunKeys,
        node_id: str,
        presence: Presence,
        enter: Callable[[Joined], None],
        zero: HeldZero | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.joined: Joined | None = None
        """Where the node is by this way, until its call ends."""
        self.early: Joined | None = None
        """Where whoever waits elsewhere has found itself to be, perhaps before the node knows of it."""
        self._shortcut = shortcut
        self._round_key, self._waiting_key, self._assign_key = keys.round, keys.waiting, keys.assign(node_id)
        self._node_id = node_id
        self._presence = presence
        self._enter_node = enter
        self._zero = zero
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._released: Released | None = None
        self._waiter: _Waiter | None = None
        self._ahead: Ahead | None = None
        """The confirmation of the attempt that is expected next: made while there is time."""
        self._ahead_as_zero: Ahead | None = None
        self._place: AssignRecord | None = None
        """What was confirmed."""
        self._revision = 0
        """Of the confirmation, once it is known."""

    def begin(self, released: Released | None) -> None:
        """A call begins, for somebody who waits elsewhere and is told; None: nobody does, and this way is not gone."""
        self._released = released if self._shortcut is not None else None

    def open(self, session: Session, door: Door, data_lease: int, patience: Patience, last: RoundRecord | None) -> None:
        """Answer what is pushed next, if it is what the node waits for: a place in a round after the `last`."""
        own, deadline = self._presence.record, patience.scope.when()
        if self._released is None or self._shortcut is None or own is None or own.phase is not _JOINING:
            return
        self._released.prepare()
        number = last.number + 1 if last is not None else 1
        self._ahead = ahead = self._presence.prepare_ahead(number)
        self._ahead_as_zero = None
        if self._zero is not None:
            with suppress(OSError):  # no port, or no file left for it: the ordinary way says so if it comes to that
                self._ahead_as_zero = self._presence.prepare_ahead(number, self._zero.hold())
        until = float("inf") if deadline is None else deadline
        self._waiter = waiter = _Waiter(own, session, door.config.incarnation, data_lease, patience.task, until)
        if ahead is None:
            self._shortcut.open(self._pushed, None)
            return
        terms = self._terms(waiter, ahead, self._released)
        lane = self._shortcut.open(self._pushed, ahead.op, terms, self._done)
        if lane is not None:
            as_zero = self._ahead_as_zero
            self._presence.pledge([ahead.record, *([as_zero.record] if as_zero is not None else [])])
            self._released.lend(lane)

    def _terms(self, waiter: _Waiter, ahead: Ahead, released: Released) -> Terms:
        """What the one who waits may do by itself: what is done here, on the same conditions."""
        shortcut, zero, data_lease = self._shortcut, self._zero, waiter.data_lease
        assert shortcut is not None

        def enter(seat: Seat) -> object:
            self.early = joined = Joined(
                seat.number, seat.rank, seat.size, seat.addr, seat.port, seat.revision, data_lease
            )
            if joined.rank == 0 and zero is not None:
                zero.let_go()
            return released.enter(joined)

        return Terms(
            node_id=self._node_id,
            number=ahead.record.round,
            join=ahead.record.join,
            incarnation=waiter.incarnation,
            op=ahead.op,
            as_zero=self._ahead_as_zero.op if self._ahead_as_zero is not None else None,
            session=waiter.session,
            held_s=2 * shortcut.held_s,
            deadline=waiter.deadline,
            enter=enter,
        )

    def _done(self, done: Done) -> None:
        """What the one who waits has done by itself."""
        waiter = self._waiter
        ahead = self._ahead if done.rank else self._ahead_as_zero
        assert waiter is not None
        assert ahead is not None
        mark("express.confirmed_elsewhere")
        self._presence.sent_ahead(ahead)
        self._place = AssignRecord(number=ahead.record.round, rank=done.rank, join=ahead.record.join)
        if done.revision:
            mark("express.entered_elsewhere")
            self._presence.confirmed_ahead(ahead, done.revision)
            self._revision = done.revision
            self.joined = joined_at(done, waiter.data_lease)
            self._enter_node(self.joined)
        self._wake()

    def settle(self) -> None:
        """Let everybody see what was answered here."""
        if self._shortcut is not None:
            self._shortcut.settle()

    def close(self) -> tuple[AssignRecord, NodeRecord] | None:
        """The node goes on by itself; the place that was confirmed for it, and how, if it is not in."""
        if self._waiter is None:
            return None
        self.settle()
        self._waiter = self._ahead = self._ahead_as_zero = None
        place, self._place, self._revision = self._place, None, 0
        sent = self._presence.sent
        return (place, sent) if place is not None and sent is not None else None

    def end(self) -> None:
        """The call is over."""
        self.close()
        self.joined = self.early = self._released = None
        if self._zero is not None:
            self._zero.let_go()

    def _pushed(self, batches: Sequence[Batch], answer: TxnResult | None) -> bool:
        record: Item | None = None
        assign: Item | None = None
        for batch in batches:
            for change in batch.changes:
                if change.key == self._round_key and change.item is not None:
                    record = change.item
                elif change.key == self._assign_key and change.item is not None:
                    assign = change.item
                elif change.key != self._waiting_key:
                    return False
        waiter = self._waiter
        if (
            waiter is None
            or self.joined is not None
            or waiter.task.cancelling()
            or waiter.session is not self._presence.session
            or waiter.session.lost.reason is not None
        ):
            return False
        try:
            if self._place is None:
                return record is not None and assign is not None and self._confirm(waiter, record, assign)
            if answer is not None:
                if not answer.committed:
                    return False
                self._revision = answer.revision
            if assign is not None or not self._revision:
                return False
            return answer is not None if record is None else self._enter(waiter, self._place, record)
        except RendezvousStateError:
            return False  # it is read again, and said

    def _confirm(self, waiter: _Waiter, record_item: Item, assign_item: Item) -> bool:
        record, assign = decode(RoundRecord, record_item), decode(AssignRecord, assign_item)
        own, shortcut, ahead = waiter.own, self._shortcut, self._ahead
        assert shortcut is not None
        # Within this time the call has returned, or goes on in the ordinary way.
        until = self._loop.time() + 2 * shortcut.held_s
        if (
            record.phase is not _FORMING
            or record.incarnation != waiter.incarnation
            or record.number != assign.number
            or assign.number <= own.round
            or assign.join != own.join
            or assign.rank == 0  # it has something to prepare
            or waiter.session.expires_at < until
            or waiter.deadline < until
        ):
            return False
        if ahead is None or ahead.record.round != assign.number:
            ahead = self._ahead = self._presence.prepare_ahead(assign.number)
            if ahead is None:
                return False
        mark("express.confirmed")
        ahead.sent = shortcut.send(ahead.op)
        self._presence.sent_ahead(ahead)
        self._place = assign
        return True

    def _enter(self, waiter: _Waiter, place: AssignRecord, item: Item) -> bool:
        record, ahead, released = decode(RoundRecord, item), self._ahead, self._released
        if (
            record.phase is not _ACTIVE
            or record.incarnation != waiter.incarnation
            or record.number != place.number
            or waiter.session.expires_at <= self._loop.time()  # this process stood still
            or ahead is None
            or released is None
        ):
            return False
        mark("express.entered")
        self._presence.confirmed_ahead(ahead, self._revision)
        self.joined = joined = Joined(
            record.number, place.rank, record.size, record.addr, record.port, self._revision, waiter.data_lease
        )
        self._enter_node(joined)
        released(joined)
        return True
