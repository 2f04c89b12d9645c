"""Questions on threads that nobody waits for."""

import asyncio
import gc
import socket
import threading
import weakref
from contextlib import suppress

import pytest

from rallypoint.backends.aside import addresses_of, aside, resolve
from tests.patience import PATIENCE_S, until


def threads() -> int:
    return sum(thread.name == "addresses" for thread in threading.enumerate())


@pytest.fixture
def silent(monkeypatch):
    """A name server that answers when it may."""
    may, real = threading.Event(), socket.getaddrinfo

    def getaddrinfo(*args, **more):
        may.wait(PATIENCE_S)
        return real("127.0.0.1", *args[1:], **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield may
    may.set()
    until(lambda: not threads(), "nobody asks any more")


def test_answers_and_errors_arrive():
    def fails():
        raise ZeroDivisionError("a defect")

    async def main():
        assert await aside(lambda: 5, "five") == 5
        with pytest.raises(ZeroDivisionError, match="a defect"):
            await aside(fails, "fails")
        assert await addresses_of("127.0.0.1", 1) == ["127.0.0.1"]

    asyncio.run(main())


def test_however_often_a_silent_name_server_is_asked_one_thread_waits_for_it(silent):
    async def main():
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await resolve("name", 1)
        assert threads() == 1
        silent.set()
        assert await addresses_of("name", 1) == ["127.0.0.1"]

    asyncio.run(main())


def test_name_is_looked_up_again_once_it_was_answered(monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: asked.append(args) or [])

    async def main():
        assert [await addresses_of("name", 1) for _ in range(2)] == [[], []]

    asyncio.run(main())
    assert len(asked) == 2


def test_answer_after_the_loop_has_ended_is_silent(silent, capsys):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await resolve("name", 1)

    asyncio.run(main())
    silent.set()
    until(lambda: not threads(), "it was answered")
    assert capsys.readouterr().err == ""


def test_name_that_is_not_found_keeps_nobody_alive(monkeypatch):
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
        await asyncio.sleep(0)  # what woke this up holds the error until then
        until(lambda: not threads(), "the one who asked is gone")
        assert kept() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
