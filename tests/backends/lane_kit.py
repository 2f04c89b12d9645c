"""Somebody who waits for a node's place on a connection of its own, and the other end of that, which a test plays."""

import time
from contextlib import contextmanager, suppress

import pytest

from rallypoint._bell import Bell
from rallypoint.backends.contract import Begun, Terms
from rallypoint.backends.lost import Lost
from rallypoint.backends.tcp_lane import TcpLane
from rallypoint.kv.types import ModRevisionIs, Put, Txn, TxnResult
from rallypoint.wire.frames import GREETING, Framer, frame
from rallypoint.wire.messages import (
    JOINS_FROM,
    PLACES_FROM,
    Answer,
    ClientFrame,
    Do,
    Hello,
    Place,
    Stand,
    Welcome,
    client_decoder,
    encoder,
    hello_decoder,
)
from tests.patience import PATIENCE_S, in_thread, result_of, until
from tests.server.threaded import listening, pool_to, soon

SHORT_S = 0.05
CONFIRMATION = Txn((ModRevisionIs("/node", 3),), (Put("/node", b"member", 1),))
AS_ZERO = Txn((ModRevisionIs("/node", 3),), (Put("/node", b"member, rank 0", 1),))


class LastingSession:
    """As much of a session as a caller looks at."""

    def __init__(self, lasts_s=60.0):
        self.expires_at = time.monotonic() + lasts_s
        self.lost = Lost()


def terms(session=None, number=7, as_zero=AS_ZERO, lasts_s=60.0):
    return Terms(
        node_id="node",
        number=number,
        join=2,
        incarnation="life",
        op=CONFIRMATION,
        as_zero=as_zero,
        session=session or LastingSession(),
        held_s=0.2,
        deadline=time.monotonic() + lasts_s,
        enter=lambda seat: (seat.number, seat.rank, seat.size, seat.addr, seat.port, seat.revision),
    )


def place(is_active=False, number=7, join=2, incarnation="life", rank=4):
    return Place(is_active, number, join, incarnation, rank, 9, 1 << 40, "zero" if is_active else "", 1234)


class Peer:
    """The server's end of the lane's connection."""

    def __init__(self, sock):
        self._sock = sock
        self._framer = Framer(1 << 20)
        self._frames = []
        sock.settimeout(PATIENCE_S)
        assert isinstance(hello_decoder.decode(self._next()), Hello)

    def _next(self):
        while not self._frames:
            data = self._sock.recv(1 << 16)
            assert data, "the connection was closed"
            self._frames += self._framer.feed(data)
        return self._frames.pop(0)

    def hear(self):
        """The next message."""
        received = client_decoder.decode(self._next())
        assert isinstance(received, ClientFrame)
        (message,) = received.messages
        return message

    def hear_all(self):
        """All messages of the next frame."""
        return client_decoder.decode(self._next()).messages

    def say_together(self, *messages):
        """In one frame."""
        self._sock.sendall(frame(encoder.encode(messages)))

    def say(self, *messages):
        """Each in a frame of its own, all at once."""
        self._sock.sendall(b"".join(frame(encoder.encode((message,))) for message in messages))

    def hears_the_end(self):
        assert self._sock.recv(1) == b""


@contextmanager
def lane_with(offered, version=PLACES_FROM):
    """A lane to somebody who speaks the protocol, with something on offer; and, once it stands, the other end."""
    welcome = Welcome(version=version, generation="g", max_frame=1 << 20)
    with listening(GREETING + frame(encoder.encode(welcome))) as (port, came), pool_to(port) as pool:
        lane = TcpLane(pool, "client", "node", 1.0)
        lane.offer(offered)
        bell = Bell()
        assert lane.wait(bell.fileno, SHORT_S) is None
        until(lambda: came, "it came")
        yield lane, bell, came
        lane.leave()


@contextmanager
def standing(offered, version=PLACES_FROM):
    with lane_with(offered, version) as (lane, bell, came):
        peer = Peer(came[0])
        assert peer.hear() == Stand("client", "node")
        yield lane, bell, peer


def keep_answering(peer, seq, call):
    """Say nothing but that, which is never what is waited for, until the call has ended."""
    deadline = soon(5.0)
    with suppress(OSError):
        while not call.done() and time.monotonic() < deadline:
            peer.say(Answer(seq, TxnResult(True, 1 << 40, ())))
            time.sleep(SHORT_S)  # never as long as it waits for the next word
    assert time.monotonic() < deadline


def wait(lane, bell):
    return lane.wait(bell.fileno, PATIENCE_S)


def nothing_is_said(peer):
    peer._sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer._sock.recv(1)
    peer._sock.settimeout(PATIENCE_S)


# --- beginning by oneself ---------------------------------------------------------------------------------------------

JOIN = Txn((ModRevisionIs("/node", 0),), (Put("/node", b"joining", 77),))


class Starting:
    """How a node joins, as far as a lane is concerned."""

    lease, ttl_s, number, join, incarnation, held_s, join_timeout_s = 77, 5.0, 7, 2, "life", 0.2, 60.0

    def __init__(self, ttl_s=5.0, confirms=True):
        self.ttl_s = ttl_s
        self._confirms = confirms

    def joins(self):
        return JOIN

    def pledges(self):
        return b"member", b"as zero"

    def confirms(self, rank, revision):
        return CONFIRMATION if self._confirms and revision == 1 << 40 else None


@contextmanager
def beginning(version=JOINS_FROM, **start):
    """Somebody who begins, with a connection to somebody who speaks the protocol: the call, how far it is, the peer."""
    welcome = Welcome(version=version, generation="g", max_frame=1 << 20)
    with listening(GREETING + frame(encoder.encode(welcome))) as (port, came), pool_to(port) as pool:
        lane, begun = TcpLane(pool, "client", "node", 1.5), Begun(Starting(**start))
        opens = in_thread(lane.stand_by)
        until(lambda: came, "it came")
        peer = Peer(came[0])
        assert peer.hear() == Do(1, Txn((), ())), "a connection is made ready by using it"
        peer.say(Answer(1, TxnResult(True, 1, ())))
        result_of(opens)
        yield in_thread(lambda: lane.begin(begun)), begun, peer, lane
        lane.leave()
