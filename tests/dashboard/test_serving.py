"""The port: TLS, slow browsers, and followers that are there only while somebody looks."""

import asyncio
import socket
import ssl
import time

import pytest

from rallypoint import aio
from rallypoint.dashboard import serving as web
from rallypoint.dashboard import watching as module
from rallypoint.dashboard.places import behind
from rallypoint.dashboard.process import bind_page, check_exposure
from rallypoint.dashboard.streams import EventStream
from rallypoint.dashboard.watching import MOST_RUNS, Crowded, Watching
from rallypoint.errors import SettingsError
from rallypoint.server.process import BindError
from tests.dashboard.kit import RUN, House, phase
from tests.patience import PATIENCE_S, until
from tests.server.kit import eventually, run, serving
from tests.server.tls_kit import Town, files


def trusting(town, pair=None):
    context = ssl.create_default_context(cafile=str(town.authority.path))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


# --- TLS --------------------------------------------------------------------------------------------------------------


def test_page_speaks_tls_with_the_certificate_of_the_server(tmp_path):
    town = Town(tmp_path)
    with House(tmp_path, token="sesame", tls=files(pair=town.server)) as house:
        browser = house.browser(context=trusting(town))
        cookie = browser.login("sesame").headers["set-cookie"]
        assert cookie.startswith(f"__Host-rallypoint-{house.port}=")
        assert {"Secure", "HttpOnly", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
        with browser.stream("/api/runs") as stream:
            assert stream.next()[1]["full"] is True
        plain = house.browser().get("/")
        assert (plain.status, plain.body) == (400, b"This page speaks https only.\n")


def test_page_with_mutual_tls_lets_in_who_has_a_certificate_and_nobody_else(tmp_path):
    town = Town(tmp_path)
    with House(tmp_path, tls=files(town.authority.path, town.server)) as house:
        known = house.browser(context=trusting(town, town.client))
        assert known.get("/api/me").json["may_act"] is True
        with pytest.raises((ssl.SSLError, ConnectionError)):
            house.browser(context=trusting(town)).get("/api/me")


def test_large_answers_pass_through_tls_whole(tmp_path):
    town = Town(tmp_path)
    with House(tmp_path, tls=files(pair=town.server)) as house:
        browser = house.browser(context=trusting(town))
        assert len(browser.get("/page/timeline.js").body) > 10_000


# --- addresses --------------------------------------------------------------------------------------------------------


def test_page_that_others_reach_asks_who_they_are():
    address = bind_page("0.0.0.0:0")
    with pytest.raises(BindError) as caught:
        check_exposure(address, authenticates=False, has_tls=False, insecure=False)
    assert "--token-file" in str(caught.value)
    address = bind_page("0.0.0.0:0")
    try:
        assert "act on none" in check_exposure(address, authenticates=False, has_tls=False, insecure=True)[0]
        assert "as they are" in check_exposure(address, authenticates=True, has_tls=False, insecure=False)[0]
        assert check_exposure(address, authenticates=True, has_tls=True, insecure=False) == []
    finally:
        address.sock.close()


def test_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BindError) as caught:
        bind_page(f"127.0.0.1:{taken.getsockname()[1]}")
    assert "is taken" in str(caught.value)


# --- followers --------------------------------------------------------------------------------------------------------


def test_follower_begins_with_the_first_reader_and_ends_after_the_last():
    async def main():
        async with serving() as server:
            watching = Watching(behind(f"tcp://{server.addresses[0]}"), linger_s=0.05)
            assert (watching.followed, server.has_company) == (0, False)
            async with watching.reading(RUN) as first:
                async with watching.reading(RUN) as second:
                    assert first is second
                await eventually(lambda: first.shown.version >= 2, "a first look")
                assert watching.followed == 1
            await eventually(lambda: watching.followed == 0, "it is stopped")
            await eventually(lambda: not server.has_company, "its connection is closed")
            await watching.close()

    run(main())


def test_what_is_told_says_what_time_it_is_now(monkeypatch):
    async def main():
        async with serving() as server:
            watching = Watching(behind(f"tcp://{server.addresses[0]}"))
            async with watching.reading(RUN) as channel:
                await eventually(lambda: channel.shown.version >= 2, "a first look")
                monkeypatch.setattr(module, "wall", lambda: 1000.0)
                assert b'"now":1000.0' in channel.message(0)[1]
                monkeypatch.setattr(module, "wall", lambda: 2000.0)
                assert b'"now":2000.0' in channel.message(0)[1]
            await watching.close()

    run(main())


def test_page_that_is_loaded_again_finds_its_time_line():
    async def main():
        async with serving() as server:
            watching = Watching(behind(f"tcp://{server.addresses[0]}"), linger_s=60)
            async with watching.reading(RUN) as first:
                pass
            async with watching.reading(RUN) as second:
                assert first is second
            await watching.close()
            assert watching.followed == 0

    run(main())


def test_runs_that_are_followed_at_a_time_are_bounded():
    async def main():
        async with serving() as server:
            watching = Watching(behind(f"tcp://{server.addresses[0]}"), linger_s=60)
            async with watching.reading("left"):
                pass
            held = [watching.reading(f"run-{number}") for number in range(MOST_RUNS)]
            for one in held:
                await one.__aenter__()  # the one that nobody looks at makes room
            with pytest.raises(Crowded) as caught:
                async with watching.reading("one more"):
                    pass
            assert str(MOST_RUNS) in str(caught.value)
            for one in held:
                await one.__aexit__(None, None, None)
            await watching.close()

    run(main())


