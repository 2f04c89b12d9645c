"""Blocking requests to the embedded server, from whatever thread asks: one trip, no event loop in between.

A thread takes a connection that nobody uses, or opens another, so a call that waits delays nobody else. Each connection
is a client of its own. What was sent and not answered when a connection broke is sent again under its number on the
next one, and executed once; if the server has lost its memory meanwhile, the outcome is unknown. A call ends at its
deadline, whatever the peer does. Connections that were not used for a while are closed.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from quorate._version import __version__
from quorate.backends.contract import Late, Limits, TooOld
from quorate.backends.forks import guard
from quorate.backends.ops import changes_something
from quorate.errors import BackendError, OutcomeUnknown, Rejected, Unavailable
from quorate.kv.types import Op, Result
from quorate.wire.frames import DEFAULT_LIMIT, GREETING, HEADER_BYTES, FrameError, Framer, NotQuorate, frame
from quorate.wire.handshake import Versions
from quorate.wire.messages import (
    Answer,
    Await,
    ClientFrame,
    Do,
    Going,
    Hello,
    RefusalCode,
    Refused,
    Welcome,
    encoder,
    server_decoder,
    welcome_decoder,
)

TICK_S = 0.25
"""How often a call that waits looks whether it may go on waiting."""
CONNECT_S = 10.0
STALL_S = 6.0
"""A connection on which an answer is due for so long is given up for a new one."""
AWAIT_S = 20.0
"""How long the server is asked to wait at a time."""
RETRY_S = 0.1
IDLE_S = 60.0
SOFTWARE = f"quorate {__version__}"
_CHUNK = 1 << 16
AWAITS_FROM = 2
"""The first version of the protocol in which the server waits for keys."""


class DirectPool:
    """Connections of one process to one server. May be used from any thread of the process that made it."""

    def __init__(
        self,
        endpoint: str,
        dial: Callable[[float], socket.socket],
        token: str,
        limits: Limits,
        versions: Versions | None = None,
    ) -> None:
        """`dial` opens a connected socket within so many seconds, or raises OSError."""
        self.endpoint = endpoint
        self.limits = limits
        self.token = token
        self.versions = versions or Versions()
        self.dial = dial
        self.ended: str | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._free: list[_Direct] = []
        self._all: set[_Direct] = set()
        guard(self)

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made it; a fork has to leave the connections alone."""
        return os.getpid() == self._pid

    def execute(self, op: Op, deadline: float) -> Result:
        """Get it executed once. Late, OutcomeUnknown, Rejected, Unavailable."""
        one = self._take()
        try:
            seq = one.next_number()
            return one.request(Do(seq, op), seq, changes_something(op), deadline, STALL_S)
        except BaseException as error:
            one.failed(error)
            raise
        finally:
            self._give_back(one)

    def await_keys(self, keys: Sequence[str], until: float, deadline: float) -> Result:
        """The keys once all exist, or as they are at that moment, or some seconds before. Late if nobody says so."""
        within_s = min(AWAIT_S, max(0.0, until - time.monotonic()))
        one = self._take()
        try:
            seq = one.next_number()
            return one.request(Await(seq, tuple(keys), within_s), seq, False, deadline, within_s + STALL_S)
        except BaseException as error:
            one.failed(error)
            raise
        finally:
            self._give_back(one)

    def _take(self) -> _Direct:
        """One that nobody uses. Without a lock where there is one: taking from a list is one step."""
        try:
            return self._free.pop()
        except IndexError:
            one = _Direct(self)
        with self._lock:
            if self.ended is not None:
                raise Unavailable(self.ended)
            self._all.add(one)
        return one

    def _give_back(self, one: _Direct) -> None:
        self._free.append(one)
        if self.ended is not None:
            one.drop()

    def close_idle(self, idle_s: float = IDLE_S) -> None:
        """Close what was not used for so long."""
        before = time.monotonic() - idle_s
        with self._lock:
            idle = [one for one in self._free if one.used_at < before]
            self._free = [one for one in self._free if one.used_at >= before]
            self._all.difference_update(idle)
        for one in idle:
            one.drop()

    def close(self, why: str) -> None:
        """End every call, now and later."""
        with self._lock:
            self.ended = why
            free, busy = self._free, self._all.difference(self._free)
            self._free, self._all = [], set()
        for one in free:
            one.drop()
        for one in busy:
            one.interrupt()

    def filenos(self) -> list[int]:
        """All sockets that are open, which a fork must not keep."""
        return [number for one in self._all for number in one.filenos()]


