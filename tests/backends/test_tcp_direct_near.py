"""Blocking connections to a server on the same machine: over its own socket, and over TCP where that is not to be."""

import asyncio
import os
import socket
import ssl
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from rallypoint.backends import tcp_direct
from rallypoint.backends.dial_direct import connect_near
from rallypoint.errors import Rejected, Unavailable
from rallypoint.kv.types import Add
from rallypoint.server.door import peer_of
from rallypoint.server.hosting import open_tcp
from rallypoint.server.near import Near
from rallypoint.settings import Settings
from tests.patience import in_thread, result_of, until
from tests.server.kit import eventually, run, serving
from tests.server.proxy import through
from tests.server.threaded import House, add, do, put, sockets, soon, values

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are no such sockets elsewhere")


@pytest.fixture
def house():
    with House() as one:
        yield one


@contextmanager
def pool_near(house, name=None):
    """Connections by the server's socket, or by one of that name; and by TCP."""
    with house.pool(house.port, near=lambda: house.server.near.name if name is None else name) as pool:
        yield pool


def families(pool):
    return [one._sock.family for one in pool._all if one._sock is not None]


# --- by way of it -----------------------------------------------------------------------------------------------------


def test_all_connections_use_it(house):
    with pool_near(house) as pool:
        assert add(pool, "/n") == 1
        waiting = in_thread(values, pool, "/a")
        until(lambda: house.awaiting == 1, "it waits")
        do(pool, put("/a", b"1"))
        assert result_of(waiting) == [b"1"]
        assert families(pool) == [socket.AF_UNIX, socket.AF_UNIX]
        assert len(house.server.connections) == 2


def test_what_is_large_goes_over_it_as_well(house):
    with pool_near(house) as pool:
        large = bytes(range(256)) * 40_000
        do(pool, put("/a", large))
        assert values(pool, "/a") == [large]
        assert families(pool) == [socket.AF_UNIX]


def test_write_that_was_executed_and_not_answered_is_sent_again_and_executed_once(house):
    with pool_near(house) as pool:
        add(pool, "/n")
        answered = threading.Event()

        def execute_and_cut(op, origin=None):
            result = execute(op, origin)
            if isinstance(op, Add) and not answered.is_set():
                answered.set()
                for one in list(house.server.connections):
                    one.replaced()
            return result

        execute, house.server.hub.execute = house.server.hub.execute, execute_and_cut
        assert add(pool, "/n") == 2
        assert answered.is_set()
        assert values(pool, "/n") == [b"2"]


def test_token_is_asked_for_there_as_well():
    with House(token="right") as house:
        options = {"near": lambda: house.server.near.name}
        with house.pool(house.port, token=lambda: "right", **options) as pool:
            add(pool, "/n")
            assert families(pool) == [socket.AF_UNIX]
        with house.pool(house.port, token=lambda: "wrong", **options) as pool, pytest.raises(Rejected, match="token"):
            add(pool, "/n")
        assert house.ask(lambda: house.server.door.refusals.describe()) == {"refused_token": "1"}


def test_nothing_of_it_is_left_when_the_server_stops():
    before = sockets()
    with House() as house, pool_near(house) as pool:
        add(pool, "/n")
        name = house.server.near.name
        connect_near(name).close()
    with pytest.raises(ConnectionRefusedError):
        connect_near(name).close()
    until(lambda: sockets() == before, "every socket is closed")


def test_child_does_not_keep_it():
    with House() as house:
        name = house.server.near.name
        here, there = socket.socketpair()
        child = os.fork()
        if child == 0:
            here.close()
            there.send(b"x")
            there.recv(1)  # until the parent is done with it
            os._exit(0)
        there.close()
        assert here.recv(1) == b"x", "the child has begun"
    with here, pytest.raises(ConnectionRefusedError):
        connect_near(name).close()
    os.waitpid(child, 0)


# --- past it ----------------------------------------------------------------------------------------------------------


