"""How a rendezvous and a recovery are measured, for all sides in the same way; one sample a call.

Every sample has its own server, its own nodes and its own run, so that one sample leaves nothing behind for the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from rallypoint.bench import usage
from rallypoint.bench.node import run_node
from rallypoint.bench.node_pool import Action, DeadlinePassed, Event, NodeFailed, NodePool
from rallypoint.bench.plan import (
    COLD_START,
    DELAYED_SETTLE_S,
    LAST_ARRIVAL,
    LATE_NODE,
    LOSS_REJOIN,
    LOSS_TOLD,
    MOST_PROCESSES,
    SETTLED_CORES,
    SHARED_PROCESSES,
    Bench,
    Case,
    Side,
    least_settle_s,
    phase_s,
)
from rallypoint.bench.processes import ChildProcess, fork, kill_all, on_new_thread
from rallypoint.bench.rallypoint_side import run_url
from rallypoint.bench.shared_nodes import run_nodes
from rallypoint.bench.sides import Implementation, RunConfig

START_SIGNAL_S = 0.2
"""How far in the future the common start lies: every node must have received the command by then."""


class Setup:
    """A server with its nodes, for one sample."""

    def __init__(self, server: ChildProcess, port: int, pool: NodePool, case: Case) -> None:
        self.server = server
        self.port = port
        self.pool = pool
        self._limit_s = case.limit_s
        self._delayed_s = DELAYED_SETTLE_S if case.bench is Bench.TRIPS else 0.0

    def deadline(self) -> float:
        """The deadline of a step that begins now."""
        return time.monotonic() + self._limit_s

    def settle(self, nodes: int, repetition: int) -> None:
        """Wait until the server has noted all calls, and then a random part of a polling interval."""
        time.sleep(least_settle_s(nodes) + self._delayed_s)
        usage.wait_until_idle([self.server.pid, *self.pool.pids], SETTLED_CORES, self._limit_s)
        time.sleep(phase_s(nodes, repetition))

    def all_but_the_last_call(self, repetition: int) -> int:
        """Connect all nodes and have all but one call; the node that is left."""
        pool, (*others, last) = self.pool, self.pool.nodes
        pool.send(Action.CONNECT, pool.nodes)
        pool.wait_for(Event.CONNECTED, pool.nodes, self.deadline())
        pool.send(Action.JOIN, others)
        pool.wait_for(Event.CALLING, others, self.deadline())
        self.settle(len(pool.nodes), repetition)
        return last

    def first_round(self, nodes: Sequence[int]) -> None:
        """Put these nodes into a round. NodeFailed if that takes too long: then there is nothing to measure."""
        self.pool.send(Action.JOIN, nodes)
        try:
            self.pool.wait_for_world(nodes, self.deadline())
        except DeadlinePassed as error:
            raise NodeFailed(f"no first round in {self._limit_s:g} s ({error})") from error


@contextmanager
def started(side: Implementation, case: Case, nodes: int, min_nodes: int) -> Iterator[Setup]:
    """Start a server and nodes that have not joined yet; kill them all at the end. A round takes up to `nodes`."""
    server, port = side.start_server(nodes)
    try:
        config = RunConfig(f"bench-{port}", min_nodes, nodes, join_timeout_s=math.ceil(2 * case.limit_s))
        with NodePool(*_processes(side, port, config, one_each=_one_process_each(case))) as pool:
            setup = Setup(server, port, pool, case)
            pool.wait_for(Event.READY, pool.nodes, setup.deadline())
            yield setup
    except (DeadlinePassed, NodeFailed) as error:
        if server.has_ended():
            raise NodeFailed(f"the server ended by itself; {error}") from error
        raise
    finally:
        kill_all([server])


def _one_process_each(case: Case) -> bool:
    """Whether every node is a process. Always for competitors; never where costs are counted by node."""
    if case.bench is Bench.SCALE:
        return False
    return case.side is not Side.RALLYPOINT or case.nodes <= MOST_PROCESSES


def _processes(
    side: Implementation, port: int, config: RunConfig, one_each: bool
) -> tuple[list[tuple[int, ...]], Callable[[int], ChildProcess]]:
    """The nodes of each process, and a function that starts a process by its index."""
    count = config.max_nodes
    if one_each:
        hosted: list[tuple[int, ...]] = [(number,) for number in range(count)]
    else:
        hosted = [tuple(range(first, count, SHARED_PROCESSES)) for first in range(SHARED_PROCESSES)]

    def start(index: int) -> ChildProcess:
        own = msgspec.structs.replace(config, node=index)
        if one_each:
            return fork(on_new_thread(lambda sock: run_node(sock, index, side.client(port, own), count)))
        return fork(lambda sock: run_nodes(sock, hosted[index], run_url(port, config)))

    return hosted, start


def last_arrival(side: Implementation, case: Case, repetition: int) -> float:
    """Seconds from the last node's call, while all others wait, until the slowest node is released."""
    with started(side, case, case.nodes, case.nodes) as setup:
        pool, last = setup.pool, setup.all_but_the_last_call(repetition)
        pool.send(Action.JOIN, [last])
        return pool.wait_for_world(pool.nodes, setup.deadline()) - pool.called_at[last]


def cold_start(side: Implementation, case: Case, repetition: int) -> float:
    """Seconds from a common start, at which all nodes make their clients, connect and call, until the slowest is
    released."""
    with started(side, case, case.nodes, case.nodes) as setup:
        start_at = time.monotonic() + START_SIGNAL_S + 0.001 * case.nodes
        setup.pool.send(Action.JOIN, setup.pool.nodes, at=start_at)
        return setup.pool.wait_for_world(setup.pool.nodes, setup.deadline()) - start_at


def loss_told(side: Implementation, case: Case, repetition: int) -> float:
    """Seconds from the kill of a node until all others are in a round; they join again when they are told to."""
    return _loss(side, case, repetition, Action.FOLLOW)


def loss_rejoin(side: Implementation, case: Case, repetition: int) -> float:
    """As above, but the others join again at the moment of the kill, as if their workers had failed with the node's."""
    return _loss(side, case, repetition, Action.JOIN)


def _loss(side: Implementation, case: Case, repetition: int, action: Action) -> float:
    with started(side, case, case.nodes, max(1, case.nodes - 1)) as setup:
        pool = setup.pool
        setup.first_round(pool.nodes)
        *survivors, victim = pool.nodes
        if action is Action.FOLLOW:
            pool.send(action, survivors)
        setup.settle(case.nodes, repetition)
        killed_at = pool.kill(victim)
        if action is Action.JOIN:
            pool.send(action, survivors)
        return pool.wait_for_world(survivors, setup.deadline()) - killed_at


def late_node(side: Implementation, case: Case, repetition: int) -> float:
    """Seconds from the call of one more node, while the others are in a round, until all are in one."""
    with started(side, case, case.nodes + 1, case.nodes) as setup:
        pool, (*others, late) = setup.pool, setup.pool.nodes
        pool.send(Action.CONNECT, [late])
        pool.wait_for(Event.CONNECTED, [late], setup.deadline())
        setup.first_round(others)
        pool.send(Action.FOLLOW, others)
        setup.settle(case.nodes, repetition)
        pool.send(Action.JOIN, [late])
        return pool.wait_for_world(pool.nodes, setup.deadline()) - pool.called_at[late]


TIMED: dict[str, Callable[[Implementation, Case, int], float]] = {
    LAST_ARRIVAL: last_arrival,
    COLD_START: cold_start,
    LOSS_TOLD: loss_told,
    LOSS_REJOIN: loss_rejoin,
    LATE_NODE: late_node,
}
