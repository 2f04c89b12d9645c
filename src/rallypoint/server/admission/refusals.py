"""Records of refusals: counters by kind, rate-limited log lines, and blocking of sources with too many failed logins.

Everything here is bounded: beyond the bound an attacker with many addresses is counted, but not stored. Time is an
argument.
"""

from __future__ import annotations

import enum
import ipaddress
from collections import OrderedDict, deque
from dataclasses import dataclass

MOST_SOURCES = 4_096
MOST_LOGGED = 256
"""Pairs of source and kind that are logged separately within an interval; all others share one line for each kind."""
LOGIN_WINDOW_S = 60.0
OTHER_SOURCES = "other sources"
"""Stands for all sources beyond `MOST_LOGGED`."""


class Refusal(enum.Enum):
    """Why a connection or a request was refused."""

    TOKEN = "token"
    CERTIFICATE = "certificate"
    TLS = "tls"
    STRANGER = "stranger"
    VERSION = "version"
    MALFORMED = "malformed"
    SILENT = "silent"
    BLOCKED = "blocked"
    CONNECTIONS = "connections"
    PENDING = "pending"
    RUNS = "runs"
    KEYS = "keys"
    BYTES = "bytes"
    VALUE = "value"
    FRAME = "frame"
    LEASES = "leases"
    WATCHES = "watches"
    WAITS = "waits"
    SLOW = "slow"


def source_of(address: str) -> str:
    """The source of an address: the address itself; of IPv6 its /64 network, because one machine may use all of it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        if not found.is_loopback:
            return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(found)


@dataclass(slots=True)
class _LogState:
    logged_at: float
    unlogged: int = 0
    """Refusals since then."""


class Refusals:
    """Counters by kind, and when each source and kind was last logged."""

    def __init__(self, interval_s: float) -> None:
        self.counts: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        self._interval_s = interval_s
        self._logged: OrderedDict[tuple[str, Refusal], _LogState] = OrderedDict()
        """In the order in which they were last logged."""

    def note(self, kind: Refusal, source: str, now: float) -> int | None:
        """Count a refusal. None: do not log it; otherwise the number of refusals since the last log line."""
        self.counts[kind] += 1
        state = self._logged.get((source, kind))
        if state is None:
            self._expire(now)
            if len(self._logged) >= MOST_LOGGED:
                source = OTHER_SOURCES
                state = self._logged.get((source, kind))
        if state is None:
            self._logged[source, kind] = _LogState(now)
            return 0
        if now - state.logged_at < self._interval_s:
            state.unlogged += 1
            return None
        unlogged = state.unlogged
        state.logged_at, state.unlogged = now, 0
        self._logged.move_to_end((source, kind))
        return unlogged

    def _expire(self, now: float) -> None:
        """Remove the entries whose next refusal would be logged anyway."""
        while self._logged:
            key, state = next(iter(self._logged.items()))
            if now - state.logged_at < self._interval_s:
                return
            del self._logged[key]

    def describe(self) -> dict[str, str]:
        """The counters that are not zero."""
        return {f"refused_{kind.value}": str(count) for kind, count in self.counts.items() if count}


class FailedLogins:
    """Sources with too many failed logins, which are blocked for a while, before any work is done for them."""

    def __init__(self, most: int, block_s: float) -> None:
        self._most = most
        self._block_s = block_s
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()
        self._blocked_until: OrderedDict[str, float] = OrderedDict()

    def failed(self, source: str, now: float) -> None:
        """A login failed: the token or certificate is wrong or missing."""
        times = self._failed.setdefault(source, deque())
        self._failed.move_to_end(source)
        times.append(now)
        while times[0] <= now - LOGIN_WINDOW_S:
            times.popleft()
        if len(times) >= self._most:
            del self._failed[source]
            self._blocked_until[source] = now + self._block_s
            self._blocked_until.move_to_end(source)
        if len(self._failed) > MOST_SOURCES:
            self._failed.popitem(last=False)
        if len(self._blocked_until) > MOST_SOURCES:
            self._blocked_until.popitem(last=False)

    def blocked_s(self, source: str, now: float) -> float:
        """How long the source is still blocked; 0 if it is not."""
        if not self._blocked_until:
            return 0.0
        until = self._blocked_until.get(source, now)
        if until <= now:
            self._blocked_until.pop(source, None)
            return 0.0
        return until - now
