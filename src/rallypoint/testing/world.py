"""Several nodes in one process: real drivers on a memory backend, usually under virtual time.

Names are machines: `start("a")` starts a process on machine a, `crash("a")` kills it. A machine has a
wall clock of its own, and under virtual time it can be paused. Every event of every node is recorded with its time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rallypoint.backends.contract import Backend
from rallypoint.backends.memory import MemoryBackend, MemoryServer, MemoryWatch
from rallypoint.events import Emitter, Event
from rallypoint.kv.types import Op, Result
from rallypoint.rendezvous.membership import Identity, Joined
from rallypoint.rendezvous.node import Node
from rallypoint.settings import Settings
from rallypoint.testing.loop import MACHINE, VirtualTimeLoop

_T = TypeVar("_T")

EPOCH_S = 1_000_000.0
"""The time of the wall clocks when the loop's time is 0."""


@dataclass(slots=True)
class Process:
    """One life of a node on a machine: its driver, and its pending call of `next_round`, if any."""

    name: str
    node: Node
    context: Context
    """The context of the process's tasks."""
    call: asyncio.Task[Joined] | None = None
    rounds: list[Joined] = field(default_factory=list)


class World:
    """Nodes by machine name. `options` are those of the run; `wrap` may wrap each node's backend."""

    def __init__(
        self,
        *,
        seed: int = 0,
        run_id: str = "run",
        server: MemoryServer | None = None,
        wrap: Callable[[str, Backend], Backend] | None = None,
        **options: object,
    ) -> None:
        self.server = server or _OwnMachine()
        self.events: list[tuple[float, Event]] = []
        self.processes: dict[str, Process] = {}
        self.clocks: dict[str, float] = {}
        """By machine: seconds by which its wall clock is ahead."""
        self.on_event: Callable[[float, Event], None] | None = None
        self._rng = random.Random(seed)
        self._run_id = run_id
        self._wrap = wrap
        self._options = options
        self._started = 0
        self._loop = asyncio.get_running_loop()

    def start(self, name: str, **options: object) -> Process:
        """Start a process on machine `name`, without joining. `options` override those of the world."""
        self._started += 1
        rng = random.Random(self._rng.getrandbits(64))
        given: dict[str, Any] = {**self._options, "name": name, **options}
        settings = Settings.build(scheme="memory", run_id=self._run_id, **given)
        identity = Identity(
            id=f"{rng.getrandbits(64):016x}",
            name=settings.name or name,
            addr=settings.local_addr or name,
            pid=self._started,
            local_id=0,
            labels=settings.labels,
            node_rank=settings.node_rank,
        )
        backend: Backend = MemoryBackend(self.server)
        if self._wrap is not None:
            backend = self._wrap(name, backend)
        context = copy_context()
        context.run(MACHINE.set, name)
        node = Node(
            backend,
            settings,
            identity,
            bootstrap=_bootstrap(identity.addr),
            emit=Emitter(self._record),
            rng=rng,
            wall=lambda: EPOCH_S + self._loop.time() + self.clocks.get(name, 0.0),
        )
        process = self.processes[name] = Process(name, node, context)
        return process

    def call(self, name: str, coro: Coroutine[Any, Any, _T], what: str = "call") -> asyncio.Task[_T]:
        """Start a task of the process: it is paused and killed with it."""
        return asyncio.create_task(coro, name=f"{what} of {name}", context=self.processes[name].context)

    def join(self, name: str) -> asyncio.Task[Joined]:
        """Start a call of `next_round` of a running process."""
        process = self.processes[name]
        process.call = self.call(name, self._join(process), "next_round")
        return process.call

    def freeze(self, name: str) -> None:
        """Pause the machine, like a process with SIGSTOP; needs virtual time."""
        self._virtual().freeze(name)

    def thaw(self, name: str) -> None:
        """Continue the machine."""
        self._virtual().thaw(name)

    def crash(self, name: str) -> None:
        """Kill the process."""
        process = self.processes.pop(name)
        if isinstance(self._loop, VirtualTimeLoop):
            self._loop.thaw(name)  # only so that its tasks can end: their node is abandoned
        if process.call is not None:
            process.node.abandon()
            process.call.cancel()
        process.node.abandon()

    async def stop(self) -> None:
        """Stop all remaining processes, which leave the run."""
        if isinstance(self._loop, VirtualTimeLoop):
            for name in self.processes:
                self._loop.thaw(name)
        for process in list(self.processes.values()):
            if process.call is not None and not process.call.done():
                process.call.cancel()
                await asyncio.wait({process.call})
            await process.node.stop()
        self.processes.clear()

    def _virtual(self) -> VirtualTimeLoop:
        if not isinstance(self._loop, VirtualTimeLoop):
            raise RuntimeError("a machine can be frozen only on a VirtualTimeLoop")
        return self._loop

    @staticmethod
    async def _join(process: Process) -> Joined:
        joined = await process.node.next_round()
        process.rounds.append(joined)
        return joined

    def _record(self, event: Event) -> None:
        now = self._loop.time()
        self.events.append((now, event))
        if self.on_event is not None:
            self.on_event(now, event)


class _OwnMachine(MemoryServer):
    """A server that belongs to no node's machine: its timers run whichever machine is paused."""

    def apply(self, op: Op) -> Result:
        return Context().run(super().apply, op)

    def start(self, watch: MemoryWatch, after_revision: int) -> None:
        Context().run(super().start, watch, after_revision)


def _bootstrap(addr: str) -> Callable[[int, int], asyncio.Future[tuple[str, int]]]:
    """Invented ports, without sockets: 20000 + the round's number."""

    def port(number: int, size: int) -> asyncio.Future[tuple[str, int]]:
        future: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        future.set_result((addr, 20_000 + number))
        return future

    return port
