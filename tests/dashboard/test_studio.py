"""Runs that are drawn in a process of its own: where it is, how it ends, and what a page sees of that."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.dashboard import studio as module
from rallypoint.dashboard import watching as watching_module
from rallypoint.dashboard.places import inside
from rallypoint.dashboard.studio import Studio
from rallypoint.dashboard.studio_words import Over
from rallypoint.dashboard.watching import Channel, Watching
from rallypoint.errors import RallypointError
from rallypoint.events import ServerTrouble
from rallypoint.kv.types import Put
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.durability.server import DurableConnection
from rallypoint.server.onlooker import Onlooker
from rallypoint.testing.disk import MemoryDisk
from tests.dashboard.kit import RUN, Browser, House, lives, phase, studios
from tests.patience import PATIENCE_S, until
from tests.server.durability.kit import serving_from
from tests.server.kit import eventually, run, serving


def troubles(house):
    return [event.reason for event in house.events if isinstance(event, ServerTrouble)]


@pytest.fixture
def no_drawing_here(monkeypatch):
    """Whoever draws in this process fails."""

    def draw(place, run_id):
        raise AssertionError("drawn in the server's process")

    monkeypatch.setattr(watching_module, "draw", draw)


# --- a page -----------------------------------------------------------------------------------------------------------


def test_run_is_drawn_by_a_process_that_the_server_started(tmp_path, no_drawing_here):
    with House(tmp_path, draws_apart=True) as house:
        house.join("a", "b")
        assert studios(os.getpid()) == []
        browser = house.browser()
        with browser.stream(f"/api/run?id={RUN}") as one, browser.stream(f"/api/run?id={RUN}") as other:
            for stream in (one, other):
                found = stream.until(lambda message: phase(message) == "active")
                assert found["version"] > 1
            assert len(studios(os.getpid())) == 1
            browser.csrf = browser.get("/api/me").json["csrf"]
            assert browser.post("/api/close", {"run": RUN}).status == 200
            for stream in (one, other):
                assert "full" not in stream.until(lambda message: (message.get("state") or {}).get("is_closed"))
    until(lambda: studios(os.getpid()) == [], "it ends with the page")
    assert troubles(house) == []


def test_page_with_a_token_is_drawn_by_a_process_that_knows_none(tmp_path, no_drawing_here):
    with House(tmp_path, token="open-sesame-17", draws_apart=True) as house:
        house.join("a")
        browser = house.browser()
        browser.login("open-sesame-17")
        with browser.stream(f"/api/run?id={RUN}") as stream:
            stream.until(lambda message: phase(message) == "active")
            (pid,) = studios(os.getpid())
            for name in ("cmdline", "environ"):
                assert b"open-sesame-17" not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_killed_process_is_replaced_and_the_page_goes_on(tmp_path, no_drawing_here):
    with House(tmp_path, draws_apart=True) as house:
        house.join("a")
        browser = house.browser()
        with browser.stream(f"/api/run?id={RUN}") as stream:
            stream.until(lambda message: phase(message) == "active")
            (first,) = studios(os.getpid())
            os.kill(first, signal.SIGKILL)
            assert stream.rest()[-1] == ("bye", "ends")  # a page comes back then
            last = stream.last
        with browser.stream(f"/api/run?id={RUN}", last_event_id=last) as stream:
            seen = [stream.next()[1]]
            while phase(seen[-1]) != "active":
                seen.append(stream.next()[1])
            assert seen[0]["full"] is True  # versions of the one before mean nothing
            (second,) = studios(os.getpid())
            assert second != first
        assert ["SIGKILL" in why and "another is started" in why for why in troubles(house)] == [True]


def test_run_is_drawn_in_the_server_when_no_process_can_be_started(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MODULE", "rallypoint.dashboard.there_is_no_such_module")
    with House(tmp_path, draws_apart=True) as house:
        house.join("a")
        browser = house.browser()
        with browser.stream(f"/api/run?id={RUN}") as stream:
            assert stream.rest() == [("bye", "ends")]
        with browser.stream(f"/api/run?id={RUN}") as stream:
            stream.until(lambda message: phase(message) == "active")
        assert ["draws them itself" in why for why in troubles(house)] == [True]


# --- the process ------------------------------------------------------------------------------------------------------


def looked_at(server, said):
    place = inside(server)
    studio = Studio(place.where, server.admit, said.append)
    watching = Watching(place, linger_s=0.05, elsewhere=studio)
    return studio, watching


def test_process_ends_when_nobody_looks_and_comes_back_with_the_next():
    async def main():
        said = []
        async with serving() as server:
            studio, watching = looked_at(server, said)
            pids = []
            for _ in range(2):
                async with watching.reading(RUN) as channel, watching.reading("other") as other:
                    await eventually(lambda: channel.version >= 2 and other.version >= 2, "first looks")
                    pids.append(studio.pid)
                await eventually(lambda: not lives(pids[-1]), "it ends")
                await eventually(lambda: not server.has_company, "its connection is closed")
            assert pids[0] != pids[1]
            await watching.close()
        assert said == []

    run(main())


def test_run_that_cannot_be_drawn_is_over_and_begins_anew():
    async def main():
        said = []
        async with serving() as server:
            studio, watching = looked_at(server, said)
            async with watching.reading(RUN) as channel:
                await eventually(lambda: channel.version >= 2, "a first look")
                pid, life = studio.pid, studio._life
                life._take(Over(channel.number))  # it says so when drawing fails
                assert channel.is_over
                await eventually(lambda: not lives(pid), "nothing is left to draw")
                async with watching.reading(RUN) as anew:
                    assert anew.epoch != channel.epoch
                    await eventually(lambda: anew.version >= 2, "it is drawn again")
            await watching.close()
        assert said == []

    run(main())


def test_process_that_stands_still_is_noticed(monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 4.0)
    monkeypatch.setattr(module, "END_S", 0.2)

    async def main():
        said = []
        async with serving() as server:
            studio, watching = looked_at(server, said)
            async with watching.reading(RUN) as channel:
                await eventually(lambda: channel.version >= 2, "a first look")
                pid = studio.pid
                os.kill(pid, signal.SIGSTOP)
                await eventually(lambda: channel.is_over, "what it drew is over")
                assert await channel.tell(1) is None
            await eventually(lambda: not lives(pid), "it is killed")
            await watching.close()
        assert "has said nothing for 4 s" in said[0]

    run(main())


def test_process_that_dies_again_and_again_is_not_started_for_a_while():
    async def main():
        said = []
        async with serving() as server:
            studio, watching = looked_at(server, said)
            for _ in range(module.MOST_DEATHS):
                async with watching.reading(RUN) as channel:
                    await eventually(lambda: channel.version >= 2, "a first look")
                    os.kill(studio.pid, signal.SIGKILL)
                    await eventually(lambda: channel.is_over and studio.pid is None, "it is dead")
            async with watching.reading(RUN) as channel:
                assert isinstance(channel, Channel)
                await eventually(lambda: channel.version >= 2, "it is drawn here")
            await watching.close()
        assert [("draws them itself" in why) for why in said] == [False, False, True]

    run(main())


def test_program_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    async def main():
        said = []
        async with serving() as server:
            _, watching = looked_at(server, said)
            async with watching.reading(RUN) as channel:
                await eventually(lambda: channel.is_over, "it cannot be started")
            async with watching.reading(RUN) as channel:
                await eventually(lambda: channel.version >= 2, "it is drawn here")
            await watching.close()
        assert "cannot be started" in said[0]
        assert "/nowhere/python" in said[0]

    run(main())


@pytest.mark.parametrize("has_data", [False, True])
def test_connection_of_an_onlooker_is_asked_for_nothing_and_can_change_nothing(has_data):
    async def main():
        options = {"token": "sesame", "limits": ServerLimits(max_connections=0)}
        async with serving_from(MemoryDisk(), **options) if has_data else serving(**options) as server:
            mine, its = socket.socketpair()
            for one in (mine, its):
                one.setblocking(False)
            await server.admit(mine)

            async def connect(make):
                await asyncio.get_running_loop().create_unix_connection(make, sock=its)

            backend = TcpBackend("here", connect, call_timeout_s=0.5)
            assert (await backend.scan("/rallypoint/")).items == ()
            assert [isinstance(one, Onlooker) for one in server.connections] == [True]
            assert [isinstance(one, DurableConnection) for one in server.connections] == [has_data]
            with pytest.raises(RallypointError):
                async with asyncio.timeout(PATIENCE_S):
                    await backend.txn((), (Put("/rallypoint/x", b"y"),))
            assert (await server.make_local().scan("/rallypoint/")).items == ()
            await backend.close()

    run(main())


# --- with the whole server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("data", [False, True])
def test_process_ends_with_the_server(tmp_path, number, data):
    command = [sys.executable, "-m", "rallypoint", "serve", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--data", str(tmp_path / "data")] if data else []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if "shows" in line)
            browser = Browser(int(line.strip().rstrip("/").rpartition(":")[2]))
            with browser.stream(f"/api/run?id={RUN}") as stream:
                stream.until(lambda message: phase(message) == "absent")
                (pid,) = studios(server.pid)
                began = time.monotonic()
                os.kill(
                    pid, signal.SIGTERM
                )  # as whoever stops all processes of a service does: it waits for the server
                server.send_signal(number)
                until(lambda: not lives(pid), "it ends")
                server.wait(PATIENCE_S)
                assert time.monotonic() - began < 10
                said = server.stderr.read()
                assert "Traceback" not in said
                assert "draws" not in said
        finally:
            server.kill()
