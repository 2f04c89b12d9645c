"""Who may look, and who may act: the token of the server, once, for a session that a cookie stands for.

Sessions are bounded in number and in time and end when their token is taken out of the file. The cookie's value is kept
as a digest only. Wrong tokens are counted with those of nodes: too many from one source, and it is refused for a while.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from rallypoint.server.admission.admission import Admission
from rallypoint.server.admission.refusals import Refusal, source_of

LONGEST_TOKEN = 8 * 1024
MOST_SESSIONS = 256
LASTS_S = 12 * 3600.0
IDLE_S = 2 * 3600.0


class How(enum.Enum):
    """By what somebody is let in."""

    SESSION = "session"
    """A cookie, from logging in."""
    TOKEN = "token"
    """The token itself, with the request: a program."""
    OPEN = "open"
    """Nothing is asked for here, or the certificate was enough."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """Somebody who may look. `csrf` has to be in every request that changes something, but for programs."""

    how: How
    csrf: str
    may_act: bool
    key: str
    """Whose streams are counted together."""
    is_valid: Callable[[], bool]


@dataclass(slots=True)
class _Session:
    token: bytes
    """The digest of the token it was opened with."""
    ends_at: float
    idle_at: float
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))


class Blocked(Exception):
    """Too many logins from there failed."""

    def __init__(self, for_s: float) -> None:
        super().__init__(f"too many failed logins from this address: try again in {for_s:.0f} s")
        self.for_s = for_s


class Access:
    """`tokens` are those that count now; none: nobody is asked (`acts_openly`: and may act all the same)."""

    def __init__(
        self,
        tokens: Callable[[], tuple[str, ...]],
        admission: Admission,
        clock: Callable[[], float],
        *,
        acts_openly: bool,
    ) -> None:
        self._tokens = tokens
        self._admission = admission
        self._clock = clock
        self._acts_openly = acts_openly
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._open_csrf = secrets.token_urlsafe(24)

    @property
    def asks(self) -> bool:
        """Whether a token is asked for."""
        return bool(self._tokens())

    # --- who is it ----------------------------------------------------------------------------------------------------

    def viewer(self, cookie: str, authorization: str, peer: tuple[str, int]) -> Viewer | None:
        """Whoever sent a request with these; None: nobody we know. Blocked."""
        if not self.asks:
            return Viewer(How.OPEN, self._open_csrf, self._acts_openly, f"open {peer[0]}", lambda: not self.asks)
        kind, _, token = authorization.partition(" ")
        if kind.lower() == "bearer":  # what else is there is for a proxy before us
            return self._by_token(token.strip(), peer)
        digest = _digest(cookie)
        session = self._live(digest) if cookie else None
        if session is None:
            return None
        return Viewer(How.SESSION, session.csrf, True, digest.hex(), lambda: self._live(digest) is session)

    def _by_token(self, token: str, peer: tuple[str, int]) -> Viewer | None:
        digest = self._check(token, peer)
        if digest is None:
            return None
        return Viewer(How.TOKEN, "", True, f"token {peer[0]}", lambda: self._is_right(digest))

    def _live(self, digest: bytes) -> _Session | None:
        session = self._sessions.get(digest)
        if session is None:
            return None
        now = self._clock()
        if now >= min(session.ends_at, session.idle_at) or not self._is_right(session.token):
            del self._sessions[digest]
            return None
        session.idle_at = now + IDLE_S  # a page that is open is in use
        return session

    def is_current(self, csrf: str, viewer: Viewer) -> bool:
        """Whether that is the viewer's own."""
        return hmac.compare_digest(csrf.encode(), viewer.csrf.encode())

    # --- logging in and out -------------------------------------------------------------------------------------------

    def login(self, token: str, peer: tuple[str, int]) -> str | None:
        """The cookie of a new session; None: the token is wrong. Blocked."""
        digest = self._check(token, peer)
        if digest is None:
            return None
        cookie = secrets.token_urlsafe(32)
        now = self._clock()
        self._sessions[_digest(cookie)] = _Session(digest, now + LASTS_S, now + IDLE_S)
        if len(self._sessions) > MOST_SESSIONS:
            oldest = min(self._sessions, key=lambda one: self._sessions[one].idle_at)
            del self._sessions[oldest]
        return cookie

    def logout(self, cookie: str) -> None:
        self._sessions.pop(_digest(cookie), None)

    def _check(self, token: str, peer: tuple[str, int]) -> bytes | None:
        """The digest of a right token. As long whatever is given: digests are of one length, and all are compared."""
        blocked_s = self._admission.logins.blocked_s(source_of(peer[0]), self._clock())
        if blocked_s > 0:
            raise Blocked(blocked_s)
        digest = _digest(token[: LONGEST_TOKEN + 1])
        if self._is_right(digest):
            return digest
        said = "a wrong token" if token else "no token"
        self._admission.refused(peer, f"{said} was given to the dashboard", Refusal.TOKEN)
        return None

    def _is_right(self, digest: bytes) -> bool:
        """Whether it is that of a token that counts now. All are compared."""
        right = [hmac.compare_digest(digest, _digest(one)) for one in self._tokens()]
        return any(right)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
