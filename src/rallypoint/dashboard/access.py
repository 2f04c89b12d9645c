"""Login: a token of the server, given once, opens a session that a cookie stands for.

Sessions are bounded in number and time, and end when their token is removed from the file. Of a cookie only the digest
is kept. Wrong tokens are counted by source; a source with too many is refused for a while.
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

MOST_TOKEN_BYTES = 8 * 1024
MOST_SESSIONS = 256
SESSION_S = 12 * 3600.0
IDLE_S = 2 * 3600.0


class LoginMethod(enum.Enum):
    """How a viewer was let in."""

    SESSION = "session"
    """By a session's cookie."""
    TOKEN = "token"
    """By the token in the request itself: a program."""
    OPEN = "open"
    """No token is needed, or a client certificate was enough."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who sent a request. Requests of a browser that change something must contain `csrf`."""

    method: LoginMethod
    csrf: str
    may_act: bool
    key: str
    """Streams are limited for each key."""
    is_valid: Callable[[], bool]


@dataclass(slots=True)
class _Session:
    token_digest: bytes
    ends_at: float
    idle_at: float
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))


class LoginBlocked(Exception):
    """Too many logins from this source failed."""

    def __init__(self, for_s: float) -> None:
        super().__init__(f"too many failed logins from this address: try again in {for_s:.0f} s")
        self.for_s = for_s


class Access:
    """`tokens` are the valid ones now. Without any, everybody is let in, and may act if `may_act_openly`."""

    def __init__(
        self,
        tokens: Callable[[], tuple[str, ...]],
        admission: Admission,
        clock: Callable[[], float],
        *,
        may_act_openly: bool,
    ) -> None:
        self._tokens = tokens
        self._admission = admission
        self._clock = clock
        self._may_act_openly = may_act_openly
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._open_csrf = secrets.token_urlsafe(24)

    @property
    def needs_login(self) -> bool:
        return bool(self._tokens())

    def viewer(self, cookie: str, authorization: str, peer: tuple[str, int]) -> Viewer | None:
        """Who sent a request with this cookie and `Authorization` header; None: not logged in. LoginBlocked."""
        if not self.needs_login:
            return Viewer(
                LoginMethod.OPEN, self._open_csrf, self._may_act_openly, f"open {peer[0]}", lambda: not self.needs_login
            )
        kind, _, token = authorization.partition(" ")
        if kind.lower() == "bearer":  # other kinds are for a proxy in front of the page
            return self._by_token(token.strip(), peer)
        digest = _digest(cookie)
        session = self._live(digest) if cookie else None
        if session is None:
            return None
        return Viewer(LoginMethod.SESSION, session.csrf, True, digest.hex(), lambda: self._live(digest) is session)

    def is_current(self, csrf: str, viewer: Viewer) -> bool:
        """Whether `csrf` is the viewer's own."""
        return hmac.compare_digest(csrf.encode(), viewer.csrf.encode())

    def login(self, token: str, peer: tuple[str, int]) -> str | None:
        """The cookie of a new session; None: the token is wrong. LoginBlocked."""
        digest = self._check(token, peer)
        if digest is None:
            return None
        cookie = secrets.token_urlsafe(32)
        now = self._clock()
        self._sessions[_digest(cookie)] = _Session(digest, now + SESSION_S, now + IDLE_S)
        if len(self._sessions) > MOST_SESSIONS:
            oldest = min(self._sessions, key=lambda one: self._sessions[one].idle_at)
            del self._sessions[oldest]
        return cookie

    def logout(self, cookie: str) -> None:
        self._sessions.pop(_digest(cookie), None)

    def _by_token(self, token: str, peer: tuple[str, int]) -> Viewer | None:
        digest = self._check(token, peer)
        if digest is None:
            return None
        return Viewer(LoginMethod.TOKEN, "", True, f"token {peer[0]}", lambda: self._is_right(digest))

    def _live(self, digest: bytes) -> _Session | None:
        """The session of a cookie, which counts as used now. An open page asks every few seconds."""
        session = self._sessions.get(digest)
        if session is None:
            return None
        now = self._clock()
        if now >= min(session.ends_at, session.idle_at) or not self._is_right(session.token_digest):
            del self._sessions[digest]
            return None
        session.idle_at = now + IDLE_S
        return session

    def _check(self, token: str, peer: tuple[str, int]) -> bytes | None:
        """The digest of a right token. Takes the same time for every token of the same length. LoginBlocked."""
        blocked_s = self._admission.logins.blocked_s(source_of(peer[0]), self._clock())
        if blocked_s > 0:
            raise LoginBlocked(blocked_s)
        digest = _digest(token[: MOST_TOKEN_BYTES + 1])
        if self._is_right(digest):
            return digest
        said = "a wrong token" if token else "no token"
        self._admission.refused(peer, f"{said} was given to the dashboard", Refusal.TOKEN)
        return None

    def _is_right(self, digest: bytes) -> bool:
        """Whether it is the digest of a valid token. Compares all of them."""
        right = [hmac.compare_digest(digest, _digest(one)) for one in self._tokens()]
        return any(right)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
