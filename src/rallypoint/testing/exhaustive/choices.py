"""The choices in a state: pending messages, spontaneous events, and faults.

Their order matters only for a world without faults: it always takes the first choice and must reach a round
(`fair_choice`).
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.rendezvous.records import ClosedRecord, RoundPhase, RoundRecord, decode
from rallypoint.testing.checkers import BrokeAdmission, BrokeCompletion, BrokeFinality
from rallypoint.testing.exhaustive.automaton import LocalState
from rallypoint.testing.exhaustive.state import Choice, Proc, State
from rallypoint.testing.exhaustive.store_model import is_write
from rallypoint.testing.exhaustive.world import World

FAULTS = frozenset({"crash", "expire", "cut", "leave", "depart", "close", "reopen", "slow", "late", "unknown", "ghost"})


def choices(world: World, state: State) -> list[Choice]:
    """All possible next events; faults last."""
    pending = list(_pending(world, state))
    spontaneous = list(_spontaneous(world, state))
    timers = [index for _, index in sorted(_timers(world, state))]
    if not pending:
        spontaneous += [("tick", index) for index in timers]
    faults = list(_faults(world, state))
    if pending and state.budget.slow:
        faults += [("slow", index) for index in timers]
    return [*pending, *spontaneous, *faults]


def fair_choice(found: list[Choice]) -> Choice | None:
    """The next choice of a world without faults; None: it is quiescent."""
    return found[0] if found and found[0][0] not in FAULTS else None


def _pending(world: World, state: State) -> Iterator[Choice]:
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


def _spontaneous(world: World, state: State) -> Iterator[Choice]:
    """Sessions of dead processes end, losses are reported, callers join, ghosts arrive; without timers."""
    for index in range(len(state.procs)):
        local = world.local(state, index)
        if local is not None and local.status.lease and local.status.lease not in state.store.leases:
            yield ("lost", index)
    for lease in state.store.leases:
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
        yield ("arrive", owner, place)


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
    if status.lease and status.lease in state.store.leases:
        if budget.expire:
            yield ("expire", index, "expire", status.lease)
        if budget.cut:
            yield ("cut", index)
    if budget.leave and status.joined and not status.told and proc.joins < world.setup.joins:
        yield ("leave", index)
    if budget.depart and status.lease and "leave" in status.verbs:
        yield ("depart", index)


def _faults_of_a_coordinator(world: World, state: State, index: int, local: LocalState) -> Iterator[Choice]:
    """Only of the elected coordinator: faults of the others have no effect."""
    lease = local.status.lease
    leads = any(item.key == world.keys.coordinator and item.lease == lease for item in state.store.items)
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


# --- first and quiescent states ---------------------------------------------------------------------------------------


def beginning(world: World) -> State:
    """The first state: reached without faults from the initial state until `Setup.begin` holds."""
    state = world.initial()
    while not _has_begun(world, state):
        choice = fair_choice(choices(world, state))
        assert choice is not None, f"a world without faults never reaches {world.setup.begin!r}"
        state = world.take(state, choice)
    return state


def _has_begun(world: World, state: State) -> bool:
    keys, setup = world.keys, world.setup
    items = {item.key: item for item in state.store.items}
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
            return inside == min(setup.nodes, setup.max_nodes) and not any(_pending(world, state))
        case other:
            raise ValueError(f"no such beginning: {other!r}")


def check_quiescent(world: World, state: State) -> None:
    """Check that every node of a quiescent world is where it should be. Raises `Broke…` if not."""
    setup = world.setup
    items = {item.key: item for item in state.store.items}
    nodes = [(index, local) for index in range(setup.nodes) if (local := world.local(state, index)) is not None]
    waiting = [world.names[index] for index, local in nodes if local.status.is_calling]
    closed = items.get(world.keys.closed)
    if closed is not None and decode(ClosedRecord, closed).closed:
        if waiting:
            raise BrokeFinality(f"the run is closed and {', '.join(waiting)} were never told")
        return
    if any(local.status.told and state.procs[index].joins >= setup.joins for index, local in nodes):
        return  # a node that should join again has used up its joins
    inside = [local.status.joined[0] for _, local in nodes if local.status.joined and local.status.lease]
    up = len(inside) + len(waiting)
    if up < setup.min_nodes:
        return
    item = items.get(world.keys.round)
    record = decode(RoundRecord, item) if item is not None else None
    current = [number for number in inside if record is not None and number == record.number]
    if record is None or record.phase is not RoundPhase.ACTIVE or len(current) < setup.min_nodes:
        raise BrokeCompletion(f"{up} nodes are up in a quiescent world, and {len(current)} of them are in a round")
    if len(current) < min(up, setup.max_nodes):
        raise BrokeAdmission(f"{up} nodes are up in a quiescent world, and only {len(current)} are in the round")
