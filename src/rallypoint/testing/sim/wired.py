"""Wire worlds: the real server behind simulated TCP connections, and the real client in every process.

`WiredServer` is one server through all its lives: it is killed, stopped in good order, paused, started again with what
it knew (the same generation) or with nothing (a new one). `WiredBackend` is the `tcp` backend of one process, with what
a director may do to its connection. Both have the faces of `network`'s, so that a world need not care.
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
from rallypoint.server import connection
from rallypoint.server.clients import LATE_S
from rallypoint.server.durability.server import DurableLocal, DurableServer
from rallypoint.server.local_backend import LocalBackend
from rallypoint.server.server import Server, first_revision
from rallypoint.testing.checkers import BrokeOutageTolerance
from rallypoint.testing.loop import MACHINE, VirtualTimeLoop
from rallypoint.testing.sim.data import SimData
from rallypoint.testing.sim.network import Weather
from rallypoint.testing.sim.plan import Plan
from rallypoint.testing.sim.strangers import STRANGERS, Garbage
from rallypoint.testing.sim.streams import Above, Sky, Stream

if TYPE_CHECKING:
    from rallypoint.testing.sim.wired_client import WiredBackend

ENDPOINT = "sim:29400"
SILENT = 0.3
"""How often the machine of the server dies, and not only its process."""
UNREACHABLE = 0.2
"""How often a cut is told to whoever tries to connect."""
Note = Callable[[str, str, object], None]


@contextmanager
def small_bounds() -> Iterator[None]:
    """The server's patience with those who do not read, as small as these worlds are."""
    before = connection.MOST_WAITING_MESSAGES, connection.MOST_WAITING_BYTES
    connection.MOST_WAITING_MESSAGES, connection.MOST_WAITING_BYTES = 10, 16 * 1024
    try:
        yield
    finally:
        connection.MOST_WAITING_MESSAGES, connection.MOST_WAITING_BYTES = before


class CoordinatorKilled(Exception):
    """The coordinator ends here, between two of its writes."""


class _Fallible(LocalBackend):
    """What the coordinators in the server work on: with limits of its own, and a point at which they fail."""

    def limit(self, limits: Limits, rng: random.Random) -> None:
        """Before it is used."""
        self.limits = limits
        self.left: int | None = None
        """So many writes of a coordinator more; then something happens."""
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
                        self._host.execute(op)  # and nobody is left who could know
                    raise CoordinatorKilled
        return await super().execute(op)


class _Local(_Fallible):
    """Of a server without data."""


class _DurableLocal(_Fallible, DurableLocal):
    """Of a server with data."""


def _is_fenced(op: Op) -> bool:
    """Whether it is a write of a coordinator in office."""
    return isinstance(op, Txn) and any(isinstance(compare, CreateRevisionIs) for compare in op.compares)


class _Life(Server):
    """One life of the server. Who asked for a commit is known while it is executed."""

    local: _Fallible

    def see(self, home: WiredServer, rng: random.Random) -> None:
        """Begin: everything is seen from outside."""
        self.local.limit(Limits(home.plan.max_txn_ops, 1 << 20), rng)
        self.has_returned = False
        """Somebody of an earlier generation has come."""
        self._home = home
        self._writer = ""
        self._renewed_at: dict[int, float] = {}
        self._plain_execute = self.engine_host.execute
        self.engine_host.execute = self.execute  # type: ignore[method-assign]  # seen by all who have the engine_host
        self.engine_host.watch(self, "", self.engine_host.engine.revision)

    def execute(self, op: Op, origin: Origin | None = None) -> Result:
        """The engine host's `execute`, recorded. The end of a lease by time has no writer."""
        deadline = self.engine_host.engine.next_deadline()
        if deadline is not None and deadline <= self._loop.time():
            self._let_end()
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

    def _let_end(self) -> None:
        """End the leases whose time is over, and tell of those that ended before that although their client is here."""
        now, leases = self._loop.time(), self.engine_host.engine.leases
        here = [
            lease
            for client in self.clients._clients.values()
            for lease in client.sessions
            if (alive := leases.get(lease)) is not None
            and alive.deadline <= now
            and (client.connection is not None or self._home.has_knocked(client.id))
        ]
        early = [lease for lease in here if now < self._renewed_at.get(lease, now) + self._home.plan.ttl_s - 1e-6]
        self._plain_execute(Tick())
        for lease in (lease for lease in early if leases.get(lease) is None):  # none ends while the disk fails
            self._home.ended_early(lease, now - self._renewed_at[lease])

    def push(self, batch: Batch) -> None:
        """Every revision; before anybody else is told of it."""
        self._committed(batch, self._writer)

    def _committed(self, batch: Batch, writer: str) -> None:
        if self._home.life is self:
            self._home.committed(batch, writer)

    def ensure_run(self, run: str, is_returning: bool, client: str) -> None:
        self.has_returned = self.has_returned or is_returning
        super().ensure_run(run, is_returning, client)


