"""How a rendezvous and a recovery are measured. The same conductor for every side; one sample a call.

Every sample has its own server, its own nodes and its own run, so that nothing of one is left when the next begins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from rallypoint.bench import usage
from rallypoint.bench.crew import Crew, Do, NodeFailed, NoneInTime, What
from rallypoint.bench.driver import be_nodes
from rallypoint.bench.helper import Helper, end_all, fork, with_a_stack_of_its_own
from rallypoint.bench.node import be_node
from rallypoint.bench.plan import (
    CALM_CORES,
    DRIVERS,
    LAST_ARRIVAL,
    LATE_NODE,
    LOSS_NOTICED,
    LOSS_TOLD,
    MOST_PROCESSES,
    TOGETHER,
    TRIPS_REST_S,
    Bench,
    Case,
    Side,
    least_settle_s,
    phase_s,
)
from rallypoint.bench.rallypoint_side import run_url
from rallypoint.bench.sides import Contender, Sizes

START_SIGNAL_S = 0.2
"""How far ahead the instant lies at which all begin: every node has to have heard of it."""


class Stage:
    """A server with its nodes, for one sample."""

    def __init__(self, server: Helper, port: int, crew: Crew, limit_s: float, rest_s: float = 0.0) -> None:
        self.server = server
        self.port = port
        self.crew = crew
        self._limit_s = limit_s
        self._rest_s = rest_s

    def deadline(self) -> float:
        """Of something that begins now."""
        return time.monotonic() + self._limit_s

    def settle(self, nodes: int, repetition: int) -> None:
        """Give the nodes time until the server has noted what they want, and a random part of a polling interval."""
        time.sleep(least_settle_s(nodes) + self._rest_s)
        usage.wait_calm([self.server.pid, *self.crew.pids], CALM_CORES, self._limit_s)
        time.sleep(phase_s(nodes, repetition))

    def all_but_the_last_wait(self, repetition: int) -> int:
        """Connect all nodes, and have all but one call and wait; the one that is left."""
        crew, (*others, last) = self.crew, self.crew.nodes
        crew.tell(Do.CONNECT, crew.nodes)
        crew.wait(What.CONNECTED, crew.nodes, self.deadline())
        crew.tell(Do.JOIN, others)
        crew.wait(What.INSIDE, others, self.deadline())
        self.settle(len(crew.nodes), repetition)
        return last

    def first_round(self, nodes: Sequence[int]) -> None:
        """Put these nodes into a round. NodeFailed if that takes too long: then there is nothing to measure."""
        self.crew.tell(Do.JOIN, nodes)
        try:
            self.crew.gather(nodes, self.deadline())
        except NoneInTime as error:
            raise NodeFailed(f"no first round in {self._limit_s:g} s ({error})") from error


@contextmanager
def stage(side: Contender, case: Case, nodes: int, least: int) -> Iterator[Stage]:
    """Start a server and nodes that have not done anything yet; end them all. `nodes` is also the most of a round."""
    server, port = side.start_server(nodes)
    try:
        sizes = Sizes(f"bench-{port}", least, nodes, join_timeout_s=math.ceil(2 * case.limit_s))
        with Crew(*_processes(side, port, sizes, own_process=_is_process(case))) as crew:
            rest_s = TRIPS_REST_S if case.bench is Bench.TRIPS else 0.0
            there = Stage(server, port, crew, case.limit_s, rest_s)
            crew.wait(What.READY, crew.nodes, there.deadline())
            yield there
    except (NoneInTime, NodeFailed) as error:
        if server.has_ended():
            raise NodeFailed(f"the server ended by itself; {error}") from error
        raise
    finally:
        end_all([server])


def _is_process(case: Case) -> bool:
    """Whether every node is a process. Competitors have no other way; what is counted by node is counted in one way."""
    if case.bench is Bench.SCALE:
        return False
    return case.side is not Side.RALLYPOINT or case.nodes <= MOST_PROCESSES


def _processes(
    side: Contender, port: int, sizes: Sizes, own_process: bool
) -> tuple[list[tuple[int, ...]], Callable[[int], Helper]]:
    """Which nodes share a process, and what starts one."""
    count = sizes.most
    if own_process:
        hosted: list[tuple[int, ...]] = [(number,) for number in range(count)]
    else:
        hosted = [tuple(range(first, count, DRIVERS)) for first in range(DRIVERS)]

    def start(number: int) -> Helper:
        own = msgspec.structs.replace(sizes, number=number)
        if own_process:
            return fork(with_a_stack_of_its_own(lambda sock: be_node(sock, number, side.client(port, own), count)))
        return fork(lambda sock: be_nodes(sock, hosted[number], run_url(port, sizes)))

    return hosted, start


def last_arrival(side: Contender, case: Case, repetition: int) -> float:
    """Seconds from the last node's call, made when all others are waiting, until the slowest node has its place."""
    with stage(side, case, case.nodes, case.nodes) as there:
        crew, last = there.crew, there.all_but_the_last_wait(repetition)
        crew.tell(Do.JOIN, [last])
        return crew.gather(crew.nodes, there.deadline()) - crew.called_at[last]


def together(side: Contender, case: Case, repetition: int) -> float:
    """Seconds from a start signal, upon which all make their clients, connect and call, until the slowest is placed."""
    with stage(side, case, case.nodes, case.nodes) as there:
        start_at = time.monotonic() + START_SIGNAL_S + 0.001 * case.nodes
        there.crew.tell(Do.JOIN, there.crew.nodes, at=start_at)
        return there.crew.gather(there.crew.nodes, there.deadline()) - start_at


def loss_told(side: Contender, case: Case, repetition: int) -> float:
    """Seconds from the kill of a node until all others are in a round; they join again when they are told to."""
    return _loss(side, case, repetition, Do.FOLLOW)


def loss_noticed(side: Contender, case: Case, repetition: int) -> float:
    """As above, but the others join again at once, as if their workers had failed with the node's."""
    return _loss(side, case, repetition, Do.JOIN)


def _loss(side: Contender, case: Case, repetition: int, do: Do) -> float:
    with stage(side, case, case.nodes, max(1, case.nodes - 1)) as there:
        crew = there.crew
        there.first_round(crew.nodes)
        *survivors, victim = crew.nodes
        if do is Do.FOLLOW:
            crew.tell(do, survivors)
        there.settle(case.nodes, repetition)
        killed_at = crew.kill(victim)
        if do is Do.JOIN:
            crew.tell(do, survivors)
        return crew.gather(survivors, there.deadline()) - killed_at


def late_node(side: Contender, case: Case, repetition: int) -> float:
    """Seconds from the call of one more node, with a round of all others under way, until they are all in one."""
    with stage(side, case, case.nodes + 1, case.nodes) as there:
        crew, (*others, late) = there.crew, there.crew.nodes
        crew.tell(Do.CONNECT, [late])
        crew.wait(What.CONNECTED, [late], there.deadline())
        there.first_round(others)
        crew.tell(Do.FOLLOW, others)
        there.settle(case.nodes, repetition)
        crew.tell(Do.JOIN, [late])
        return crew.gather(crew.nodes, there.deadline()) - crew.called_at[late]


TIMED: dict[str, Callable[[Contender, Case, int], float]] = {
    LAST_ARRIVAL: last_arrival,
    TOGETHER: together,
    LOSS_TOLD: loss_told,
    LOSS_NOTICED: loss_noticed,
    LATE_NODE: late_node,
}
