"""Who was refused and how often: counters for all, one line a source and interval, and a stop for those who guess.

Everything here is bounded: an attacker with many addresses gets counted, not remembered. Time is an argument.
"""

from __future__ import annotations

import enum
import ipaddress
from collections import OrderedDict, deque

MOST_SOURCES = 4_096
MOST_TOLD = 256
"""Sources and kinds that get lines of their own within an interval; all others share one for each kind."""
LOGIN_WINDOW_S = 60.0
ELSEWHERE = "elsewhere"
"""The source of all those beyond what is remembered."""


class Refusal(enum.Enum):
    """Why somebody, or something, was refused."""

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
    """Whom an address stands for: itself, or of IPv6 the network of which one machine has all addresses."""
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


class Refusals:
    """Counters by kind, and what was said of whom lately."""

    def __init__(self, interval_s: float) -> None:
        self.counts: dict[Refusal, int] = dict.fromkeys(Refusal, 0)
        self._interval_s = interval_s
        self._said: OrderedDict[tuple[str, Refusal], list[float]] = OrderedDict()
        """When the last line was, and how many were not told since."""

    def note(self, kind: Refusal, source: str, now: float) -> int | None:
        """Count one. None: say nothing of it; otherwise so many were not told of since the last line."""
        self.counts[kind] += 1
        said = self._said.get((source, kind))
        if said is None:
            self._forget(now)
            if len(self._said) >= MOST_TOLD:
                source = ELSEWHERE
                said = self._said.get((source, kind))
        if said is None:
            self._said[source, kind] = [now, 0]
            return 0
        if now - said[0] < self._interval_s:
            said[1] += 1
            return None
        untold = int(said[1])
        said[0], said[1] = now, 0
        self._said.move_to_end((source, kind))
        return untold

    def _forget(self, now: float) -> None:
        """Those of whom a line would be said again anyway; in order of their last line."""
        while self._said:
            key, (at, _) = next(iter(self._said.items()))
            if now - at < self._interval_s:
                return
            del self._said[key]

    def describe(self) -> dict[str, str]:
        """What there is to count, by kind."""
        return {f"refused_{kind.value}": str(count) for kind, count in self.counts.items() if count}


class FailedLogins:
    """Sources that fail to log in too often are refused for a while, before any work is done for them."""

    def __init__(self, most: int, block_s: float) -> None:
        self._most = most
        self._block_s = block_s
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()
        self._blocked_until: OrderedDict[str, float] = OrderedDict()

    def failed(self, source: str, now: float) -> None:
        """A wrong token, none, or a certificate that is missing or refused."""
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
        """For how long the source is still refused; 0: it is not."""
        if not self._blocked_until:
            return 0.0
        until = self._blocked_until.get(source, now)
        if until <= now:
            self._blocked_until.pop(source, None)
            return 0.0
        return until - now
