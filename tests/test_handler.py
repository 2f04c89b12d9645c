"""The blocking handler: conformance, threads, garbage collection, its end, `join`, and errors."""

import asyncio
import contextlib
import gc
import logging
import random
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager
from typing import ClassVar

import pytest

import rallypoint
from rallypoint import Cause, RendezvousClosedError, RendezvousError, RendezvousParameters, SettingsError
from rallypoint.backends import schemes
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.events import JoinStarted, NodeLeft, RoundEntered, RunClosed
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import NodeRecord, decode
from rallypoint.testing.chaos import ChaosBackend, Faults
from rallypoint.testing.conformance.handler import HANDLER_CHECKS, HandlerKit, run_handler_checks
from tests.patience import (
    PATIENCE_S,
    background_threads,
    in_thread,
    result_of,
    script,
    unique,
    until,
    until_let_go,
    users,
)

KEYS = RunKeys("rallypoint", "run")
FAST = {"last_call_timeout": 0.2, "admission_window": 0, "keep_alive_interval": 0.5}


class Place:
    """A memory server, and handlers of the run `run` on it."""

    def __init__(self) -> None:
        name = unique()
        self.url = f"memory://{name}/run"
        self.server = schemes._memory_servers[name] = MemoryServer()
        self.made = weakref.WeakSet()
        self.before = users()
        """The users of the background loop from other tests."""

    def handler(self, name="a", **options) -> rallypoint.Handler:
        handler = rallypoint.create_handler(self.url, **{"name": name, "min_nodes": 1, **FAST, **options})
        self.made.add(handler)
        return handler

    def nodes(self) -> list[NodeRecord]:
        items = list(self.server.engine.items.items())
        return [decode(NodeRecord, item) for key, item in items if key.startswith(KEYS.nodes)]

    def is_clean(self) -> bool:
        """No node has a key or a session. The remaining leases belong to the run."""
        return not self.nodes() and len(self.server.engine.leases) <= 2


@pytest.fixture
def place():
    place = Place()
    yield place
    for handler in list(place.made):
        handler.close()
    until_let_go(place.before)


@contextmanager
def gathered(place, *names, **options):
    """Form a round; its handlers and worlds, in rank order."""
    handlers = [place.handler(name, **{"min_nodes": len(names), **options}) for name in names]
    calls = [in_thread(handler.next_rendezvous) for handler in handlers]
    pairs = [(handler, result_of(call)) for handler, call in zip(handlers, calls, strict=True)]
    pairs.sort(key=lambda pair: pair[1].rank)
    yield [handler for handler, _ in pairs], [world for _, world in pairs]


# --- conformance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", HANDLER_CHECKS)
def test_handlers_conform_on_the_memory_backend(check):
    check(HandlerKit.at(f"memory://{unique()}", "run"))


def test_every_handler_check_documents_its_guarantee():
    for check in HANDLER_CHECKS:
        assert check.__name__.startswith("check_")
        assert check.__doc__.endswith("."), check.__name__
    assert len({check.__name__ for check in HANDLER_CHECKS}) == len(HANDLER_CHECKS)


def test_handler_with_wrong_answers_does_not_conform(monkeypatch):
    monkeypatch.setattr(rallypoint.Handler, "num_nodes_waiting", lambda self: 7)
    monkeypatch.setattr(rallypoint.Handler, "is_closed", lambda self: False)
    kit = HandlerKit.at(f"memory://{unique()}", "run", read_timeout=1)
    names = ("check_nobody_waits_in_a_run_without_a_round", "check_who_never_joined_can_close")
    report = run_handler_checks(kit, [check for check in HANDLER_CHECKS if check.__name__ in names])
    assert sorted(report.failed) == sorted(names)


# --- threads ----------------------------------------------------------------------------------------------------------


def test_other_threads_can_use_the_handler_while_a_call_blocks(place):
    handler = place.handler(min_nodes=2)
    call = in_thread(handler.next_rendezvous)
    until(place.nodes, "it has joined")
    assert handler.num_nodes_waiting() == 0
    assert handler.is_closed() is False
    assert handler.get_run_id() == "run"
    assert not call.done()
    place.handler("b", min_nodes=2).next_rendezvous()
    assert result_of(call).world_size == 2


def test_many_threads_can_query_the_handler_at_once(place):
    with gathered(place, "a", "b") as (handlers, _):

        def ask():
            return {(h.num_nodes_waiting(), h.is_closed()) for _ in range(200) for h in handlers}

        assert [result_of(call) for call in [in_thread(ask) for _ in range(8)]] == [{(0, False)}] * 8


