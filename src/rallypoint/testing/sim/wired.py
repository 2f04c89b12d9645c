"""Wire worlds: the real server behind simulated TCP connections, and the real client in every process.

`WiredServer` is one server through all its restarts: it is killed, stopped, paused, and restarted with its data (the
same generation) or without (a new one). `WiredBackend` in `wired_client` is the `tcp` backend of one process, with the
controls of the director. Both have the interfaces of `network`, so that a world can use either. Nothing of the server
may be reimplemented here: subclasses only observe it, and make it fail.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rallypoint.backends.contract import Limits
from rallypoint.errors import DataError
from rallypoint.events import Emitter, Event
from rallypoint.kv.engine import Engine
from rallypoint.kv.snapshot import restore, snapshot
from rallypoint.kv.types import (
    Add,
    Batch,
    CreateRevisionIs,
    Grant,
    LeaseResult,
    Op,
    Origin,
    Result,
    Shorten,
    Tick,
    Txn,
)
from rallypoint.rendezvous import kept_events
from rallypoint.server import connection
from rallypoint.server.clients import LATE_S
from rallypoint.server.durability.server import DurableLocal, DurableServer
from rallypoint.server.local_backend import LocalBackend
from rallypoint.server.server import Server, first_revision
from rallypoint.testing.checkers import BrokeOutageTolerance
from rallypoint.testing.loop import MACHINE, VirtualTimeLoop
from rallypoint.testing.sim.data import SimData
from rallypoint.testing.sim.foreign_clients import FOREIGN_BYTES, ForeignClient
from rallypoint.testing.sim.network import LinkConditions
from rallypoint.testing.sim.plan import Plan
from rallypoint.testing.sim.streams import HasConditions, ProcessLink, Stream

if TYPE_CHECKING:
    from rallypoint.testing.sim.wired_client import WiredBackend

ENDPOINT = "sim:29400"
SILENT = 0.3
"""The probability that the machine of the server dies with its process."""
UNREACHABLE = 0.2
"""The probability that connecting fails at once during a cut, instead of hanging."""
Note = Callable[[str, str, object], None]


@contextmanager
def small_bounds() -> Iterator[None]:
    """Lower the server's limits for slow readers and the number of kept events, in proportion to these small worlds."""
    before = connection.MOST_WAITING_MESSAGES, connection.MOST_WAITING_BYTES, kept_events.KEPT
    connection.MOST_WAITING_MESSAGES, connection.MOST_WAITING_BYTES, kept_events.KEPT = 10, 16 * 1024, 20
    try:
        yield
    finally:
        connection.MOST_WAITING_MESSAGES, connection.MOST_WAITING_BYTES, kept_events.KEPT = before


class CoordinatorKilled(Exception):
    """Raised in the coordinator between two of its writes."""


class _FailingLocal(LocalBackend):
    """The backend of the coordinators in the server, with its own limits and a point of failure."""

    def limit(self, limits: Limits, rng: random.Random) -> None:
        """Set the limits. Call it before the first use."""
        self.limits = limits
        self.left: int | None = None
        """The number of coordinator writes until the failure."""
        self.is_deadly = False
        self.reached = asyncio.Event()
        self._rng = rng

    async def execute(self, op: Op) -> Result:
        if self.left is not None and _is_fenced(op):
            self.left -= 1
            if self.left < 0:
                self.left = None
                self.reached.set()
                if self.is_deadly:
                    if self._rng.random() < 0.5:
                        self._host.execute(op)  # executed, but the coordinator does not learn of it
                    raise CoordinatorKilled
        return await super().execute(op)


class _Local(_FailingLocal):
    """For a server without data."""


class _DurableLocal(_FailingLocal, DurableLocal):
    """For a server with data."""


def _is_fenced(op: Op) -> bool:
    """Whether it is a fenced write of a coordinator."""
    return isinstance(op, Txn) and any(isinstance(compare, CreateRevisionIs) for compare in op.compares)