class _PlainLife(_Life):
    """Of a server without data."""

    def __init__(self, engine: Engine | None, **options: Any) -> None:
        super().__init__(engine=engine, **options)

    def make_local(self) -> LocalBackend:
        self.local = _Local(self.engine_host)
        return self.local


class _DurableLife(_Life, DurableServer):
    """Of a server with data. What it executes has happened when it is kept."""

    def make_local(self) -> LocalBackend:
        self.local = _DurableLocal(self.engine_host, self.journal)
        return self.local

    def push(self, batch: Batch) -> None:
        self.journal.when_durable(partial(self._committed, batch, self._writer))


class WiredServer:
    """The server of a world, through all its lives."""

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
        self.lives = 0
        self.is_up = True
        self.is_silent = False
        """It is down with its machine: nobody even says that nobody listens."""
        self.writers: dict[str, str] = {}
        """Which node a client is."""
        self.backends: dict[str, WiredBackend] = {}
        """Who a client is."""
        self.first_revision = 0
        """What is older is of an earlier generation."""
        self.rng = random.Random(f"wired server {plan.seed}")
        self._streams: list[Stream] = []
        self._saved = b""
        self.data = SimData(plan.seed, plan.history) if plan.has_data else None
        self._told = 0
        self._pauses: Counter[str] = Counter()  # by machine
        self.life = self._begin(None)
        self._told = self.engine.revision

    @property
    def engine(self) -> Engine:
        return self.life.engine_host.engine

    def execute(self, op: Op, writer: str, origin: Origin | None) -> Result:
        """Something that nobody asked for over a connection."""
        return self._context.run(self.life.engine_host.execute, op)

    # --- lives --------------------------------------------------------------------------------------------------------

    def _begin(self, engine: Engine | None) -> _Life:
        self.lives += 1
        self._machine = f"server#{self.lives}"
        rng = random.Random(f"{self.plan.seed} {self._machine}")
        self._context = contextvars.copy_context()
        self._context.run(MACHINE.set, self._machine)
        return self._context.run(self._be_born, self._machine, engine, rng)

    def _be_born(self, name: str, engine: Engine | None, rng: random.Random) -> _Life:
        emit, loop, lives = Emitter(lambda event: self.emitted(name, event)), self.loop, self.lives

        def wall() -> float:
            return 1e9 + 1000 * lives + loop.time()

        options: dict[str, Any] = {
            "name": name,
            "emit": emit,
            "history": self.plan.history,
            "rng": rng,
            "wall": wall,
        }
        life: _Life
        if self.data is None:
            life = _PlainLife(engine, **options)
        else:
            engine, journal = self.data.open(name, emit, first_revision(wall))
            life = _DurableLife(engine, journal, **options)
        life.see(self, rng)
        return life

    def committed(self, batch: Batch, writer: str) -> None:
        """A revision is there, and may be told."""
        self._told = batch.revision
        self.on_commit(batch, writer)

    def crash(self, is_machine: bool | None = None) -> None:
        """Its process dies, or its whole machine (None: drawn)."""
        self.is_silent = self.rng.random() < SILENT if is_machine is None else is_machine
        self._end_life()

    async def stop(self) -> None:
        """It stops in good order, unless it stands still: then it is killed."""
        life = self.life
        if self._pauses[self._machine]:
            self.crash(is_machine=False)
            return
        self.is_up = self.is_silent = False
        await life.stop("it is restarted")
        self._end_life()

    def _end_life(self) -> None:
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
        """Start again, from what was saved (all leases renewed; the same generation) or from nothing."""
        generation = self.life.generation
        if self.data is not None:
            self._restart_from(self.data, with_data)
        else:
            self.life = self._begin(restore(self._saved, self.loop.time(), self.plan.history) if with_data else None)
        if with_data:
            self.life.generation = generation
        else:
            self.first_revision = self.engine.revision
        for stream in self._streams:
            if stream.far.is_deaf:  # the machine is there again, and knows nothing of it
                stream.later(self.rng.uniform(0.0, 1.0), stream.reset)
        self.is_up = True

    def _restart_from(self, data: SimData, with_data: bool) -> None:
        """What was told is there. More may be: what was kept, and nobody had been told of."""
        if not with_data:
            data.wipe()
        try:
            self.life = self._begin(None)
        except DataError as error:
            raise BrokeOutageTolerance(f"the server does not start again: {error}") from error
        if not with_data:
            self._told = self.engine.revision
        else:
            if self.engine.revision < self._told or data.found.oldest > self._told:
                raise BrokeOutageTolerance(
                    f"revision {self._told} was told, and the server went on from {self.engine.revision}"
                )
            for batch in data.found.after(self._told, ""):
                self.committed(batch, "")

    async def pause(self, length_s: float, after_writes: int, is_cut: bool = False) -> None:
        """Its process stands still for a while, after so many more writes of its coordinator.

        With `is_cut`, one of its connections breaks just before: whoever had it comes back and is not heard.
        """
        machine = self._machine
        await self._until_written(after_writes, deadly=False)
        if is_cut and (streams := [stream for stream in self._streams if not stream.is_over]):
            self.rng.choice(streams).reset(silent=0.0)
            await asyncio.sleep(2 * self.plan.slowest_s)
        if not self._lives_on(machine):
            return
        self._pauses[machine] += 1
        self.loop.freeze(machine)
        self.note("pause", machine, "")
        await asyncio.sleep(length_s)
        self._pauses[machine] -= 1
        if self._lives_on(machine) and not self._pauses[machine]:
            self.loop.thaw(machine)
            self.note("thaw", machine, "")

    def _lives_on(self, machine: str) -> bool:
        return machine == self._machine and self.is_up

    async def kill_coordinator(self, after_writes: int) -> None:
        """The coordinator fails after so many more writes; the server starts it again."""
        await self._until_written(after_writes, deadly=True)

    async def _until_written(self, writes: int, deadly: bool) -> None:
        local = self.life.local
        local.left, local.is_deadly = writes, deadly
        local.reached.clear()
        try:
            async with asyncio.timeout(self.plan.ttl_s):
                await local.reached.wait()
        except TimeoutError:
            local.left = None  # it has nothing to write

    # --- connections --------------------------------------------------------------------------------------------------

    def accept(self, name: str, sky: Sky, rng: random.Random, protocol: asyncio.Protocol) -> Stream:
        """A connection to the running code; its near end is for the caller to open. ConnectionRefusedError if down."""
        if not self.is_up:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self._streams = [stream for stream in self._streams if not stream.is_over]
        stream = Stream(name, sky, rng)
        stream.join((protocol, contextvars.copy_context()), (self.life.connect(), self._context))
        self._streams.append(stream)
        self.loop.call_soon(stream.far.open, context=self._context)
        return stream

    def has_knocked(self, client: str) -> bool:
        """Whether a client has come back, and was not listened to."""
        backend = self.backends.get(client)
        stream = backend.stream if backend is not None else None
        return stream is not None and stream.far.unread_s > LATE_S and not stream.near.is_closing()

    def reset_all(self) -> None:
        """Whatever is between the server and all others dies: a switch, a proxy."""
        for stream in self._streams:
            stream.reset(silent=0.0)

    def meet_stranger(self, kind: int) -> None:
        """Somebody comes who does not speak the protocol, or says nothing at all."""
        if self.is_up:
            protocol = Garbage(STRANGERS[kind % len(STRANGERS)])
            self.accept("a stranger", Above(Weather()), self.rng, protocol).near.open()

    def end(self) -> None:
        """The world is over."""
        self.is_up = False
        for stream in self._streams:
            stream.is_broken = stream.is_void = True
