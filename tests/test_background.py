"""The background loop: blocked callers, users, forks, Ctrl-C and the exit of the process."""

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

from rallypoint import _background
from rallypoint._background import BackgroundLoop
from rallypoint.errors import RendezvousError
from tests.patience import (
    PATIENCE_S,
    background_threads,
    in_thread,
    result_of,
    said,
    script,
    until,
    users,
)


@pytest.fixture
def loop():
    loop = BackgroundLoop()
    yield loop
    loop.stop()
    assert not loop.is_alive


async def give(value):
    await asyncio.sleep(0)
    return value


async def forever(started=None, ended=None):
    try:
        if started is not None:
            started.set()
        await asyncio.get_running_loop().create_future()
    finally:
        if ended is not None:
            ended.set()


# --- calls ------------------------------------------------------------------------------------------------------------


def test_call_returns_the_result_or_raises_the_error(loop):
    async def fail():
        raise KeyError("unchanged")

    assert loop.call(give(3)) == 3
    with pytest.raises(KeyError, match="unchanged"):
        loop.call(fail())
    assert [result_of(call) for call in [in_thread(loop.call, give(n)) for n in range(50)]] == list(range(50))


def test_error_does_not_keep_the_callers_objects_alive(loop):
    class Thing:
        pass

    async def fail():
        raise KeyError

    def work():
        thing = Thing()
        try:
            loop.call(fail())
        except KeyError:
            return weakref.ref(thing)

    gc.disable()
    try:
        assert work()() is None
    finally:
        gc.enable()


def test_call_on_the_loop_itself_is_refused(loop):
    async def wrong():
        loop.call(give(1))

    with pytest.raises(RuntimeError, match="on the background loop itself"):
        loop.call(wrong())


def test_blocked_caller_is_released_when_the_loop_ends(loop):
    started = threading.Event()
    call = in_thread(loop.call, forever(started))
    assert started.wait(PATIENCE_S)
    loop.stop()
    with pytest.raises(RendezvousError, match="was shut down"):
        result_of(call)


def test_call_after_the_end_raises_a_clear_error(loop):
    loop.stop()
    with pytest.raises(RendezvousError, match="was shut down"):
        loop.call(give(1))
    called = []
    loop.spawn(give(None), lambda: called.append(True))
    assert called == [True]


def test_every_caller_is_released_while_the_loop_ends():
    for _ in range(40):
        loop = BackgroundLoop()
        go = threading.Event()

        def work(loop=loop, go=go):
            go.wait()
            answers = []
            for n in range(20):
                try:
                    answers.append(loop.call(give(n)) == n)
                except RendezvousError:
                    return answers
            return answers

        calls = [in_thread(work) for _ in range(6)]
        go.set()
        loop.stop()
        assert all(all(result_of(call)) for call in calls)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_callers_are_released_when_the_loop_is_killed(loop):
    async def exit_now():
        raise SystemExit(3)

    started = threading.Event()
    blocked = in_thread(loop.call, forever(started))
    assert started.wait(PATIENCE_S)
    with pytest.raises((SystemExit, RendezvousError)):
        loop.call(exit_now())
    with pytest.raises(RendezvousError):
        result_of(blocked)


