"""Blocking requests to the embedded server from the thread that makes them: one round trip, no event loop between.

Only the blocking store uses this. A thread takes an idle connection or opens a new one, so a call that waits delays no
other. Each connection is a client of its own. A request that was not answered when its connection broke is sent again
under its number on the next connection, and executed once; if the server has lost its memory meanwhile, the outcome is
unknown. A call ends at its deadline, whatever the peer does. Idle connections are closed after a while.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec

from rallypoint._version import SOFTWARE
from rallypoint.backends import forks
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Late, Limits
from rallypoint.backends.ops import changes_something
from rallypoint.backends.tcp.connection import not_rallypoint, refusal_of
from rallypoint.backends.tcp.dial import ONE_ADDRESS_S, tune_socket
from rallypoint.errors import OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import Op, Result
from rallypoint.wire.frames import DEFAULT_LIMIT, GREETING, HEADER_BYTES, FrameError, Framer, NotRallypoint, frame
from rallypoint.wire.handshake import Versions, describe
from rallypoint.wire.messages import (
    Answer,
    Await,
    Do,
    Going,
    Hello,
    Refused,
    Welcome,
    encoder,
    server_decoder,
    welcome_decoder,
)

CONNECT_S = 10.0
TICK_S = 0.25
"""How often a blocked thread checks whether its call is still wanted."""
STALL_S = 6.0
"""A connection that is silent for so long while an answer is due is given up for a new one."""
AWAIT_S = 20.0
"""How long the server is asked to wait for keys at a time."""
IDLE_S = 60.0
STALE_S = 0.02
"""A connection that was not used for so long is checked before it is used."""
_CHUNK = 1 << 16

Dial: TypeAlias = Callable[[float, Callable[[], None]], socket.socket]
"""Opens a connected socket until an instant, or raises OSError; the callback is to be called now and then."""


def connect(host: str, port: int, until: float, check: Callable[[], None]) -> socket.socket:
    """A connected socket. OSError if there is none; or what `check` raises, which is called every tick.

    Looking up a name takes what it takes.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    trouble = OSError(f"{host!r} has no address")
    for family, kind, protocol, _, address in found:
        one = socket.socket(family, kind, protocol)
        try:
            one.setblocking(False)
            failed = one.connect_ex(address)
            if failed == errno.EINPROGRESS:
                _wait_writable(one, until if len(found) == 1 else min(until, time.monotonic() + ONE_ADDRESS_S), check)
                failed = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            tune_socket(one)
        except OSError as error:
            one.close()
            trouble = error
        except BaseException:
            one.close()
            raise
        else:
            return one
    raise trouble


