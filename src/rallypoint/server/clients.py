"""Clients, their sessions and the connections they have now: what it means for a session that a connection closed.

A connection that the *peer* closed (it ended, or its machine said so) shortens the sessions of its client to their
grace: a dead process is seen in about a second, and a client that reconnects within the grace goes on as if nothing had
been. A connection that this side dropped, or that broke without a word, shortens nothing. Nor does a closed connection
when many close at once: that is a switch or a proxy that died, not the nodes. A grace that was over while this process
stood still (stopped, starved, busy) begins again: whoever came back meanwhile could not be heard.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rallypoint._marks import mark
from rallypoint.kv.types import KeepAlive, LeaseResult, Shorten, Tick
from rallypoint.server.engine_host import EngineHost
from rallypoint.wire.messages import Held

MASS_SESSIONS = 20
MASS_SHARE = 0.1
MASS_WINDOW_S = 1.0
"""More than so many sessions, and more than this share of all, within this time: not the nodes died."""
LATE_S = 0.1
"""A grace whose end is noticed later than this was over while nobody here could hear anything."""


class Ended(enum.Enum):
    """How a session ended."""

    LEFT = "left"
    """Its client ended it."""
    DISCONNECTED = "disconnected"
    """The connection was closed by the peer, and the grace is over: the process died."""
    SILENT = "silent"
    """It was not renewed in time: paused, starved, or cut off."""


class Line(Protocol):
    """A connection, as far as its client is concerned."""

    def replaced(self) -> None:
        """The client has come back on another connection: deliver nothing more, close."""


@dataclass(slots=True)
class Client:
    """One client, for as long as it is connected or has sessions."""

    id: str
    run: str
    line: Line | None = None
    sessions: dict[int, float] = field(default_factory=dict)
    """Lease to grace."""


class Clients:
    """All clients of a server."""

    def __init__(self, engine_host: EngineHost) -> None:
        self._host = engine_host
        self._loop = asyncio.get_running_loop()
        self._clients: dict[str, Client] = {}
        self._session_count = 0
        self._closed: deque[tuple[float, int]] = deque()
        """When the connections of which sessions were closed, within the window."""
        self._is_mass = False
        self._graces: dict[int, tuple[float, asyncio.TimerHandle]] = {}
        """The sessions that end soon, and when."""
        self.runs_alive: set[str] = set()
        """The runs in which some session lived when that was last looked at, and those that had one since."""
        self.on_alive: Callable[[], None] = lambda: None
        """Called when a run that had no session gets one."""
        self.ended: dict[Ended, int] = dict.fromkeys(Ended, 0)
        """How many sessions ended how; counted when that is noticed, at most some seconds later."""
        self.reconnects = 0
        """Clients that came back: those that were known, or that had sessions to go on with."""
        self._how: dict[int, Ended] = {}
        """How leases ended that may be sessions, until the next sweep."""
        engine_host.on_revoked = self._revoked

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client_id: str) -> bool:
        return client_id in self._clients

    @property
    def session_count(self) -> int:
        """Sessions that were not seen to end: an upper bound, brought down whenever a client comes or goes."""
        return self._session_count

    def came(self, client_id: str, run: str, line: Line, held: Sequence[Held]) -> tuple[Client, tuple[int, ...]]:
        """A client connected, perhaps again: its sessions go on with their full time. Those that have ended are told.

        Its earlier connection, if there still is one, is replaced: what that had not delivered yet never counts.
        """
        client = self._clients.get(client_id)
        self.reconnects += client is not None or bool(held)
        if client is None:
            client = self._clients[client_id] = Client(client_id, run)
        elif client.line is not None:
            mark("server.replaced")
            client.line.replaced()
        client.line, client.run = line, run
        ended = []
        for session in held:
            self._lift(session.lease)
            result = self._host.execute(KeepAlive(session.lease))
            assert isinstance(result, LeaseResult)
            if result.alive:
                self.hold(client, session.lease, session.grace_s)
            else:
                ended.append(session.lease)
        self._forget_ended(client)
        return client, tuple(ended)

    def hold(self, client: Client, lease: int, grace_s: float) -> bool:
        """The lease is a session of this client; False: it has ended, or never was."""
        if self._host.engine.leases.get(lease) is None:
            return False
        if lease not in client.sessions:
            self._session_count += 1
        client.sessions[lease] = max(0.0, grace_s)
        if client.run not in self.runs_alive:
            self.runs_alive.add(client.run)
            self.on_alive()
        return True

    def gone(self, client: Client, line: Line, by_peer: bool) -> None:
        """A connection of this client is closed. Only its current one matters."""
        if client.line is not line:
            return
        client.line = None
        self._forget_ended(client)
        if by_peer:
            for lease, grace_s in client.sessions.items():
                self._shorten(lease, grace_s)
        if not client.sessions:
            del self._clients[client.id]

    def stop(self) -> None:
        """Nobody's session is cut short any more."""
        for lease in list(self._graces):
            self._lift(lease)

    def ends_at(self, lease: int) -> float:
        """When a session that lives will end, unless its client comes back or renews it."""
        alive, grace = self._host.engine.leases.get(lease), self._graces.get(lease)
        assert alive is not None
        return alive.deadline if grace is None else min(alive.deadline, grace[0])

    def present_runs(self) -> set[str]:
        """The runs that somebody is connected for."""
        return {client.run for client in self._clients.values() if client.line is not None}

    def live_runs(self) -> set[str]:
        """The runs in which some session lives."""
        leases = self._host.engine.leases
        self.runs_alive = {
            client.run
            for client in self._clients.values()
            if any(leases.get(lease) is not None for lease in client.sessions)
        }
        return self.runs_alive

    def sweep(self) -> None:
        """Forget sessions that have ended, and those who are neither connected nor have a session that lives."""
        for client in list(self._clients.values()):
            self._forget_ended(client)
            if client.line is None and not client.sessions:
                del self._clients[client.id]
        self._how.clear()

    def _forget_ended(self, client: Client) -> None:
        leases = self._host.engine.leases
        for lease in [lease for lease in client.sessions if leases.get(lease) is None]:
            del client.sessions[lease]
            self._session_count -= 1
            self.ended[self._how.pop(lease, Ended.SILENT)] += 1

    def _revoked(self, lease: int) -> None:
        self._how.setdefault(lease, Ended.LEFT)

    def _shorten(self, lease: int, grace_s: float) -> None:
        """Let a session end soon, unless too many go at once: then all of them keep their full time."""
        now = self._loop.time()
        closed = self._closed
        while closed and closed[0][0] < now - MASS_WINDOW_S:
            closed.popleft()
        closed.append((now, lease))
        if len(closed) <= MASS_SESSIONS or len(closed) <= MASS_SHARE * self._session_count:
            self._begin_grace(lease, grace_s)
            self._is_mass = False
        elif not self._is_mass:
            mark("server.mass")
            self._is_mass = True
            for _, spared in closed:
                self._lift(spared)
                self._host.execute(KeepAlive(spared))

    def _begin_grace(self, lease: int, grace_s: float) -> None:
        self._lift(lease)
        if (alive := self._host.engine.leases.get(lease)) is not None:
            # Not every loop's timers can be asked when they are due.
            due = self._loop.time() + grace_s
            self._graces[lease] = due, self._loop.call_at(due, self._grace_over, lease, grace_s, alive.deadline)

    def _lift(self, lease: int) -> None:
        """The session has its full time again."""
        if (grace := self._graces.pop(lease, None)) is not None:
            grace[1].cancel()

    def _grace_over(self, lease: int, grace_s: float, deadline: float) -> None:
        due, _ = self._graces.pop(lease)
        alive = self._host.engine.leases.get(lease)
        if alive is None or alive.deadline > deadline:
            return  # it has ended, or was renewed
        if self._loop.time() > due + LATE_S:
            mark("server.stood_still")
            self._begin_grace(lease, grace_s)
        else:
            self._how.setdefault(lease, Ended.DISCONNECTED)
            self._host.execute(Shorten(lease, 0.0))
            self._host.execute(Tick())
