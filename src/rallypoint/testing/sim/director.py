"""The director of a world: injects the plan's faults, heals, and then checks liveness.

The bounds of the second phase are generous sums of the settings involved: they detect events that never happen, or
happen a lease too late; they do not measure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rallypoint.errors import BackendError, RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from rallypoint.kv.types import Add
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.records import NodePhase, RoundPhase
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.server.clients import MASS_SESSIONS
from rallypoint.testing.checkers import (
    Broke,
    BrokeAdmission,
    BrokeCompletion,
    BrokeDetection,
    BrokeFinality,
    BrokeOutageTolerance,
    BrokeRelease,
)
from rallypoint.testing.sim.network import LinkConditions
from rallypoint.testing.sim.plan import Action, Fault
from rallypoint.testing.sim.wired import WiredServer
from rallypoint.testing.sim.world import SLACK_S, WITHDRAW_S, SimProcess, SimWorld, never_confirms

LOOK_EVERY_S = 0.25
REGISTER_S = 0.5
"""The additional time for a poll of a cell and races for it."""
NOT_CONNECTED = 2
"""At most this many nodes have a session but temporarily no connection."""
COUNTED_S = 2.0
"""How long a server restart waits for an `add`."""
KEPT_S = 0.01
"""An upper bound of the time until it is durable and answered."""
LATE_TTLS = 2
"""The longest delay of a request, in times to live."""


class _Refused(Exception):
    """A node was refused because the cell is too slow for the time-outs of this world."""


class Director:
    """Runs one world from start to end."""

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._plan = world.plan
        self._loop = world.loop
        self._healing: list[asyncio.Task[object]] = []
        self._healed_at = 0.0
        self.faults = 0

    async def run(self) -> None:
        """Raises the error of the first broken guarantee."""
        plan = self._plan
        starts = [(index * plan.start_within_s / plan.nodes, f"n{index:02d}") for index in range(plan.nodes)]
        script: list[tuple[float, int, Callable[[], None]]] = [
            (at, index, lambda name=name: self._start(name))  # type: ignore[misc]
            for index, (at, name) in enumerate(starts)
        ]
        script += [
            (action.at_s, 1000 + index, lambda action=action: self._happen(action))  # type: ignore[misc]
            for index, action in enumerate(plan.actions)
        ]
        for at, _, act in sorted(script, key=lambda entry: entry[:2]):
            await self._until(at)
            act()
        await self._until(plan.faults_end_at_s)
        await self._heal()
        with suppress(_Refused):  # no round is guaranteed in such a world
            await self._live_on()
        self._raise_if_broken()

    async def _live_on(self) -> None:
        """Check liveness after the faults."""
        plan = self._plan
        await self._complete("after the faults")
        if plan.thorough:
            # Delayed requests may renew the lease of a process that dies now: that is not a late detection.
            await asyncio.sleep(LATE_TTLS * plan.ttl_s)
            await self._detect()
            await self._admit()
            await self._tolerate_outage()
            await self._release()

    async def _until(self, at: float) -> None:
        while self._loop.time() < at:
            await asyncio.sleep(min(LOOK_EVERY_S, at - self._loop.time()))
            self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self._world.broken is not None:
            raise self._world.broken

    def _start(self, name: str) -> None:
        if name not in self._world.processes:
            self._world.start(name)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _happen(self, action: Action) -> None:
        self.faults += 1
        world = self._world
        pool = sorted(world.processes)
        process = world.processes[pool[action.target % len(pool)]] if pool else None
        decides = action.fault is Fault.LATE and action.target % 2
        if decides or action.fault in (Fault.KILL_COORDINATOR, Fault.PAUSE_COORDINATOR):
            process = world.coordinator() or process
        world.note("fault", process.machine if process else "-", f"{action.fault.name} for {action.length_s:.2f} s")
        match action.fault:
            case Fault.SERVER_RESTART:
                self._spawn(self._restart_server(action, with_data=True))
            case Fault.SERVER_WIPE:
                self._spawn(self._restart_server(action, with_data=False))
            case Fault.SERVER_CUT if world.wire is not None and action.target % 3 == 0:
                world.wire.reset_all()
            case Fault.SERVER_CUT:
                for each in list(world.processes.values()):
                    self._spawn(
                        self._set_conditions(each, LinkConditions(to_server=False, from_server=False), action.length_s)
                    )
            case Fault.CLOSE:
                self._spawn(self._operate(lambda operator: operator.close("a fault")))
            case Fault.CLOSE_FORMING:
                self._spawn(self._close_while_forming(action))
            case Fault.REOPEN:
                self._spawn(self._operate(lambda operator: operator.reopen("a fault")))
            case Fault.LEASE_END:
                world.end_run_lease()
            case Fault.KILL_COORDINATOR if world.wire is not None:
                self._spawn(world.wire.kill_coordinator(action.target % 7))
            case Fault.PAUSE_COORDINATOR if world.wire is not None:
                is_cut = action.target % 3 == 0
                self._spawn(world.wire.pause(action.length_s, action.target % 7, is_cut))
            case Fault.CLOCK if world.wire is not None:
                world.wire.connect_foreign_client(action.target)
            case _ if process is not None:
                self._happen_to(process, action)

    def _happen_to(self, process: SimProcess, action: Action) -> None:
        world, length_s = self._world, action.length_s
        slowest = self._plan.slowest_s
        match action.fault:
            case Fault.CRASH:
                world.crash(process)
                self._spawn(self._later(length_s, lambda: self._start(process.name)))
            case Fault.KILL_COORDINATOR:
                self._spawn(self._kill_mid_write(process, action.target % 7, length_s))
            case Fault.PAUSE:
                self._spawn(self._pause(process, length_s))
            case Fault.PAUSE_COORDINATOR:
                self._spawn(self._pause_mid_write(process, action.target % 7, length_s))
            case Fault.CUT:
                self._spawn(self._set_conditions(process, LinkConditions(to_server=False, from_server=False), length_s))
            case Fault.CUT_UP:
                self._spawn(self._set_conditions(process, LinkConditions(to_server=False), length_s))
            case Fault.CUT_DOWN if action.target % 2:
                self._spawn(self._set_conditions(process, LinkConditions(watches=False), length_s))
            case Fault.CUT_DOWN:
                self._spawn(self._set_conditions(process, LinkConditions(from_server=False), length_s))
            case Fault.SLOW:
                slow = LinkConditions(delay_s=(slowest, min(1.0, slowest * 100)))
                self._spawn(self._set_conditions(process, slow, length_s))
            case Fault.LOSSY:
                late_s = LATE_TTLS * self._plan.ttl_s
                lossy = LinkConditions(delay_s=(0.0002, slowest), lose=0.1, repeat=0.3, late=0.1, late_s=late_s)
                self._spawn(self._set_conditions(process, lossy, length_s))
            case Fault.LATE:
                late = LinkConditions(delay_s=(0.0002, slowest), late=0.3, late_s=LATE_TTLS * self._plan.ttl_s)
                self._spawn(self._set_conditions(process, late, length_s))
            case Fault.RESET:
                process.backend.reset()
            case Fault.SESSION_END:
                self._spawn(self._end_session_while_forming(process, action))
            case Fault.MUTE:
                process.backend.swallow = never_confirms
                self._spawn(self._later(length_s, lambda: setattr(process.backend, "swallow", None)))
            case Fault.LEAVE:
                process.wants = "leave"
                process.changed.set()
            case Fault.REJOIN:
                process.changed.set()
            case Fault.DRAIN:
                self._spawn(self._operate(lambda operator: operator.drain(process.name, "a fault")))
                self._spawn(self._later(length_s, lambda: self._start(process.name)))
            case _:
                pass  # jumps of wall clocks have no effect

    def _spawn(self, coro: object) -> None:
        self._healing.append(self._world.in_background(coro))  # type: ignore[arg-type]

    async def _later(self, after_s: float, act: Callable[[], None]) -> None:
        await asyncio.sleep(after_s)
        act()

    async def _pause(self, process: SimProcess, length_s: float) -> None:
        self._loop.freeze(process.machine)
        process.paused_s += length_s
        await asyncio.sleep(length_s)
        if not process.is_over:
            self._loop.thaw(process.machine)
            self._world.note("thaw", process.machine, "")

    async def _set_conditions(self, process: SimProcess, conditions: LinkConditions, length_s: float) -> None:
        process.backend.conditions = conditions
        await asyncio.sleep(length_s)
        process.backend.conditions = self._world._fair()
        process.backend.reset()

    async def _kill_mid_write(self, process: SimProcess, writes: int, then_s: float) -> None:
        await self._limit_requests(process, writes)
        self._world.crash(process)
        await self._later(then_s, lambda: self._start(process.name))

    async def _pause_mid_write(self, process: SimProcess, writes: int, length_s: float) -> None:
        await self._limit_requests(process, writes)
        if not process.is_over:
            await self._pause(process, length_s)
        process.backend.conditions = self._world._fair()

    async def _limit_requests(self, process: SimProcess, writes: int) -> None:
        """Wait until the process has sent this many more requests, some of which arrive after its death."""
        backend, plan = process.backend, self._plan
        backend.left_to_send = writes
        backend.has_sent.clear()
        backend.conditions = LinkConditions(delay_s=(0.0002, plan.slowest_s), late=0.5, late_s=2 * plan.ttl_s)
        if writes:
            try:
                async with asyncio.timeout(plan.ttl_s):
                    await backend.has_sent.wait()
            except TimeoutError:
                pass  # it had nothing to send

    async def _restart_server(self, action: Action, *, with_data: bool) -> None:
        world, down_s = self._world, action.length_s / 3
        if action.target % 2:
            await self._forming(action)
            if world.wire is not None and world.wire.data is not None and action.target % 4 == 1:
                await self._counting(world.wire, action)
        if not with_data and action.target % 11 < 2:
            await self._close_and_lose_host(action)
        if not world.server.is_up:
            return
        if world.wire is not None and action.target % 3 == 0:
            await world.wire.stop()
        else:
            world.server.crash()
        if world.server_backend is not None:
            world.server_backend.is_dead = True
            self._loop.freeze(f"server#{world._coordinator_lives}")
        await asyncio.sleep(min(down_s, 3.0))
        if not with_data:
            world.safety.wiped(is_told=world.wire is not None)
        world.server.restart(with_data)
        world.note("server", "-", "up with its data" if with_data else "up with nothing")
        if world.wire is not None:
            return
        for process in list(world.processes.values()):
            process.backend.reset()
        if world.plan.server_coordinator:
            world.start_coordinator()

    async def _close_and_lose_host(self, action: Action) -> None:
        """The run is closed before the server goes, and some nodes may be told; a node goes with it, as its host."""
        world = self._world
        await self._operate(lambda operator: operator.close("its work is done"), tries=1)
        await asyncio.sleep(self._plan.slowest_s * (action.target % 20) / 10)
        pool = sorted(world.processes)
        if action.target % 2 and pool:
            host = world.processes[pool[action.target % len(pool)]]
            world.crash(host)
            self._spawn(self._later(action.length_s, lambda: self._start(host.name)))

    async def _forming(self, action: Action) -> None:
        """Wait until a random moment between the decision of the next attempt and its last confirmation."""
        self._world.forming.clear()
        try:
            async with asyncio.timeout(action.length_s):
                await self._world.forming.wait()
        except TimeoutError:
            pass  # no round forms: any moment is fine
        await asyncio.sleep(self._plan.slowest_s * (action.target % 50) / 10)

    async def _counting(self, wire: WiredServer, action: Action) -> None:
        """Wait until a random moment after an `add` was executed, perhaps before it is answered."""
        executed, until = wire.running.engine_host.executed, self._loop.time() + COUNTED_S
        before = executed[Add]
        while executed[Add] == before and self._loop.time() < until:  # noqa: ASYNC110 - of virtual time
            await asyncio.sleep(KEPT_S / 10)
        await asyncio.sleep(KEPT_S * (action.target % 50) / 50)

    async def _end_session_while_forming(self, process: SimProcess, action: Action) -> None:
        await self._forming(action)
        self._world.end_session(process)

    async def _close_while_forming(self, action: Action) -> None:
        await self._forming(action)
        await self._operate(lambda operator: operator.close("a fault"))
        if action.target % 3:
            await self._operate(lambda operator: operator.reopen("a fault"))

    async def _operate(self, act: Callable[[RunConfig], Awaitable[object]], tries: int = 5) -> None:
        for _ in range(tries):
            try:
                async with self._world.entry() as operator:
                    await act(operator)
                return
            except BackendError:
                await asyncio.sleep(0.5)
            except RendezvousError:
                return

    # --- the second phase ---------------------------------------------------------------------------------------------

    async def _heal(self) -> None:
        """End all faults, start a process on every machine, reopen the run."""
        world = self._world
        await asyncio.gather(*self._healing)
        self._healing.clear()
        world.is_calm = True
        for index in range(self._plan.nodes):
            self._start(f"n{index:02d}")
        for process in world.processes.values():
            process.wants = ""
        await self._operate(lambda operator: operator.reopen("healed"), tries=100)  # a disk may be out for longer
        self._healed_at = self._loop.time()
        world.note("heal", "-", "")

    def _settled(self) -> str | None:
        """Why the world has not settled yet; None: it has."""
        world, plan = self._world, self._plan
        picture = world.safety.picture
        alive = {p.node.identity.id: p for p in world.processes.values()}
        size = min(len(alive), plan.max_nodes) // plan.step * plan.step
        if size < plan.min_nodes:
            return None
        if picture.round is None or picture.round.phase is not RoundPhase.ACTIVE:
            return f"no round is active: {picture.waiting.reason if picture.waiting else 'no reason is known'}"
        number = picture.round.number
        inside = [
            p
            for node_id, p in alive.items()
            if (record := picture.nodes.get(node_id)) is not None
            and record.phase is NodePhase.MEMBER
            and record.round == number
            and p.joined is not None
            and p.joined.number == number
            and (session := p.node._node_session.session) is not None
            and not session.lost.is_set()  # else it has yet to join again
        ]
        if len(inside) != size:
            reason = picture.waiting.reason if picture.waiting else "no reason is known"
            return f"{len(inside)} of {size} are in round {number}: {reason}"
        return None

    def _bound_s(self) -> float:
        plan = self._plan
        holds_s = 120.0 if plan.hold_back_losses else 0.0
        return (
            4 * plan.ttl_s
            + 3 * plan.last_call_timeout_s
            + 4 * plan.confirm_timeout_s
            + 2 * plan.admission_window_s
            + plan.join_timeout_s
            + plan.reopen_after_s
            + holds_s
            + 30.0
        )

    async def _complete(self, when: str, broke: type[Broke] = BrokeCompletion) -> None:
        bound_s = self._bound_s()
        deadline = self._loop.time() + bound_s
        while (why := self._settled()) is not None:
            self._raise_if_broken()
            self._stop_if_refused()
            if self._world.wire is not None and self._world.safety.picture.is_closed:
                # A node that returned only now told a server without data that the run had been closed.
                await self._operate(lambda operator: operator.reopen("healed again"))
            if self._loop.time() > deadline:
                raise broke(f"{when}: not settled within {bound_s:.0f} s: {why}")
            await asyncio.sleep(LOOK_EVERY_S)

    def _stop_if_refused(self) -> None:
        """End the world if a node was refused because the cell of a register is too slow, where that is allowed."""
        if self._plan.may_be_too_slow and self._world.is_told_too_slow(self._healed_at):
            raise _Refused

    def _members(self) -> list[SimProcess]:
        current = self._world.safety.picture.round
        number = current.number if current else 0
        return [p for p in self._world.processes.values() if p.joined is not None and p.joined.number == number]

    async def _detect(self) -> None:
        """A member dies: every survivor is notified in time, and the round re-forms."""
        world, plan = self._world, self._plan
        members = self._members()
        if len(members) < 2:
            return
        victim = members[self._plan.seed % len(members)]
        number = victim.joined.number if victim.joined else 0
        died_at = self._loop.time()
        is_seen = plan.wired and plan.seed % 3 > 0  # its machine lives, and closes its connection
        world.crash(victim, is_machine=not is_seen)
        data = world.wire.data if world.wire else None
        is_prompt = is_seen and not (data and data.may_fail)
        within_s = plan.disconnect_grace_s + 0.5 if is_prompt else plan.ttl_s + 1.0
        if plan.register:
            within_s += REGISTER_S
        await asyncio.sleep(within_s + 20 * plan.slowest_s)
        anew_s = plan.ttl_s + 1.0 + 20 * plan.slowest_s
        while data and died_at <= data.begun_anew_at and self._loop.time() < data.begun_anew_at + anew_s:  # noqa: ASYNC110 - of virtual time
            await asyncio.sleep(LOOK_EVERY_S)  # a failed disk has extended the victim's session, too
        self._stop_if_refused()
        for process in members:
            if process is victim or process.is_over:
                continue
            notified = any(at >= died_at and of == number for at, of, _ in process.causes)
            moved = process.joined is None or process.joined.number != number
            if not notified and not moved:
                raise BrokeDetection(f"{process.machine} was not told that {victim.machine} died {within_s} s ago")
        await self._complete("after a crash")

    async def _admit(self) -> None:
        """A machine returns: if there is room, it is admitted within one further round."""
        world, plan = self._world, self._plan
        missing = [f"n{i:02d}" for i in range(plan.nodes) if f"n{i:02d}" not in world.processes]
        if not missing:
            return
        before = world.safety.picture.round
        late = world.start(missing[0])
        await self._complete("after a late node came", BrokeAdmission)
        size = min(len(world.processes), plan.max_nodes) // plan.step * plan.step
        if len(world.processes) <= size and late.joined is None:
            raise BrokeAdmission(f"{late.machine} was not admitted although there is room")
        after = world.safety.picture.round
        if before and after and plan.hold_back_losses == 0 and after.number > before.number + 2:
            raise BrokeAdmission(f"it took from round {before.number} to {after.number} to admit one node")

    async def _tolerate_outage(self) -> None:
        """An outage of the control plane that is shorter than a lease disturbs no member."""
        world, plan = self._world, self._plan
        await asyncio.sleep(plan.ttl_s / 2)  # the last node has renewed its session: granting it may have taken long
        before = {p.machine: (p.joined.number if p.joined else 0, len(p.causes)) for p in world.processes.values()}
        if world.wire is not None and plan.seed % 2:
            world.wire.crash(is_machine=False)
            await asyncio.sleep(plan.ttl_s * 0.15)  # the pauses between connection attempts grow to twice this time
            world.wire.restart(with_data=True)
        else:
            length_s = plan.ttl_s * 0.4
            if plan.register:  # a third of a lease may have passed, a call may hang, and all nodes renew in turn
                length_s = min(length_s, plan.ttl_s / 2 - 4 * plan.slowest_s * len(world.processes))
            if plan.wired:  # a third of a lease may have passed, and a new connection takes several round trips
                length_s = min(length_s, plan.ttl_s * 0.6 - 12 * plan.slowest_s)
            if world.wire is not None and len(world.safety.picture.nodes) > MASS_SESSIONS + NOT_CONNECTED:
                world.wire.reset_all()  # so many at once that the server blames the network
                await asyncio.sleep(plan.slowest_s)
                length_s = min(length_s, plan.ttl_s * 0.2)
            for process in world.processes.values():
                process.backend.conditions = LinkConditions(to_server=False, from_server=False)
            await asyncio.sleep(max(length_s, 0.0))
            for process in world.processes.values():
                process.backend.conditions = world._fair()
                process.backend.reset()
        await asyncio.sleep(plan.ttl_s)
        self._stop_if_refused()
        for process in world.processes.values():
            number, causes = before.get(process.machine, (0, 0))
            if number and ((process.joined.number if process.joined else 0) != number or len(process.causes) != causes):
                cause = process.causes[-1][2] if process.causes else Cause.ROUND_OVER
                raise BrokeOutageTolerance(f"{process.machine} was disturbed in round {number}: {cause.value}")

    async def _release(self) -> None:
        """With too few nodes left, no node waits for ever: the run is closed, or the join times out."""
        world, plan = self._world, self._plan
        left = sorted(world.processes)[: plan.min_nodes - 1]
        for name in sorted(world.processes.keys() - left):
            world.crash(world.processes[name])
        waiting = [world.processes[name] for name in left]
        await asyncio.sleep(2 * plan.ttl_s + 1.0 + 20 * plan.slowest_s)
        self._raise_if_broken()
        since = self._loop.time()
        if plan.seed % 2:
            await self._operate(lambda operator: operator.close("too few are left"))
            await asyncio.sleep(SLACK_S + 20 * plan.slowest_s)
            for process in waiting:
                # With reopen_after 0 a node whose join timed out just then may have reopened the run.
                expected = RendezvousClosedError if plan.reopen_after_s > 0 else RendezvousError
                notified = any(at >= since and isinstance(error, expected) for at, error in process.raised)
                if not notified and not process.is_over:
                    raise BrokeFinality(f"{process.machine} was not told that the run is closed")
            return
        await asyncio.sleep(plan.join_timeout_s + plan.confirm_timeout_s + 2 * WITHDRAW_S + SLACK_S)
        for process in waiting:
            errors = [error for at, error in process.raised if at >= since]
            if not errors:
                raise BrokeRelease(f"{process.machine} still waits although too few nodes are left")
            if not any(isinstance(error, RendezvousTimeoutError) and "of at least" in str(error) for error in errors):
                raise BrokeRelease(f"{process.machine} was not told who is missing: {errors[0]}")
