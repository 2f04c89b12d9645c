"""The embedded server: an engine, its clients, its runs, and listening sockets.

It must never make DNS look-ups, which could block: addresses are bound and shown as numbers. Without stored data its
revisions start above all that an earlier process at the same address can have reached, so that a revision remembered
from then never matches one of now.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence

from rallypoint._version import SOFTWARE
from rallypoint.backends.forks import guard
from rallypoint.events import Emitter, ServerListens, ServerStopped, ServerTrouble
from rallypoint.kv.engine import DEFAULT_HISTORY, Engine
from rallypoint.server.acceptor import Acceptor
from rallypoint.server.admission.admission import Admission, TlsAdmission
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.admission.quota import Quota
from rallypoint.server.admission.refusals import Refusal
from rallypoint.server.clients import Clients
from rallypoint.server.connection import Connection
from rallypoint.server.engine_host import EngineHost
from rallypoint.server.local_backend import LocalBackend
from rallypoint.server.observer_watches import ObserverWatches
from rallypoint.server.runs import Runs
from rallypoint.server.traffic import Traffic
from rallypoint.urls import format_endpoint
from rallypoint.wire.handshake import Versions

REVISIONS_A_MS = 2_048
"""More revisions per millisecond than any server makes. So a later server starts above the revisions of this one."""
BACKLOG = 16_384
SHUTDOWN_S = 1.0
"""How long `stop` waits for clients to receive their last messages."""
POLL_S = 0.01


def first_revision(wall: Callable[[], float] = time.time) -> int:
    """The first revision of a new store, derived from the time of day."""
    return int(wall() * 1000) * REVISIONS_A_MS


def new_generation(rng: random.Random | None) -> str:
    """The id of a new store: 16 hexadecimal digits."""
    return secrets.token_hex(8) if rng is None else f"{rng.getrandbits(64):016x}"


class Server:
    """A server on the current event loop. It serves from `listen` until `stop`."""

    def __init__(
        self,
        *,
        token: str | tuple[str, ...] | None = None,
        tls: ssl.SSLContext | None = None,
        limits: ServerLimits | None = None,
        name: str = "server",
        emit: Emitter | None = None,
        versions: Versions | None = None,
        history: int = DEFAULT_HISTORY,
        rng: random.Random | None = None,
        wall: Callable[[], float] = time.time,
        engine: Engine | None = None,
        generation: str | None = None,
        is_dedicated: bool = False,
    ) -> None:
        self.is_dedicated = is_dedicated
        """It is a process of its own, and not hosted by a node."""
        self.name = name
        self.tokens: tuple[str, ...] = ()
        self.token = token
        self.tls = tls
        """For connections accepted from now on; None: plain text."""
        self.emit = emit or Emitter()
        self.limits = limits or ServerLimits()
        self.admission = Admission(self.limits, self.emit, name)
        self.versions = versions or Versions()
        self.generation = generation or new_generation(rng)
        self.software = SOFTWARE
        self.max_frame = self.limits.max_frame
        self.traffic = Traffic()
        self.connections: dict[Connection, None] = {}
        self.engine_host = self.make_engine_host(engine or Engine(history, first=first_revision(wall)))
        self.first_revision = self.engine_host.engine.revision
        self.observer_watches = ObserverWatches(self.engine_host, self.max_frame)
        self.quota = Quota(self.engine_host.engine, self.limits)
        self.clients = Clients(self.engine_host)
        self.runs = Runs(
            self.engine_host,
            self.clients,
            name,
            self.emit,
            rng or random.Random(secrets.randbits(64)),
            wall,
            self.make_local(),
        )
        self.runs.start()
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._acceptors: list[Acceptor] = []
        self._sockets: tuple[socket.socket, ...] = ()
        self.addresses: tuple[str, ...] = ()

    def make_engine_host(self, engine: Engine) -> EngineHost:
        return EngineHost(engine)

    def make_local(self) -> LocalBackend:
        """The backend of the coordinators."""
        return LocalBackend(self.engine_host)

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections on bound sockets."""
        for sock in sockets:
            sock.listen(BACKLOG)
            self._acceptors.append(Acceptor(sock, self.connect, self._report_trouble, self.admission.has_room))
        self._sockets = tuple(sockets)
        self.addresses = tuple(format_endpoint(*sock.getsockname()[:2]) for sock in sockets)
        guard(self)
        self.emit(ServerListens(run_id="", by=self.name, addresses=self.addresses))

    @property
    def token(self) -> str | tuple[str, ...] | None:
        """The token, or several, of which clients must present one; None: no authentication by token."""
        return self.tokens or None

    @token.setter
    def token(self, token: str | tuple[str, ...] | None) -> None:
        self.tokens = (token,) if isinstance(token, str) else token or ()

    def connect(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return (
            self.make_connection() if self.tls is None else TlsAdmission(self.tls, self.admission, self.make_connection)
        )

    def make_connection(self) -> Connection:
        return Connection(self)

    async def admit(self, sock: socket.socket) -> None:
        """Serve a connection of a process that this one started: without token, TLS and limits."""

        def make() -> Connection:
            connection = self.make_connection()
            connection.is_trusted = True
            return connection

        await self._loop.connect_accepted_socket(make, sock)

    async def stop(self, why: str = "the server stops") -> None:
        """Tell all clients, close all connections. No request is executed after this returns."""
        for acceptor in self._acceptors:
            acceptor.close()
        self.admission.stop(why)
        await self.runs.stop()
        await self.settle()
        self.observer_watches.flush()
        for connection in list(self.connections):
            connection.shut_down(why)
        for _ in range(round(SHUTDOWN_S / POLL_S)):
            if not self.connections:
                break
            await asyncio.sleep(POLL_S)
        for connection in list(self.connections):
            connection.abort()
        self.clients.stop()
        self.engine_host.stop()
        if self.addresses:
            self.emit(ServerStopped(run_id="", by=self.name, reason=why))

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop it runs on. Its state may be read on that thread only."""
        return self._loop

    @property
    def up_s(self) -> float:
        """Time since it was created."""
        return self._loop.time() - self._started_at

    async def settle(self) -> None:
        """Return when all executed operations are durable. Nothing to wait for without stored data."""

    def filenos(self) -> list[int]:
        """All open sockets, to close them in a forked child."""
        listening = [sock.fileno() for sock in self._sockets if sock.fileno() >= 0]
        return listening + [number for one in (*self.connections, *self.admission.pending) for number in one.filenos()]

    # --- ConnectionContext --------------------------------------------------------------------------------------------

    def ensure_run(self, run: str, is_returning: bool, client: str) -> None:
        found = self.runs.ensure_run(run)
        if is_returning:
            self.runs.expect(found, client)

    def is_to_make(self, run: str, client: str) -> bool:
        if not run:
            return False
        found = self.runs.ensure_run(run)
        is_made = found.keys.config in self.engine_host.engine.items
        return not is_made and found.takes_turn(client, self._loop.time())

    def claimed(self, run: str, client: str, claim: bytes) -> None:
        if run:
            self.runs.claimed(run, client, claim)

    def limit_reached(self, client: str, run: str) -> tuple[Refusal, str] | None:
        """Clients that are known already are never refused because of the limit on connections."""
        limits = self.limits
        if self.admission.admitted >= limits.max_connections and client not in self.clients:
            return Refusal.CONNECTIONS, (
                f"the server has {limits.max_connections} clients, its limit: raise --max-connections"
            )
        if run and run not in self.runs and len(self.runs) >= limits.max_runs:
            return Refusal.RUNS, f"the server has {limits.max_runs} runs, its limit: raise --max-runs"
        return None

    def _report_trouble(self, why: str) -> None:
        self.emit(ServerTrouble(run_id="", by=self.name, reason=why))

    def describe(self) -> dict[str, str]:
        engine, traffic = self.engine_host.engine, self.traffic
        return {
            "software": self.software,
            "generation": self.generation,
            "up_s": f"{self.up_s:.1f}",
            "connections": str(len(self.connections)),
            "runs": str(len(self.runs)),
            "keys": str(len(engine.items)),
            "leases": str(len(engine.leases)),
            "watches": str(self.engine_host.watch_count),
            "bytes_in": str(traffic.bytes_in),
            "bytes_out": str(traffic.bytes_out),
            "frames_in": str(traffic.frames_in),
            "frames_out": str(traffic.frames_out),
            "refused": str(sum(self.admission.refusals.counts.values())),
            "dropped_as_slow": str(traffic.slow),
            "pending": str(len(self.admission.pending)),
            "key_bytes": str(engine.usage.size),
            **self.admission.refusals.describe(),
        }