def _wait_writable(one: socket.socket, until: float, check: Callable[[], None]) -> None:
    """TimeoutError at `until`."""
    ready = select.poll()
    ready.register(one, select.POLLOUT)
    while True:
        left_s = until - time.monotonic()
        if ready.poll(max(0.0, min(TICK_S, left_s)) * 1000):
            return
        check()
        if left_s <= 0:
            raise TimeoutError("no answer in time")


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
    ) -> None:
        """`loop_thread` is the one thread that must never block: the server may run there."""
        self.endpoint = endpoint
        self.limits = limits
        self.token = token
        self.versions = versions or Versions()
        self.dial = dial
        self.rng = random.Random(secrets.randbits(64))
        self.ended: str | None = None
        self.over = threading.Event()
        """Set when it has ended."""
        self._loop_thread = loop_thread
        self._forks = forks.count()
        self._lock = threading.Lock()
        self._idle: list[DirectConnection] = []
        self._all: set[DirectConnection] = set()
        forks.guard(self)

    @property
    def is_usable(self) -> bool:
        """Whether this thread may ask: not on the event loop, and not in a fork."""
        return forks.count() == self._forks and threading.get_ident() != self._loop_thread

    def execute(self, op: Op, deadline: float) -> Result:
        """Get it executed once. Late, OutcomeUnknown, Rejected, Unavailable."""
        one = self._take()
        try:
            return one.request(Do(one.next_seq(), op), deadline, STALL_S)
        finally:
            self._give_back(one)

    def await_keys(
        self, keys: Sequence[str], until: float, deadline: float, given_up: Callable[[], object] | None = None
    ) -> Result:
        """The keys once all exist, or as they are at `until`, or some seconds before. Late without an answer.

        `given_up` is called now and then; Unavailable once it returns a true value.
        """
        within_s = min(AWAIT_S, max(0.0, until - time.monotonic()))
        one = self._take()
        try:
            return one.request(Await(one.next_seq(), tuple(keys), within_s), deadline, within_s + STALL_S, given_up)
        finally:
            self._give_back(one)

    def _take(self) -> DirectConnection:
        """A connection that no other thread uses until it is given back."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self.ended is not None:
                raise Unavailable(self.ended)
            one = DirectConnection(self)
            self._all.add(one)
            return one

    def _give_back(self, one: DirectConnection) -> None:
        with self._lock:
            if self.ended is None:
                self._idle.append(one)
                return
        one.drop()

    def close_idle(self, idle_s: float = IDLE_S) -> None:
        """Close what was not used for so long."""
        before = time.monotonic() - idle_s
        with self._lock:
            unused = [one for one in self._idle if one.used_at < before]
            self._idle = [one for one in self._idle if one.used_at >= before]
            self._all.difference_update(unused)
        for one in unused:
            one.drop()

    def close(self, why: str) -> None:
        """End every call, now and later. Idempotent."""
        with self._lock:
            self.ended = why if self.ended is None else self.ended
            idle, self._idle = self._idle, []
            busy, self._all = self._all.difference(idle), set()
        self.over.set()
        for one in idle:
            one.drop()
        for one in busy:
            one.interrupt()

    def filenos(self) -> list[int]:
        """For `forks.guard`."""
        return [number for one in list(self._all) for number in one.filenos()]


class DirectConnection:
    """One connection. Used by one thread at a time, `interrupt` excepted."""

    def __init__(self, pool: DirectPool) -> None:
        self.used_at = time.monotonic()
        self._pool = pool
        self._seq = 0
        self._client = secrets.token_hex(12)
        self._sock: socket.socket | None = None
        self._framer = Framer(DEFAULT_LIMIT)
        self._generation = ""
        self._max_frame = 0
        self._backoff = Backoff(pool.rng)

    def next_seq(self) -> int:
        """The number of the next request."""
        self._seq += 1
        return self._seq

    def request(
        self, message: Do | Await, deadline: float, silence_s: float, given_up: Callable[[], object] | None = None
    ) -> Result:
        """Send, and wait for the answer; on a new connection if one breaks or is silent for `silence_s`."""
        payload = encoder.encode((message.seq - 1, (message,)))  # a ClientFrame
        before, self.used_at = self.used_at, time.monotonic()
        if self.used_at >= deadline:
            raise Late
        if self.used_at - before > STALE_S:
            self._drop_if_closed()
        sent_to = ""
        while True:
            try:
                sock = self._sock or self._open(deadline, given_up)
                if sent_to not in ("", self._generation) and isinstance(message, Do) and changes_something(message.op):
                    raise OutcomeUnknown(f"{self._pool.endpoint} was restarted without its data")
                if len(payload) > self._max_frame:
                    most = self._max_frame
                    raise Rejected(f"a request of {len(payload)} bytes is too large: the server takes {most} at most")
                is_answered = False
                try:
                    sock.settimeout(max(0.001, min(STALL_S, deadline - time.monotonic())))
                    sock.sendall(len(payload).to_bytes(HEADER_BYTES, "big") + payload)
                    sent_to = self._generation
                    result = self._receive(sock, message.seq, deadline, silence_s, given_up)
                    is_answered = True
                    return result
                finally:
                    if not is_answered:  # nothing more can be asked here: an answer may still come
                        self.drop()
            except (OSError, FrameError, msgspec.DecodeError, Late) as error:
                self._check_wanted(given_up)
                left_s = deadline - time.monotonic()
                if not isinstance(error, Late) and left_s > 0:
                    self._pool.over.wait(min(self._backoff.next_s(), left_s))
                    self._check_wanted(given_up)
                if time.monotonic() >= deadline:
                    raise Late from error

    def _drop_if_closed(self) -> None:
        """Drop a connection on which the server has said anything unasked: it closes it.

        A request sent there would go to a server that is gone, and its outcome would count as unknown.
        """
        try:
            if self._sock is not None:
                self._sock.settimeout(0.0)
                self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            pass
        self.drop()

    def _check_wanted(self, given_up: Callable[[], object] | None) -> None:
        if self._pool.ended is not None:
            raise Unavailable(self._pool.ended)
        if given_up is not None and given_up():
            raise Unavailable("the answer is not wanted any more")

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _receive(
        self, sock: socket.socket, seq: int, deadline: float, silence_s: float, given_up: Callable[[], object] | None
    ) -> Result:
        while True:
            data = self._read(sock, min(deadline, time.monotonic() + silence_s), given_up)
            for payload in self._framer.feed(data):
                for message in server_decoder.decode(payload):
                    if type(message) is Answer and message.seq == seq:
                        return message.result
                    if type(message) is Going:
                        raise ConnectionError(f"the server said: {message.why}")
            silence_s = STALL_S

    def _read(self, sock: socket.socket, until: float, given_up: Callable[[], object] | None) -> bytes:
        """The next bytes. Late at `until`, ConnectionError at the end."""
        while True:
            left_s = until - time.monotonic()
            sock.settimeout(max(0.001, min(TICK_S, left_s)))
            try:
                data = sock.recv(_CHUNK)
            except TimeoutError:
                self._check_wanted(given_up)
                if left_s <= TICK_S:
                    raise Late from None
                continue
            if not data:
                raise ConnectionError("the connection was closed")
            return data

    # --- the connection -----------------------------------------------------------------------------------------------

    def _open(self, deadline: float, given_up: Callable[[], object] | None) -> socket.socket:
        """A connection that the server has welcomed. OSError, Rejected."""
        pool = self._pool
        until = min(deadline, time.monotonic() + CONNECT_S)
        sock = pool.dial(until, lambda: self._check_wanted(given_up))
        self._sock, self._framer = sock, Framer(DEFAULT_LIMIT)
        try:
            hello = Hello(
                oldest=pool.versions.oldest,
                newest=pool.versions.newest,
                client=self._client,
                token=pool.token(),
                software=SOFTWARE,
                generation=self._generation,
            )
            sock.settimeout(max(0.001, until - time.monotonic()))
            sock.sendall(GREETING + frame(encoder.encode(hello)))
            welcome = self._read_welcome(sock, until, given_up)
            if isinstance(welcome, Refused):
                raise refusal_of(pool.endpoint, welcome)
        except BaseException as error:
            self.drop()
            if isinstance(error, Unavailable) and pool.ended is None:  # a busy server: try again
                raise ConnectionError(str(error)) from error
            raise
        self._backoff.reset()
        self._generation = welcome.generation
        self._max_frame = welcome.max_frame
        return sock

    def _read_welcome(
        self, sock: socket.socket, until: float, given_up: Callable[[], object] | None
    ) -> Welcome | Refused:
        try:
            while True:
                for payload in self._framer.feed(self._read(sock, until, given_up)):
                    welcome: Welcome | Refused = welcome_decoder.decode(payload)
                    return welcome
        except NotRallypoint as error:
            raise not_rallypoint(self._pool.endpoint, describe(error.first)) from error
        except Late:
            raise ConnectionError("no welcome in time") from None

    def drop(self) -> None:
        """Let go of the connection; the next request opens another."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def interrupt(self) -> None:
        """From another thread: wake the thread that waits here."""
        sock = self._sock
        if sock is not None:
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def filenos(self) -> list[int]:
        """For `forks.guard`."""
        sock = self._sock
        return [sock.fileno()] if sock is not None and sock.fileno() >= 0 else []
