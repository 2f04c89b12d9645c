"""The blocking store on blocking connections to a real server."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

import rallypoint
from rallypoint.backends.contract import Limits
from rallypoint.errors import OutcomeUnknown, StoreError, StoreFencedError, StoreTimeoutError
from rallypoint.events import RoundEntered
from rallypoint.testing.conformance import store_rounds
from rallypoint.testing.conformance.store import STORE_CHECKS, run_store_checks
from rallypoint.wire.handshake import Versions
from tests.patience import PATIENCE_S, in_thread, result_of, script, unique, until
from tests.server.threaded import ThreadedServer, sockets
from tests.store.blocking_kit import OPTIONS, BlockingKit, threads

SOON_S = 5.0
"""Much shorter than the time-outs here, much longer than a busy machine needs."""


@pytest.fixture
def served():
    with ThreadedServer() as one:
        yield one


def url_of(served, *, port: int = 0, run: str = "run", more: str = "") -> str:
    return f"tcp://127.0.0.1:{port or served.port}/{run}?min_nodes=1&{OPTIONS}{more}"


@contextmanager
def world_of(served, **options):
    handler = rallypoint.create_handler(url_of(served, **options))
    try:
        yield handler.next_rendezvous()
    finally:
        handler.close()


@contextmanager
def two_of(served):
    """The stores of two members."""
    url = url_of(served).replace("min_nodes=1", "min_nodes=2")
    handlers = [rallypoint.create_handler(url, name=f"n{number}") for number in range(2)]
    calls = [in_thread(handler.next_rendezvous) for handler in handlers]
    try:
        yield [result_of(call).store for call in calls]
    finally:
        for handler in handlers:
            handler.close()


# --- conformance ------------------------------------------------------------------------------------------------------

NOT_APPLICABLE = {store_rounds.check_who_is_taken_for_dead_is_fenced}
"""The handler of a lost node has closed the connections of its store."""


@pytest.mark.parametrize("check", [check for check in STORE_CHECKS if check not in NOT_APPLICABLE])
def test_blocking_store_conforms_on_tcp(served, check):
    kit = BlockingKit(None, asyncio.sleep, run_id="run", lease_slack_s=0.7, late_s=4.0, served=served)
    report = asyncio.run(asyncio.wait_for(run_store_checks(kit, [check]), 90.0))
    assert report.conforming, str(report)
    assert len(report.passed) == 1
    until(lambda: not threads(), "all calls have ended")


# --- round trips ------------------------------------------------------------------------------------------------------


def test_every_call_of_torchs_store_is_one_frame_in_each_direction(served):
    with world_of(served) as world:
        store = world.store
        store.multi_set(["a", "b"], [b"1", b"2"])

        def get_of_absent_key() -> None:
            with pytest.raises(StoreTimeoutError):
                store.get("absent", 0.05)

        calls = {
            "get": lambda: store.get("a"),
            "wait": lambda: store.wait(["a", "b"]),
            "multi_get": lambda: store.multi_get(["a", "b"]),
            "check": lambda: store.check(["a", "absent"]),
            "add": lambda: store.add("n", 1),
            "compare_set": lambda: store.compare_set("a", "1", "1"),
            "compare_set of another value": lambda: store.compare_set("a", "other", "x"),
            "set": lambda: store.set("a", b"1"),
            "multi_set": lambda: store.multi_set(["a", "b"], [b"1", b"2"]),
            "delete_key": lambda: store.delete_key("n"),
            "num_keys": lambda: store.num_keys(),
            "get of an absent key": get_of_absent_key,
        }
        for name, call in calls.items():
            for attempt in range(20):  # a renewal of the session may interfere
                before = served.frames
                call()
                if served.frames == (before[0] + 1, before[1] + 1):
                    break
                assert attempt < 10, name


def test_get_that_waits_is_one_round_trip_and_is_released_by_another_process(served):
    with world_of(served) as world:
        world.store.set("there", b"")
        waiting = in_thread(world.store.get, "later", 60.0)
        until(lambda: served.awaiting == 1, "it waits")
        key = world.store._store._path("later")
        script(
            f"""
            from tests.server.threaded import pool_to, do, put
            with pool_to({served.port}) as pool:
                do(pool, put({key!r}, b"from afar"))
            """
        )
        assert result_of(waiting) == b"from afar"
        assert served.awaiting == 0


def test_fifty_waiting_threads_do_not_block_one_that_sets(served):
    with two_of(served) as (one, other):
        waiting = [in_thread(one.get, f"k{number}", 60.0) for number in range(50)]
        until(lambda: served.awaiting == 50, "all wait")
        for number in range(50):
            (one if number % 2 else other).set(f"k{number}", f"{number}")
        assert [result_of(call) for call in waiting] == [b"%d" % number for number in range(50)]


def test_key_lists_above_the_limit_of_the_backend_are_read_in_parts(served):
    with world_of(served) as world:
        store = world.store
        keys = [f"k{number}" for number in range(20)]
        store.multi_set(keys, [key.encode() for key in keys])
        store.usable_direct().connections.limits = Limits(max_txn_ops=8)
        assert store.multi_get(keys) == [key.encode() for key in keys]
        store.wait(keys)
        assert store.check(keys)
        assert not store.check([*keys, "absent"])
        with pytest.raises(StoreTimeoutError) as caught:
            store.wait([*keys, "absent"], 0.1)
        assert caught.value.missing == ("absent",)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_and_messages_equal_those_of_the_asynchronous_store(served):
    with world_of(served) as world:
        store, core = world.store, world.store._store
        store.multi_set(["a", "text"], ["1", "no number"])
        calls = [
            (lambda: store.get("absent", 0.1), lambda: core.get("absent", 0.1)),
            (lambda: store.wait(["a", "x", "y"], 0.1), lambda: core.wait(["a", "x", "y"], 0.1)),
            (lambda: store.multi_get(["x", "a"], 0.1), lambda: core.multi_get(["x", "a"], 0.1)),
            (
                lambda: store.wait([f"k{n}" for n in range(50)], 0.1),
                lambda: core.wait([f"k{n}" for n in range(50)], 0.1),
            ),
            (lambda: store.add("text", 1), lambda: core.add("text", 1)),
            (lambda: store.add("n", 2**63), lambda: core.add("n", 2**63)),
            (lambda: store.set("", b"x" * 40_000_000), lambda: core.set("", b"x" * 40_000_000)),
        ]
        for blocking, other in calls:
            with pytest.raises(StoreError) as mine:
                blocking()
            with pytest.raises(StoreError) as theirs:
                store._call(other())
            assert type(mine.value) is type(theirs.value)
            assert str(mine.value) == str(theirs.value)
            assert getattr(mine.value, "missing", None) == getattr(theirs.value, "missing", None)


def test_errors_after_the_end_equal_those_of_the_asynchronous_store(served):
    with world_of(served) as world:
        store, core = world.store, world.store._store
        store.set("a", "1")
    calls = [
        (lambda: store.get("a"), lambda: core.get("a")),
        (lambda: store.wait(["a"]), lambda: core.wait(["a"])),
        (lambda: store.check(["a"]), lambda: core.check(["a"])),
        (lambda: store.add("n", 1), lambda: core.add("n", 1)),
        (lambda: store.set("a", b""), lambda: core.set("a", b"")),
        (lambda: store.compare_set("a", b"", b""), lambda: core.compare_set("a", b"", b"")),
        (lambda: store.num_keys(), lambda: core.num_keys()),
    ]
    for blocking, other in calls:
        with pytest.raises(StoreError, match="can no longer be used") as mine:
            blocking()
        with pytest.raises(StoreError) as theirs:
            asyncio.run(other())
        assert str(mine.value) == str(theirs.value)


@contextmanager
def served_by_a_process():
    """The port of `rallypoint serve`, and its process."""
    command = [sys.executable, "-m", "rallypoint", "serve", "--bind", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serves:
        try:
            yield int(serves.stderr.readline().rpartition("127.0.0.1:")[2].split()[0].rstrip(".;,")), serves
        finally:
            serves.send_signal(signal.SIGCONT)
            serves.kill()
            serves.stderr.close()


def test_calls_time_out_while_the_server_is_stopped():
    with served_by_a_process() as (port, serves):
        handler = rallypoint.create_handler(f"tcp://127.0.0.1:{port}/run?min_nodes=1&{OPTIONS}")
        store = handler.next_rendezvous().store
        store.set("a", b"1")
        serves.send_signal(signal.SIGSTOP)
        store.set_timeout(0.5)
        calls = {
            "get": lambda: store.get("a"),
            "get of another": lambda: store.get("b", 0.5),
            "wait": lambda: store.wait(["a", "b"]),
            "add": lambda: store.add("n", 1),
            "set": lambda: store.set("a", b"x" * 10_000_000),
            "compare_set": lambda: store.compare_set("a", "1", "2"),
            "check": lambda: store.check(["a"]),
            "append": lambda: store.append("a", "1"),
            "num_keys": lambda: store.num_keys(),
        }
        for name, call in calls.items():
            started_at = time.monotonic()
            with pytest.raises(StoreTimeoutError, match=r"no answer within 0.5 s") as caught:
                call()
            took_s = time.monotonic() - started_at
            # A read may take as long again (at most a second) to find the missing keys.
            limit_s = 1.0 if name in ("get", "get of another", "wait") else 0.5
            assert 0.45 <= took_s <= limit_s + 0.25 + 1.5, (name, took_s)
            assert name.split()[0] in str(caught.value)
        assert caught.value.missing == ()
        serves.send_signal(signal.SIGCONT)
        store.set_timeout(60.0)
        assert store.get("a") in (b"1", b"2") or len(store.get("a")) == 10_000_000
        handler.close()


def test_write_with_an_unknown_outcome_raises_and_a_node_that_lost_its_session_is_fenced(served):
    with world_of(served, port=served.proxy.port) as world:
        store = world.store
        store.add("n", 1)
        key = store._store._path("n")
        served.proxy.swallows = True
        adding = in_thread(store.add, "n", 1)
        until(lambda: served.items[key].value == b"2", "it is executed")
        served.restart()
        served.proxy.swallows = False
        served.ask(served.proxy.cut)
        with pytest.raises(OutcomeUnknown):
            result_of(adding)
        store.set_timeout(10.0)
        for call in (
            lambda: store.add("n", 1),
            lambda: store.set("n", b"1"),
            lambda: store.compare_set("n", "", "1"),
            lambda: store.append("n", "1"),
            lambda: store.delete_key("n"),
            lambda: store.multi_set(["n"], ["1"]),
        ):
            with pytest.raises(StoreFencedError):
                call()
        assert not [name for name in list(served.items) if "/store/" in name]


def test_refused_token_is_reported_at_once(served):
    with world_of(served) as world:
        world.store.set("a", b"1")
        served.restart(token="a token")
        for call in (lambda: world.store.get("a"), lambda: world.store.add("n", 1), lambda: world.store.check(["a"])):
            started_at = time.monotonic()
            with pytest.raises((StoreError, OutcomeUnknown), match="token"):
                call()
            assert time.monotonic() - started_at < SOON_S


# --- old servers ----------------------------------------------------------------------------------------------------


def test_store_works_with_a_server_of_version_1():
    with ThreadedServer(versions=Versions(1, 1)) as served, two_of(served) as (one, other):
        one.set("a", "1")
        assert other.get("a") == b"1"
        waiting = in_thread(one.multi_get, ["a", "later"], 60.0)
        assert other.check(["a"])
        assert not other.check(["later"])
        other.set("later", "2")
        assert result_of(waiting) == [b"1", b"2"]
        assert (one.add("n", 1), other.add("n", 1)) == (1, 2)
        assert one.compare_set("a", "1", "3") == b"3"
        other.append("a", "4")
        one.wait(["a"])
        assert one.multi_get(["a", "n"]) == [b"34", b"2"]
        with pytest.raises(StoreTimeoutError, match=r"missing after 0.1 s: absent"):
            other.get("absent", 0.1)


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_interrupted_get_ends_at_once_and_the_store_works_afterwards(served):
    source = f"""
        import os, signal, threading, time
        import rallypoint
        handler = rallypoint.create_handler({url_of(served)!r})
        store = handler.next_rendezvous().store
        store.set("a", b"1")
        for turn in range(3):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            started_at = time.monotonic()
            try:
                store.get("never", 60.0)
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("not interrupted")
            assert time.monotonic() - started_at < 10.0
            assert store.get("a") == b"1"
            assert store.add("n", 1) == turn + 1
        handler.close()
        """
    script(source)
    until(lambda: not served.server.connections, "the process has exited")
    assert served.awaiting == 0


def test_store_raises_in_a_forked_child_and_works_in_the_parent(served):
    source = f"""
        import os, threading
        import rallypoint
        handler = rallypoint.create_handler({url_of(served)!r})
        store = handler.next_rendezvous().store
        store.set("a", b"1")
        got = []
        waiting = threading.Thread(target=lambda: got.append(store.get("later", 60.0)))
        waiting.start()
        store.set("b", b"2")
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (
                lambda: store.get("a"),
                lambda: store.set("a", b"2"),
                lambda: store.add("n", 1),
                lambda: store.check(["a"]),
                lambda: store.wait(["a"]),
                lambda: store.compare_set("a", "1", "2"),
                lambda: store.append("a", "1"),
            ):
                try:
                    call()
                except rallypoint.errors.ForkedProcessError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert store.get("a") == b"1"
        store.set("later", b"now")
        waiting.join(20)
        assert got == [b"now"]
        handler.close()
        """
    script(source)


def test_unused_store_raises_in_a_forked_child(served):
    source = f"""
        import os
        import rallypoint
        handler = rallypoint.create_handler({url_of(served)!r})
        store = handler.next_rendezvous().store
        child = os.fork()
        if child == 0:
            try:
                store.set("a", b"2")
            except rallypoint.errors.ForkedProcessError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        store.set("a", b"1")
        assert store.get("a") == b"1"
        handler.close()
        """
    script(source)


def test_call_on_the_background_loop_raises_and_does_not_block(served):
    errors = []
    stores = []

    def sink(event):
        if isinstance(event, RoundEntered) and stores:
            for call in (lambda: stores[0].get("a"), lambda: stores[0].add("n", 1), lambda: stores[0].check(["a"])):
                try:
                    call()
                except RuntimeError as error:
                    errors.append(str(error))

    handler = rallypoint.create_handler(url_of(served), sinks=[sink])
    stores.append(handler.next_rendezvous().store)
    handler.next_rendezvous()
    # Regression: it blocked the loop, which also runs the server of a hosting node.
    assert len(errors) == 3
    assert all("background loop" in error for error in errors)
    handler.close()


# --- the end of a store -----------------------------------------------------------------------------------------------

ENDS = {
    "shutdown": lambda handler: handler.shutdown(),
    "close": lambda handler: handler.close(),
    "leave": lambda handler: handler.leave("enough"),
    "next round": lambda handler: handler.next_rendezvous(),
    "abandon": lambda handler: handler.abandon(),
}


@pytest.mark.parametrize("scheme", ["tcp", "memory"])
@pytest.mark.parametrize("end", ENDS)
def test_wait_for_a_key_ends_when_the_node_leaves_or_closes(served, end, scheme):
    if scheme == "memory" and end == "abandon":
        pytest.skip("the store of an abandoned node keeps waiting")
    url = url_of(served) if scheme == "tcp" else f"memory://{unique()}/run?min_nodes=1&last_call_timeout=0.1"
    handler = rallypoint.create_handler(url)
    store = handler.next_rendezvous().store
    store.set("a", b"1")
    waiting = [
        in_thread(store.get, "never"),
        in_thread(store.wait, ["a", "never"]),
        in_thread(store.multi_get, ["never", "a"], 200.0),
    ]
    until(lambda: (served.awaiting if scheme == "tcp" else len(store._store._waits)) == 3, "all wait")
    ENDS[end](handler)
    for call in waiting:
        # Regression: a wait for a key of a round that the node had left took until its time-out.
        with pytest.raises(StoreError, match=r"left the round|can no longer be used|never") as caught:
            call.result(SOON_S)
        assert not isinstance(caught.value, StoreTimeoutError)
    if end in ("leave", "next round"):
        assert store.get("a") == b"1"  # existing keys can be read
        with pytest.raises(StoreError, match=r"missing keys are no longer awaited.*: never"):
            store.get("never")
        with pytest.raises(StoreFencedError):
            store.set("a", b"2")
    handler.close()
    until(lambda: served.awaiting == 0, "the server waits for nothing")


def test_closed_handlers_leave_no_open_sockets(served):
    def world(number: int) -> None:
        with world_of(served, run=f"run-{number}") as one:
            one.store.set("a", b"1")
            assert one.store.get("a") == b"1"

    world(0)
    until(lambda: not served.server.connections, "all connections are closed")
    before = sockets()
    for number in range(1, 200):
        world(number)
    until(lambda: not served.server.connections, "all connections are closed")
    until(lambda: sockets() <= before, f"no more than {before} sockets are open")


def test_each_of_many_threads_gets_its_own_answers_despite_cut_connections(served):
    over = threading.Event()

    def cut() -> None:
        while not over.wait(0.05):
            served.ask(served.proxy.cut)

    def work(number: int) -> int:
        for turn in range(25):
            store.set(f"k{number}", f"{turn} of {number}")
            assert store.get(f"k{number}") == b"%d of %d" % (turn, number)
            assert store.add(f"n{number}", 1) == turn + 1
        return store.add("all", 1)

    with world_of(served, port=served.proxy.port) as world:
        store = world.store
        cutting = in_thread(cut)
        calls = [in_thread(work, number) for number in range(8)]
        try:
            assert sorted(call.result(2 * PATIENCE_S) for call in calls) == list(range(1, 9))
        finally:
            over.set()
            result_of(cutting)
