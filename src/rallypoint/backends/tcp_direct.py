"""Blocking requests to the embedded server, from whatever thread asks: one trip, no event loop in between.

A thread takes a connection that nobody uses, or opens another, so a call that waits delays nobody else. Each connection
is a client of its own. What was sent and not answered when a connection broke is sent again under its number on the
next one, and executed once; if the server has lost its memory meanwhile, the outcome is unknown. A call ends at its
deadline, whatever the peer does. Connections that were not used for a while are closed.
"""

from __future__ import annotations

import random
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec

from rallypoint._version import SOFTWARE
from rallypoint.backends import forks
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Late, Limits, TooOld
from rallypoint.backends.dial_direct import TICK_S, connect_near, look, tick, wait_for
from rallypoint.backends.ops import changes_something
from rallypoint.backends.pairs import Pairs
from rallypoint.errors import OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import Op, Result
from rallypoint.wire.frames import DEFAULT_LIMIT, GREETING, HEADER_BYTES, FrameError, Framer, NotRallypoint, frame
from rallypoint.wire.handshake import Versions, describe
from rallypoint.wire.messages import (
    PLACES_FROM,
    Answer,
    Await,
    Do,
    Going,
    Hello,
    RefusalCode,
    Refused,
    Stand,
    Welcome,
    encoder,
    server_decoder,
    welcome_decoder,
)

CONNECT_S = 10.0
NEAR_S = 1.0
"""A server on the same machine that does not welcome within that is asked by way of its endpoint."""
STALL_S = 6.0
"""A connection on which nothing is heard for so long, while an answer is due, is given up for a new one."""
AWAIT_S = 20.0
"""How long the server is asked to wait at a time."""
IDLE_S = 60.0
STALE_S = 0.02
"""A connection that was not used for so long is looked at before it is used."""
LOOK_S = 0.0001
"""For so long an answer is looked for before the thread sleeps: to be woken takes longer than a near server does."""
LOOK_VAIN, LOOK_AGAIN = 3, 64
"""After so many answers in a row that took longer it sleeps at once, but for one call in so many."""
LOOKS = sys.platform == "linux"
_CHUNK = 1 << 16
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)  # once: Python makes a new flag of two each time
_SMALL = 448  # what most answers fit into, and Python has room for without asking the system
AWAITS_FROM = 2  # the first version of the protocol in which the server waits for keys

Dial: TypeAlias = Callable[[float, Callable[[], None]], socket.socket]
"""Opens a connected socket until an instant, or raises OSError; the callback is to be called now and then."""


