"""The admission of a server: who may come in, before anything is done for them, and what is said of those who may not.

A connection is pending from the moment it is accepted until its hello was accepted. Those are bounded in number and in
time, and hold nothing but a hello's bytes. When there are too many, nobody more is accepted for a moment, and the one
that has been silent for longest has to go: a crowd of strangers keeps nobody out who says hello at once.
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

CROWDED_PATIENCE_S = 1.0
"""So long a silent connection is let be, even if others wait."""
_KINDS = {
    RefusalCode.TOKEN: Refusal.TOKEN,
    RefusalCode.VERSION: Refusal.VERSION,
    RefusalCode.TLS: Refusal.TLS,
    RefusalCode.MALFORMED: Refusal.MALFORMED,
    RefusalCode.BUSY: Refusal.BLOCKED,
}
_SILENT_ENDS = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN})
TLS_ONLY = Refused(RefusalCode.TLS, "this server speaks TLS only: give tls_ca, the authority of its certificate")


class Pending(Protocol):
    """A connection that has not said hello."""

    def evict(self) -> None:
        """Others wait, and it is silent: it has to go."""

    def shut_down(self, why: str) -> None:
        """The server stops."""

    def filenos(self) -> list[int]:
        """What is open of it."""


class Admission:
    """Everything about coming in. Belongs to the loop it is made on."""

    def __init__(self, limits: ServerLimits, emit: Emitter, name: str) -> None:
        self.limits = limits
        self.refusals = Refusals(limits.log_interval_s)
        self.logins = FailedLogins(limits.max_failed_logins, limits.login_block_s)
        self.pending: dict[Pending, float] = {}
        self.admitted = 0
        """Connections that have said hello."""
        self._is_stopped = False
        self._emit = emit
        self._name = name
        self._loop = asyncio.get_running_loop()

    # --- pending ------------------------------------------------------------------------------------------------------

    def add_pending(self, one: Pending, address: str) -> Refused | None:
        """A connection was accepted; why it has to go at once."""
        self.pending[one] = self._loop.time()
        if self._is_stopped:
            return Refused(RefusalCode.BUSY, "the server stops")
        blocked_s = self.logins.blocked_s(source_of(address), self._loop.time())
        if blocked_s <= 0:
            return None
        return Refused(
            RefusalCode.BUSY, f"too many logins from {address} failed: nobody from there comes in for {blocked_s:.0f} s"
        )

    def remove_pending(self, one: Pending) -> None:
        """It has come in, or has gone."""
        self.pending.pop(one, None)

    def stop(self, why: str) -> None:
        """The server stops: those who are pending go, and nobody else comes in."""
        self._is_stopped = True
        for one in list(self.pending):
            one.shut_down(why)

    def has_room(self, coming: int) -> bool:
        """Whether another connection may be accepted, while so many that were are not pending yet."""
        if len(self.pending) + coming < self.limits.max_pending:
            return True
        oldest, since = next(iter(self.pending.items()), (None, 0.0))
        if oldest is None or self._loop.time() - since < CROWDED_PATIENCE_S:
            return False
        del self.pending[oldest]
        oldest.evict()
        return len(self.pending) + coming < self.limits.max_pending

    # --- refusals -----------------------------------------------------------------------------------------------------

    def refused(self, peer: tuple[str, int], why: str, kind: Refusal) -> None:
        """Count it, and say it unless the same was said of that source a moment ago."""
        source = source_of(peer[0])
        now = self._loop.time()
        if kind in (Refusal.TOKEN, Refusal.CERTIFICATE):
            self.logins.failed(source, now)
        untold = self.refusals.note(kind, source, now)
        if untold is None:
            return
        if untold:
            why += f" (and {untold} more from there since this was last said)"
        self._emit(ClientRefused(run_id="", by=self._name, peer=format_peer(peer), reason=why))

    @staticmethod
    def kind_of(refused: Refused) -> Refusal:
        return _KINDS.get(refused.code, Refusal.MALFORMED)


def format_peer(peer: tuple[str, int]) -> str:
    """An address for people."""
    return (f"{peer[0]}:{peer[1]}" if peer[1] else peer[0]) or "a connection"


def is_inconclusive(error: Exception | None) -> bool:
    """Whether the end of a connection says nothing about the process at the other side."""
    return isinstance(error, (TimeoutError, ssl.SSLError)) or getattr(error, "errno", None) in _SILENT_ENDS


def peer_of(transport: asyncio.BaseTransport | None) -> tuple[str, int]:
    """The other side's address, as far as there is one."""
    if transport is None:
        return "", 0
    one = transport.get_extra_info("socket")
    if one is not None and one.family == socket.AF_UNIX:
        return "this machine", 0  # such a peer may call itself whatever it likes
    address = transport.get_extra_info("peername")
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else (str(address or ""), 0)


class TlsAdmission(TlsPipe):
    """A connection before its TLS handshake is done: pending too, and told in its own terms why it may not go on."""

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
            self._end(ACCESS_DENIED, refused.message, Refusal.BLOCKED)
            return
        within_s = self._admission.limits.hello_timeout_s
        self._timer = asyncio.get_running_loop().call_later(within_s, self._too_late, within_s)

    def shake(self) -> bool:
        is_done = super().shake()
        if self.is_open:
            self._settle()
        return is_done

    def connection_lost(self, error: Exception | None) -> None:
        self._settle()
        super().connection_lost(error)

    def evict(self) -> None:
        self._end(ACCESS_DENIED, "it is silent, and others wait to be let in", Refusal.PENDING)

    def shut_down(self, why: str) -> None:
        self.is_over = True
        if self.below is not None:
            self.below.abort()

    def filenos(self) -> list[int]:
        return fileno_of(self.below)

    def _too_late(self, within_s: float) -> None:
        self._end(b"", f"no TLS handshake within {within_s:g} s", Refusal.SILENT)

    def _failed(self, pipe: TlsPipe, error: Exception) -> None:
        if isinstance(error, PlainText):
            first = error.first
            if GREETING.startswith(first[: len(GREETING)]):
                self.say(GREETING + frame(encoder.encode(TLS_ONLY)))
                why = "it speaks plain text, and this server TLS only"
            else:
                self.say(stranger_line(first) if is_http(first) else b"")
                why = f"it sent {describe(first)} instead of TLS"
            self._end(b"", why, Refusal.TLS)
            return
        is_login, why = trouble_with_client(error)
        self._end(b"", why, Refusal.CERTIFICATE if is_login else Refusal.TLS)

    def _end(self, words: bytes, why: str, kind: Refusal) -> None:
        self._settle()
        self.is_over = True
        self._admission.refused(self._peer, why, kind)
        if words:
            self.say(words)
        self.close_below()

    def _settle(self) -> None:
        self._admission.remove_pending(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
