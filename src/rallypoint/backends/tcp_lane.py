"""A connection on which the one who waits for a node's place is told it, on its own thread.

Between the bytes on the node's own connection and a caller that blocks there are the event loop, another thread to
wake, and all that the loop does about a push. So whoever waits has a connection of its own (`DirectPool`), on which the
server says in a few bytes what there is to know (`Stand`, `Place`): it can tell by comparing them, confirms with bytes
that were made for it beforehand, and goes on when it is in. The loop hears of the same things a moment later.

Whoever has looked at the run before it joins may begin there, too (`TcpLane.begin`): it opens the node's session and
joins, and if it was the last one that was missing it is in without the loop. If not, the loop takes over.

Whoever waits here confirms its place beforehand, while it is about (`tcp_pledge.py`): most often the first word that it
is told is that it is in. What caller and loop may both do, one of them takes (`tcp_offers.py`).
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec

from rallypoint.backends.contract import Begun, Done, Late, Seat, Terms
from rallypoint.backends.pairs import Pair, let_go
from rallypoint.backends.tcp_direct import DirectConnection, DirectPool
from rallypoint.backends.tcp_offers import OfferedLane, done_at, place_of
from rallypoint.backends.tcp_pledge import (
    PLEDGE_EVERY_S,
    PLEDGED_S,
    may_pledge,
    may_pledge_at_once,
    pledge_at_once,
    pledge_of,
)
from rallypoint.errors import BackendError
from rallypoint.kv.types import Grant, Op, Txn, TxnResult
from rallypoint.wire.frames import HEADER_BYTES, FrameError, frame
from rallypoint.wire.messages import (
    JOINS_FROM,
    PLEDGES_FROM,
    Answer,
    Do,
    Hold,
    Place,
    Pledge,
    Stand,
    encoder,
    place_decoder,
    server_decoder,
)

OPEN_S = 1.0
"""A connection that takes longer is none."""
ALONE_S = 0.005
"""For so long at least a caller that has joined waits for its place before the loop takes over."""
_CHUNK = 1 << 12
_ANSWER, _ANSWERS = b"\x91\x93\x01", b"\x92\x93\x01"
"""How the payload begins that holds an answer, and nothing else, and two of them."""
_UNKNOWN = 5
"""How many bytes of a `Place` are behind what a node knows beforehand, if those are nothing: the rank is first."""


class _Prepared(NamedTuple):
    """The bytes that terms need on this connection."""

    number: int
    terms: Terms
    forming: bytes
    active: bytes
    confirmation: bytes
    as_zero: bytes | None
    pledge: bytes
    """Confirms beforehand; empty: the server does not take that."""
    renewal: bytes


class Stander:
    """A connection that somebody waits on, and nobody else uses meanwhile."""

    def __init__(self, pool: DirectPool, one: DirectConnection) -> None:
        self.is_owed = True
        """Whether something may still come on it."""
        self._pool = pool
        self.one = one

    def tell(self, message: Stand, deadline: float) -> bool:
        return self.one.tell(message, deadline)

    @property
    def sock(self) -> socket.socket | None:
        return self.one.sock

    def frame_of(self, op: Op) -> bytes:
        """The next request, as it is sent."""
        seq = self.one.seq + 1
        return frame(encoder.encode((seq - 1, (Do(seq, op),))))

    def count(self) -> None:
        """The next request was sent."""
        self.one.seq += 1

    def frame_of_pledge(self, pledge: Pledge) -> bytes:
        """As it is sent; empty: the server does not know it."""
        return frame(encoder.encode((self.one.seq, (pledge,)))) if self.one.version >= PLEDGES_FROM else b""

    def leave(self) -> None:
        """Nobody waits on it any more."""
        self.one.is_owed = self.is_owed
        self._pool.give_back(self.one)


def stand(pool: DirectPool, message: Stand, deadline: float) -> Stander | None:
    """A connection on which the server says where a node stands; None: it does not. OSError, BackendError."""
    stander = Stander(pool, pool.take())
    try:
        if stander.tell(message, deadline):
            return stander
        stander.is_owed = False
    except BaseException:
        stander.leave()
        raise
    stander.leave()
    return None


class TcpLane(OfferedLane):
    """For one node, and one caller at a time: what is here is the caller's, and is called on its thread."""

    def __init__(self, pool: DirectPool, client: str, node_id: str, grace_s: float) -> None:
        super().__init__()
        self._pool = pool
        self._grace_s = grace_s
        self._stand = Stand(client, node_id)
        self._stander: Stander | None = None
        self._failed_for = 0
        """For which offer there was no connection."""
        self._prepared: _Prepared | None = None
        self._is_confirmed = False
        self._trip_s = 0.0
        """A request and its answer took so long, or less: with opening the connection, most often."""
        self._has_pledged = False
        """A place was confirmed beforehand, on the terms that are prepared ..."""
        self._pledge_at = 0.0
        """... and is to be again at this time."""

    @property
    def is_standing(self) -> bool:
        return self._stander is not None

    def stand_by(self) -> None:
        if self._pool.is_usable:
            began_at = time.monotonic()
            with suppress(BackendError, Late):
                self._pool.execute(Txn((), ()), began_at + OPEN_S)
            self._trip_s = time.monotonic() - began_at

    def begin(self, begun: Begun) -> Done | None:
        """As in the contract. One function, and what can be done while the server is busy is done then: see `wait`."""
        one = self._pool.take_open(JOINS_FROM)
        if one is None or one.sock is None:
            return None
        self._stander = stander = Stander(self._pool, one)
        start, seq, sock, dont_wait = begun.start, one.seq, one.sock, socket.MSG_DONTWAIT
        session, join = Do(seq + 1, Grant(start.ttl_s, start.lease)), Do(seq + 2, start.joins())
        said = [self._stand, session, Hold(start.lease, self._grace_s), join]
        is_pledged = one.version >= PLEDGES_FROM and may_pledge_at_once(start)
        if is_pledged:
            said.append(pledge_at_once(start))
        sent = frame(encoder.encode((seq, said)))
        one.seq = seq + 2
        begun.sent_at = time.monotonic()
        try:
            if sock.send(sent, dont_wait) != len(sent):
                return self._at_a_loss()
            forming, active = _beginnings(start.number, start.join, start.incarnation)
            until = begun.sent_at + min(start.ttl_s, start.join_timeout_s) - start.held_s
            if not is_pledged and (op := start.confirms(1, 0)) is not None:
                stander.frame_of(op)  # for practice, while the server decides: what is done next is done the faster
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            if not poll.poll(max(ALONE_S, self._trip_s) * 1000):
                return self._at_a_loss()  # not even the join was answered: the node asks, and is told itself
            data = sock.recv(_CHUNK, dont_wait)
            is_told = data.startswith(forming, HEADER_BYTES)
            if is_told:
                place = place_of(data)
                begun.revision = place.revision
                op = start.confirms(place.rank, place.revision)
                if op is None or time.monotonic() > until:
                    return self._at_a_loss()
                sent = stander.frame_of(op)
                begun.done = Done(place.rank)
                if sock.send(sent, dont_wait) != len(sent):
                    return self._at_a_loss()
                stander.count()
                data = b""
            elif not (is_pledged and data.startswith(active, HEADER_BYTES)):  # else it was confirmed beforehand
                begun.revision = _revision_of(data, seq + 2)
                return None if begun.revision and not _past_first(data) else self._at_a_loss()
            while not data:
                data = sock.recv(_CHUNK, dont_wait) if poll.poll(start.held_s * 1000) else b""
                if data.startswith(_ANSWER, HEADER_BYTES) and time.monotonic() <= until:  # as in `wait`
                    data = _past_first(data)
                elif not data:
                    return self._at_a_loss()
            if not data.startswith(active, HEADER_BYTES):
                return self._at_a_loss()
            end = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big")
            place = place_decoder.decode(data[HEADER_BYTES:end])[0]
            if time.monotonic() >= begun.sent_at + start.ttl_s:
                return self._at_a_loss()  # this process stood still, most likely
            begun.done = done_at(place)
        except (OSError, msgspec.DecodeError):
            return self._at_a_loss()
        self._stander = None
        one.is_owed = not _ends_with(_ANSWER if is_told else _ANSWERS, data, end)
        self._pool.give_back(one)
        return begun.done

    def wait(self, bell: int, within_s: float) -> object | None:
        """Until the bell rings, or for so long; what the caller goes on with, if it is in.

        One function, with everything at hand that it needs: what a process does when it is woken it does with cold
        caches, where every attribute and every call takes its time. In pieces it took three times as long.
        """
        prepared, poll, wait_ms = self._prepared_now(), select.poll(), within_s * 1000
        poll.register(bell, select.POLLIN)
        stander = self._stander
        if prepared is None or stander is None or stander.sock is None:
            poll.poll(wait_ms)
            return None
        poll.register(stander.sock, select.POLLIN)
        number, terms, forming, active, ordinary, as_zero, _, _ = prepared
        recv, send, session, held_s, deadline = (
            stander.sock.recv,
            stander.sock.send,
            terms.session,
            terms.held_s,
            terms.deadline,
        )
        at_rank, dont_wait, monotonic = HEADER_BYTES + len(forming), socket.MSG_DONTWAIT, time.monotonic
        try:
            if not self._is_confirmed:
                ready = poll.poll(wait_ms)
                if not ready or ready[0][0] == bell:
                    return None
                data = recv(_CHUNK, dont_wait)
            else:
                data = b""
            is_pledged = self._has_pledged and data.startswith(
                active, HEADER_BYTES
            )  # then that is all there is to know
            if not (is_pledged or self._is_confirmed):
                confirmation = ordinary if data[at_rank : at_rank + 1] != b"\0" else as_zero
                until = monotonic() + held_s
                if (
                    not data.startswith(forming, HEADER_BYTES)
                    or len(data) < HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big")
                    or not confirmation
                    or until > deadline
                    or until > session.expires_at
                    or session.lost.reason is not None
                ):
                    return self._at_a_loss()
                self.place = data  # before it is taken: who finds it taken looks here
                if self.terms.pop(number, None) is None:
                    return self._at_a_loss()
                if send(confirmation, dont_wait) != len(confirmation):
                    return self._at_a_loss()
                self._is_confirmed = True
                stander.count()
                data = b""
            is_answered = False
            while not data:
                ready = poll.poll(wait_ms)
                if not ready or ready[0][0] == bell:
                    return None
                data = recv(_CHUNK, dont_wait)
                if not is_answered and data.startswith(_ANSWER, HEADER_BYTES):  # to the confirmation
                    is_answered, data = True, _past_first(data)
                elif not data:
                    return self._at_a_loss()
            if not data.startswith(active, HEADER_BYTES):
                return self._at_a_loss()
            end = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big")
            place = self.entered = place_decoder.decode(data[HEADER_BYTES:end])[0]  # before the seat is taken, as above
            if session.expires_at <= monotonic() or session.lost.reason is not None:
                return self._at_a_loss()  # this process stood still, most likely
            if is_pledged:
                self.place = data
                if self.terms.pop(number, None) is None:
                    return self._at_a_loss()
            if not self.seats.pop(number, False):
                return self._at_a_loss()
        except (OSError, msgspec.DecodeError):
            return self._at_a_loss()
        self._stander = self._prepared = None
        stander.is_owed = len(data) != end if is_pledged else not _ends_with(_ANSWER, data, end)
        stander.leave()
        return terms.enter(place)

    def keep_warm(self, bell: int) -> None:
        """As in the contract: what `wait` would do, with somebody at the other end who is not the server."""
        prepared = self._prepared
        if prepared is None or self._is_confirmed or not self._pool.is_usable:
            return
        if time.monotonic() >= self._pledge_at:
            self._pledge(prepared.renewal if self._has_pledged else prepared.pledge, prepared.terms)
        with suppress(OSError):  # no file is left for it, or the pool was closed
            pair = self._pool.pairs.take()
            is_clean = False
            try:
                is_clean = Practice(self._pool, pair).goes_well(prepared, bell)
            finally:
                self._pool.pairs.give_back(pair) if is_clean else let_go(pair)

    def leave(self) -> None:
        """Wait no more."""
        stander, self._stander, self._prepared = self._stander, None, None
        if stander is not None:
            stander.leave()

    def _at_a_loss(self) -> Done | None:
        """Whatever was read, or is not: without this connection the node is told of it at once, and sees to it."""
        self.leave()
        return None

    def _prepared_now(self) -> _Prepared | None:
        """What is offered, made ready; None: nothing is, or there is no connection."""
        number, terms = next(iter(self.terms.items()), (0, None))
        known = self._prepared
        if terms is None or number == self._failed_for or (known is not None and known.number == number):
            return known
        if self._stander is None:
            with suppress(OSError, BackendError, FrameError, msgspec.DecodeError):
                self._stander = stand(self._pool, self._stand, time.monotonic() + OPEN_S)
        if self._stander is None:
            self._failed_for = number
            return None
        self._is_confirmed = self._has_pledged = False
        forming, active = _beginnings(terms.number, terms.join, terms.incarnation)
        as_zero = self._stander.frame_of(terms.as_zero) if terms.as_zero is not None else None
        confirmation = self._stander.frame_of(terms.op)
        pledge = self._stander.frame_of_pledge(pledge_of(terms))
        renewal = self._stander.frame_of_pledge(Pledge(PLEDGED_S))
        self._prepared = _Prepared(number, terms, forming, active, confirmation, as_zero, pledge, renewal)
        self._pledge(pledge, terms)
        return self._prepared

    def _pledge(self, said: bytes, terms: Terms) -> None:
        """Confirm beforehand, if that holds for as long as it counts."""
        now, stander = time.monotonic(), self._stander
        self._pledge_at = now + PLEDGE_EVERY_S
        if said and may_pledge(terms, now) and stander is not None and stander.sock is not None:
            try:
                if stander.sock.send(said, socket.MSG_DONTWAIT) == len(said):
                    self._has_pledged = True
                    return
            except OSError:
                pass
            self._at_a_loss()