class DirectPool:
    """Connections of one process to one server. May be used from any thread of the process that made it."""

    def __init__(
        self,
        endpoint: str,
        dial: Dial,
        token: Callable[[], str],
        limits: Limits,
        versions: Versions | None = None,
        loop_thread: int = 0,
        near: Callable[[], str] = str,
    ) -> None:
        """`loop_thread` is the one thread that must never block: the server may live there.

        `near` gives the name of a shorter way to the same server (`Welcome.near`), if there is one now.
        """
        self.endpoint = endpoint
        self.limits = limits
        self.token = token
        self.versions = versions or Versions()
        self.dial = dial
        self.rng = random.Random(secrets.randbits(64))
        self.near = near
        self.shunned = ""
        """The name of a shorter way that led nowhere."""
        self.ended: str | None = None
        self.over = threading.Event()
        """Set when it has ended."""
        self._loop_thread = loop_thread
        self._forks = forks.count()
        self._lock = threading.Lock()
        self._free: list[DirectConnection] = []
        """Who takes one out owns it, and nobody else ever touches it but to interrupt it. Changed in single steps."""
        self._all: set[DirectConnection] = set()
        self.pairs = Pairs()
        forks.guard(self)

    @property
    def is_usable(self) -> bool:
        """Whether this thread may ask: not in a fork, which has to leave the connections alone, nor on the loop."""
        return forks.count() == self._forks and threading.get_ident() != self._loop_thread

    def execute(self, op: Op, deadline: float) -> Result:
        """Get it executed once. Late, OutcomeUnknown, Rejected, Unavailable."""
        try:
            one = self._free.pop()
        except IndexError:
            one = self._new()
        one.seq += 1
        try:
            return one.request(Do(one.seq, op), time.monotonic(), deadline, STALL_S, None)
        finally:
            self.give_back(one)

    def await_keys(
        self, keys: Sequence[str], until: float, deadline: float, given_up: Callable[[], object] | None = None
    ) -> Result:
        """The keys once all exist, or as they are at that moment, or some seconds before. Late if nobody says so.

        `given_up` is asked now and then; Unavailable once it says something.
        """
        now = time.monotonic()
        within_s = AWAIT_S if until - now > AWAIT_S else max(0.0, until - now)
        one = self.take()
        one.seq += 1
        try:
            return one.request(Await(one.seq, tuple(keys), within_s), now, deadline, within_s + STALL_S, given_up)
        finally:
            self.give_back(one)

    def take_open(self, version: int) -> DirectConnection | None:
        """The same, if there is one on which a server of that version, or a later one, can be asked without delay."""
        if not self.is_usable or not self._free:
            return None
        one = self.take()
        if one.is_open(version):
            return one
        self.give_back(one)
        return None

    def take(self) -> DirectConnection:
        """One that nobody else uses, until it is given back."""
        try:
            return self._free.pop()
        except IndexError:
            return self._new()

    def give_back(self, one: DirectConnection) -> None:
        """Whoever took it does not use it any more."""
        if one.is_owed:
            one.drop()
        self._free.append(one)
        if self.ended is not None:  # looked at last: whoever ended it meanwhile did not see this one
            self._drop_free()

    def _new(self) -> DirectConnection:
        """One more. Nobody needs a lock to take one that is free: taking from a list is one step."""
        one = DirectConnection(self)
        with self._lock:
            if self.ended is not None:  # and there is never a free one again
                raise Unavailable(self.ended)
            self._all.add(one)
        return one

    def _drop_free(self) -> None:
        with suppress(IndexError):
            while True:
                self._free.pop().drop()

    def close_idle(self, idle_s: float = IDLE_S) -> None:
        """Close what was not used for so long."""
        self.pairs.let_go_of_all()
        before = time.monotonic() - idle_s
        for one in list(self._free):
            if one.used_at < before:
                try:
                    self._free.remove(one)
                except ValueError:
                    continue  # somebody took it meanwhile
                one.drop()
                with self._lock:
                    self._all.discard(one)

    def close(self, why: str) -> None:
        """End every call, now and later. Once is enough."""
        with self._lock:
            self.ended = why if self.ended is None else self.ended
            everyone, self._all = self._all, set()
        self.pairs.close()
        self.over.set()
        self._drop_free()
        for one in everyone:
            one.interrupt()

    def filenos(self) -> list[int]:
        """All sockets that are open, which a fork must not keep."""
        return [number for one in list(self._all) for number in one.filenos()]


