"""One simulated world: real drivers, store and engine; simulated time, network and faults.

First a phase with the plan's faults, in which only safety is checked. Then everything is healed, every machine
has a process again, the run is reopened, and liveness is required within bounds: the round completes, a crash is
detected, a late node is admitted, and an outage of the control plane disturbs no member.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rallypoint.backends.backoff import Backoff
from rallypoint.backends.session import LeaseSession
from rallypoint.errors import BackendError, RendezvousError, RendezvousGracefulExitError, StoreError
from rallypoint.events import Emitter, Event
from rallypoint.kv.types import Batch, Op, Put, Revoke, Txn
from rallypoint.rendezvous.election import Election
from rallypoint.rendezvous.fenced_writer import OTHER_COMPARES
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Cause, Identity, Joined
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.records import CoordinatorRecord, LeaveCause, LeaveKind, RoundPhase, RoundRecord
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings
from rallypoint.store import AsyncStore
from rallypoint.testing.checkers import (
    BrokeCompletion,
    BrokeExclusivity,
    BrokeFencing,
    BrokeOutageTolerance,
    BrokeRelease,
    Safety,
)
from rallypoint.testing.loop import MACHINE, VirtualTimeLoop
from rallypoint.testing.sim.event_log import EventLog
from rallypoint.testing.sim.network import LinkConditions, SimBackend, SimServer
from rallypoint.testing.sim.plan import Plan
from rallypoint.testing.sim.register import CellBackend, RegisterCell
from rallypoint.testing.sim.wired import WiredServer
from rallypoint.testing.sim.wired_client import WiredBackend

MOST_EVENTS = 150_000
"""No world that settles has nearly as many."""
WITHDRAW_S = 5.0
SLACK_S = 2.0
OBSERVE_S = 0.5


_LESS_GRAVE = (LeaveKind.OPERATOR, LeaveKind.STOPPED, LeaveKind.FINISHED)


@dataclass(slots=True)
class SimProcess:
    """One life of a node. `machine` identifies that life, `name` is the machine that it runs on."""

    name: str
    machine: str
    backend: SimBackend | WiredBackend | CellBackend
    node: Node
    rng: random.Random
    changed: asyncio.Event
    causes: list[tuple[float, int, Cause]] = field(default_factory=list)
    raised: list[tuple[float, RendezvousError]] = field(default_factory=list)
    joined: Joined | None = None
    task: asyncio.Task[None] | None = None
    wants: str = ""
    """The director's command: "leave", "rejoin" or nothing."""
    observes_first: bool = False
    """Its caller looks at the run before it asks to join."""
    paused_s: float = 0.0
    is_over: bool = False


