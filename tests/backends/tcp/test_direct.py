"""Blocking connections on real sockets: one round trip, executed once, no resources left."""

import os
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rallypoint.backends.tcp import direct
from rallypoint.backends.tcp.direct import TICK_S
from rallypoint.errors import OutcomeUnknown, Unavailable
from rallypoint.kv.types import Exists, Put, Txn, ValueIs
from tests.patience import PATIENCE_S, in_thread, result_of, until
from tests.ports import free_port
from tests.server.threaded import ThreadedServer, add, do, listening, pool_to, put, sockets, soon, values

SLOW_S = 2.0
"""The slack of every time limit on this machine."""


@pytest.fixture
def served():
    with ThreadedServer() as one:
        yield one


# --- round trips ------------------------------------------------------------------------------------------------------


def test_every_request_is_one_frame_in_each_direction(served):
    with served.pool(served.port) as pool:
        do(pool, put("/a", b"1"))
        requests = [
            lambda: do(pool, put("/a", b"1")),
            lambda: do(pool, Txn((ValueIs("/a", b"1"),), (Put("/a", b"2"),))),
            lambda: add(pool, "/n"),
            lambda: values(pool, "/a"),
            lambda: values(pool, "/a", "/n", "/a"),
            lambda: values(pool, "/absent", limit_s=0.05),
        ]
        for request in requests:
            before = served.frames
            request()
            assert served.frames == (before[0] + 1, before[1] + 1)
        assert len(served.server.connections) == 1


def test_waiting_for_keys_is_one_round_trip(served):
    with served.pool(served.port) as pool, served.pool(served.port) as other:
        do(other, put("/else"))
        values(pool, "/else")
        before = served.frames
        waiting = in_thread(values, pool, "/a", "/b")
        until(lambda: served.awaiting == 1, "it waits")
        do(other, put("/a", b"1"))
        do(other, put("/b", b"2"))
        assert result_of(waiting) == [b"1", b"2"]
        assert served.frames == (before[0] + 3, before[1] + 3)
        assert served.awaiting == 0


def test_wait_ends_early_at_the_limit_of_one_request(served, monkeypatch):
    monkeypatch.setattr(direct, "AWAIT_S", 0.05)
    with served.pool() as pool:
        assert values(pool, "/a", limit_s=60.0) == [None]  # the caller repeats the request


def test_fifty_waiting_threads_do_not_block_another(served):
    with served.pool() as pool:
        waiting = [in_thread(values, pool, "/go", f"/{number}") for number in range(50)]
        until(lambda: served.awaiting == 50, "all wait")
        for number in range(50):
            do(pool, put(f"/{number}", b"%d" % number))
        do(pool, put("/go", b""))
        assert [result_of(one)[1] for one in waiting] == [b"%d" % number for number in range(50)]
        assert len(served.server.connections) == 51
        until(lambda: served.awaiting == 0, "no thread waits")


def test_each_of_many_threads_gets_its_own_answers(served):
    def work(number: int) -> int:
        rng = random.Random(number)
        mine = f"/{number}"
        for turn in range(150):
            value = b"%d of %d" % (turn, number) + b"x" * rng.choice((0, 10, 100_000))
            do(pool, put(mine, value))
            assert values(pool, mine) == [value]
            if turn % 50 == 7:
                assert values(pool, mine, f"/{number}/absent", limit_s=0.01) == [value, None]
            assert add(pool, f"/n{number}") == turn + 1
        return add(pool, "/all")

    with served.pool(served.port) as pool, ThreadPoolExecutor(16) as threads:
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            assert sorted(threads.map(work, range(16))) == list(range(1, 17))
        finally:
            sys.setswitchinterval(before)
        assert len(served.server.connections) <= 16


def test_closing_idle_connections_does_not_disturb_concurrent_requests(served):
    over = threading.Event()

    def tidy() -> None:
        while not over.is_set():
            pool.close_idle(0.0)

    def work(number: int) -> None:
        for turn in range(100):
            do(pool, put(f"/{number}", b"%d" % turn))
            assert values(pool, f"/{number}") == [b"%d" % turn]

    with served.pool(served.port) as pool, ThreadPoolExecutor(8) as threads:
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        tidying = in_thread(tidy)
        try:
            list(threads.map(work, range(7)))
        finally:
            sys.setswitchinterval(before)
            over.set()
        result_of(tidying)
        pool.close_idle(-1.0)
        until(lambda: not served.server.connections, "all connections are closed")


# --- broken connections -----------------------------------------------------------------------------------------------


