"""Admission of connections: bounds on unauthenticated peers, and the counting and logging of refusals.

A connection is pending from the moment it is accepted until its hello is accepted. Pending connections are bounded in
number and time, and hold no more memory than a hello. At the bound, accepting pauses, and the oldest pending connection
is evicted if it has had enough time for its hello. So idle connections can never starve clients that authenticate
promptly.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from rallypoint.backends.forks import fileno_of
from rallypoint.backends.tls import ACCESS_DENIED, PlainText, trouble_with_client
from rallypoint.backends.tls_pipe import TlsPipe
from rallypoint.events import ClientRefused, Emitter
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.admission.refusals import FailedLogins, Refusal, Refusals, source_of
from rallypoint.wire.frames import GREETING, frame
from rallypoint.wire.handshake import describe, is_http, stranger_line
from rallypoint.wire.messages import RefusalCode, Refused, encoder

EVICT_AFTER_S = 1.0
"""A connection that has been pending for less is not evicted."""
_KINDS = {
    RefusalCode.TOKEN: Refusal.TOKEN,
    RefusalCode.VERSION: Refusal.VERSION,
    RefusalCode.TLS: Refusal.TLS,
    RefusalCode.MALFORMED: Refusal.MALFORMED,
    RefusalCode.BUSY: Refusal.BLOCKED,
}
_NETWORK_ERRORS = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN})
TLS_ONLY = Refused(RefusalCode.TLS, "this server speaks TLS only: give tls_ca, the authority of its certificate")


class Pending(Protocol):
    """A connection whose hello has not been accepted yet."""

    def evict(self) -> None:
        """Refuse it, to make room for newer connections."""

    def shut_down(self, why: str) -> None:
        """Close it because the server stops."""

    def filenos(self) -> list[int]:
        """Its open file descriptors."""


class Admission:
    """Pending connections and refusals of one server. Must be created and used on one event loop."""

    def __init__(self, limits: ServerLimits, emit: Emitter, name: str) -> None:
        self.limits = limits
        self.refusals = Refusals(limits.log_interval_s)
        self.logins = FailedLogins(limits.max_failed_logins, limits.login_block_s)
        self.pending: dict[Pending, float] = {}
        self.admitted = 0
        """Number of open connections whose hello was accepted."""
        self._is_stopped = False
        self._emit = emit
        self._name = name
        self._loop = asyncio.get_running_loop()

    # --- pending ------------------------------------------------------------------------------------------------------

    def add_pending(self, one: Pending, address: str) -> Refused | None:
        """Register an accepted connection. Returns a refusal if it must be closed at once."""
        self.pending[one] = self._loop.time()
        if self._is_stopped:
            return Refused(RefusalCode.BUSY, "the server stops")
        blocked_s = self.logins.blocked_s(source_of(address), self._loop.time())
        if blocked_s <= 0:
            return None
        return Refused(RefusalCode.BUSY, f"too many failed logins from {address}: it is blocked for {blocked_s:.0f} s")

    def remove_pending(self, one: Pending) -> None:
        """A connection was admitted, refused or closed."""
        self.pending.pop(one, None)

    def stop(self, why: str) -> None:
        """Close all pending connections, and refuse every new one."""
        self._is_stopped = True
        for one in list(self.pending):
            one.shut_down(why)

    def has_room(self, starting: int) -> bool:
        """Whether another connection may be accepted. `starting` connections are accepted but not registered yet.

        Evicts the oldest pending connection if that makes room.
        """
        if len(self.pending) + starting < self.limits.max_pending:
            return True
        oldest, since = next(iter(self.pending.items()), (None, 0.0))
        if oldest is None or self._loop.time() - since < EVICT_AFTER_S:
            return False
        del self.pending[oldest]
        oldest.evict()
        return len(self.pending) + starting < self.limits.max_pending

    # --- refusals -----------------------------------------------------------------------------------------------------

    def refused(self, peer: tuple[str, int], why: str, kind: Refusal) -> None:
        """Count a refusal, and log it unless the same kind of refusal of this source was logged a short time ago."""
        source = source_of(peer[0])
        now = self._loop.time()
        if kind in (Refusal.TOKEN, Refusal.CERTIFICATE):
            self.logins.failed(source, now)
        unlogged = self.refusals.note(kind, source, now)
        if unlogged is None:
            return
        if unlogged:
            why += f" (and {unlogged} more of this address since the last message)"
        self._emit(ClientRefused(run_id="", by=self._name, peer=format_peer(peer), reason=why))

    @staticmethod
    def kind_of(refused: Refused) -> Refusal:
        return _KINDS.get(refused.code, Refusal.MALFORMED)


def format_peer(peer: tuple[str, int]) -> str:
    """The address of a peer, for log lines."""
    return (f"{peer[0]}:{peer[1]}" if peer[1] else peer[0]) or "a connection"


def is_inconclusive(error: Exception | None) -> bool:
    """Whether a connection ended for a reason that says nothing about the peer's process, such as a network failure."""
    return isinstance(error, (TimeoutError, ssl.SSLError)) or getattr(error, "errno", None) in _NETWORK_ERRORS