class SimWorld:
    """The state of a world and operations on it. Runs on a VirtualTimeLoop."""

    def __init__(self, plan: Plan, loop: VirtualTimeLoop) -> None:
        self.plan = plan
        self.loop = loop
        self.keys = RunKeys("rallypoint", "sim")
        self.safety = Safety(
            self.keys, plan.min_nodes, plan.max_nodes, plan.step, compared=plan.max_txn_ops - OTHER_COMPARES
        )
        self.processes: dict[str, SimProcess] = {}
        self.dead: list[SimProcess] = []
        self.broken: BaseException | None = None
        self.forming = asyncio.Event()
        """An attempt was written since it was last cleared."""
        self.is_calm = False
        """The faults are over: all nodes stay, and re-join when their world changes."""
        self._event_log = EventLog()
        self._settings: dict[str, Settings] = {}
        self._rng = random.Random(f"world {plan.seed}")
        self._revision = 0
        self._lives = 0
        self._operators = 0
        self._machine_of: dict[str, str] = {}
        self._spare_seen_at = float("-inf")
        self._decided_knowing = False
        """The current attempt was decided after a client of the server's earlier life had returned."""
        self._coordinator_task: asyncio.Task[None] | None = None
        self._coordinator_lives = 0
        self.server_backend: SimBackend | None = None
        self.wire: WiredServer | None = None
        """The server, if this is a wire world."""
        self.server: SimServer | WiredServer | RegisterCell
        if plan.register:
            self.server = RegisterCell(self._committed, plan.history)
        elif plan.wired:
            self.server = self.wire = WiredServer(plan, self.note, self._committed, self._emitted, self._ended_early)
        else:
            self.server = SimServer(self._committed, plan.history)
            if plan.server_coordinator:
                self.start_coordinator()

    # --- the event log ------------------------------------------------------------------------------------------------

    def note(self, kind: str, actor: str, content: object) -> None:
        """Record an event in the digest and among the last events, which a failure prints."""
        if self._event_log.count >= MOST_EVENTS and self.broken is None:
            self.broken = BrokeCompletion(f"{MOST_EVENTS} events without an end")
        self._event_log.add(self.loop.now, kind, actor, content, self._revision)

    @property
    def events(self) -> int:
        return self._event_log.count

    @property
    def notes(self) -> Iterable[tuple[float, str, str, object]]:
        """The last events."""
        return self._event_log.last

    @property
    def digest(self) -> str:
        return self._event_log.digest

    def _committed(self, batch: Batch, writer: str) -> None:
        self._revision = batch.revision
        self.note("commit", self._machine_of.get(writer, writer) or "(time)", batch)
        try:
            self.safety.committed(batch.revision, batch.changes, writer)
        except AssertionError as error:
            self._break(error)
        current = self.safety.picture.round
        if self.wire is not None and any(change.key == self.keys.round for change in batch.changes):
            self._guard(lambda: self._check_lost_round(current))
        if current is not None and current.phase is RoundPhase.FORMING:
            self.forming.set()
        waiting = self.safety.picture.waiting
        if waiting is not None and waiting.spare > 0:
            self._spare_seen_at = self.loop.time()

    def _guard(self, check: Callable[[], None]) -> None:
        """Run a check; a broken guarantee ends the world."""
        try:
            check()
        except AssertionError as error:
            self._break(error)

    def _break(self, error: AssertionError) -> None:
        if self.broken is None:
            self.broken = error

    # --- processes ----------------------------------------------------------------------------------------------------

    def start(self, name: str) -> SimProcess:
        """Start a process on a machine."""
        self._lives += 1
        machine = f"{name}#{self._lives}"
        rng = random.Random(f"{self.plan.seed} {machine}")
        identity = Identity(
            id=f"{rng.getrandbits(64):016x}",
            name=name,
            addr=name,
            pid=1,
            local_id=0,
            labels={},
            node_rank=int(name[1:]) if self.plan.ranks == "node_rank" else None,
        )
        backend = self._connect(machine, identity.id, rng, self.plan.ttl_s / 2, self.plan.max_txn_ops)
        backend.has_coordinator = self.plan.server_coordinator
        made: list[SimProcess] = []

        def boot() -> None:
            MACHINE.set(machine)
            node = Node(
                backend,
                self.settings(name),
                identity,
                bootstrap=_bootstrap(name),
                emit=Emitter(lambda event: self._emitted(machine, event)),
                rng=rng,
                wall=lambda: 1e9 + rng.random(),
            )
            process = SimProcess(name, machine, backend, node, rng, asyncio.Event())
            node.on_closed = lambda _: self._told_closed(node)
            process.observes_first = random.Random(f"{self.plan.seed} {machine} observes").random() < 0.3
            made.append(process)
            process.task = asyncio.create_task(self._live(process), name=machine)

        contextvars.copy_context().run(boot)
        (process,) = made
        self.processes[name] = process
        self._machine_of[identity.id] = machine
        self.note("start", machine, "")
        for dead in self.dead:
            if dead.name == name and isinstance(dead.backend, WiredBackend):
                dead.backend.machine_is_back()
        return process

    def _connect(
        self, actor: str, writer: str, rng: random.Random, call_timeout_s: float, max_txn_ops: int
    ) -> SimBackend | WiredBackend | CellBackend:
        if isinstance(self.server, RegisterCell):
            return CellBackend(self.server, actor, writer, rng, self._fair(), self.note, self.plan.ttl_s)
        if isinstance(self.server, WiredServer):
            return WiredBackend(self.server, actor, writer, rng, self._fair())
        return SimBackend(self.server, actor, writer, rng, self._fair(), self.note, call_timeout_s, max_txn_ops)

    def settings(self, name: str) -> Settings:
        """The settings of the node on a machine: the same in each of its lives."""
        settings = self._settings.get(name)
        if settings is None:
            settings = self._settings[name] = self._build_settings(name)
        return settings

    def _build_settings(self, name: str) -> Settings:
        if self._settings:
            return msgspec.structs.replace(next(iter(self._settings.values())), name=name)
        plan = self.plan
        return Settings.build(
            scheme="sim",
            run_id="sim",
            name=name,
            min_nodes=plan.min_nodes,
            max_nodes=plan.max_nodes,
            step=plan.step,
            keep_alive_interval=plan.keep_alive_interval_s,
            keep_alive_max_attempt=3,
            heartbeat_timeout=plan.keep_alive_interval_s,
            last_call_timeout=plan.last_call_timeout_s,
            last_call_mode=plan.last_call_mode,
            confirm_timeout=plan.confirm_timeout_s,
            admission_window=plan.admission_window_s,
            join_timeout=plan.join_timeout_s,
            reopen_after=plan.reopen_after_s,
            hold_back_losses=plan.hold_back_losses,
            hold_back=2,
            hold_back_window=60,
            ranks=plan.ranks,
        )

    def _fair(self) -> LinkConditions:
        return LinkConditions(delay_s=(0.0002, self.plan.slowest_s))

    def crash(self, process: SimProcess, is_machine: bool | None = None) -> None:
        """Kill the process at once; messages that it has sent are still in flight.

        In a wire world its connections are closed, unless its machine dies, too (None: random).
        """
        if process.is_over:
            return
        process.is_over = True
        process.backend.is_dead = True
        self.loop.freeze(process.machine)
        if isinstance(process.backend, WiredBackend):
            process.backend.crash(process.backend.server.rng.random() < 0.5 if is_machine is None else is_machine)
        self.dead.append(process)
        if self.processes.get(process.name) is process:
            del self.processes[process.name]
        self.note("crash", process.machine, "")

    def coordinator(self) -> SimProcess | None:
        """The process of the current coordinator, if it is a node."""
        record = self.safety.picture.coordinator
        if record is None:
            return None
        return next((p for p in self.processes.values() if p.node.identity.id == record.id), None)

    def start_coordinator(self) -> None:
        """Start the coordinator inside the server, if the backend has one: a candidate with a perfect connection."""
        self._coordinator_lives += 1
        machine = f"server#{self._coordinator_lives}"
        rng = random.Random(f"{self.plan.seed} {machine}")
        assert isinstance(self.server, SimServer)
        line = LinkConditions(delay_s=(0.00001, 0.0001))
        backend = SimBackend(self.server, machine, machine, rng, line, self.note, 1.0, self.plan.max_txn_ops)
        self.server_backend = backend

        def boot() -> None:
            MACHINE.set(machine)
            self._coordinator_task = asyncio.create_task(self._coordinate(backend, machine, rng), name=machine)

        contextvars.copy_context().run(boot)

    async def _coordinate(self, backend: SimBackend, machine: str, rng: random.Random) -> None:
        emit = Emitter(lambda event: self._emitted(machine, event))
        backoff = Backoff(rng)
        while True:
            try:
                session = await backend.open_session(self.plan.ttl_s)
                record = CoordinatorRecord(id=machine, name="server")
                candidate = Election(backend, self.keys, session, record, emit, rng, lambda: 1e9, lambda: True)
                await candidate.run()
            except BackendError:
                await backoff.sleep()

    def end_run_lease(self) -> None:
        """End the lease of `config` and `state/`, as if it had not been renewed."""
        item = self.server.engine.items.get(self.keys.config)
        if item is not None and self.server.is_up:
            self.server.execute(Revoke(item.lease), "", None)

    def end_session(self, process: SimProcess) -> None:
        """The server ends the session of a process, which learns of it later."""
        item = self.server.engine.items.get(self.keys.node(process.node.identity.id))
        if item is not None and self.server.is_up:
            self.server.execute(Revoke(item.lease), "", None)

    @asynccontextmanager
    async def entry(self) -> AsyncIterator[RunConfig]:
        """An operator's `RunConfig` to the run, with a new connection each time."""
        self._operators += 1
        actor = f"operator {self._operators}"
        rng = random.Random(f"{self.plan.seed} {actor}")
        backend = self._connect(actor, "", rng, 5.0, 128)
        settings = self.settings("n00")
        try:
            yield RunConfig(backend, self.keys, settings, "operator", lambda: f"{rng.getrandbits(64):x}", lambda: 1e9)
        finally:
            await backend.close()

    # --- the main loop of a process -----------------------------------------------------------------------------------

    async def _live(self, process: SimProcess) -> None:
        node = process.node
        cause: LeaveCause | None = None
        while True:
            process.joined = None
            process.changed.clear()
            if process.observes_first and not self.is_calm:
                await _observe(node)
            began_at, paused_s = self.loop.time(), process.paused_s
            try:
                joined = await node.next_round(cause=cause)
            except RendezvousGracefulExitError as error:
                self.note("exit", process.machine, str(error)[:60])
                await node.stop()
                await process.backend.close()
                self._gone(process)
                return
            except RendezvousError as error:
                self.note("raised", process.machine, f"{type(error).__name__}: {str(error)[:80]}")
                process.raised.append((self.loop.time(), error))
                self._check_release(process, began_at, paused_s)
                await asyncio.sleep(process.rng.uniform(0.1, 1.0))
                continue
            self._check_release(process, began_at, paused_s)
            self.note("return", process.machine, f"round {joined.number} rank {joined.rank} of {joined.size}")
            process.joined = joined
            process.changed.clear()
            self._guard(lambda joined=joined: self.safety.returned(process.machine, node.identity.id, joined))  # type: ignore[misc]
            node.listen(lambda cause, _: self._told(process, cause))
            await self._work(process, joined)
            cause = self._cause(process, joined)
            if process.wants == "leave":
                process.wants = ""
                process.joined = None
                await node.leave("the director asked for it", cause=cause)
                self.note("left", process.machine, "")
                await asyncio.sleep(process.rng.uniform(0.0, 3.0))

    def _cause(self, process: SimProcess, joined: Joined) -> LeaveCause | None:
        """Why the process leaves its round; None: because of what it was told of, if anything.

        Drawn apart, so that it does not change the rest of the world. A failure may be an echo of something else.
        """
        rng = random.Random(f"cause {self.plan.seed} {process.machine} {joined.number}")
        if rng.random() < (0.8 if process.changed.is_set() else 0.4):
            return None
        kind = rng.choice([LeaveKind.WORKER_FAILED, LeaveKind.STALLED, *_LESS_GRAVE * (not process.changed.is_set())])
        is_failure = kind in (LeaveKind.WORKER_FAILED, LeaveKind.STALLED)
        why = f"rank {joined.rank} on {process.machine}: {kind.value}"
        return LeaveCause(kind=kind, why=why, rank=joined.rank if is_failure else None)

    async def _work(self, process: SimProcess, joined: Joined) -> None:
        """Use the store, then stay until the world changes, a random time has passed, or the director commands."""
        store = AsyncStore(process.node.backend, self.keys, process.node.identity.id, joined)
        store.timeout_s = 2.0
        try:
            await store.set(f"rank{joined.rank}", process.machine)
            self._check_sum(process, joined, await store.add("sum", 1))
            if process.rng.random() < 0.3:
                await store.barrier("b")
        except (StoreError, BackendError) as error:
            self.note("store", process.machine, type(error).__name__)
        stay_s: float | None = None
        if not self.is_calm and process.rng.random() < self.plan.restless:
            stay_s = process.rng.expovariate(1 / 5.0)
        try:
            async with asyncio.timeout(stay_s):
                await process.changed.wait()
        except TimeoutError:
            if self.is_calm:
                await process.changed.wait()
            self.note("restless", process.machine, "")

    def _check_sum(self, process: SimProcess, joined: Joined, total: int) -> None:
        """Every member adds one, once: a larger sum means a request counted twice, or the store of another round."""
        if total > joined.size and self.broken is None:
            self.broken = BrokeFencing(
                f"{process.machine} found {total} in the store of round {joined.number}, "
                f"which has {joined.size} members"
            )

    def _check_lost_round(self, current: RoundRecord | None) -> None:
        """When a round of a server that lost its data becomes active, no node may still be in one of its earlier life.

        This is not guaranteed if the attempt was decided before any client of the earlier life had returned.
        """
        assert self.wire is not None
        first_revision, now = self.wire.first_revision, self.loop.time()
        if current is None:
            return
        if current.phase is RoundPhase.FORMING:
            self._decided_knowing = self.wire.running.has_returned
            return
        if not self._decided_knowing:
            return
        for process in self.processes.values():
            joined, session = process.node.current, process.node._node_session.session
            if joined is None or joined.own_revision >= first_revision or not isinstance(session, LeaseSession):
                continue
            if not session.lost.is_set() and now < session.expires_at:
                raise BrokeExclusivity(
                    f"round {current.number} of a server without its data is active, and {process.machine} believes to "
                    f"be in round {joined.number} of its earlier life"
                )

    def _ended_early(self, lease: int, after_s: float) -> None:
        """The server ended a session early although its client is connected: the client must have ended it."""
        for process in self.processes.values():
            session = process.node._node_session.session
            if session is not None and session.lease == lease and not session.lost.is_set() and self.broken is None:
                self.broken = BrokeOutageTolerance(
                    f"the session of {process.machine} was ended {after_s:.2f} s after it was renewed, although it is "
                    f"connected and its time to live is {session.ttl_s:g} s"
                )

    def _check_release(self, process: SimProcess, began_at: float, paused_s: float) -> None:
        """Check that no node waits past its deadline, except a spare."""
        plan, now = self.plan, self.loop.time()
        allowed_s = plan.join_timeout_s + plan.confirm_timeout_s + WITHDRAW_S + SLACK_S
        allowed_s += process.paused_s - paused_s
        if now - began_at > allowed_s and self._spare_seen_at < began_at and self.broken is None:
            self.broken = BrokeRelease(
                f"{process.machine} was in next_rendezvous for {now - began_at:.1f} s, allowed were {allowed_s:.1f} s"
            )

    def is_told_too_slow(self, since: float) -> bool:
        """Whether a node was refused because the cell of a register is too slow for its time-outs."""
        return any(at >= since and "too slow" in str(error) for p in self.processes.values() for at, error in p.raised)

    def _told(self, process: SimProcess, cause: Cause) -> None:
        if process.joined is not None:
            process.causes.append((self.loop.time(), process.joined.number, cause))
        process.changed.set()

    def _told_closed(self, node: Node) -> None:
        if (told := node.view.mark) is not None:
            self.safety.told_closed(node.identity.id, told.config.incarnation)

    def _gone(self, process: SimProcess) -> None:
        process.is_over = True
        if self.processes.get(process.name) is process:
            del self.processes[process.name]

    def _emitted(self, machine: str, event: Event) -> None:
        self.note("event", machine, event)

    def end(self) -> None:
        """End the world after the verdict: all connections fail from now on."""
        self.server.is_up = False
        if self.wire is not None:
            self.wire.end()
        for process in (*self.dead, *self.processes.values()):
            process.backend.is_dead = True
        if self.server_backend is not None:
            self.server_backend.is_dead = True

    def in_background(self, coro: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Start a task that belongs to no machine."""
        return asyncio.create_task(coro)


def in_words(what: object) -> str:
    """The text of an event."""
    if isinstance(what, Event):
        return f"{type(what).__name__}: {what.text()}"
    if isinstance(what, Batch):
        keys = [("-" if c.item is None else "+") + c.key.removeprefix("/rallypoint/sim") for c in what.changes]
        return f"r{what.revision} {', '.join(keys[:4])}" + (" ..." if len(keys) > 4 else "")
    return what if isinstance(what, str) else type(what).__name__


def never_confirms(op: Op) -> bool:
    """Whether a request is a confirmation."""
    if not isinstance(op, Txn):
        return False
    return any(
        isinstance(step, Put) and "/nodes/" in step.key and b'"phase":"member"' in step.value for step in op.then
    )


async def _observe(node: Node) -> None:
    """What `is_closed()` does: look at the run, for a moment at most."""
    node.observe()
    with suppress(TimeoutError):
        async with asyncio.timeout(OBSERVE_S):
            await node.view.wait_synced()


def _bootstrap(addr: str) -> Callable[[int, int], Coroutine[Any, Any, tuple[str, int]]]:
    async def port(number: int, size: int) -> tuple[str, int]:
        return addr, 20_000 + number % 10_000

    return port