def cut_before_the_answer(served, call, has_happened):
    """The result of a call whose first answer is lost with its connection."""
    served.proxy.swallows = True
    calling = in_thread(call)
    until(has_happened, "the server executes it")
    assert not calling.done()
    served.proxy.swallows = False
    served.ask(served.proxy.cut)
    return result_of(calling)


def test_request_that_was_executed_before_the_connection_broke_is_not_executed_again(served):
    with served.pool() as pool:
        assert add(pool, "/n", 5) == 5
        assert cut_before_the_answer(served, lambda: add(pool, "/n"), lambda: served.items["/n"].value == b"6") == 6
        create = Txn((Exists("/a", False),), (Put("/a", b"mine"),))
        assert cut_before_the_answer(served, lambda: do(pool, create), lambda: "/a" in served.items).committed
        swap = Txn((ValueIs("/a", b"mine"),), (Put("/a", b"yours"),))
        assert cut_before_the_answer(
            served, lambda: do(pool, swap), lambda: served.items["/a"].value == b"yours"
        ).committed
        assert served.items["/a"].version == 2
        assert add(pool, "/n") == 7


def test_request_that_was_lost_is_sent_again(served):
    with served.pool() as pool:
        add(pool, "/n")
        served.proxy.deafens = True
        adding = in_thread(add, pool, "/n")
        until(lambda: served.proxy.connections == 1, "it connects")
        time.sleep(0.05)
        served.proxy.deafens = False
        served.ask(served.proxy.cut)
        assert result_of(adding) == 2


@pytest.mark.parametrize("seed", range(6))
def test_requests_survive_cuts_at_any_byte_without_loss_or_repetition(served, seed):
    rng = random.Random(seed)
    cuts = 25

    def limits(number: int) -> tuple[float, float]:
        if number >= cuts:
            return float("inf"), float("inf")
        return (rng.randint(1, 700), float("inf")) if rng.random() < 0.5 else (float("inf"), rng.randint(1, 700))

    served.proxy.limits = limits
    with served.pool() as pool:
        mine = b""
        for turn in range(1, 41):
            assert add(pool, "/n") == turn
            new = b"%d" % turn + b"y" * rng.choice((0, 300))
            compare = ValueIs("/a", mine) if mine else Exists("/a", False)
            assert do(pool, Txn((compare,), (Put("/a", new),))).committed
            mine = new
            assert values(pool, "/a") == [mine]
        assert served.items["/a"].version == 40
        assert served.proxy.connections > 5


def test_outcome_of_a_write_is_unknown_after_a_restart_without_data(served):
    with served.pool() as pool:
        add(pool, "/n")
        served.proxy.swallows = True
        adding = in_thread(add, pool, "/n")
        until(lambda: served.items["/n"].value == b"2", "it is executed")
        served.restart()
        served.proxy.swallows = False
        served.ask(served.proxy.cut)
        with pytest.raises(OutcomeUnknown, match="restarted without its data"):
            result_of(adding)
        assert "/n" not in served.items
        assert add(pool, "/n") == 1


def test_write_that_was_never_sent_is_executed_after_the_restart(served):
    with served.pool() as pool:
        add(pool, "/n")
        served.restart()
        served.ask(served.proxy.cut)
        until(lambda: not served.proxy._writers, "all is cut")
        # A broken connection may be noticed only by sending: then the outcome is unknown.
        try:
            assert add(pool, "/n") == 1
        except OutcomeUnknown:
            assert "/n" not in served.items


def test_wait_continues_after_a_restart_without_data(served):
    with served.pool() as pool:
        do(pool, put("/a"))
        waiting = in_thread(values, pool, "/b")
        until(lambda: served.awaiting == 1, "it waits")
        served.restart()
        until(lambda: served.awaiting == 1, "it waits again")
        do(pool, put("/b", b"new"))
        assert result_of(waiting) == [b"new"]


# --- life cycle -------------------------------------------------------------------------------------------------------


def test_idle_connections_are_closed_and_opened_again(served):
    with served.pool(served.port) as pool:
        waiting = in_thread(values, pool, "/later")
        until(lambda: served.awaiting == 1, "it waits")
        add(pool, "/n")
        pool.close_idle(3600.0)
        assert len(served.server.connections) == 2
        pool.close_idle(-1.0)
        until(lambda: len(served.server.connections) == 1, "only the waiting thread is connected")
        assert add(pool, "/n") == 2
        do(pool, put("/later", b"now"))
        assert result_of(waiting) == [b"now"]
        pool.close_idle(-1.0)
        until(lambda: not served.server.connections, "all connections are closed")
        assert pool.filenos() == []


