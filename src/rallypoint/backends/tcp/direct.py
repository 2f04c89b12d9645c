"""Blocking requests to the embedded server on the caller's thread, without an event loop.

Only the blocking store uses this. A thread takes an idle connection or opens a new one, so a call that waits does not
delay other threads. Each connection is a client of its own. If a connection breaks before the answer, the request is
sent again under its number on the next connection, and executed once; if the server was restarted without its data in
between, the outcome is unknown. A call ends at its deadline, whatever the server does. It must never run on the thread
of the event loop, which may be the server's. Idle connections are closed.
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
from rallypoint.backends.contract import DeadlineExceeded, Limits
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
"""How often a blocked thread checks whether its call was cancelled."""
STALL_S = 6.0
"""After this long without data while an answer is due, the connection is replaced."""
AWAIT_S = 20.0
"""The longest wait for keys that one request asks the server for."""
IDLE_S = 60.0
STALE_S = 0.02
"""A connection that has been idle for this long is checked before use."""
_CHUNK = 1 << 16

Dial: TypeAlias = Callable[[float, Callable[[], None]], socket.socket]
"""Opens a connected socket before a deadline, or raises OSError. It calls the callback regularly, which may raise."""


def connect(host: str, port: int, until: float, check: Callable[[], None]) -> socket.socket:
    """A connected socket. OSError if there is none. Errors of `check`, which is called every `TICK_S`, propagate.

    The DNS look-up has no time limit.
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
    """Wait until the socket is connected, or connecting has failed. TimeoutError at `until`."""
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
    """Connections of one process to one server, for all its threads but one. Not usable in a forked child."""

    def __init__(
        self,
        endpoint: str,
        dial: Dial,
        token: Callable[[], str],
        limits: Limits,
        versions: Versions | None = None,
        loop_thread: int = 0,
    ) -> None:
        """`loop_thread` is the thread of the event loop, which must never block: the server may run there."""
        self.endpoint = endpoint
        self.limits = limits
        self.token = token
        self.versions = versions or Versions()
        self.dial = dial
        self.rng = random.Random(secrets.randbits(64))
        self.closed_reason: str | None = None
        self.closed = threading.Event()
        """Set after `closed_reason`."""
        self._loop_thread = loop_thread
        self._forks = forks.count()
        self._lock = threading.Lock()
        self._idle: list[DirectConnection] = []
        self._all: set[DirectConnection] = set()
        forks.guard(self)

    @property
    def is_usable(self) -> bool:
        """Whether this thread may use the pool: not on the event loop, and not in a forked child."""
        return forks.count() == self._forks and threading.get_ident() != self._loop_thread

    def execute(self, op: Op, deadline: float) -> Result:
        """Execute once. DeadlineExceeded, OutcomeUnknown, Rejected, Unavailable."""
        one = self._take()
        try:
            return one.request(Do(one.next_seq(), op), deadline, STALL_S)
        finally:
            self._give_back(one)

    def await_keys(
        self, keys: Sequence[str], until: float, deadline: float, is_cancelled: Callable[[], object] | None = None
    ) -> Result:
        """As in the contract. It returns after `AWAIT_S` at the latest. DeadlineExceeded without an answer."""
        within_s = min(AWAIT_S, max(0.0, until - time.monotonic()))
        one = self._take()
        try:
            return one.request(Await(one.next_seq(), tuple(keys), within_s), deadline, within_s + STALL_S, is_cancelled)
        finally:
            self._give_back(one)

    def _take(self) -> DirectConnection:
        """A connection for exclusive use until `_give_back`."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self.closed_reason is not None:
                raise Unavailable(self.closed_reason)
            one = DirectConnection(self)
            self._all.add(one)
            return one

    def _give_back(self, one: DirectConnection) -> None:
        with self._lock:
            if self.closed_reason is None:
                self._idle.append(one)
                return
        one.drop()

    def close_idle(self, idle_s: float = IDLE_S) -> None:
        """Close the connections that have been idle for this long."""
        before = time.monotonic() - idle_s
        with self._lock:
            unused = [one for one in self._idle if one.used_at < before]
            self._idle = [one for one in self._idle if one.used_at >= before]
            self._all.difference_update(unused)
        for one in unused:
            one.drop()

    def close(self, why: str) -> None:
        """Fail all current and later calls. Idempotent."""
        with self._lock:
            self.closed_reason = why if self.closed_reason is None else self.closed_reason
            idle, self._idle = self._idle, []
            busy, self._all = self._all.difference(idle), set()
        self.closed.set()
        for one in idle:
            one.drop()
        for one in busy:
            one.interrupt()

    def filenos(self) -> list[int]:
        """For `forks.guard`."""
        return [number for one in list(self._all) for number in one.filenos()]


class DirectConnection:
    """One connection. Used by one thread at a time, except for `interrupt`."""

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
        """A new request number."""
        self._seq += 1
        return self._seq

    def request(
        self, message: Do | Await, deadline: float, silence_s: float, is_cancelled: Callable[[], object] | None = None
    ) -> Result:
        """Send and wait for the answer; retry on a new connection if one breaks or is silent for `silence_s`."""
        payload = encoder.encode((message.seq - 1, (message,)))  # a ClientFrame
        before, self.used_at = self.used_at, time.monotonic()
        if self.used_at >= deadline:
            raise DeadlineExceeded
        if self.used_at - before > STALE_S:
            self._drop_if_closed()
        sent_to = ""
        while True:
            try:
                sock = self._sock or self._open(deadline, is_cancelled)
                if sent_to not in ("", self._generation) and isinstance(message, Do) and changes_something(message.op):
                    raise OutcomeUnknown(f"{self._pool.endpoint} was restarted without its data")
                if len(payload) > self._max_frame:
                    size, limit = len(payload), self._max_frame
                    raise Rejected(f"a request of {size} bytes is too large: the server accepts at most {limit}")
                is_answered = False
                try:
                    sock.settimeout(max(0.001, min(STALL_S, deadline - time.monotonic())))
                    sock.sendall(len(payload).to_bytes(HEADER_BYTES, "big") + payload)
                    sent_to = self._generation
                    result = self._receive(sock, message.seq, deadline, silence_s, is_cancelled)
                    is_answered = True
                    return result
                finally:
                    if not is_answered:  # a late answer may still arrive on this connection
                        self.drop()
            except (OSError, FrameError, msgspec.DecodeError, DeadlineExceeded) as error:
                self._check_cancelled(is_cancelled)
                left_s = deadline - time.monotonic()
                if not isinstance(error, DeadlineExceeded) and left_s > 0:
                    self._pool.closed.wait(min(self._backoff.next_s(), left_s))
                    self._check_cancelled(is_cancelled)
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded from error

    def _drop_if_closed(self) -> None:
        """Drop the connection if data has arrived without a request: the server is closing it.

        The outcome of a request on a closed connection would be unknown.
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

    def _check_cancelled(self, is_cancelled: Callable[[], object] | None) -> None:
        if self._pool.closed_reason is not None:
            raise Unavailable(self._pool.closed_reason)
        if is_cancelled is not None and is_cancelled():
            raise Unavailable("the request was cancelled")

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _receive(
        self,
        sock: socket.socket,
        seq: int,
        deadline: float,
        silence_s: float,
        is_cancelled: Callable[[], object] | None,
    ) -> Result:
        while True:
            data = self._read(sock, min(deadline, time.monotonic() + silence_s), is_cancelled)
            for payload in self._framer.feed(data):
                for message in server_decoder.decode(payload):
                    if type(message) is Answer and message.seq == seq:
                        return message.result
                    if type(message) is Going:
                        raise ConnectionError(f"the server said: {message.why}")
            silence_s = STALL_S

    def _read(self, sock: socket.socket, until: float, is_cancelled: Callable[[], object] | None) -> bytes:
        """The next bytes. DeadlineExceeded at `until`, ConnectionError if the connection is closed."""
        while True:
            left_s = until - time.monotonic()
            sock.settimeout(max(0.001, min(TICK_S, left_s)))
            try:
                data = sock.recv(_CHUNK)
            except TimeoutError:
                self._check_cancelled(is_cancelled)
                if left_s <= TICK_S:
                    raise DeadlineExceeded from None
                continue
            if not data:
                raise ConnectionError("the connection was closed")
            return data

    # --- the connection -----------------------------------------------------------------------------------------------

    def _open(self, deadline: float, is_cancelled: Callable[[], object] | None) -> socket.socket:
        """Connect and exchange hello and welcome. OSError, Rejected."""
        pool = self._pool
        until = min(deadline, time.monotonic() + CONNECT_S)
        sock = pool.dial(until, lambda: self._check_cancelled(is_cancelled))
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
            welcome = self._read_welcome(sock, until, is_cancelled)
            if isinstance(welcome, Refused):
                raise refusal_of(pool.endpoint, welcome)
        except BaseException as error:
            self.drop()
            if isinstance(error, Unavailable) and pool.closed_reason is None:  # a busy server: retry
                raise ConnectionError(str(error)) from error
            raise
        self._backoff.reset()
        self._generation = welcome.generation
        self._max_frame = welcome.max_frame
        return sock

    def _read_welcome(
        self, sock: socket.socket, until: float, is_cancelled: Callable[[], object] | None
    ) -> Welcome | Refused:
        try:
            while True:
                for payload in self._framer.feed(self._read(sock, until, is_cancelled)):
                    welcome: Welcome | Refused = welcome_decoder.decode(payload)
                    return welcome
        except NotRallypoint as error:
            raise not_rallypoint(self._pool.endpoint, describe(error.first)) from error
        except DeadlineExceeded:
            raise ConnectionError("no welcome in time") from None

    def drop(self) -> None:
        """Close the connection; the next request opens a new one."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def interrupt(self) -> None:
        """Called by another thread: wake the thread that waits on this connection."""
        sock = self._sock
        if sock is not None:
            with suppress(OSError):  # already closed
                sock.shutdown(socket.SHUT_RDWR)

    def filenos(self) -> list[int]:
        """For `forks.guard`."""
        sock = self._sock
        return [sock.fileno()] if sock is not None and sock.fileno() >= 0 else []
