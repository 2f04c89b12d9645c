"""The node pool with real node processes and a scripted rendezvous: no server, no network."""

import os
import resource
import socket
import sys
import time

import pytest

from rallypoint.bench.node import run_node
from rallypoint.bench.node_pool import Action, Command, DeadlinePassed, Event, NodeFailed, NodePool, Report
from rallypoint.bench.processes import MessageSocket, PeerClosed, copy_shared_memory, fork
from rallypoint.bench.sides import Place
from tests.patience import in_thread, result_of

PATIENCE_S = 30.0


class ScriptedClient:
    """Returns the given places, one after the other."""

    def __init__(self, *places: Place | str) -> None:
        self._places = list(places)

    def warm_up(self) -> None: ...

    def create(self) -> None: ...

    def connect(self) -> None: ...

    def wait_changed(self) -> None: ...

    def join(self) -> Place:
        place = self._places.pop(0)
        if isinstance(place, str):
            raise RuntimeError(place)
        return place


def pool_of(*clients: ScriptedClient) -> NodePool:
    hosted = [(number,) for number in range(len(clients))]
    return NodePool(hosted, lambda number: fork(lambda sock: run_node(sock, number, clients[number], len(clients))))


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_nodes_of_one_world_are_awaited():
    with pool_of(ScriptedClient(Place(1, 2)), ScriptedClient(Place(0, 2))) as pool:
        start_at = time.monotonic()
        pool.send(Action.JOIN, pool.nodes)
        released_at = pool.wait_for_world(pool.nodes, soon())
    assert start_at < released_at < time.monotonic()
    assert all(start_at < called_at < released_at for called_at in pool.called_at.values())
    assert pool.called_at.keys() == {0, 1}


def test_node_of_a_smaller_world_follows_it_into_the_next():
    with pool_of(ScriptedClient(Place(0, 1), Place(1, 2)), ScriptedClient(Place(0, 2))) as pool:
        pool.send(Action.JOIN, pool.nodes)
        pool.wait_for_world(pool.nodes, soon())


def test_nodes_with_the_same_rank_are_no_world():
    with pool_of(ScriptedClient(Place(0, 2)), ScriptedClient(Place(0, 2))) as pool:
        pool.send(Action.JOIN, pool.nodes)
        pool.wait_for(Event.CALLING, pool.nodes, soon())
        with pytest.raises(DeadlinePassed) as raised:
            pool.wait_for_world(pool.nodes, time.monotonic() + 2.0)
    assert str(raised.value) == "2 of 2 nodes released"


def test_error_of_a_node_is_raised():
    with pool_of(ScriptedClient("no such run")) as pool:
        pool.send(Action.JOIN, pool.nodes)
        with pytest.raises(NodeFailed) as raised:
            pool.wait_for_world(pool.nodes, soon())
    assert str(raised.value) == "node 0: RuntimeError: no such run"


def test_process_that_ends_is_noticed():
    def end(sock: socket.socket) -> None: ...

    with NodePool([(0,)], lambda _: fork(end)) as pool, pytest.raises(NodeFailed) as raised:
        pool.wait_for(Event.CONNECTED, [0], soon())
    assert str(raised.value) == "the process of node 0 ended"


def test_killed_node_is_not_waited_for():
    with pool_of(ScriptedClient(), ScriptedClient(Place(0, 1))) as pool:
        pool.kill(0)
        pool.send(Action.JOIN, [1])
        pool.wait_for_world([1], soon())


def test_command_waits_for_its_instant():
    with pool_of(ScriptedClient(Place(0, 1))) as pool:
        at = time.monotonic() + 0.3
        pool.send(Action.JOIN, pool.nodes, at=at)
        assert pool.wait_for_world(pool.nodes, soon()) >= at


def test_no_process_is_left_at_the_end():
    with pool_of(ScriptedClient(), ScriptedClient()) as pool:
        pids = [process.pid for process in pool._processes]
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_messages_arrive_whole_and_in_order():
    here, there = socket.socketpair()
    with here, there:
        MessageSocket(here, Command).send([Report(1, Event.CALLING, 1.5), Report(2, Event.RELEASED, 2.5, 0, 4)])
        line = MessageSocket(there, Report)
        assert line.receive() == [Report(1, Event.CALLING, 1.5), Report(2, Event.RELEASED, 2.5, 0, 4)]
        here.sendall(b'{"node":3,"event":"call')
        assert line.receive() == []
        here.sendall(b'ing","at":1.0}\n')
        assert line.receive() == [Report(3, Event.CALLING, 1.0)]
        here.close()
        with pytest.raises(PeerClosed):
            line.receive()


@pytest.mark.parametrize("blocks", [True, False])
def test_more_messages_than_fit_into_a_socket_arrive(blocks):
    """An event loop makes its sockets non-blocking."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(blocks)
        there.settimeout(PATIENCE_S)
        many = [Report(number, Event.RELEASED, 1.0, number, 50_000) for number in range(50_000)]
        sending = in_thread(lambda: MessageSocket(here, Command).send(many))
        line, received = MessageSocket(there, Report), []
        while len(received) < len(many):
            received += line.receive()
        assert received == many
        result_of(sending)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
@pytest.mark.parametrize("copies", [False, True])
def test_process_that_has_copied_its_memory_has_no_page_faults_when_it_writes(copies):
    inherited, page = bytearray(8 << 20), resource.getpagesize()
    inherited[::page] = b"x" * len(inherited[::page])

    def work(sock):
        is_copied = copy_shared_memory() if copies else False
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        inherited[::page] = b"y" * len(inherited[::page])
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        MessageSocket(sock, Report).send([Report(int(is_copied), Event.READY, float(faults))])

    process = fork(work)
    report = MessageSocket(process.sock, Report).wait_one(PATIENCE_S)
    process.reap()
    assert report is not None
    pages = len(inherited) / page
    if report.node:  # otherwise the kernel does not support it
        assert report.at < pages / 10
    elif not copies:
        assert report.at >= pages / 10