class _ObservedServer(Server):
    """One server process. It reports each operation with its client."""

    local: _FailingLocal

    def observe(self, home: WiredServer, rng: random.Random) -> None:
        """Report all operations and commits to `home`. Call it before the first connection."""
        self.local.limit(Limits(home.plan.max_txn_ops, 1 << 20), rng)
        self.has_returned = False
        """A client of an earlier generation has connected."""
        self._home = home
        self._writer = ""
        self._renewed_at: dict[int, float] = {}
        self._plain_execute = self.engine_host.execute
        self.engine_host.execute = self.execute  # type: ignore[method-assign]  # for all users of the engine_host
        self.engine_host.watch(self, "", self.engine_host.engine.revision)

    def execute(self, op: Op, origin: Origin | None = None) -> Result:
        """The engine host's `execute`, recorded. The end of a lease by time has no writer."""
        deadline = self.engine_host.engine.next_deadline()
        if deadline is not None and deadline <= self._loop.time():
            self._end_due_leases()
        if origin is not None:
            self._writer = self._home.writers.get(origin.client, "")
        else:
            self._writer = self.name if isinstance(op, Txn | Add) else ""
        self._home.note("executes", self._writer, op)
        try:
            result = self._plain_execute(op, origin)
        finally:
            self._writer = ""
        if isinstance(result, LeaseResult) and result.alive and not isinstance(op, Shorten):
            is_resent = isinstance(op, Grant) and result.lease in self._renewed_at
            self._renewed_at[result.lease] = self._renewed_at[result.lease] if is_resent else self._loop.time()
        return result

    def _end_due_leases(self) -> None:
        """End due leases; report those that ended before their time to live although their client is connected."""
        now, leases = self._loop.time(), self.engine_host.engine.leases
        connected = [
            lease
            for client in self.clients._clients.values()
            for lease in client.sessions
            if (alive := leases.get(lease)) is not None
            and alive.deadline <= now
            and (client.connection is not None or self._home.has_unread_connection(client.id))
        ]
        early = [lease for lease in connected if now < self._renewed_at.get(lease, now) + self._home.plan.ttl_s - 1e-6]
        self._plain_execute(Tick())
        for lease in (lease for lease in early if leases.get(lease) is None):  # none ends while the disk fails
            self._home.ended_early(lease, now - self._renewed_at[lease])

    def push(self, batch: Batch) -> None:
        """Called for every revision, before the watches of clients."""
        self._committed(batch, self._writer)

    def _committed(self, batch: Batch, writer: str) -> None:
        if self._home.running is self:
            self._home.committed(batch, writer)

    def ensure_run(self, run: str, is_returning: bool, client: str) -> None:
        self.has_returned = self.has_returned or is_returning
        super().ensure_run(run, is_returning, client)


class _ServerWithoutData(_ObservedServer):
    """A server without data."""

    def __init__(self, engine: Engine | None, **options: Any) -> None:
        super().__init__(engine=engine, **options)

    def make_local(self) -> LocalBackend:
        self.local = _Local(self.engine_host)
        return self.local


class _ServerWithData(_ObservedServer, DurableServer):
    """A server with data. A commit is reported when it is durable."""

    def make_local(self) -> LocalBackend:
        self.local = _DurableLocal(self.engine_host, self.journal)
        return self.local

    def push(self, batch: Batch) -> None:
        self.journal.when_durable(partial(self._committed, batch, self._writer))