@pytest.mark.parametrize("before_it_starts", [False, True])
def test_interrupted_call_is_cancelled_and_cleans_up(loop, monkeypatch, before_it_starts):
    started, ended = threading.Event(), threading.Event()
    if before_it_starts:

        def interrupted(self, call):
            raise KeyboardInterrupt

        monkeypatch.setattr(BackgroundLoop, "_submit", interrupted)
    else:

        def interrupted(self):
            started.wait(PATIENCE_S)
            raise KeyboardInterrupt

        monkeypatch.setattr(_background._Call, "wait_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.call(forever(started, ended))
    monkeypatch.undo()
    assert ended.is_set() is not before_it_starts
    assert not loop._calls
    assert loop.call(give(1)) == 1


def test_interruption_waits_a_limited_time_for_a_call_that_ignores_cancellation(loop, monkeypatch):
    monkeypatch.setattr(_background, "INTERRUPTED_S", 0.2)
    release = asyncio.Event()

    async def stubborn():
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(_background._Call, "wait_result", interrupted)
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.call(stubborn())
    monkeypatch.undo()
    assert time.monotonic() - before < 10.0
    loop._loop.call_soon_threadsafe(release.set)
    until(lambda: not loop._calls, "the call has ended")


# --- users ------------------------------------------------------------------------------------------------------------


class Isolated:
    """Shared state without the users of other tests, whose loops may not have been collected yet."""

    def __init__(self):
        self._others = set(background_threads())

    def threads(self):
        return set(background_threads()) - self._others

    def assert_released(self):
        until(lambda: not users() and not self.threads(), "the loop has no users, and its thread has ended")


@pytest.fixture
def isolated(monkeypatch):
    monkeypatch.setattr(_background, "_shared", _background._Shared())
    return Isolated()


def test_loop_lives_from_the_first_user_to_the_last(isolated):
    first, one = _background.acquire(lambda: give(None))
    second, two = _background.acquire(lambda: give(None))
    assert first is second
    assert len(isolated.threads()) == 1
    _background.release(one)
    _background.release(one)
    assert first.call(give(1)) == 1
    _background.release(two)
    isolated.assert_released()
    third, three = _background.acquire(lambda: give(None))
    assert third is not first
    assert third.call(give(1)) == 1
    _background.release(three)
    isolated.assert_released()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_killed_loop_is_replaced(isolated):
    async def exit_now():
        raise SystemExit(3)

    first, one = _background.acquire(lambda: give(None))
    with pytest.raises((SystemExit, RendezvousError)):
        first.call(exit_now())
    until(lambda: not first.is_alive, "it has ended")
    second, two = _background.acquire(lambda: give(None))
    assert second.call(give(1)) == 1
    _background.release(one)
    _background.release(two)
    isolated.assert_released()


def test_loop_is_acquired_and_released_on_many_threads(isolated):
    def work():
        for n in range(50):
            loop, user = _background.acquire(lambda: give(None))
            assert loop.call(give(n)) == n
            if n % 2:
                loop.spawn(give(None), lambda user=user: _background.release(user))
            else:
                _background.release(user)
        return True

    assert all(result_of(call) for call in [in_thread(work) for _ in range(6)])
    isolated.assert_released()


def test_users_that_fail_or_hang_do_not_delay_the_exit(isolated, monkeypatch):
    monkeypatch.setattr(_background, "EXIT_S", 0.3)
    closed = []

    async def fail():
        raise KeyError

    async def close():
        closed.append(True)

    for user in (fail, forever, close):
        _background.acquire(user)
    before = time.monotonic()
    _background._at_exit()
    assert time.monotonic() - before < 10.0
    assert closed == [True]
    isolated.assert_released()


# --- processes --------------------------------------------------------------------------------------------------------

PREAMBLE = """
    import os, signal, sys, threading, time
    import rallypoint
    from rallypoint.backends import schemes
    from rallypoint.rendezvous.records import NodeRecord, decode

    def until(condition, patience_s=20):
        deadline = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline, "not in time"
            time.sleep(0.005)

    def nodes():
        return [key for key in list(schemes._memory_servers["x"].engine.items) if "/nodes/" in key]

    URL = "memory://x/run?keep_alive_interval=0.3&keep_alive_max_attempt=3"
"""


def run_script(source, *options):
    return script(textwrap.dedent(PREAMBLE) + textwrap.dedent(source), *options).stdout


FORK = """
    handler = rallypoint.create_handler(URL, min_nodes=1)
    world = handler.next_rendezvous()
    world.store.set("k", "v")
    changes = world.store.watch("k")
    assert next(changes) == b"v"
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        calls = {
            "next_rendezvous": handler.next_rendezvous, "is_closed": handler.is_closed, "close": handler.close,
            "num_nodes_waiting": handler.num_nodes_waiting, "shutdown": handler.shutdown, "leave": handler.leave,
            "set": lambda: world.store.set("k", "child"), "get": lambda: world.store.get("k"),
            "watch": lambda: next(changes), "members": lambda: world.members, "changed": world.changed.wait,
        }
        for name, call in calls.items():
            try:
                call()
            except rallypoint.ForkedProcessError as error:
                assert "Create a new handler" in str(error)
            else:
                raise SystemExit(f"{name} worked in the child")
        assert handler.get_run_id() == "run"
        assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
        own = rallypoint.create_handler(URL, min_nodes=1)
        mine = own.next_rendezvous()                     # another run: the child has its own memory server
        mine.store.set("k", "child")
        assert mine.store.get("k") == b"child"
        assert own.shutdown()
        del handler, world, changes, call, calls         # garbage collection of inherited objects has no effect
        import gc
        gc.collect()
        print("child is done", flush=True)
        if LEAVE_BY == "exit":
            sys.exit(0)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    time.sleep(1.2)                                      # longer than the time to live of the session
    assert not world.changed.is_set()
    assert handler.is_closed() is False
    assert world.store.get("k") == b"v"
    world.store.set("k", "w")
    assert next(changes) == b"w"
    assert handler.next_rendezvous().round == 2
    assert handler.shutdown()
    print("parent is done")
"""


WITHOUT_UVLOOP = """
    import sys
    sys.modules["uvloop"] = None                         # as if it were not installed
"""


def test_uvloop_is_used_if_it_is_installed():
    uvloop = pytest.importorskip("uvloop")
    loop = BackgroundLoop()
    assert isinstance(loop._loop, uvloop.Loop)
    loop.stop()
    show = "from rallypoint._background import BackgroundLoop; print(type(BackgroundLoop()._loop).__module__)"
    assert run_script(WITHOUT_UVLOOP + f"    {show}") == "asyncio.unix_events\n"


@pytest.mark.parametrize("leave_by", ["exit", "_exit"])
@pytest.mark.parametrize("before", ["", WITHOUT_UVLOOP], ids=["as installed", "without uvloop"])
def test_forked_child_cannot_use_inherited_objects_and_the_parent_is_not_disturbed(leave_by, before):
    output = run_script(before + FORK.replace("LEAVE_BY", repr(leave_by)))
    assert output.split("\n") == ["child is done", "parent is done", ""]


def test_forked_child_never_renews_the_parents_session():
    # Each renewal writes the id of its process to a file.
    run_script(
        """
        import tempfile
        from rallypoint.backends.memory import MemoryBackend, MemoryServer
        path = tempfile.mktemp()

        class Recording(MemoryBackend):
            async def keep_alive(self, lease):
                with open(path, "a") as file:
                    print(os.getpid(), file=file)
                return await super().keep_alive(lease)

        async def opener(settings):
            return Recording(MemoryServer())

        rallypoint.register_backend("recording", opener)
        handler = rallypoint.create_handler(URL.replace("memory", "recording"), min_nodes=1)
        handler.next_rendezvous()
        pid = os.fork()
        if pid == 0:
            time.sleep(1.5)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        handler.close()
        with open(path) as file:
            assert set(file.read().split()) == {str(os.getpid())}
        os.unlink(path)
        """
    )


def test_with_block_that_ends_in_a_forked_child_does_not_leave_for_the_parent():
    run_script(
        """
        with rallypoint.join(URL, min_nodes=1) as run:
            for world in run.rounds():
                pid = os.fork()
                if pid == 0:
                    sys.exit(7)                          # leaves the block, with its own status
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
                world.store.set("k", "v")
                break
        """
    )


@pytest.mark.parametrize("options", [(), ("-O",)])
def test_process_that_ends_without_shutdown_ends_its_session_promptly(options):
    output = run_script(
        """
        import atexit
        started = time.monotonic()
        atexit.register(lambda: print("nodes at the end:", len(nodes())))  # runs after our own exit handler
        atexit.unregister(rallypoint._background._at_exit)
        atexit.register(lambda: print("nodes before:", len(nodes())) or rallypoint._background._at_exit())
        handlers = [rallypoint.create_handler(URL, min_nodes=2, name=f"n{n}") for n in range(2)]
        calls = [threading.Thread(target=handler.next_rendezvous) for handler in handlers]
        for call in calls: call.start()
        for call in calls: call.join()
        blocked = rallypoint.create_handler(URL, min_nodes=2, name="late")
        threading.Thread(target=blocked.next_rendezvous, daemon=True).start()
        until(lambda: len(nodes()) == 3)
        threading.excepthook = lambda args: None         # the blocked call may or may not get its error
        """,
        *options,
    )
    assert output == "nodes before: 3\nnodes at the end: 0\n"


def test_handler_used_during_exit_raises_a_clear_error():
    output = run_script(
        """
        import atexit
        atexit.unregister(rallypoint._background._at_exit)

        def late():
            try:
                handler.is_closed(), handler.next_rendezvous()
            except rallypoint.RendezvousError as error:
                print("shut down" in str(error))

        atexit.register(late)
        atexit.register(rallypoint._background._at_exit)
        handler = rallypoint.create_handler(URL, min_nodes=1)
        handler.next_rendezvous()
        """
    )
    assert output == "True\n"


def test_process_that_exits_right_after_shutdown_prints_nothing():
    for end in ("shutdown()", "close()", "leave()"):
        run_script(f"handler = rallypoint.create_handler(URL, min_nodes=1)\nhandler.next_rendezvous()\nhandler.{end}")


def interrupted(source: str, *, wait_for: str) -> tuple[str, float]:
    """Run a script and send it Ctrl-C when it has printed `wait_for`; its output, and the seconds until its exit."""
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(PREAMBLE) + textwrap.dedent(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().strip() == wait_for, process.communicate()
        sent_at = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert said(errors) == []
        assert process.returncode == 0
        return output, time.monotonic() - sent_at
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("wait", ["alone.next_rendezvous()", "world.changed.wait()"])
@pytest.mark.parametrize("before", ["", WITHOUT_UVLOOP], ids=["as installed", "without uvloop"])
def test_signal_that_does_not_wake_the_blocked_thread_is_handled_soon(wait, before):
    """A signal on another thread has the same effect as one just before the thread sleeps, which cannot be timed."""
    source = f"""
        def send_signal():
            time.sleep(0.5)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        world = rallypoint.create_handler(URL, min_nodes=1).next_rendezvous()
        alone = rallypoint.create_handler("memory://y/run", min_nodes=2)
        threading.Thread(target=send_signal, daemon=True).start()
        try:
            {wait}
        except KeyboardInterrupt:
            print("interrupted")
    """
    assert run_script(textwrap.dedent(before) + textwrap.dedent(source)) == "interrupted\n"


@pytest.mark.parametrize("call", ["handler.next_rendezvous()", "next(run.rounds())"])
@pytest.mark.parametrize("before", ["", WITHOUT_UVLOOP], ids=["as installed", "without uvloop"])
def test_ctrl_c_ends_a_blocked_call_and_withdraws_the_node(call, before):
    source = f"""
        run = rallypoint.join(URL, min_nodes=2)
        handler = run.handler

        def announce():
            until(lambda: "x" in schemes._memory_servers and nodes())
            print("blocked", flush=True)

        threading.Thread(target=announce, daemon=True).start()
        try:
            {call}
        except KeyboardInterrupt:
            print(nodes())
        """
    output, took_s = interrupted(textwrap.dedent(before) + textwrap.dedent(source), wait_for="blocked")
    assert output == "[]\n"
    assert took_s < 10.0


@pytest.mark.parametrize("call", ["world.store.get('never')", "world.changed.wait()", "next(world.store.watch('k'))"])
def test_ctrl_c_ends_each_blocking_call_of_a_member(call):
    output, took_s = interrupted(
        f"""
        handler = rallypoint.create_handler(URL, min_nodes=1)
        world = handler.next_rendezvous()
        try:
            print("blocked", flush=True)
            {call}
        except KeyboardInterrupt:
            world.store.set("k", "still a member")
            print("interrupted")
        """,
        wait_for="blocked",
    )
    assert output == "interrupted\n"
    assert took_s < 10.0