@pytest.mark.parametrize("has_company", [False, True], ids=["alone", "beside another"])
def test_query_during_a_shutdown_on_another_thread_returns_or_raises_a_clear_error(place, has_company):
    elsewhere = Place()
    company = elsewhere.handler() if has_company else None
    if company is not None:
        assert not company.is_closed()  # it keeps the background loop running
    for n in range(5):
        handler = place.handler(f"n{n}")
        handler.next_rendezvous()
        stop = threading.Event()

        def ask(handler=handler, stop=stop):
            while not stop.is_set():
                try:
                    handler.num_nodes_waiting()
                    handler.is_closed()
                except RendezvousError as error:
                    assert "shut down" in str(error)  # noqa: PT017
            return True

        calls = [in_thread(ask) for _ in range(3)]
        handler.close()
        stop.set()
        assert all(result_of(call) for call in calls)
    if company is not None:
        company.close()


def test_handlers_share_one_thread_and_are_different_nodes(place):
    with gathered(place, "a", "b", "c"):
        until(lambda: len(background_threads()) == 1, "one thread, once that of another test has ended")
        nodes = place.nodes()
        assert len({node.local_id for node in nodes}) == 3
        assert len({node.id for node in nodes}) == 3
        assert len({node.pid for node in nodes}) == 1


def test_one_call_at_a_time(place):
    handler = place.handler(min_nodes=2)
    call = in_thread(handler.next_rendezvous)
    until(place.nodes, "it has joined")
    with pytest.raises(RendezvousError, match="one call at a time"):
        handler.next_rendezvous()
    assert not call.done()
    handler.leave()
    with pytest.raises(RendezvousError):
        result_of(call)


@pytest.mark.parametrize("end", ["leave", "close", "shutdown"])
def test_leaving_from_another_thread_ends_a_blocked_call(place, end):
    handler = place.handler(min_nodes=2)
    call = in_thread(handler.next_rendezvous)
    until(place.nodes, "it has joined")
    getattr(handler, end)()
    with pytest.raises(RendezvousError, match="left the run while it was joining"):
        result_of(call)
    assert place.nodes() == []


def test_leaving_at_any_time_ends_a_blocked_call(place):
    handler = place.handler(min_nodes=2)
    rng = random.Random(0)
    for _ in range(60):
        call = in_thread(handler.next_rendezvous)
        time.sleep(rng.uniform(0.0, 0.004))  # to interrupt it at different points
        handler.leave()
        if not call.done():
            # The call may have started after `leave`: leave again.
            until(lambda call=call: call.done() or handler.leave(), "the call ends", 10.0)
        with pytest.raises(RendezvousError, match="left the run"):
            result_of(call)
    assert place.nodes() == []


def test_blocking_call_from_a_sink_is_refused(place):
    errors = []

    def sink(event):
        for call in (handler.next_rendezvous, handler.leave, handler.set_closed, lambda: handler.shutdown()):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    handler = place.handler(sinks=[sink])
    world = handler.next_rendezvous()
    assert len(errors) >= 4
    assert all("background loop" in error and "sink" in error for error in errors)
    world.store.set("k", b"it still works")


def test_sink_can_query_the_handler(place):
    answers = []

    def sink(event):
        if isinstance(event, RoundEntered | NodeLeft):
            answers.append((handler.num_nodes_waiting(), handler.is_closed()))

    handler = place.handler(sinks=[sink])
    handler.next_rendezvous()
    handler.leave()
    assert answers == [(0, False)] * 2