class WiredServer:
    """The server of a world, through all its restarts."""

    def __init__(
        self,
        plan: Plan,
        note: Note,
        on_commit: Callable[[Batch, str], None],
        emitted: Callable[[str, Event], None],
        ended_early: Callable[[int, float], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.plan = plan
        self.loop = loop
        self.note = note
        self.on_commit = on_commit
        self.emitted = emitted
        self.ended_early = ended_early
        self.starts = 0
        self.is_up = True
        self.is_silent = False
        """Its machine is down: attempts to connect are not even refused."""
        self.writers: dict[str, str] = {}
        """The node of each client."""
        self.backends: dict[str, WiredBackend] = {}
        """The backend of each client."""
        self.first_revision = 0
        """Smaller revisions belong to an earlier generation."""
        self.rng = random.Random(f"wired server {plan.seed}")
        self._streams: list[Stream] = []
        self._saved = b""
        self.data = SimData(plan.seed, plan.history) if plan.has_data else None
        self._reported = 0
        """The last revision that a client may know."""
        self._pauses: Counter[str] = Counter()  # by machine
        self.running = self._begin(None)
        self._reported = self.engine.revision

    @property
    def engine(self) -> Engine:
        return self.running.engine_host.engine

    def execute(self, op: Op, writer: str, origin: Origin | None) -> Result:
        """Execute an operation of the world itself, without a connection."""
        return self._context.run(self.running.engine_host.execute, op)

    # --- starts and stops --------------------------------------------------------------------------------------------

    def _begin(self, engine: Engine | None) -> _ObservedServer:
        self.starts += 1
        self._machine = f"server#{self.starts}"
        rng = random.Random(f"{self.plan.seed} {self._machine}")
        self._context = contextvars.copy_context()
        self._context.run(MACHINE.set, self._machine)
        return self._context.run(self._create, self._machine, engine, rng)

    def _create(self, name: str, engine: Engine | None, rng: random.Random) -> _ObservedServer:
        emit, loop, starts = Emitter(lambda event: self.emitted(name, event)), self.loop, self.starts

        def wall() -> float:
            return 1e9 + 1000 * starts + loop.time()

        options: dict[str, Any] = {
            "name": name,
            "emit": emit,
            "history": self.plan.history,
            "rng": rng,
            "wall": wall,
        }
        server: _ObservedServer
        if self.data is None:
            server = _ServerWithoutData(engine, **options)
        else:
            engine, journal = self.data.open(name, emit, first_revision(wall))
            server = _ServerWithData(engine, journal, **options)
        server.observe(self, rng)
        return server

    def committed(self, batch: Batch, writer: str) -> None:
        """Report a commit that clients may learn of now."""
        self._reported = batch.revision
        self.on_commit(batch, writer)

    def crash(self, is_machine: bool | None = None) -> None:
        """The process dies, or the whole machine (None: random)."""
        self.is_silent = self.rng.random() < SILENT if is_machine is None else is_machine
        self._go_down()

    async def stop(self) -> None:
        """Stop it regularly; a paused server is killed."""
        server = self.running
        if self._pauses[self._machine]:
            self.crash(is_machine=False)
            return
        self.is_up = self.is_silent = False
        await server.stop("it is restarted")
        self._go_down()

    def _go_down(self) -> None:
        self.is_up = False
        if self.data is None:
            self._saved = snapshot(self.engine)
        else:
            self.data.crash(self.is_silent)
        self.loop.freeze(self._machine)
        for stream in self._streams:
            if self.is_silent:
                stream.far.vanish()
            else:
                stream.far.die()

    def restart(self, with_data: bool) -> None:
        """Restart, with the saved data (all leases renewed, the same generation) or without."""
        generation = self.running.generation
        if self.data is not None:
            self._restart_from(self.data, with_data)
        else:
            self.running = self._begin(restore(self._saved, self.loop.time(), self.plan.history) if with_data else None)
        if with_data:
            self.running.generation = generation
        else:
            self.first_revision = self.engine.revision
        for stream in self._streams:
            if stream.far.is_deaf:  # the new machine does not know the connection
                stream.later(self.rng.uniform(0.0, 1.0), stream.reset)
        self.is_up = True

    def _restart_from(self, data: SimData, with_data: bool) -> None:
        """Recover, and check that no reported revision is missing. Further durable revisions are reported now."""
        if not with_data:
            data.wipe()
        try:
            self.running = self._begin(None)
        except DataError as error:
            raise BrokeOutageTolerance(f"the server does not restart: {error}") from error
        if not with_data:
            self._reported = self.engine.revision
        else:
            if self.engine.revision < self._reported or data.found.oldest > self._reported:
                raise BrokeOutageTolerance(
                    f"clients know revision {self._reported}, and the server restarted at {self.engine.revision}"
                )
            for batch in data.found.after(self._reported, ""):
                self.committed(batch, "")

    async def pause(self, length_s: float, after_writes: int, is_cut: bool = False) -> None:
        """Pause the process for a time, after this many more writes of its coordinator.

        With `is_cut`, one of its connections breaks just before: its client reconnects and gets no answer.
        """
        machine = self._machine
        await self._until_written(after_writes, deadly=False)
        if is_cut and (streams := [stream for stream in self._streams if not stream.is_over]):
            self.rng.choice(streams).reset(silent=0.0)
            await asyncio.sleep(2 * self.plan.slowest_s)
        if not self._is_running(machine):
            return
        self._pauses[machine] += 1
        self.loop.freeze(machine)
        self.note("pause", machine, "")
        await asyncio.sleep(length_s)
        self._pauses[machine] -= 1
        if self._is_running(machine) and not self._pauses[machine]:
            self.loop.thaw(machine)
            self.note("thaw", machine, "")

    def _is_running(self, machine: str) -> bool:
        return machine == self._machine and self.is_up

    async def kill_coordinator(self, after_writes: int) -> None:
        """The coordinator fails after this many more writes; the server restarts it."""
        await self._until_written(after_writes, deadly=True)

    async def _until_written(self, writes: int, deadly: bool) -> None:
        local = self.running.local
        local.left, local.is_deadly = writes, deadly
        local.reached.clear()
        try:
            async with asyncio.timeout(self.plan.ttl_s):
                await local.reached.wait()
        except TimeoutError:
            local.left = None  # it had nothing to write

    # --- connections --------------------------------------------------------------------------------------------------

    def accept(self, name: str, link: HasConditions, rng: random.Random, protocol: asyncio.Protocol) -> Stream:
        """A connection to the server; the caller opens its near end. ConnectionRefusedError if the server is down."""
        if not self.is_up:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self._streams = [stream for stream in self._streams if not stream.is_over]
        stream = Stream(name, link, rng)
        stream.join((protocol, contextvars.copy_context()), (self.running.connect(), self._context))
        self._streams.append(stream)
        self.loop.call_soon(stream.far.open, context=self._context)
        return stream

    def has_unread_connection(self, client: str) -> bool:
        """Whether a client has reconnected, and its data waits to be read."""
        backend = self.backends.get(client)
        stream = backend.stream if backend is not None else None
        return stream is not None and stream.far.unread_s > LATE_S and not stream.near.is_closing()

    def reset_all(self) -> None:
        """Reset all connections, as when a switch or proxy dies."""
        for stream in self._streams:
            stream.reset(silent=0.0)

    def connect_foreign_client(self, kind: int) -> None:
        """Connect a client that sends something other than the protocol, or nothing."""
        if self.is_up:
            protocol = ForeignClient(FOREIGN_BYTES[kind % len(FOREIGN_BYTES)])
            self.accept("a stranger", ProcessLink(LinkConditions()), self.rng, protocol).near.open()

    def end(self) -> None:
        """End the world: connections carry nothing more."""
        self.is_up = False
        for stream in self._streams:
            stream.is_broken = stream.is_void = True
