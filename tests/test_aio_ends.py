"""The API for asyncio: opening within deadlines, and ending without leaving resources."""

import asyncio
import gc
import logging
import socket
import threading
import time

import pytest

import rallypoint
from rallypoint import _address, aio
from rallypoint.backends import schemes
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import RendezvousConnectionError, RendezvousTimeoutError, Unavailable
from rallypoint.rendezvous.membership import Cause
from rallypoint.testing.cuttable import CuttableBackend
from rallypoint.testing.loop import run
from tests.patience import PATIENCE_S, script, unique

SOLO = {"min_nodes": 1, "last_call_timeout": 0.1, "name": "a", "local_addr": "here"}


def now() -> float:
    return asyncio.get_running_loop().time()


def virtual(main):
    return run(main(), limit_s=3_600.0)


@pytest.fixture
def opened_by(monkeypatch):
    """A URL whose backend is opened by the given function."""

    def register(opener):
        name = unique().replace("-", "")
        monkeypatch.setitem(schemes._openers, name, opener)
        return f"{name}://here/run"

    return register


# --- listeners --------------------------------------------------------------------------------------------------------


def test_listener_that_raises_is_removed_and_the_node_enters_the_next_round(caplog):
    url = f"memory://{unique()}/run?min_nodes=1&max_nodes=2&last_call_timeout=1&join_timeout=30"
    calls, causes = [], []

    def fails(cause, reason):
        calls.append(cause)
        raise ZeroDivisionError("a bug")

    async def main():
        a, b = (aio.create_handler(url, name=name) for name in "ab")
        world = await a.next_rendezvous()
        world.changed.add_listener(fails)
        world.changed.add_listener(lambda cause, reason: causes.append(cause))
        joining = asyncio.create_task(b.next_rendezvous())
        await world.changed.wait()
        world.changed.set(Cause.LOSS, "graver")
        again, other = await asyncio.gather(a.next_rendezvous(), joining)
        assert again.round == other.round == 2
        for handler in (a, b):
            await handler.aclose()

    with caplog.at_level(logging.ERROR, "rallypoint"):
        virtual(main)
    assert calls == [Cause.WAITING]
    assert causes[:2] == [Cause.WAITING, Cause.LOSS]
    (record,) = caplog.records
    assert "not called again" in record.getMessage()
    assert "ZeroDivisionError" in caplog.text


def test_listener_that_raises_when_it_is_added_is_removed(caplog):
    def fails(cause, reason):
        raise ZeroDivisionError("a bug")

    async def main():
        changed = aio.AsyncChanged()
        changed.set(Cause.LOSS, "b is lost")
        changed.add_listener(fails)
        assert await changed.wait() == "b is lost"
        changed.set(Cause.ROUND_OVER, "over")

    with caplog.at_level(logging.ERROR, "rallypoint"):
        virtual(main)
    assert len(caplog.records) == 1


# --- dropping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["nothing", "world", "store"])
def test_dropped_handler_ends_its_session_and_leaves_no_task(opened_by, kept):
    server = MemoryServer()

    async def opener(settings):
        return MemoryBackend(server)

    def nodes():
        return [key for key in server.engine.items if "/nodes/" in key]

    async def main():
        handler = aio.create_handler(opened_by(opener), **SOLO)
        world = await handler.next_rendezvous()
        needed = {"nothing": None, "world": world, "store": world.store}[kept]
        del handler, world
        gc.collect()
        await asyncio.sleep(60.0)
        assert bool(nodes()) is (needed is not None), "a node is a member while its world or store is referenced"
        if needed is not None:
            del needed
            gc.collect()
            await asyncio.sleep(1.0)
        assert nodes() == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not server._watches

    virtual(main)


def test_dropped_handler_of_a_closed_loop_prints_nothing(opened_by, capsys):
    async def opener(settings):
        return MemoryBackend(MemoryServer())

    async def main():
        handler = aio.create_handler(opened_by(opener), **SOLO)
        await handler.next_rendezvous()
        return handler

    handler = virtual(main)
    del handler
    gc.collect()
    assert capsys.readouterr().err == ""


# --- ending -----------------------------------------------------------------------------------------------------------