class _Direct:
    """One connection. Used by one thread at a time, `interrupt` excepted."""

    def __init__(self, pool: DirectPool) -> None:
        self.used_at = time.monotonic()
        self._pool = pool
        self._client = secrets.token_hex(12)
        self._sock: socket.socket | None = None
        self._framer = Framer(DEFAULT_LIMIT)
        self._generation = ""
        self._version = 0
        self._max_frame = 0
        self._seq = 0
        self._tick_s = 0.0

    def next_number(self) -> int:
        """For the next request."""
        self._seq += 1
        return self._seq

    def failed(self, error: BaseException) -> None:
        """A request ended with an error. Late, or an interruption, may have left an answer or half a frame behind."""
        if not isinstance(error, BackendError):
            self.drop()

    def request(self, message: Do | Await, seq: int, changes: bool, deadline: float, patience_s: float) -> Result:
        """Send, again on a new connection if one breaks or is silent for longer than patience, and wait."""
        payload = encoder.encode(ClientFrame(seq - 1, (message,)))
        sent_to = ""
        while True:
            try:
                sock = self._sock or self._open(deadline)
                if sent_to != self._generation:
                    self._check(message, payload, changes and bool(sent_to))
                sock.sendall(len(payload).to_bytes(HEADER_BYTES, "big") + payload)
                sent_to = self._generation
                return self._receive(sock, seq, min(deadline, time.monotonic() + patience_s))
            except (OSError, FrameError, msgspec.DecodeError, Late) as error:
                self.drop()
                if self._pool.ended is not None:
                    raise Unavailable(self._pool.ended) from error
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise Late from error
                if not isinstance(error, Late):
                    time.sleep(min(RETRY_S, left_s))

    def _check(self, message: Do | Await, payload: bytes, was_sent_elsewhere: bool) -> None:
        """Whether this server may be asked this."""
        endpoint = self._pool.endpoint
        if was_sent_elsewhere:
            raise OutcomeUnknown(f"{endpoint} was restarted without its data")
        if self._version < AWAITS_FROM and isinstance(message, Await):
            raise TooOld(f"{endpoint} speaks version {self._version} of the protocol")
        if len(payload) > self._max_frame:
            raise Rejected(
                f"a request of {len(payload)} bytes is too large: {endpoint} takes {self._max_frame} at most"
            )

    def _receive(self, sock: socket.socket, seq: int, deadline: float) -> Result:
        feed, decode = self._framer.feed, server_decoder.decode
        while True:
            for payload in feed(self._read(sock, deadline)):
                for message in decode(payload):
                    if type(message) is Answer:
                        if message.seq == seq:  # else an answer that somebody did not wait for
                            return message.result
                    elif type(message) is Going:
                        raise ConnectionError(f"the server said: {message.why}")

    def _read(self, sock: socket.socket, deadline: float) -> bytes:
        """What arrives next. Late at the deadline, ConnectionError at the end."""
        while True:
            self.used_at = now = time.monotonic()
            left_s = deadline - now
            if left_s <= 0:
                raise Late
            if left_s < TICK_S or self._tick_s != TICK_S:
                self._tick(sock, min(TICK_S, left_s))
            try:
                data = sock.recv(_CHUNK)
            except (BlockingIOError, TimeoutError):
                if self._pool.ended is not None:
                    raise ConnectionError(self._pool.ended) from None
                continue
            if not data:
                raise ConnectionError("the connection was closed")
            return data

    def _tick(self, sock: socket.socket, tick_s: float) -> None:
        """Where it can be, a time-out of the kernel's: Python's own costs another system call for every answer."""
        self._tick_s = tick_s
        if sys.platform != "linux":
            sock.settimeout(tick_s)
            return
        micros = max(1, int(tick_s * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(micros, 1_000_000)))

    # --- the connection -----------------------------------------------------------------------------------------------

    def _open(self, deadline: float) -> socket.socket:
        """A connection that is welcome. OSError, Rejected."""
        limit_s = min(CONNECT_S, deadline - time.monotonic())
        if limit_s <= 0:
            raise Late
        until = time.monotonic() + limit_s
        sock = self._pool.dial(limit_s)
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if sys.platform == "linux":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(STALL_S), 0))
            self._tick_s = 0.0
            self._framer = Framer(DEFAULT_LIMIT)
            versions = self._pool.versions
            hello = Hello(
                oldest=versions.oldest,
                newest=versions.newest,
                client=self._client,
                token=self._pool.token,
                software=SOFTWARE,
                generation=self._generation,
            )
            sock.sendall(GREETING + frame(encoder.encode(hello)))
            self._welcomed(self._read_welcome(sock, until))
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        return sock

    def _read_welcome(self, sock: socket.socket, until: float) -> Welcome | Refused:
        try:
            while True:
                for payload in self._framer.feed(self._read(sock, until)):
                    welcome: Welcome | Refused = welcome_decoder.decode(payload)
                    return welcome
        except NotQuorate as error:
            raise Rejected(f"{self._pool.endpoint} is not a Quorate server: is the port right?") from error
        except Late:
            raise ConnectionError("no welcome in time") from None

    def _welcomed(self, welcome: Welcome | Refused) -> None:
        if isinstance(welcome, Refused):
            if welcome.code is RefusalCode.BUSY:
                raise ConnectionError(welcome.message)
            raise Rejected(f"{self._pool.endpoint} refused: {welcome.message}")
        self._generation = welcome.generation
        self._version = welcome.version
        self._max_frame = welcome.max_frame

    def drop(self) -> None:
        """Let go of the connection; the next request opens another."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def interrupt(self) -> None:
        """From another thread: whoever waits here is woken."""
        sock = self._sock
        if sock is not None:
            with suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)

    def filenos(self) -> list[int]:
        return [self._sock.fileno()] if self._sock is not None else []