def test_closing_fails_all_current_and_later_calls(served):
    with served.pool(served.port) as pool:
        waiting = [in_thread(values, pool, f"/{number}") for number in range(10)]
        until(lambda: served.awaiting == 10, "all wait")
        pool.close("it is over")
        for one in waiting:
            with pytest.raises(Unavailable, match="it is over"):
                one.result(TICK_S + SLOW_S)
        pool.close("again")
        for _ in range(3):
            with pytest.raises(Unavailable, match="it is over"):
                add(pool, "/n")
        until(lambda: not served.server.connections, "all connections are closed")
        assert "/n" not in served.items


@pytest.mark.parametrize("kind", ["silent", "refused"])
def test_closing_fails_calls_that_are_connecting(kind):
    with listening(accepts=kind == "silent") as (port, came):
        if kind == "refused":
            port = free_port()
        with pool_to(port) as pool:
            calling = in_thread(add, pool, "/n")
            if kind == "silent":
                until(lambda: came, "it connects")
            else:
                until(lambda: pool._all, "it tries")
            pool.close("it is over")
            with pytest.raises(Unavailable, match="it is over"):
                calling.result(TICK_S + SLOW_S)


def test_cancelled_wait_ends_soon_and_others_continue(served):
    with served.pool(served.port) as pool:
        over = threading.Event()
        cancelled = in_thread(lambda: pool.await_keys(["/a"], soon(), soon(), over.is_set))
        going_on = in_thread(values, pool, "/a")
        until(lambda: served.awaiting == 2, "both wait")
        over.set()
        with pytest.raises(Unavailable):
            cancelled.result(TICK_S + SLOW_S)
        until(lambda: served.awaiting == 1, "the server has noticed")
        do(pool, put("/a", b"1"))
        assert result_of(going_on) == [b"1"]


def test_closed_pools_leave_no_open_sockets(served):
    def world(turn: int) -> None:
        with served.pool() as pool:
            waiting = in_thread(lambda: pool.await_keys(["/never"], soon(), soon()))
            add(pool, "/n")
            if turn % 3 == 0:
                pool.close_idle(-1.0)
            if turn % 5 == 0:
                served.ask(served.proxy.cut)
            assert add(pool, "/m") == turn + 1
        with pytest.raises(Unavailable):
            result_of(waiting)

    world(0)
    until(lambda: not served.server.connections, "all connections are closed")
    until(lambda: not served.proxy._writers, "those of the proxy, too")
    before = sockets()
    for turn in range(1, 200):
        world(turn)
    until(lambda: not served.server.connections, "all connections are closed")
    until(lambda: sockets() <= before, f"no more than {before} sockets are open")


def test_pool_works_after_an_interrupted_call(served):
    class Stop(BaseException):
        pass

    with served.pool(served.port) as pool:
        add(pool, "/n")
        stopped: list[int] = []

        def stop() -> None:
            stopped.append(1)
            raise Stop

        with pytest.raises(Stop):
            pool.await_keys(["/a"], soon(), soon(), stop)
        assert stopped
        until(lambda: served.awaiting == 0, "the server waits for nothing")
        assert add(pool, "/n") == 2
        assert len(pool._all) == 1


def is_unconnected(number):
    with socket.socket(fileno=os.dup(number)) as one:
        try:
            one.getpeername()
        except OSError:
            return True
    return False


def test_forked_child_does_not_use_the_connections(served):
    with served.pool(served.port) as pool:
        waiting = in_thread(values, pool, "/later")
        until(lambda: served.awaiting == 1, "it waits")
        add(pool, "/n")
        assert pool.is_usable
        numbers = pool.filenos()
        assert len(numbers) == 2
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if all(map(is_unconnected, numbers)) and not pool.is_usable else 3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert add(pool, "/n") == 2
        do(pool, put("/later", b"now"))
        assert result_of(waiting) == [b"now"]
        assert len(served.server.connections) == 2


def test_pool_is_not_usable_on_the_thread_of_the_loop(served):
    with served.pool(served.port, loop_thread=threading.get_ident()) as pool:
        assert not pool.is_usable
        assert in_thread(lambda: pool.is_usable).result(PATIENCE_S)


def test_write_after_a_restart_during_idle_time_is_executed():
    # Regression: it was sent on the closed connection, so its outcome was unknown.
    with ThreadedServer() as served, served.pool(served.port) as pool:
        do(pool, put("/before"))
        served.restart()
        time.sleep(2 * direct.STALE_S)
        do(pool, put("/after"))
        assert values(pool, "/after") == [b""]
