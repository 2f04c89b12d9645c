"""The clients of a server, their sessions and connections, and what the end of a connection means for a session.

A connection that the peer closed shortens the sessions of its client to their disconnect grace: a dead process is
detected soon (after 0.3 s by default), and a client that reconnects within the grace resumes its sessions with their
full time.

A closed connection must not shorten sessions when the process may be alive:

- when this side closed it, or it failed without a message from the peer;
- when many connections close at once: a switch or a proxy failed, not the nodes;
- when it is not the current connection of its client.

A grace that ends while this process is suspended or overloaded starts again, because clients that reconnected in the
meantime could not be served.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rallypoint._marks import mark
from rallypoint.kv.types import KeepAlive, LeaseResult, Shorten, Tick
from rallypoint.server.engine_host import EngineHost
from rallypoint.wire.messages import Held

if TYPE_CHECKING:
    from rallypoint.server.connection import Connection

MASS_SESSIONS = 20
MASS_SHARE = 0.1
MASS_WINDOW_S = 1.0
"""If more sessions than `MASS_SESSIONS`, and more than this share of all, are disconnected within this time, none of
them is shortened."""
LATE_S = 0.1
"""If the timer of a grace fires later than this, the process was not running, and the grace starts again."""


class Ended(enum.Enum):
    """How a session ended."""

    LEFT = "left"
    """Its client ended it."""
    DISCONNECTED = "disconnected"
    """The peer closed the connection and did not reconnect within the grace: the process died."""
    SILENT = "silent"
    """It was not renewed in time: the process was paused or overloaded, or the network failed."""


@dataclass(slots=True)
class Client:
    """A client that is connected or has sessions."""

    id: str
    run: str
    connection: Connection | None = None
    sessions: dict[int, float] = field(default_factory=dict)
    """Lease -> disconnect grace in seconds."""


class Clients:
    """All clients of a server."""

    def __init__(self, engine_host: EngineHost) -> None:
        self._host = engine_host
        self._loop = asyncio.get_running_loop()
        self._clients: dict[str, Client] = {}
        self._session_count = 0
        self._closed: deque[tuple[float, int]] = deque()
        """Time and lease of the disconnects within `MASS_WINDOW_S`."""
        self._is_mass = False
        self._graces: dict[int, tuple[float, asyncio.TimerHandle]] = {}
        """Lease -> end of its running grace, and the timer for it."""
        self.runs_alive: set[str] = set()
        """The result of the last `live_runs`, and the runs that got a session since."""
        self.on_run_alive: Callable[[], None] = lambda: None
        """Called when a run that had no live session gets one."""
        self.ended: dict[Ended, int] = dict.fromkeys(Ended, 0)
        """Number of ended sessions by cause. Updated when the end is noticed, up to some seconds later."""
        self.reconnects = 0
        """Connections of clients that were known already or presented sessions."""
        self._causes: dict[int, Ended] = {}
        """Why leases ended that may be sessions, until the next sweep."""
        engine_host.on_revoked = self._revoked

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client_id: str) -> bool:
        return client_id in self._clients

    @property
    def session_count(self) -> int:
        """Sessions whose end was not noticed yet: an upper bound, corrected when a client connects or disconnects."""
        return self._session_count

    def connected(
        self, client_id: str, run: str, connection: Connection, held: Sequence[Held]
    ) -> tuple[Client, tuple[int, ...]]:
        """A client connected or reconnected. Renews the sessions it holds; returns those that have ended.

        An earlier connection of the client is closed, and requests that it has not delivered are never executed.
        """
        client = self._clients.get(client_id)
        self.reconnects += client is not None or bool(held)
        if client is None:
            client = self._clients[client_id] = Client(client_id, run)
        elif client.connection is not None:
            mark("server.replaced")
            client.connection.abort()
        client.connection, client.run = connection, run
        ended = []
        for session in held:
            self._cancel_grace(session.lease)
            result = self._host.execute(KeepAlive(session.lease))
            assert isinstance(result, LeaseResult)
            if result.alive:
                self.hold(client, session.lease, session.grace_s)
            else:
                ended.append(session.lease)
        self._forget_ended(client)
        return client, tuple(ended)

    def hold(self, client: Client, lease: int, grace_s: float) -> bool:
        """Register a lease as a session of this client; False if the lease has ended or never existed."""
        if self._host.engine.leases.get(lease) is None:
            return False
        if lease not in client.sessions:
            self._session_count += 1
        client.sessions[lease] = max(0.0, grace_s)
        if client.run not in self.runs_alive:
            self.runs_alive.add(client.run)
            self.on_run_alive()
        return True

    def disconnected(self, client: Client, connection: Connection, by_peer: bool) -> None:
        """A connection of this client closed. Ignored unless it is the current one."""
        if client.connection is not connection:
            return
        client.connection = None
        self._forget_ended(client)
        if by_peer:
            for lease, grace_s in client.sessions.items():
                self._shorten(lease, grace_s)
        if not client.sessions:
            del self._clients[client.id]

    def stop(self) -> None:
        """Cancel all running graces."""
        for lease in list(self._graces):
            self._cancel_grace(lease)

    def connected_runs(self) -> set[str]:
        """The runs with at least one connected client."""
        return {client.run for client in self._clients.values() if client.connection is not None}

    def live_runs(self) -> set[str]:
        """The runs with at least one live session."""
        leases = self._host.engine.leases
        self.runs_alive = {
            client.run
            for client in self._clients.values()
            if any(leases.get(lease) is not None for lease in client.sessions)
        }
        return self.runs_alive

    def sweep(self) -> None:
        """Remove ended sessions, and clients that are not connected and have no live session."""
        for client in list(self._clients.values()):
            self._forget_ended(client)
            if client.connection is None and not client.sessions:
                del self._clients[client.id]
        self._causes.clear()

    def _forget_ended(self, client: Client) -> None:
        leases = self._host.engine.leases
        for lease in [lease for lease in client.sessions if leases.get(lease) is None]:
            del client.sessions[lease]
            self._session_count -= 1
            self.ended[self._causes.pop(lease, Ended.SILENT)] += 1

    def _revoked(self, lease: int) -> None:
        self._causes.setdefault(lease, Ended.LEFT)

    def _shorten(self, lease: int, grace_s: float) -> None:
        """Start the grace of a session. If too many sessions are disconnected at once, renew all of them instead."""
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
            for _, each in closed:
                self._cancel_grace(each)
                self._host.execute(KeepAlive(each))

    def _begin_grace(self, lease: int, grace_s: float) -> None:
        self._cancel_grace(lease)
        if (alive := self._host.engine.leases.get(lease)) is not None:
            due_at = self._loop.time() + grace_s  # kept here: `TimerHandle.when` is not available on every event loop
            timer = self._loop.call_at(due_at, self._grace_ended, lease, grace_s, alive.deadline)
            self._graces[lease] = due_at, timer

    def _cancel_grace(self, lease: int) -> None:
        if (grace := self._graces.pop(lease, None)) is not None:
            _, timer = grace
            timer.cancel()

    def _grace_ended(self, lease: int, grace_s: float, deadline: float) -> None:
        """End the session, unless it was renewed since the grace began (it had this deadline then)."""
        due_at, _ = self._graces.pop(lease)
        alive = self._host.engine.leases.get(lease)
        if alive is None or alive.deadline > deadline:
            return
        if self._loop.time() > due_at + LATE_S:
            mark("server.stood_still")
            self._begin_grace(lease, grace_s)
        else:
            self._causes.setdefault(lease, Ended.DISCONNECTED)
            self._host.execute(Shorten(lease, 0.0))
            self._host.execute(Tick())