@contextmanager
def stranger(closes):
    """Somebody with a socket of that kind who accepts and says nothing, or closes; its name and how often one came."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        name = f"rallypoint-test-{os.getpid()}-{time.monotonic_ns()}"
        listening.bind("\0" + name)
        listening.listen()
        came = []

        def serve():
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:
                    return
                came.append(one)
                if closes:
                    one.close()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield name, came
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for one in came:
                one.close()


@pytest.mark.parametrize("closes", [False, True])
def test_one_that_does_not_welcome_is_asked_once_and_tcp_is_used(house, closes, monkeypatch):
    monkeypatch.setattr(tcp_direct, "NEAR_S", 0.3)
    with stranger(closes) as (name, came), pool_near(house, name) as pool:
        assert [add(pool, "/n"), add(pool, "/n")] == [1, 2]
        assert families(pool) == [socket.AF_INET]
        waiting = in_thread(values, pool, "/a")
        until(lambda: house.awaiting == 1, "it waits")
        do(pool, put("/a", b"1"))
        assert result_of(waiting) == [b"1"]
        assert families(pool) == [socket.AF_INET, socket.AF_INET]
        assert len(came) == 1


def test_where_it_cannot_be_used_tcp_is(house, monkeypatch):
    def forbidden(name):
        raise PermissionError(f"no {name}")

    monkeypatch.setattr(tcp_direct, "connect_near", forbidden)
    with pool_near(house) as pool:
        assert [add(pool, "/n"), add(pool, "/n")] == [1, 2]
        assert families(pool) == [socket.AF_INET]


def test_server_that_took_the_place_of_the_first_is_reached(house):
    with pool_near(house, house.server.near.name) as pool:
        add(pool, "/n")
        house.restart()
        assert add(pool, "/m") == 1
        assert "/m" in house.items
        assert families(pool) == [socket.AF_INET], "nobody has told of the new one's yet"


def test_pool_that_is_closed_while_it_opens_sends_nothing(house, monkeypatch):
    with stranger(closes=False) as (name, came), pool_near(house, name) as pool:
        adding = in_thread(add, pool, "/n")
        until(lambda: came, "it waits to be welcome")
        pool.close("bye")
        with pytest.raises(Unavailable, match="bye"):
            result_of(adding)
    assert house.ask(lambda: dict(house.items)) == {}


def test_who_gives_up_is_heard_after_the_first_tick(house, monkeypatch):
    with pool_near(house) as pool:
        add(pool, "/n")
        (one,) = pool._free
        one._vain = tcp_direct.LOOK_VAIN  # it sleeps at once

        def sleep_again(*args):
            raise AssertionError("it slept for another tick before it asked")

        monkeypatch.setattr(one, "_read", sleep_again)
        with pytest.raises(Unavailable):
            pool.await_keys(["/a"], soon(), soon(), lambda: True)


def test_socket_without_a_name_is_never_used():
    with pytest.raises(OSError, match="anybody"):
        connect_near("")


# --- who is told of it ------------------------------------------------------------------------------------------------


async def opened(port):
    """A node's connection that has come for a run, and its blocking way."""
    backend = await open_tcp(Settings.from_url(f"tcp://127.0.0.1:{port}/run?min_nodes=1&max_nodes=1&is_host=false"))
    await backend.get("/a")
    return backend, backend.direct()


def test_node_learns_of_it_with_its_session_and_forgets_it_without():
    async def main():
        async with serving() as server:
            backend, pool = await opened(server._sockets[0].getsockname()[1])
            try:
                assert pool.near() == server.near.name != ""
                assert await asyncio.to_thread(add, pool, "/n") == 1
                assert families(pool) == [socket.AF_UNIX]
                await server.stop()
                await eventually(lambda: pool.near() == "", "it is forgotten with its server")
            finally:
                await backend.close()

    run(main())


def test_somebody_in_between_is_not_passed_by():
    async def main():
        async with serving() as server, through(server) as proxy:
            backend, pool = await opened(proxy.port)
            try:
                assert pool.near() == ""
                assert await asyncio.to_thread(add, pool, "/n") == 1
                assert families(pool) == [socket.AF_INET]
            finally:
                await backend.close()

    run(main())


def test_server_that_encrypts_has_none():
    with House(tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as house:
        assert house.server.near.name == ""


class Transport:
    def __init__(self, own, peer, one=None):
        self._extra = {"sockname": own, "peername": peer, "socket": one}

    def get_extra_info(self, name):
        return self._extra[name]


def test_only_whoever_has_the_address_of_the_server_is_told():
    near = Near()
    with near.open(1):
        own = ("10.0.0.1", 29400)
        assert near.told_to(Transport(own, ("10.0.0.1", 51234))) == (near.name, "10.0.0.1:29400")
        assert near.told_to(Transport(own, ("10.0.0.2", 51234))) == ("", "")
        assert near.told_to(Transport(("::1", 29400, 0, 0), ("::1", 5, 0, 0))) == (near.name, "[::1]:29400")
        assert near.told_to(Transport("", "")) == ("", "")
        assert near.told_to(None) == ("", "")


@pytest.mark.parametrize("call", ["bind", "listen"])
def test_there_is_none_where_the_system_forbids_it(call, monkeypatch):
    def forbidden(*args):
        raise PermissionError("no such sockets here")

    before = sockets()
    monkeypatch.setattr(socket.socket, call, forbidden)
    near = Near()
    assert near.open(1) is None
    assert near.told_to(Transport(("10.0.0.1", 1), ("10.0.0.1", 2))) == ("", "")
    assert sockets() == before


def test_there_is_none_where_the_system_has_none(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Near().open(1) is None


@pytest.mark.parametrize("name", ["", "\0any", "/tmp/x\nsomebody else: all is well", b"\0\xff"])
def test_its_clients_are_called_this_machine_whatever_they_call_themselves(name):
    with socket.socket(socket.AF_UNIX) as one:
        assert peer_of(Transport("", name, one)) == ("this machine", 0)
