"""Which choices there are in a state: what is under way, what happens by itself, and what may go wrong.

The order matters to one reader: a world without faults takes the first choice, again and again, and has to come to a
round (`fair`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.rendezvous.records import ClosedRecord, RoundPhase, RoundRecord, decode
from rallypoint.testing.checkers import BrokeAdmission, BrokeCompletion, BrokeFinality
from rallypoint.testing.exhaustive.automaton import LocalState
from rallypoint.testing.exhaustive.server import is_write
from rallypoint.testing.exhaustive.values import Choice, Proc, State
from rallypoint.testing.exhaustive.world import World

FAULTS = frozenset({"crash", "expire", "cut", "leave", "depart", "close", "reopen", "slow", "late", "unknown", "ghost"})


def choices(world: World, state: State) -> list[Choice]:
    """Everything that may happen next; faults last."""
    under_way = list(_under_way(world, state))
    by_itself = list(_by_itself(world, state))
    timers = [index for _, index in sorted(_timers(world, state))]
    if not under_way:
        by_itself += [("tick", index) for index in timers]
    faults = list(_faults(world, state))
    if under_way and state.budget.slow:
        faults += [("slow", index) for index in timers]
    return [*under_way, *by_itself, *faults]


def fair(found: list[Choice]) -> Choice | None:
    """What a world without faults does next, of all choices; None: it has come to rest."""
    return found[0] if found and found[0][0] not in FAULTS else None


def _under_way(world: World, state: State) -> Iterator[Choice]:
    for index, proc in enumerate(state.procs):
        local = world.local(state, index)
        if local is None:
            continue
        executed = {place for place, _ in proc.answers}
        for place in range(len(local.pending)):
            yield ("answer" if place in executed else "do", index, place)
        for place, queue in enumerate(proc.queues):
            is_read = local.watches[place][1]
            if queue and is_read:
                yield ("deliver", index, place, 1)
            if len(queue) > 1 or (queue and not is_read):
                yield ("deliver", index, place, len(queue))


def _by_itself(world: World, state: State) -> Iterator[Choice]:
    """Sessions of the dead end, losses are told, agents join, ghosts appear; not timers."""
    for index in range(len(state.procs)):
        local = world.local(state, index)
        if local is not None and local.status.lease and local.status.lease not in state.server.leases:
            yield ("lost", index)
    for lease in state.server.leases:
        owner = world.owner_of_session(lease)
        if owner is not None:
            local = world.local(state, owner)
            if local is None or local.status.lease != lease:
                yield ("end", owner, lease)
    for index, proc in enumerate(state.procs):
        local = world.local(state, index)
        if local is None or "join" not in local.status.verbs or proc.joins >= world.setup.joins:
            continue
        if proc.joins == 0 or local.status.told:
            yield ("join", index)
    for place, (owner, _) in enumerate(state.ghosts):
        yield ("haunt", owner, place)


def _timers(world: World, state: State) -> Iterator[tuple[float, int]]:
    for index in range(len(state.procs)):
        local = world.local(state, index)
        if local is not None and local.timer_s is not None:
            yield local.timer_s, index


# --- faults -----------------------------------------------------------------------------------------------------------


def _faults(world: World, state: State) -> Iterator[Choice]:
    for index, proc in enumerate(state.procs):
        local = world.local(state, index)
        if local is None:
            continue
        if index < world.setup.nodes:
            yield from _faults_of_a_node(world, state, index, proc, local)
        elif index in world.coordinators:
            yield from _faults_of_a_coordinator(world, state, index, local)
        elif state.budget.close and "close" in local.status.verbs:
            yield ("close", index)
        elif state.budget.reopen and "reopen" in local.status.verbs:
            yield ("reopen", index)
        yield from _faults_of_writes(state, index, proc, local)


def _faults_of_a_node(world: World, state: State, index: int, proc: Proc, local: LocalState) -> Iterator[Choice]:
    budget, status = state.budget, local.status
    if not proc.joins:
        return
    if budget.crash:
        yield ("crash", index, "crash")
        yield from _deaths_with_a_ghost(state, index, local, "crash")
    if status.lease and status.lease in state.server.leases:
        if budget.expire:
            yield ("expire", index, "expire", status.lease)
        if budget.cut:
            yield ("cut", index)
    if budget.leave and status.joined and not status.told and proc.joins < world.setup.joins:
        yield ("leave", index)
    if budget.depart and status.lease and "leave" in status.verbs:
        yield ("depart", index)


def _faults_of_a_coordinator(world: World, state: State, index: int, local: LocalState) -> Iterator[Choice]:
    """Only of the one that leads: the others have nothing to lose."""
    lease = local.status.lease
    leads = any(item.key == world.keys.coordinator and item.lease == lease for item in state.server.items)
    if state.budget.take_over and leads:
        yield ("crash", index, "take_over")
        yield from _deaths_with_a_ghost(state, index, local, "take_over")
        yield ("expire", index, "take_over", lease)


def _deaths_with_a_ghost(state: State, index: int, local: LocalState, budget: str) -> Iterator[Choice]:
    if state.budget.ghost:
        for place, op in enumerate(local.pending):
            if is_write(op):
                yield ("crash", index, budget, place)


def _faults_of_writes(state: State, index: int, proc: Proc, local: LocalState) -> Iterator[Choice]:
    budget = state.budget
    executed = {place for place, _ in proc.answers}
    for place, op in enumerate(local.pending):
        if not is_write(op) or place in executed:
            continue
        if budget.late:
            yield ("late", index, place)
        if budget.unknown:
            yield ("unknown", index, place, True)
            yield ("unknown", index, place, False)
        if budget.ghost:
            yield ("ghost", index, place)


# --- beginning and rest -----------------------------------------------------------------------------------------------


def beginning(world: World) -> State:
    """The first state: as fair a world as it takes to come to where the choices begin."""
    state = world.initial()
    while not _has_begun(world, state):
        choice = fair(choices(world, state))
        assert choice is not None, f"a fair world never comes to {world.setup.begin!r}"
        state = world.take(state, choice)
    return state


def _has_begun(world: World, state: State) -> bool:
    keys, setup = world.keys, world.setup
    items = {item.key: item for item in state.server.items}
    item = items.get(keys.round)
    record = decode(RoundRecord, item) if item is not None else None
    match setup.begin:
        case "nothing":
            return True
        case "joined":
            return sum(key.startswith(keys.nodes) for key in items) == setup.nodes
        case "forming":
            return record is not None
        case "active":
            nodes = [world.local(state, index) for index in range(setup.nodes)]
            inside = sum(local is not None and local.status.joined is not None for local in nodes)
            return inside == min(setup.nodes, setup.max_nodes) and not any(_under_way(world, state))
        case other:
            raise ValueError(f"no such beginning: {other!r}")


def judge_rest(world: World, state: State) -> None:
    """A world that has come to rest without faults: is everybody where it should be? Raises `Broke…` if not."""
    setup = world.setup
    items = {item.key: item for item in state.server.items}
    nodes = [(index, local) for index in range(setup.nodes) if (local := world.local(state, index)) is not None]
    waiting = [world.names[index] for index, local in nodes if local.status.is_calling]
    closed = items.get(world.keys.closed)
    if closed is not None and decode(ClosedRecord, closed).closed:
        if waiting:
            raise BrokeFinality(f"the run is closed and {', '.join(waiting)} were never told")
        return
    if any(local.status.told and state.procs[index].joins >= setup.joins for index, local in nodes):
        return  # who should join again has used up its joins
    inside = [local.status.joined[0] for _, local in nodes if local.status.joined and local.status.lease]
    up = len(inside) + len(waiting)
    if up < setup.min_nodes:
        return
    item = items.get(world.keys.round)
    record = decode(RoundRecord, item) if item is not None else None
    current = [number for number in inside if record is not None and number == record.number]
    if record is None or record.phase is not RoundPhase.ACTIVE or len(current) < setup.min_nodes:
        raise BrokeCompletion(f"{up} nodes are up, nothing happens any more, and {len(current)} of them are in a round")
    if len(current) < min(up, setup.max_nodes):
        raise BrokeAdmission(f"{up} nodes are up, nothing happens any more, and only {len(current)} are in the round")