def test_concurrent_aclose_waits_for_the_first_one(opened_by):
    class Slow(MemoryBackend):
        async def close(self):
            await asyncio.sleep(5.0)
            await super().close()
            closed_at.append(now())

    closed_at: list[float] = []

    async def opener(settings):
        return Slow(MemoryServer())

    async def main():
        handler = aio.create_handler(opened_by(opener), **SOLO)
        await handler.next_rendezvous()
        first = asyncio.create_task(handler.aclose())
        await asyncio.sleep(1.0)
        assert not closed_at
        await handler.aclose()
        assert closed_at == [now()]
        await first

    virtual(main)


def test_cancelled_aclose_leaves_no_resources(opened_by):
    class Recording(CuttableBackend):
        is_shortened = False

        def shorten_close(self):
            self.is_shortened = True

        async def close(self):
            closed_at.append(now())
            await super().close()

    lines: list[CuttableBackend] = []
    closed_at: list[float] = []

    async def opener(settings):
        lines.append(Recording(MemoryBackend(MemoryServer())))
        return lines[-1]

    async def main():
        handler = aio.create_handler(opened_by(opener), **SOLO)
        world = await handler.next_rendezvous()
        lines[0].cut()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await handler.aclose()
        assert closed_at == [now()]
        assert lines[0].is_shortened, "closing does not wait for other processes"
        assert world.changed.cause is Cause.ROUND_OVER
        await asyncio.sleep(60.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual(main)


def test_world_changes_when_an_abandoned_handler_is_closed(opened_by):
    async def opener(settings):
        return MemoryBackend(MemoryServer())

    async def main():
        handler = aio.create_handler(opened_by(opener), **SOLO)
        world = await handler.next_rendezvous()
        await handler.abandon()
        await handler.aclose()
        assert world.changed.cause is Cause.ROUND_OVER

    virtual(main)


@pytest.fixture
def lingering(opened_by):
    """The URL of a backend that takes five seconds to close, and a list of the opened backends."""
    opened = []

    class Lingering(MemoryBackend):
        async def close(self):
            await asyncio.sleep(5.0)
            await super().close()

    async def opener(settings):
        opened.append(Lingering(server))
        return opened[-1]

    server = MemoryServer()
    return opened_by(opener), opened


def test_shutdown_and_aclose_during_a_shutdown_wait_for_it(lingering):
    url, opened = lingering

    async def main():
        handler = aio.create_handler(url, **SOLO)
        await handler.next_rendezvous()
        first = asyncio.create_task(handler.shutdown())
        await asyncio.sleep(1.0)
        assert await asyncio.gather(handler.shutdown(), handler.aclose()) == [True, None]
        assert now() == pytest.approx(5.0, abs=0.5)
        assert await first is True
        assert len(opened) == 1

    virtual(main)


def test_shutdown_that_is_cancelled_after_the_close_counts_as_successful(lingering):
    url, opened = lingering

    async def main():
        handler = aio.create_handler(url, **SOLO)
        await handler.next_rendezvous()
        first = asyncio.create_task(handler.shutdown())
        await asyncio.sleep(1.0)
        second = asyncio.create_task(handler.shutdown())
        await asyncio.sleep(1.0)
        first.cancel()
        assert await second is True
        assert len(opened) == 1

    virtual(main)


def test_concurrent_shutdown_takes_over_from_a_cancelled_one(opened_by):
    server, lines = MemoryServer(), []

    async def opener(settings):
        lines.append(CuttableBackend(MemoryBackend(server)))
        return lines[-1]

    async def main():
        url = opened_by(opener)
        handler, other = (aio.create_handler(url, **SOLO | {"name": name, "max_nodes": 2}) for name in "ab")
        await handler.next_rendezvous()
        lines[0].cut()
        first = asyncio.create_task(handler.shutdown())
        await asyncio.sleep(1.0)
        second = asyncio.create_task(handler.shutdown())
        await asyncio.sleep(1.0)
        first.cancel()
        assert await second is True
        assert await other.is_closed()
        await other.aclose()

    virtual(main)


@pytest.mark.parametrize("query", ["is_closed", "observe"])
def test_ending_handler_does_not_open_the_backend_again_for_a_query(lingering, query):
    url, opened = lingering

    async def main():
        handler = aio.create_handler(url, **SOLO)
        await handler.next_rendezvous()
        ending = asyncio.create_task(handler.shutdown())
        await asyncio.sleep(1.0)
        assert await getattr(handler, query)() is (True if query == "is_closed" else None)
        assert now() == pytest.approx(1.0, abs=0.1)
        await ending
        assert len(opened) == 1

    virtual(main)


def test_run_can_be_closed_while_the_handler_is_ending(lingering):
    url, _ = lingering

    async def main():
        handler, other = (aio.create_handler(url, **SOLO | {"name": name, "max_nodes": 2}) for name in "ab")
        await handler.next_rendezvous()
        ending = asyncio.create_task(handler.aclose())
        await asyncio.sleep(1.0)
        assert await handler.shutdown() is True
        assert await other.is_closed()
        await ending
        await other.aclose()

    virtual(main)


def test_join_during_aclose_is_not_signalled_as_left(opened_by):
    class Slow(MemoryBackend):
        async def close(self):
            await asyncio.sleep(5.0)
            await super().close()

    server = MemoryServer()

    async def opener(settings):
        return Slow(server)

    async def main():
        handler = aio.create_handler(opened_by(opener), join_timeout=30, **SOLO)
        await handler.next_rendezvous()
        ending = asyncio.create_task(handler.aclose())
        await asyncio.sleep(1.0)
        world = await handler.next_rendezvous()
        await ending
        await asyncio.sleep(10.0)
        assert not world.changed.is_set()
        await handler.aclose()

    virtual(main)


# --- opening ----------------------------------------------------------------------------------------------------------


def test_join_deadline_covers_a_slow_opener(opened_by):
    async def opener(settings):
        await asyncio.sleep(30.0)

    async def main():
        handler = aio.create_handler(opened_by(opener), join_timeout=0.5, **SOLO)
        with pytest.raises(RendezvousConnectionError, match=r"within 0\.5 s: no answer"):
            await handler.next_rendezvous()
        assert now() == pytest.approx(0.5)
        await handler.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual(main)


def test_join_deadline_counts_from_the_call_and_not_from_the_opening(opened_by):
    async def opener(settings):
        await asyncio.sleep(3.0)
        return MemoryBackend(MemoryServer())

    async def main():
        handler = aio.create_handler(opened_by(opener), join_timeout=5, **{**SOLO, "min_nodes": 2})
        with pytest.raises(RendezvousTimeoutError, match="no round after 5 s"):
            await handler.next_rendezvous()
        assert now() == pytest.approx(5.0, abs=0.1)
        await handler.aclose()

    virtual(main)


def test_join_deadline_covers_a_name_server_that_does_not_answer(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(_address, "_found", None)
    monkeypatch.setattr(socket, "getfqdn", lambda *_: answers.wait(PATIENCE_S) and "here")
    handler = rallypoint.create_handler(f"memory://{unique()}/run", min_nodes=2, join_timeout=0.5)
    started_at = time.monotonic()
    try:
        with pytest.raises(RendezvousConnectionError, match=r"within 0\.5 s"):
            handler.next_rendezvous()
        assert time.monotonic() - started_at < PATIENCE_S / 2
    finally:
        answers.set()
        handler.close()


def test_process_exits_although_a_name_server_does_not_answer():
    script(
        """
        import socket, threading
        import rallypoint

        socket.getaddrinfo = lambda *args, **more: threading.Event().wait()
        handler = rallypoint.create_handler("tcp://elsewhere/run", min_nodes=2, join_timeout=0.5, local_addr="here")
        try:
            handler.next_rendezvous()
        except rallypoint.RendezvousConnectionError:
            handler.close()
        else:
            raise AssertionError("it has no address")
        """
    )


def test_unavailable_opener_is_retried(opened_by):
    server = MemoryServer()

    async def opener(settings):
        if now() < 5.0:
            raise Unavailable("not there yet")
        return MemoryBackend(server)

    async def main():
        handler = aio.create_handler(opened_by(opener), join_timeout=30, **SOLO)
        world = await handler.next_rendezvous()
        assert world.round == 1
        assert now() == pytest.approx(5.0, abs=1.0)
        await handler.aclose()

    virtual(main)


@pytest.mark.parametrize("call", ["set_closed", "reopen"])
@pytest.mark.parametrize("opening_s", [30.0, 1.5])
def test_close_timeout_covers_a_slow_opener_and_a_slow_backend(opened_by, call, opening_s):
    async def opener(settings):
        await asyncio.sleep(opening_s)
        line = CuttableBackend(MemoryBackend(MemoryServer()))
        line.cut()
        return line

    async def main():
        handler = aio.create_handler(opened_by(opener), close_timeout=2, **SOLO)
        with pytest.raises((RendezvousConnectionError, RendezvousTimeoutError), match="within 2 s"):
            await getattr(handler, call)()
        assert now() == pytest.approx(2.0, abs=0.01)
        await handler.aclose()

    virtual(main)