# --- dropping ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector():
    """Disable the cycle collector: reference counting must release all objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def assert_released(place) -> None:
    until(place.is_clean, "no session is left")
    until_let_go(place.before)


def test_dropped_handler_that_was_never_used_leaves_no_resources(place, no_collector):
    handler = place.handler()
    del handler
    assert_released(place)


def test_dropped_handler_that_was_only_queried_leaves_no_resources(place, no_collector):
    handler = place.handler()
    handler.is_closed()
    handler.num_nodes_waiting()
    del handler
    assert_released(place)


def test_dropped_member_leaves_the_run(place, no_collector):
    handler = place.handler()
    world = handler.next_rendezvous()
    assert world.members[0].name == "a"
    del handler
    assert not place.is_clean()  # the world references the handler
    del world
    assert_released(place)
    until(lambda: not place.server._watches, "all watches have ended")


def test_dropped_handler_ends_only_its_own_session(place, no_collector):
    dropped, kept = (place.handler(name, max_nodes=2, last_call_timeout=5) for name in ("a", "b"))
    call = in_thread(dropped.next_rendezvous)
    world = kept.next_rendezvous()
    assert result_of(call).world_size == 2
    del call, dropped
    until(lambda: [node.name for node in place.nodes()] == ["b"], "a has left")
    until(lambda: len(background_threads()) == 1, "one thread, once that of another test has ended")
    world.store.set("k", b"")


def test_dropped_handler_after_an_error_leaves_no_resources(place, no_collector):
    place.handler("closer").shutdown()
    handler = place.handler()
    try:
        handler.next_rendezvous()
    except RendezvousClosedError as error:
        kept = error
    assert place.is_clean()  # although the error still exists
    assert kept.__traceback__ is not None
    del handler
    assert place.is_clean()
    del kept
    assert_released(place)


def test_dropped_handler_after_a_time_out_leaves_no_resources(place):
    handler = place.handler(min_nodes=2, join_timeout=0.2)
    with contextlib.suppress(rallypoint.RendezvousTimeoutError):
        handler.next_rendezvous()
    assert place.is_clean()
    del handler
    gc.collect()
    assert_released(place)


def test_dropped_handler_after_leaving_during_a_join_leaves_no_resources(place, no_collector):
    handler = place.handler(min_nodes=2)

    def join():
        with contextlib.suppress(RendezvousError):
            handler_of().next_rendezvous()

    handler_of = weakref.ref(handler)
    call = in_thread(join)
    until(place.nodes, "it has joined")
    handler.leave()
    result_of(call)
    del handler
    assert_released(place)


def test_dropped_iterator_of_rounds_leaves_no_resources(place, no_collector):
    run = rallypoint.join(place.url, min_nodes=1, **FAST)
    rounds = run.rounds()
    next(rounds)
    assert not place.is_clean()
    del rounds, run
    assert_released(place)


def test_repeated_creation_and_release_of_handlers_leaves_no_resources(place):
    for n in range(10):
        handler = place.handler(f"n{n}")
        handler.next_rendezvous()
        if n % 3 == 0:
            handler.close()
        elif n % 3 == 1:
            handler.leave()
        del handler
        gc.collect()
    assert_released(place)
    until(lambda: not place.server._watches, "all watches have ended")


# --- after the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["shutdown", "close"])
def test_handler_raises_a_clear_error_after_its_end(place, end):
    handler = place.handler()
    world = handler.next_rendezvous()
    getattr(handler, end)()
    calls = {
        "next_rendezvous": handler.next_rendezvous,
        "set_closed": handler.set_closed,
        "leave": handler.leave,
        "reopen": handler.reopen,
        "store": lambda: world.store.set("k", b""),
        "members": lambda: place.handler("b") and world.members,
    }
    for name, call in calls.items():
        with pytest.raises(RendezvousError, match="was shut down: make a new one"):
            call()
        assert name
    assert handler.num_nodes_waiting() == 0
    assert handler.is_closed() is (end == "shutdown")
    assert handler.get_run_id() == "run"
    assert handler.get_backend() == "memory"
    assert not handler.in_use
    handler.close()


def test_shutdown_that_fails_warns_and_returns_false(place, monkeypatch, caplog):
    async def opener(settings):
        return ChaosBackend(MemoryBackend(MemoryServer()), random.Random(0), Faults(unavailable=1.0))

    monkeypatch.setitem(schemes._openers, "away", opener)
    handler = rallypoint.create_handler("away://x/run?min_nodes=1&close_timeout=0.3")
    with caplog.at_level(logging.WARNING, "rallypoint"):
        assert handler.shutdown() is False
    assert [r.levelname for r in caplog.records if "could not close the run at shutdown" in r.message] == ["WARNING"]
    assert handler.shutdown() is False


class Lingering(MemoryBackend):
    """A backend whose `close` waits for `may_close`."""

    made: ClassVar[list["Lingering"]] = []
    may_close = threading.Event()

    def __init__(self) -> None:
        super().__init__(MemoryServer())
        self.is_closing = False
        self.made.append(self)

    async def close(self) -> None:
        self.is_closing = True
        await asyncio.to_thread(self.may_close.wait, PATIENCE_S)
        await super().close()


@pytest.fixture
def lingering(monkeypatch):
    """A member whose backend takes long to close."""

    async def opener(settings):
        return Lingering()

    monkeypatch.setitem(schemes._openers, "lingering", opener)
    monkeypatch.setattr(Lingering, "made", [])
    monkeypatch.setattr(Lingering, "may_close", threading.Event())
    before = users()
    handler = rallypoint.create_handler("lingering://x/run", min_nodes=1, **FAST)
    handler.next_rendezvous()
    yield handler
    Lingering.may_close.set()
    handler.close()
    until_let_go(before)


@pytest.mark.parametrize("end", ["shutdown", "close"])
def test_concurrent_calls_that_end_the_handler_wait_and_return_the_same_result(lingering, end):
    first = in_thread(getattr(lingering, end))
    until(lambda: Lingering.made[0].is_closing, "it is ending")
    second = in_thread(getattr(lingering, end))
    with pytest.raises(TimeoutError):
        second.result(0.2)
    Lingering.may_close.set()
    assert result_of(first) is result_of(second) is (True if end == "shutdown" else None)
    assert len(Lingering.made) == 1, "it was ended once"


def test_close_during_a_shutdown_on_another_thread_waits_for_it(lingering):
    first = in_thread(lingering.shutdown)
    until(lambda: Lingering.made[0].is_closing, "it is ending")
    second = in_thread(lingering.close)
    with pytest.raises(TimeoutError):
        second.result(0.2)
    Lingering.may_close.set()
    result_of(second)
    assert result_of(first) is True
    assert lingering.shutdown() is True


def test_shutdown_during_a_close_on_another_thread_closes_the_run(lingering):
    first = in_thread(lingering.close)
    until(lambda: Lingering.made[0].is_closing, "it is ending")
    second = in_thread(lingering.shutdown)
    until(lambda: len(Lingering.made) > 1 and Lingering.made[1].is_closing, "the run was closed")
    Lingering.may_close.set()
    result_of(first)
    assert result_of(second) is True
    assert not lingering.in_use


def test_result_of_shutdown_is_known_before_the_loop_is_released(place):
    class CallingFinalizer:
        """Calls `shutdown` again just before the real finalizer."""

        alive = True

        def __call__(self):
            results.append(handler.shutdown())
            handler.close()
            self.alive = False
            real()

    results: list[bool] = []
    handler = place.handler()
    handler.next_rendezvous()
    real, handler._finalizer = handler._finalizer, CallingFinalizer()
    assert handler.shutdown() is True
    assert results == [True]


@pytest.mark.parametrize("end", ["shutdown", "close"])
def test_signal_handler_can_end_a_handler_that_its_thread_is_ending(end):
    script(
        f"""
        import asyncio, os, signal, threading
        import rallypoint
        from rallypoint.backends import schemes
        from rallypoint.backends.memory import MemoryBackend, MemoryServer

        signalled = threading.Event()

        class Lingering(MemoryBackend):
            async def close(self):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.to_thread(signalled.wait)
                await super().close()

        async def opener(settings):
            return Lingering(MemoryServer())

        def ended(number, frame):
            signalled.set()
            handler.{end}()
            print("closed")

        schemes._openers["lingering"] = opener
        signal.signal(signal.SIGTERM, ended)
        handler = rallypoint.create_handler("lingering://x/run", min_nodes=1, last_call_timeout=0.1)
        handler.next_rendezvous()
        handler.{end}()
        assert not handler.in_use
        """
    )


def test_sink_that_ends_an_ending_handler_gets_an_error_at_once(place):
    errors = []

    def sink(event):
        if isinstance(event, NodeLeft):
            for end in (handler.shutdown, handler.close):
                with pytest.raises(RuntimeError, match="background loop") as caught:
                    end()
                errors.append(caught.value)

    handler = place.handler(sinks=[sink])
    handler.next_rendezvous()
    result_of(in_thread(handler.close))
    assert len(errors) == 2


def test_members_that_were_read_are_available_after_the_end(place):
    handler = place.handler()
    world = handler.next_rendezvous()
    members = world.members
    handler.close()
    assert world.members is members


# --- join -------------------------------------------------------------------------------------------------------------


def test_with_block_leaves_and_never_closes(place):
    with rallypoint.join(place.url, min_nodes=1, name="a", **FAST) as run:
        for world in run.rounds():
            assert world.world_size == 1
            break
        assert [node.name for node in place.nodes()] == ["a"]
    assert place.nodes() == []
    assert place.handler("b").is_closed() is False


def test_with_block_that_raises_leaves_with_the_reason(place):
    events = []

    def fail():
        with rallypoint.join(place.url, min_nodes=1, sinks=[events.append], **FAST) as run:
            next(run.rounds())
            raise KeyError("the work failed")

    with pytest.raises(KeyError):
        fail()
    assert ["the work failed" in event.reason for event in events if isinstance(event, NodeLeft)] == [True]
    assert not [event for event in events if isinstance(event, RunClosed)]


def test_with_block_can_shut_down_the_handler(place):
    with rallypoint.join(place.url, min_nodes=1, **FAST) as run:
        next(run.rounds())
        assert run.handler.shutdown()
    assert place.handler("b").is_closed()


def test_rounds_yield_new_worlds_and_end_when_the_node_is_drained(place):
    seen = []
    with ExitStack() as stack:
        run = stack.enter_context(rallypoint.join(place.url, min_nodes=1, max_nodes=2, name="a", **FAST))
        late = place.handler("b", max_nodes=2)
        for world in run.rounds():
            seen.append((world.world_size, world.rank))
            if len(seen) == 1:
                call = in_thread(late.next_rendezvous)
                assert world.changed.wait(20)
                assert world.changed.cause is Cause.WAITING
            else:
                result_of(call)
                core = run.handler._core
                run.handler._loop.call(core._node._run_config.drain("a", "go"))
                assert world.changed.wait(20)
                assert world.changed.cause is Cause.DRAIN
                assert "go" in world.changed.reason
    assert seen == [(1, 0), (2, 0)]


def test_rounds_end_when_another_thread_leaves(place):
    with rallypoint.join(place.url, min_nodes=1, **FAST) as run:
        rounds = in_thread(lambda: [world.round for world in run.rounds()])
        until(lambda: run.handler._core.changed, "it is a member")
        run.handler.leave("enough")
        assert result_of(rounds) == [1]


def test_world_changes_by_a_loss_and_by_a_lost_session(place):
    with gathered(place, "a", "b", min_nodes=1, max_nodes=2) as (handlers, worlds):
        assert not worlds[0].changed.is_set()
        assert worlds[0].changed.wait(0.01) is False
        node = next(node for node in place.nodes() if node.name == "b")
        handlers[0]._loop.call(handlers[0]._core._backend.revoke(node.session))
        assert worlds[0].changed.wait(20)
        assert (worlds[0].changed.cause, "b" in worlds[0].changed.reason) == (Cause.LOSS, True)
        until(lambda: worlds[1].changed.cause is Cause.SESSION_LOST, "the graver cause replaces the loss")
        with pytest.raises(rallypoint.StoreFencedError):
            worlds[1].store.set("k", b"")


# --- creating handlers ------------------------------------------------------------------------------------------------


def test_parameters_and_keywords_create_equal_handlers():
    params = RendezvousParameters("memory", "p", "run", 1, 2, local_addr="here", join_timeout=7, last_call_timeout="3")
    by_params = rallypoint.create_handler(params)
    by_url = rallypoint.create_handler(
        "memory://p/run?min_nodes=1&join_timeout=7", max_nodes=2, local_addr="here", last_call_timeout=3
    )
    assert by_params.settings == by_url.settings
    assert by_params.get_backend() == by_url.get_backend() == "memory"
    assert rallypoint.create_handler(by_url.settings).settings == by_url.settings


def test_sinks_cannot_be_given_with_parameters():
    with pytest.raises(TypeError, match="sinks"):
        rallypoint.create_handler(RendezvousParameters("memory", "p", "run", 1, 1), sinks=[print])


def test_invalid_urls_are_refused_before_a_thread_is_started():
    before = set(background_threads())
    for url, text in {
        "memory:///run?min_nodes=1&joint_timeout=3": "did you mean join_timeout",
        "nowhere://x/run?min_nodes=1": "no backend for scheme 'nowhere'",
        "memory:///run": "min_nodes is missing",
    }.items():
        with pytest.raises(SettingsError, match=text):
            rallypoint.create_handler(url)
    assert set(background_threads()) <= before  # a thread of another test may have ended


def test_sinks_get_typed_events_in_order(place):
    events = []
    handler = place.handler(sinks=[events.append])
    handler.next_rendezvous()
    handler.shutdown()
    kinds = [type(event) for event in events]
    own = [JoinStarted, RoundEntered, RunClosed, NodeLeft]
    assert [kind for kind in kinds if kind in own] == own