def peer_of(transport: asyncio.BaseTransport | None) -> tuple[str, int]:
    """The peer's host and port; the host alone, or "", where there is no more."""
    if transport is None:
        return "", 0
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        return "this machine", 0  # the peer chooses the name of its socket
    address = transport.get_extra_info("peername")
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else (str(address or ""), 0)


class TlsAdmission(TlsPipe):
    """A connection during its TLS handshake: pending like others, but refused in terms of TLS, or of plain text."""

    def __init__(self, context: ssl.SSLContext, admission: Admission, make: Callable[[], asyncio.Protocol]) -> None:
        super().__init__(context, make(), on_failed=self._failed)
        self._admission = admission
        self._timer: asyncio.TimerHandle | None = None
        self._peer = ("", 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._peer = peer_of(transport)
        super().connection_made(transport)
        refused = self._admission.add_pending(self, self._peer[0])
        if refused is not None:
            self._refuse(ACCESS_DENIED, refused.message, Refusal.BLOCKED)
            return
        within_s = self._admission.limits.hello_timeout_s
        self._timer = asyncio.get_running_loop().call_later(within_s, self._timed_out, within_s)

    def continue_handshake(self) -> bool:
        is_done = super().continue_handshake()
        if self.is_open:
            self._remove_pending()
        return is_done

    def connection_lost(self, error: Exception | None) -> None:
        self._remove_pending()
        super().connection_lost(error)

    def evict(self) -> None:
        self._refuse(ACCESS_DENIED, "no TLS handshake yet, and newer connections are waiting", Refusal.PENDING)

    def shut_down(self, why: str) -> None:
        self.is_over = True
        if self.below is not None:
            self.below.abort()

    def filenos(self) -> list[int]:
        return fileno_of(self.below)

    def _timed_out(self, within_s: float) -> None:
        self._refuse(b"", f"no TLS handshake within {within_s:g} s", Refusal.SILENT)

    def _failed(self, pipe: TlsPipe, error: Exception) -> None:
        if isinstance(error, PlainText):
            first = error.first
            if GREETING.startswith(first[: len(GREETING)]):
                self.write_plain(GREETING + frame(encoder.encode(TLS_ONLY)))
                why = "it speaks plain text, and this server TLS only"
            else:
                self.write_plain(stranger_line(first) if is_http(first) else b"")
                why = f"it sent {describe(first)} instead of TLS"
            self._refuse(b"", why, Refusal.TLS)
            return
        is_login, why = trouble_with_client(error)
        self._refuse(b"", why, Refusal.CERTIFICATE if is_login else Refusal.TLS)

    def _refuse(self, message: bytes, why: str, kind: Refusal) -> None:
        self._remove_pending()
        self.is_over = True
        self._admission.refused(self._peer, why, kind)
        if message:
            self.write_plain(message)
        self.close_below()

    def _remove_pending(self) -> None:
        self._admission.remove_pending(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