class DirectConnection:
    """One connection. Used by one thread at a time, `interrupt` excepted."""

    def __init__(self, pool: DirectPool) -> None:
        self.used_at = time.monotonic()
        self.seq = 0
        """The number of the last request."""
        self.is_owed = False
        """Whether an answer may still come, or half a request was sent: nothing more can be asked here."""
        self._pool = pool
        self._client = secrets.token_hex(12)
        self._sock: socket.socket | None = None
        self._opening: socket.socket | None = None
        self._framer = Framer(DEFAULT_LIMIT)
        self._generation = ""
        self.version = 0
        self._max_frame = 0
        self._tick_s = 0.0
        self._backoff = Backoff(pool.rng)
        self._given_up: Callable[[], object] | None = None
        self._vain = 0

    def request(
        self,
        message: Do | Await,
        now: float,
        deadline: float,
        patience_s: float,
        given_up: Callable[[], object] | None,
    ) -> Result:
        """Send, again on a new connection if one breaks or is silent for longer than patience, and wait."""
        payload = encoder.encode((message.seq - 1, (message,)))  # a ClientFrame
        self._given_up = given_up
        before, self.used_at = self.used_at, now
        if now >= deadline:
            raise Late
        if now - before > STALE_S:
            self._drop_if_closed()
        sent_to = ""
        while True:
            try:
                sock = self._sock
                if sock is None:
                    sock, now = self._open(deadline), time.monotonic()
                if sent_to or self.version < AWAITS_FROM or len(payload) > self._max_frame:
                    self._check_server(message, payload, sent_to not in ("", self._generation))
                self.is_owed = True
                data = len(payload).to_bytes(HEADER_BYTES, "big") + payload
                try:
                    at = sock.send(data, socket.MSG_DONTWAIT)
                except (BlockingIOError, TimeoutError):
                    at = 0
                if at < len(data):
                    self._send(sock, data, at, deadline)
                    now = time.monotonic()
                sent_to = self._generation
                result = self._receive(sock, message.seq, now, deadline, patience_s)
                self.is_owed = False
                return result
            except (OSError, FrameError, msgspec.DecodeError, Late) as error:
                self.drop()
                self._check_wanted()
                if not isinstance(error, Late):
                    left_s = deadline - time.monotonic()
                    self._pool.over.wait(max(0.0, min(self._backoff.next_s(), left_s)))
                    self._check_wanted()
                now = time.monotonic()
                if now >= deadline:
                    raise Late from error

    def tell(self, message: Stand, deadline: float) -> bool:
        """Send something that is not answered; False: the server does not know it. OSError, BackendError."""
        self.is_open()
        sock = self._sock or self._open(deadline)
        if self.version < PLACES_FROM:
            return False
        self._send(sock, frame(encoder.encode((self.seq, (message,)))), 0, deadline)
        return True

    def is_open(self, version: int = 0) -> bool:
        """Whether it is connected to a server that speaks that version, as far as one can see."""
        before, self.used_at, self._given_up = self.used_at, time.monotonic(), None
        if self.used_at - before > STALE_S:
            self._drop_if_closed()
        return self._sock is not None and self.version >= version

    @property
    def sock(self) -> socket.socket | None:
        return self._sock

    def _drop_if_closed(self) -> None:
        """Of a connection that rests nothing is to be read but its end, or that the server goes.

        Else what is sent now would go to a server that is no more, and its outcome would be taken for unknown.
        """
        try:
            if self._sock is not None:
                self._sock.recv(1, _PEEK)
        except BlockingIOError:
            return
        except OSError:
            pass
        self.drop()

    def _check_server(self, message: Do | Await, payload: bytes, was_sent_elsewhere: bool) -> None:
        """Whether this server may be asked this."""
        endpoint = self._pool.endpoint
        if was_sent_elsewhere and isinstance(message, Do) and changes_something(message.op):
            raise OutcomeUnknown(f"{endpoint} was restarted without its data")
        if self.version < AWAITS_FROM and isinstance(message, Await):
            raise TooOld(f"{endpoint} speaks version {self.version} of the protocol")
        if len(payload) > self._max_frame:
            raise Rejected(
                f"a request of {len(payload)} bytes is too large: the server takes {self._max_frame} at most"
            )

    def _check_wanted(self) -> None:
        """Unavailable if nobody wants the answer any more."""
        if self._pool.ended is not None:
            raise Unavailable(self._pool.ended)
        if self._given_up is not None and self._given_up():
            raise Unavailable("nobody waits for it any more")

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _send(self, sock: socket.socket, data: bytes, at: int, deadline: float) -> None:
        """What is left from there on. Late at the deadline, TimeoutError if nothing is taken for long."""
        while at < len(data):
            until = min(deadline, time.monotonic() + STALL_S)
            wait_for(sock, select.POLLOUT, until, self._check_wanted)
            with suppress(BlockingIOError, TimeoutError):
                at += sock.send(memoryview(data)[at:], socket.MSG_DONTWAIT)

    def _receive(self, sock: socket.socket, seq: int, now: float, deadline: float, patience_s: float) -> Result:
        data = b""
        if self._vain >= LOOK_VAIN and self._vain % LOOK_AGAIN and self._tick_s == TICK_S <= deadline - now:
            self._vain += 1
            try:
                data = sock.recv(_SMALL)  # as `_read` does, with less to do: here are those who share a core with many
            except (BlockingIOError, TimeoutError):
                self._check_wanted()
                now = time.monotonic()
        while True:
            until = now + patience_s
            data = data or self._read(sock, now, until if until < deadline else deadline)
            for payload in self._framer.feed(data):
                for message in server_decoder.decode(payload):
                    if type(message) is Answer:
                        if message.seq == seq:  # else an answer that somebody did not wait for
                            return message.result
                    elif type(message) is Going:
                        raise ConnectionError(f"the server said: {message.why}")
            data, patience_s = b"", STALL_S
            now = time.monotonic()
            if now >= deadline:
                raise Late

    def _read(self, sock: socket.socket, now: float, until: float) -> bytes:
        """What arrives next. Late if nothing does until then, ConnectionError at the end."""
        while True:
            left_s = until - now
            if left_s < TICK_S:
                self._tick(sock, left_s)
            elif self._tick_s != TICK_S:
                self._tick(sock, TICK_S)
            try:
                if LOOKS and (self._vain < LOOK_VAIN or not self._vain % LOOK_AGAIN):
                    data = self._look(sock) or sock.recv(_CHUNK)
                else:
                    self._vain += 1
                    data = sock.recv(_CHUNK)
            except (BlockingIOError, TimeoutError):
                self._check_wanted()
                if left_s <= self._tick_s:
                    raise Late from None
                now = time.monotonic()
                continue
            if not data:
                raise ConnectionError("the connection was closed")
            return data

    def _look(self, sock: socket.socket) -> bytes | None:
        """What arrives within a moment, without sleeping; None if nothing does.

        In vain is also what took longer because others needed the core meanwhile: sleeping would have cost nothing.
        """
        data, is_late = look(sock, _CHUNK, LOOK_S)
        self._vain = self._vain + 1 if is_late else 0 if self._vain < LOOK_VAIN else LOOK_VAIN - 1
        return data

    def _tick(self, sock: socket.socket, tick_s: float) -> None:
        self._tick_s = tick_s
        tick(sock, tick_s)

    # --- the connection -----------------------------------------------------------------------------------------------

    def _open(self, deadline: float) -> socket.socket:
        """A connection that is welcome. OSError, Rejected."""
        until = min(deadline, time.monotonic() + CONNECT_S)
        sock = self._open_near(min(until, time.monotonic() + NEAR_S))
        if sock is None:
            self._check_wanted()
            sock = self._pool.dial(until, self._check_wanted)
            self._greet(sock, until)
        self._backoff.reset()
        self._sock = sock
        return sock

    def _open_near(self, until: float) -> socket.socket | None:
        """By the shorter way, if there is one that has not failed before; None: the endpoint decides."""
        name = self._pool.near()
        if not name or name == self._pool.shunned:
            return None
        try:
            sock = connect_near(name)
            self._greet(sock, until)
        except OSError:
            self._pool.shunned = name
            return None
        return sock

    def _greet(self, sock: socket.socket, until: float) -> None:
        """Say hello and be welcome; else the socket is closed."""
        self._opening = sock
        try:
            self._tick_s = 0.0
            self._framer = Framer(DEFAULT_LIMIT)
            versions = self._pool.versions
            hello = Hello(
                oldest=versions.oldest,
                newest=versions.newest,
                client=self._client,
                token=self._pool.token(),
                software=SOFTWARE,
                generation=self._generation,
            )
            self._send(sock, GREETING + frame(encoder.encode(hello)), 0, until)
            self._welcomed(self._read_welcome(sock, until))
        except BaseException:
            sock.close()
            raise
        finally:
            self._opening = None

    def _read_welcome(self, sock: socket.socket, until: float) -> Welcome | Refused:
        try:
            while True:
                for payload in self._framer.feed(self._read(sock, time.monotonic(), until)):
                    welcome: Welcome | Refused = welcome_decoder.decode(payload)
                    return welcome
                if time.monotonic() >= until:
                    raise Late
        except NotRallypoint as error:
            raise Rejected(
                f"{self._pool.endpoint} is not a Rallypoint server: it answered with {describe(error.first)}. "
                f"Is the port right?"
            ) from error
        except Late:
            raise ConnectionError("no welcome in time") from None

    def _welcomed(self, welcome: Welcome | Refused) -> None:
        if isinstance(welcome, Refused):
            if welcome.code is RefusalCode.BUSY:
                raise ConnectionError(welcome.message)
            raise Rejected(f"{self._pool.endpoint} refused: {welcome.message}")
        self._generation = welcome.generation
        self.version = welcome.version
        self._max_frame = welcome.max_frame

    def drop(self) -> None:
        """Let go of the connection; the next request opens another."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        self.is_owed = False

    def interrupt(self) -> None:
        """From another thread: whoever waits here is woken."""
        for sock in (self._sock, self._opening):
            if sock is not None:
                with suppress(OSError):  # it is closed already
                    sock.shutdown(socket.SHUT_RDWR)

    def filenos(self) -> list[int]:
        """For `forks.guard`."""
        return [one.fileno() for one in (self._sock, self._opening) if one is not None and one.fileno() >= 0]
