"""The crew with nodes that are real processes, and a rendezvous that is made up: no server, no network."""

import os
import resource
import socket
import sys
import time

import pytest

from rallypoint.bench.crew import Command, Crew, Do, NodeFailed, NoneInTime, Report, What
from rallypoint.bench.helper import Gone, Line, fork, own_memory
from rallypoint.bench.node import be_node
from rallypoint.bench.sides import Place
from tests.patience import in_thread, result_of

PATIENCE_S = 30.0


class ScriptedClient:
    """Finds itself in the given places, one after the other."""

    def __init__(self, *places: Place | str) -> None:
        self._places = list(places)

    def rehearse(self) -> None: ...

    def create(self) -> None: ...

    def connect(self) -> None: ...

    def wait_told(self) -> None: ...

    def join(self) -> Place:
        place = self._places.pop(0)
        if isinstance(place, str):
            raise RuntimeError(place)
        return place


def crew_of(*clients: ScriptedClient) -> Crew:
    hosted = [(number,) for number in range(len(clients))]
    return Crew(hosted, lambda number: fork(lambda sock: be_node(sock, number, clients[number], len(clients))))


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_nodes_of_one_world_are_gathered():
    with crew_of(ScriptedClient(Place(1, 2)), ScriptedClient(Place(0, 2))) as crew:
        start_at = time.monotonic()
        crew.tell(Do.JOIN, crew.nodes)
        released_at = crew.gather(crew.nodes, soon())
    assert start_at < released_at < time.monotonic()
    assert all(start_at < called_at < released_at for called_at in crew.called_at.values())
    assert crew.called_at.keys() == {0, 1}


def test_node_of_a_smaller_world_follows_it_into_the_next():
    with crew_of(ScriptedClient(Place(0, 1), Place(1, 2)), ScriptedClient(Place(0, 2))) as crew:
        crew.tell(Do.JOIN, crew.nodes)
        crew.gather(crew.nodes, soon())


def test_nodes_with_the_same_rank_are_no_world():
    with crew_of(ScriptedClient(Place(0, 2)), ScriptedClient(Place(0, 2))) as crew:
        crew.tell(Do.JOIN, crew.nodes)
        crew.wait(What.INSIDE, crew.nodes, soon())
        with pytest.raises(NoneInTime) as raised:
            crew.gather(crew.nodes, time.monotonic() + 2.0)
    assert str(raised.value) == "2 of 2 nodes released"


def test_error_of_a_node_is_told():
    with crew_of(ScriptedClient("no such run")) as crew:
        crew.tell(Do.JOIN, crew.nodes)
        with pytest.raises(NodeFailed) as raised:
            crew.gather(crew.nodes, soon())
    assert str(raised.value) == "node 0: RuntimeError: no such run"


def test_process_that_ends_is_noticed():
    def end(sock: socket.socket) -> None: ...

    with Crew([(0,)], lambda _: fork(end)) as crew, pytest.raises(NodeFailed) as raised:
        crew.wait(What.CONNECTED, [0], soon())
    assert str(raised.value) == "the process of node 0 ended"


def test_killed_node_is_not_missed():
    with crew_of(ScriptedClient(), ScriptedClient(Place(0, 1))) as crew:
        crew.kill(0)
        crew.tell(Do.JOIN, [1])
        crew.gather([1], soon())


def test_command_waits_for_its_instant():
    with crew_of(ScriptedClient(Place(0, 1))) as crew:
        at = time.monotonic() + 0.3
        crew.tell(Do.JOIN, crew.nodes, at=at)
        assert crew.gather(crew.nodes, soon()) >= at


def test_no_process_is_left_at_the_end():
    with crew_of(ScriptedClient(), ScriptedClient()) as crew:
        pids = [helper.pid for helper in crew._helpers]
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_messages_arrive_whole_and_in_order():
    here, there = socket.socketpair()
    with here, there:
        Line(here, Command).send([Report(1, What.INSIDE, 1.5), Report(2, What.RELEASED, 2.5, 0, 4)])
        line = Line(there, Report)
        assert line.receive() == [Report(1, What.INSIDE, 1.5), Report(2, What.RELEASED, 2.5, 0, 4)]
        here.sendall(b'{"node":3,"what":"ins')
        assert line.receive() == []
        here.sendall(b'ide","at":1.0}\n')
        assert line.receive() == [Report(3, What.INSIDE, 1.0)]
        here.close()
        with pytest.raises(Gone):
            line.receive()


@pytest.mark.parametrize("blocks", [True, False])
def test_more_messages_than_fit_into_a_socket_arrive(blocks):
    """An event loop makes a socket that it looks at one that does not block."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(blocks)
        there.settimeout(PATIENCE_S)
        many = [Report(number, What.RELEASED, 1.0, number, 50_000) for number in range(50_000)]
        sending = in_thread(lambda: Line(here, Command).send(many))
        line, received = Line(there, Report), []
        while len(received) < len(many):
            received += line.receive()
        assert received == many
        result_of(sending)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
@pytest.mark.parametrize("owns", [False, True])
def test_process_with_memory_of_its_own_pays_for_no_page_when_it_writes_to_it(owns):
    inherited, page = bytearray(8 << 20), resource.getpagesize()
    inherited[::page] = b"x" * len(inherited[::page])

    def work(sock):
        is_own = own_memory() if owns else False
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        inherited[::page] = b"y" * len(inherited[::page])
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        Line(sock, Report).send([Report(int(is_own), What.READY, float(faults))])

    helper = fork(work)
    report = Line(helper.sock, Report).wait_one(PATIENCE_S)
    helper.reap()
    assert report is not None
    pages = len(inherited) / page
    if report.node:  # else a kernel that cannot
        assert report.at < pages / 10
    elif not owns:
        assert report.at >= pages / 10