class Actor(Stander):
    """One who waits on a connection that does not lead to a server."""

    def __init__(self, sock: socket.socket) -> None:
        self.is_owed = False
        self._sock = sock

    @property
    def sock(self) -> socket.socket | None:
        return self._sock

    def count(self) -> None:
        pass

    def leave(self) -> None:
        pass


class Practice(TcpLane):
    """A lane between two sockets that are connected with each other: one is told a place there, whenever it likes."""

    def __init__(self, pool: DirectPool, pair: Pair) -> None:
        super().__init__(pool, "", "", 0.0)
        self._near, self._far = pair

    def goes_well(self, known: _Prepared, bell: int) -> bool:
        """Confirm a place, and enter. Whether it went to the end: if not, something may be left in the sockets."""
        terms = known.terms
        ready = self._prepared = known._replace(terms=terms._replace(enter=_stay))
        self._stander, self.terms, self.seats = Actor(self._near), {ready.number: terms}, {ready.number: True}
        self._has_pledged = bool(ready.pledge)
        if not self._has_pledged:
            self._tell(Place(False, terms.number, terms.join, terms.incarnation, 1, 2))
            if self.wait(bell, 0.0) is not None or not self._is_confirmed:
                return False
            if self._far.recv(len(ready.confirmation)) != ready.confirmation:
                return False
        self._tell(Place(True, terms.number, terms.join, terms.incarnation, 1, 2, 3, terms.node_id, 4))
        return self.wait(bell, 0.0) is not None

    def _tell(self, place: Place) -> None:
        self._far.send(frame(encoder.encode((place,))))

    def _prepared_now(self) -> _Prepared | None:
        return self._prepared


def _stay(seat: Seat) -> object:
    return seat


def _beginnings(number: int, join: int, incarnation: str) -> tuple[bytes, bytes]:
    """How what is said of a place begins: in an attempt, and when that is active."""
    forming, active = (
        encoder.encode((Place(is_active, number, join, incarnation, 0, 0),))[:-_UNKNOWN] for is_active in (False, True)
    )
    return forming, active


def _ends_with(answers: bytes, data: bytes, end: int) -> bool:
    """Whether there is one frame from there on that begins like this, and all of it."""
    start = end + HEADER_BYTES
    return data.startswith(answers, start) and len(data) == start + int.from_bytes(data[end:start], "big")


def _past_first(data: bytes) -> bytes:
    """What is behind the first frame."""
    return data[HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big") :]


def _revision_of(data: bytes, seq: int) -> int:
    """Of a transaction that was committed, from a frame with the answer to it; 0: it is not known. DecodeError."""
    length = int.from_bytes(data[:HEADER_BYTES], "big")
    for message in server_decoder.decode(data[HEADER_BYTES : HEADER_BYTES + length]):
        if isinstance(message, Answer) and message.seq == seq and isinstance(message.result, TxnResult):
            return message.result.revision if message.result.committed else 0
    return 0
