"""Blocking connections to peers that fail or misbehave: calls end in time, and refusals are reported at once."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest

from rallypoint.backends.contract import DeadlineExceeded
from rallypoint.backends.tcp import direct as tcp_direct
from rallypoint.backends.tcp.direct import TICK_S, connect
from rallypoint.errors import Rejected
from rallypoint.kv.types import Add
from rallypoint.wire.frames import GREETING, frame
from rallypoint.wire.messages import RefusalCode, Refused, encoder
from tests.patience import until
from tests.ports import free_port
from tests.server.threaded import ThreadedServer, add, do, listening, pool_to, put, soon, values

SLOW_S = 2.0
"""The slack of every time limit on this machine."""


@pytest.fixture
def served():
    with ThreadedServer() as one:
        yield one


@contextmanager
def in_time(after_s: float):
    """Assert that the block ends after this time, or a tick later."""
    started_at = time.monotonic()
    yield
    took_s = time.monotonic() - started_at
    assert after_s - 0.05 <= took_s <= after_s + TICK_S + SLOW_S, took_s


# --- deadlines --------------------------------------------------------------------------------------------------------


REQUESTS = {
    "add": lambda pool, limit_s: pool.execute(Add("/n", 1), soon(limit_s)),
    "a large set": lambda pool, limit_s: pool.execute(put("/big", b"x" * 20_000_000), soon(limit_s)),
    "waiting": lambda pool, limit_s: pool.await_keys(["/a"], soon(limit_s), soon(limit_s)),
}


def assert_deadline_exceeded(pool, request: str, limit_s: float = 0.4) -> None:
    with in_time(limit_s), pytest.raises(DeadlineExceeded):
        REQUESTS[request](pool, limit_s)


@pytest.mark.parametrize("accepts", [True, False])
def test_call_ends_at_its_deadline_without_a_welcome(accepts):
    with listening(accepts=accepts) as (port, _), pool_to(port) as pool:
        for request in REQUESTS:
            assert_deadline_exceeded(pool, request)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("switch", ["swallows", "deafens"])
def test_call_ends_at_its_deadline_if_the_peer_becomes_silent(served, switch, request_):
    with served.pool() as pool:
        add(pool, "/n")
        setattr(served.proxy, switch, True)
        assert_deadline_exceeded(pool, request_)
        assert_deadline_exceeded(pool, request_)
        setattr(served.proxy, switch, False)
        assert add(pool, "/m") == 1


@pytest.mark.parametrize("request_", REQUESTS)
def test_call_ends_at_its_deadline_if_the_peer_stops_reading(served, request_):
    with served.pool(served.port) as pool:
        add(pool, "/m")
        go_on = threading.Event()
        served._loop.call_soon_threadsafe(go_on.wait)  # the server stops reading
        try:
            # Regression: sending to a full socket buffer took longer than the deadline.
            assert_deadline_exceeded(pool, request_)
            assert_deadline_exceeded(pool, request_)
        finally:
            go_on.set()
        assert add(pool, "/m") == 2


def test_refused_connection_is_retried_until_the_deadline(served):
    with pool_to(free_port()) as pool:
        with in_time(0.3), pytest.raises(DeadlineExceeded) as caught:
            pool.execute(Add("/n", 1), soon(0.3))
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_request_with_a_past_deadline_is_not_sent(served):
    with served.pool(served.port) as pool:
        add(pool, "/n")
        before = served.frames
        with pytest.raises(DeadlineExceeded):
            pool.execute(Add("/n", 1), soon(-1.0))
        assert add(pool, "/n") == 2
        assert served.frames == (before[0] + 1, before[1] + 1)


def test_answer_that_has_arrived_counts_after_the_deadline(served, monkeypatch):
    with served.pool(served.port) as pool:
        add(pool, "/n")
        receive = tcp_direct.DirectConnection._receive

        def slow(self, sock, seq, deadline, silence_s, is_cancelled):
            until(lambda: served.items["/n"].value == b"2", "it is executed")
            time.sleep(max(0.0, deadline - time.monotonic()) + 0.1)
            return receive(self, sock, seq, deadline, silence_s, is_cancelled)

        monkeypatch.setattr(tcp_direct.DirectConnection, "_receive", slow)
        # Regression: the deadline was checked before the socket, so the answer was ignored.
        assert pool.execute(Add("/n", 1), soon(0.5)).value == 2


def test_slow_but_steady_answer_does_not_time_out(served, monkeypatch):
    monkeypatch.setattr(tcp_direct, "STALL_S", 0.3)
    with served.pool(served.port) as pool:
        do(pool, put("/big", b"x" * 300_000))

    class Slow:
        """Returns received data in small pieces."""

        def __init__(self, sock):
            self.sock = sock

        def recv(self, size, flags=0):
            time.sleep(0.03)
            return self.sock.recv(8_000, flags)

        def __getattr__(self, name):
            return getattr(self.sock, name)

        def __bool__(self):
            return True

    def slow(until, check):
        opened.append(1)
        return Slow(connect("127.0.0.1", served.port, until, check))

    opened: list[int] = []
    pool = tcp_direct.DirectPool("slow", slow, str, tcp_direct.Limits())
    # Regression: an answer that took longer than `STALL_S` to arrive was requested again and again.
    assert values(pool, "/big") == [b"x" * 300_000]
    assert len(opened) == 1
    pool.close("over")


def test_truncated_answer_is_requested_again(served):
    with served.pool() as pool:
        do(pool, put("/a", b"x" * 1000))
        served.proxy.limits = lambda number: (float("inf"), 500 if number < 3 else float("inf"))
        served.ask(served.proxy.cut)
        assert values(pool, "/a") == [b"x" * 1000]
        assert served.proxy.connections >= 4


def test_several_addresses_share_one_deadline(monkeypatch):
    with listening(accepts=False) as (port, _):
        full = []
        with socket.create_server(("127.0.0.1", 0), backlog=0) as blocked:
            for _ in range(4):  # fill the accept queue: connecting hangs
                one = socket.socket()
                one.setblocking(False)
                one.connect_ex(blocked.getsockname())
                full.append(one)
            address = blocked.getsockname()
            found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)] * 5
            monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: found)
            # Regression: each address of a name had the whole time limit.
            with in_time(0.5), pytest.raises(TimeoutError):
                connect("head", port, soon(0.5), lambda: None)
        for one in full:
            one.close()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_wrong_token_is_reported_at_once():
    with ThreadedServer(token="right") as served:
        for token, words in (("wrong", "the token is wrong"), ("", "none was given")):
            with served.pool(token=lambda token=token: token) as pool:
                with in_time(0.0), pytest.raises(Rejected, match=words):
                    do(pool, put("/a"))
                with pytest.raises(Rejected, match="token"):
                    values(pool, "/a")
        with served.pool(token=lambda: "right") as pool:
            assert add(pool, "/n") == 1
        assert not {"/a"} & set(served.items)


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"), (b"SSH-2.0-x\r\n", "SSH"), (b"\x00\x01", "bytes")],
)
def test_other_protocol_is_reported_at_once(answer, words):
    wanted = pytest.raises(Rejected, match=rf"is not a Rallypoint server.*{words}")
    with listening(answer) as (port, _), pool_to(port) as pool, in_time(0.0), wanted:
        do(pool, put("/a"))


def test_busy_server_is_retried_with_pauses():
    refused = GREETING + frame(encoder.encode(Refused(RefusalCode.BUSY, "too many connections")))
    with listening(refused) as (port, came), pool_to(port) as pool:
        with in_time(1.0), pytest.raises(DeadlineExceeded) as caught:
            do(pool, put("/a"), 1.0)
        assert "too many connections" in str(caught.value.__cause__)
        assert 2 <= len(came) <= 8


def test_request_that_is_too_large_is_rejected_and_the_next_succeeds(served):
    with served.pool() as pool:
        with pytest.raises(Rejected, match="too large"):
            do(pool, put("/a", b"x" * 40_000_000))
        assert add(pool, "/n") == 1
        assert served.proxy.connections == 1


def test_garbage_instead_of_an_answer_closes_the_connection(served):
    with served.pool() as pool:
        add(pool, "/n")
        (one,) = pool._all
        mine, other = socket.socketpair()
        one._sock.close()
        one._sock = mine
        other.sendall(frame(b"\xc1 garbage"))
        assert add(pool, "/n") == 2
        other.close()