def test_outage_is_shown_and_lived_through():
    async def main():
        async with serving() as server:
            port = int(server.addresses[0].rpartition(":")[2])
            watching = Watching(behind(f"tcp://127.0.0.1:{port}"))
            held = watching.reading(RUN)
            channel = await held.__aenter__()
            state = lambda: channel.shown.since(0, 0.0).state  # noqa: E731
            await eventually(lambda: state()["phase"] == "absent", "a first look")
        await eventually(lambda: state()["trouble"], "the outage is told")
        assert state()["phase"] == "absent"
        async with serving(port):
            await eventually(lambda: not state()["trouble"], "it is over")
            await held.__aexit__(None, None, None)
            await watching.close()

    run(main())


# --- places -----------------------------------------------------------------------------------------------------------


def test_url_of_one_run_shows_that_run_only():
    place = behind("tcp://127.0.0.1:1/my-run?min_nodes=2")
    assert place.only == "my-run"
    assert place.target("my-run").settings.run_id == "my-run"
    with pytest.raises(SettingsError) as caught:
        place.target("other")
    assert "'my-run' only" in str(caught.value)


@pytest.mark.parametrize("run_id", ["a/b", "<script>", "%2e%2e", "ü", "a b", "x" * 200])
def test_any_run_id_is_found_by_a_url_without_one(run_id):
    place = behind("tcp://127.0.0.1:1")
    assert place.only is None
    assert place.target(run_id).keys.run_id == run_id


def test_directory_of_runs_is_no_place():
    with pytest.raises(SettingsError):
        behind("file:///tmp/runs/")
    assert behind("file:///tmp/runs/one").only == "one"


def test_run_in_a_file_is_shown_as_any_other(tmp_path):
    async def main():
        url = f"file://{tmp_path}/one"
        node = aio.create_handler(f"{url}?min_nodes=1&name=a&last_call_timeout=0.1")
        await node.next_rendezvous()
        watching = Watching(behind(url))
        async with watching.reading("one") as channel:
            await eventually(lambda: channel.shown.since(0, 0.0).state["phase"] == "active", "the round")
            message = channel.shown.since(0, 0.0)
            assert [(card.name, spot.rank) for card, spot in zip(message.nodes, message.spots, strict=True)] == [
                ("a", 0)
            ]
        async with watching.reading(None) as runs:
            await eventually(lambda: runs.shown.version > 0, "the list")
            assert [run.run_id for run in runs.shown.since(0, 0.0).runs] == ["one"]
        await watching.close()
        await node.abandon()

    run(main())


# --- slow browsers ----------------------------------------------------------------------------------------------------


class Reading:
    """An ASGI server whose client reads when it is told to."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ready = asyncio.Event()
        self.ready.set()

    async def send(self, message):
        await self.ready.wait()
        self.sent.append(message.get("body", b""))

    async def receive(self):
        await asyncio.Event().wait()


def test_browser_that_reads_nothing_is_given_up_and_nothing_is_kept_for_it():
    async def main():
        async with serving() as server:
            watching = Watching(behind(f"tcp://{server.addresses[0]}"))
            async with watching.reading(RUN) as channel:
                reading = Reading()
                stream = EventStream(channel, "", lambda: True, beat_s=0.05, send_s=0.3, stopping=asyncio.Event())
                task = asyncio.create_task(stream({}, reading.receive, reading.send))
                await eventually(lambda: any(b": keep-alive" in body for body in reading.sent), "a word")
                reading.ready.clear()
                began = time.monotonic()
                await asyncio.wait_for(task, 30)
                assert time.monotonic() - began >= 0.2
            await watching.close()

    run(main())


def ask_and_read_nothing(house):
    """More answers than any buffer between takes."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", house.port))
    one.sendall(b"GET /page/timeline.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000)
    return one


def stalled(house, wait_s=PATIENCE_S):
    """Whether there is a connection that takes nothing."""

    def count():
        return [one for one in house.web_connections() if one.flow.write_paused]

    until(lambda: house.ask(count), "it does not take what it asked for", wait_s)


def test_who_asks_and_reads_nothing_is_dropped_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(web, "STALLED_S", 0.5)
    with House(tmp_path, token="sesame") as house, ask_and_read_nothing(house):
        stalled(house)
        until(lambda: not house.ask(house.web_connections), "its connection is gone")


def test_who_asks_and_reads_nothing_does_not_keep_the_page_from_stopping(tmp_path):
    with House(tmp_path, token="sesame") as house, ask_and_read_nothing(house):
        stalled(house)
        began = time.monotonic()
        house.ask(house.stop_page())
        assert time.monotonic() - began < 10


def test_browser_that_was_slow_gets_one_difference_for_all_it_missed(tmp_path):
    with House(tmp_path) as house:
        house.join("a", "b")
        browser = house.browser()
        with browser.stream(f"/api/run?id={RUN}") as stream:
            seen = stream.until(lambda message: phase(message) == "active")["version"]
            browser.csrf = browser.get("/api/me").json["csrf"]
            last = stream.last
        for name in ("close", "reopen", "close"):
            assert browser.post(f"/api/{name}", {"run": RUN}).status == 200
        with browser.stream(f"/api/run?id={RUN}", last_event_id=last) as stream:
            missed = stream.until(lambda message: (message.get("state") or {}).get("is_closed"))
            assert missed["version"] > seen
