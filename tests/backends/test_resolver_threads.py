"""Blocking DNS look-ups on daemon threads."""

import asyncio
import gc
import socket
import threading
import weakref
from contextlib import suppress

import pytest

from rallypoint.backends.resolver_threads import addresses_of, resolve, run_in_thread
from tests.patience import PATIENCE_S, until


def threads() -> int:
    return sum(thread.name == "addresses" for thread in threading.enumerate())


@pytest.fixture
def silent(monkeypatch):
    """A name server that does not answer until the event is set."""
    may, real = threading.Event(), socket.getaddrinfo

    def getaddrinfo(*args, **more):
        may.wait(PATIENCE_S)
        return real("127.0.0.1", *args[1:], **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield may
    may.set()
    until(lambda: not threads(), "all look-ups have ended")


def test_results_and_errors_of_the_thread_arrive():
    def fails():
        raise ZeroDivisionError("a defect")

    async def main():
        assert await run_in_thread(lambda: 5, "five") == 5
        with pytest.raises(ZeroDivisionError, match="a defect"):
            await run_in_thread(fails, "fails")
        assert await addresses_of("127.0.0.1", 1) == ["127.0.0.1"]

    asyncio.run(main())


def test_concurrent_look_ups_of_one_name_share_one_thread(silent):
    async def main():
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await resolve("name", 1)
        assert threads() == 1
        silent.set()
        assert await addresses_of("name", 1) == ["127.0.0.1"]

    asyncio.run(main())


def test_name_is_looked_up_again_after_an_answer(monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: asked.append(args) or [])

    async def main():
        assert [await addresses_of("name", 1) for _ in range(2)] == [[], []]

    asyncio.run(main())
    assert len(asked) == 2


def test_answer_after_the_end_of_the_loop_is_ignored(silent, capsys):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await resolve("name", 1)

    asyncio.run(main())
    silent.set()
    until(lambda: not threads(), "the look-up has ended")
    assert capsys.readouterr().err == ""


def test_error_of_a_look_up_leaves_no_reference_cycle(monkeypatch):
    def getaddrinfo(*args, **more):
        raise socket.gaierror("no such name")

    class Owner:
        pass

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def asks() -> weakref.ref:
        owner = Owner()
        with suppress(OSError):
            await resolve("name", 1)
        return weakref.ref(owner)

    async def main():
        kept = await asks()
        await asyncio.sleep(0)  # the event loop still holds the error in this turn
        until(lambda: not threads(), "the thread has ended")
        assert kept() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
