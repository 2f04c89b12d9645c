"""Blocking connections to a server on the same machine: over its own socket, and over TCP where that is not to be."""

import os
import socket
import ssl
import sys

import pytest

from quorate.backends import tcp_direct
from quorate.backends.dial_direct import connect_near
from quorate.errors import Rejected
from quorate.server.door import peer_of
from quorate.server.near import Near
from tests.patience import in_thread, result_of, until
from tests.server.threaded import House, add, do, put, sockets, values

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are no such sockets elsewhere")


@pytest.fixture
def house():
    with House() as one:
        yield one


def families(pool):
    return [one._sock.family for one in pool._all if one._sock is not None]


def test_first_connection_learns_of_the_socket_and_all_use_it(house):
    with house.pool(house.port) as pool:
        assert add(pool, "/n") == 1
        waiting = in_thread(values, pool, "/a")
        until(lambda: house.awaiting == 1, "it waits")
        do(pool, put("/a", b"1"))
        assert result_of(waiting) == [b"1"]
        assert families(pool) == [socket.AF_UNIX, socket.AF_UNIX]
        until(lambda: len(house.server.connections) == 2, "the one it came by is closed")


def test_what_is_large_goes_over_it_as_well(house):
    with house.pool(house.port) as pool:
        large = bytes(range(256)) * 40_000
        do(pool, put("/a", large))
        assert values(pool, "/a") == [large]
        assert families(pool) == [socket.AF_UNIX]


def test_somebody_in_between_is_not_passed_by(house):
    with house.pool() as pool:
        assert add(pool, "/n") == 1
        assert families(pool) == [socket.AF_INET]
        assert pool.near == ""


def test_server_that_took_the_place_of_the_first_is_reached_and_its_socket_used(house):
    with house.pool(house.port) as pool:
        add(pool, "/n")
        before = pool.near
        house.restart()
        assert add(pool, "/m") == 1
        assert "/m" in house.items
        assert pool.near not in ("", before)
        assert families(pool) == [socket.AF_UNIX]


def test_where_it_cannot_be_used_tcp_is(house, monkeypatch):
    def forbidden(name):
        raise PermissionError(f"no {name}")

    monkeypatch.setattr(tcp_direct, "connect_near", forbidden)
    with house.pool(house.port) as pool:
        assert [add(pool, "/n"), add(pool, "/n")] == [1, 2]
        assert families(pool) == [socket.AF_INET]


def test_request_that_was_on_its_way_is_executed_once_when_the_connection_breaks(house):
    with house.pool(house.port) as pool:
        add(pool, "/n")
        waiting = in_thread(values, pool, "/a")
        until(lambda: house.awaiting == 1, "it waits")
        house.ask(lambda: [one.replaced() for one in list(house.server.connections)])
        do(pool, put("/a", b"1"))
        assert result_of(waiting) == [b"1"]
        assert add(pool, "/n") == 2
        assert families(pool) == [socket.AF_UNIX, socket.AF_UNIX]


def test_nothing_of_it_is_left_when_the_server_stops():
    before = sockets()
    with House() as house, house.pool(house.port) as pool:
        add(pool, "/n")
        name = pool.near
        connect_near(name).close()
    with pytest.raises(ConnectionRefusedError):
        connect_near(name)
    until(lambda: sockets() == before, "every socket is closed")


def test_child_does_not_keep_it():
    with House() as house, house.pool(house.port) as pool:
        add(pool, "/n")
        name = pool.near
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the parent is done with it
            os._exit(0)
    try:
        with pytest.raises(ConnectionRefusedError):
            connect_near(name)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_token_is_asked_for_there_as_well():
    with House(token="right") as house:
        with house.pool(house.port, token=lambda: "right") as pool:
            add(pool, "/n")
            near = pool.near
        with house.pool(house.port, token=lambda: "wrong") as pool:
            pool.near = near
            with pytest.raises(Rejected, match="token"):
                add(pool, "/n")
        assert house.ask(lambda: house.server.door.refusals.describe()) == {"refused_token": "1"}


def test_server_that_encrypts_has_none():
    with House(tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as house:
        assert house.server.near.name == ""


class Transport:
    def __init__(self, own, peer):
        self._extra = {"sockname": own, "peername": peer}

    def get_extra_info(self, name):
        return self._extra[name]


def test_only_whoever_has_the_address_of_the_server_is_told():
    near = Near()
    with near.open():
        own = ("10.0.0.1", 29400)
        assert near.told_to(Transport(own, ("10.0.0.1", 51234))) == (near.name, "10.0.0.1:29400")
        assert near.told_to(Transport(own, ("10.0.0.2", 51234))) == ("", "")
        assert near.told_to(Transport(("::1", 29400, 0, 0), ("::1", 5, 0, 0))) == (near.name, "[::1]:29400")
        assert near.told_to(Transport("", "")) == ("", "")
        assert near.told_to(None) == ("", "")


def test_there_is_none_where_the_system_has_none_or_forbids_it(monkeypatch):
    def forbidden(*args):
        raise PermissionError("no such sockets here")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "bind", forbidden)
        near = Near()
        assert near.open() is None
        assert near.name == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert near.open() is None
    assert near.told_to(Transport(("10.0.0.1", 1), ("10.0.0.1", 2))) == ("", "")


def test_its_clients_are_called_this_machine():
    assert peer_of(Transport("", "")) == ("this machine", 0)
