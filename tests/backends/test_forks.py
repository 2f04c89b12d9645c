"""Forks: a child that outlives its parent keeps neither the parent's connection nor its address open."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.patience import script
from tests.ports import free_port

SCRIPT = """
import os, sys, time
import rallypoint
handler = rallypoint.create_handler(sys.argv[1])
world = handler.next_rendezvous()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def forked():
    """A node that hosts its run and has forked a child that outlives it: (port, node, pid of the child)."""
    port = free_port()
    url = f"tcp://127.0.0.1:{port}/run?min_nodes=1&last_call_timeout=0.1"
    with subprocess.Popen([sys.executable, "-c", SCRIPT, url], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        child = int(node.stdout.readline())
        try:
            yield port, node, child
        finally:
            os.kill(child, signal.SIGKILL)
            node.kill()


def test_child_of_a_host_does_not_keep_its_address(forked):
    port, node, child = forked
    node.kill()
    node.wait()
    os.kill(child, 0)  # the child is running
    deadline = time.monotonic() + 10
    while True:
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
                one.listen()
                return
            except OSError:
                assert time.monotonic() < deadline, "the child still has the address"
                time.sleep(0.05)


def test_child_does_not_keep_the_connection_of_its_parent(forked):
    port, node, _ = forked
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.settimeout(10)
        node.kill()
        node.wait()
        try:
            closed = client.recv(100) == b""
        except ConnectionResetError:
            closed = True
    assert closed


FORK = """
    child = os.fork()
    if child == 0:
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    handler.close()
"""


def test_child_of_a_node_that_looked_up_a_name_exits_normally():
    done = script(
        f"""
    import os, sys
    import rallypoint
    handler = rallypoint.create_handler("tcp://localhost:{free_port()}/run", min_nodes=1, last_call_timeout=0.1)
    world = handler.next_rendezvous()
    world.store.set("key", b"value")
    {FORK}"""
    )
    assert done.stdout == "7\n"


def test_child_of_a_node_that_found_no_etcd_exits_normally():
    pytest.importorskip("grpc")
    done = script(
        f"""
    import os, sys
    import rallypoint
    endpoint = "etcd://localhost:{free_port()}/run"
    handler = rallypoint.create_handler(endpoint, min_nodes=1, join_timeout=2, local_addr="here")
    try:
        handler.next_rendezvous()
    except rallypoint.RendezvousConnectionError as error:
        assert "connection refused" in str(error), error
    {FORK}"""
    )
    assert done.stdout == "7\n"
