"""Feeds run only while somebody reads them, live through outages, and give a slow reader one difference."""

import asyncio
import time

import pytest

from rallypoint import aio
from rallypoint.dashboard import feeds as module
from rallypoint.dashboard.feeds import MOST_FEEDS, Feeds, TooManyRuns
from rallypoint.dashboard.source import behind
from rallypoint.dashboard.streams import EventStream
from rallypoint.errors import SettingsError
from tests.dashboard.kit import RUN, Site, phase
from tests.server.kit import eventually, run, serving

# --- feeds ------------------------------------------------------------------------------------------------------------


def test_feed_starts_with_the_first_reader_and_stops_after_the_last():
    async def main():
        async with serving() as server:
            feeds = Feeds(behind(f"tcp://{server.addresses[0]}"), linger_s=0.05)
            assert (len(feeds), len(server.connections)) == (0, 0)
            async with feeds.reading(RUN) as first:
                async with feeds.reading(RUN) as second:
                    assert first is second
                await eventually(lambda: first.view.version >= 2, "a first look")
                assert len(feeds) == 1
            await eventually(lambda: len(feeds) == 0, "it is stopped")
            await eventually(lambda: not server.connections, "its connection is closed")
            await feeds.close()

    run(main())


def test_update_contains_the_current_time(monkeypatch):
    async def main():
        async with serving() as server:
            feeds = Feeds(behind(f"tcp://{server.addresses[0]}"))
            async with feeds.reading(RUN) as feed:
                await eventually(lambda: feed.view.version >= 2, "a first look")
                monkeypatch.setattr(module, "wall", lambda: 1000.0)
                assert b'"now":1000.0' in feed.message(0)[1]
                monkeypatch.setattr(module, "wall", lambda: 2000.0)
                assert b'"now":2000.0' in feed.message(0)[1]
            await feeds.close()

    run(main())


def test_page_that_is_loaded_again_finds_its_time_line():
    async def main():
        async with serving() as server:
            feeds = Feeds(behind(f"tcp://{server.addresses[0]}"), linger_s=60)
            async with feeds.reading(RUN) as first:
                pass
            async with feeds.reading(RUN) as second:
                assert first is second
            await feeds.close()
            assert len(feeds) == 0

    run(main())


def test_feeds_are_bounded():
    async def main():
        async with serving() as server:
            feeds = Feeds(behind(f"tcp://{server.addresses[0]}"), linger_s=60)
            async with feeds.reading("left"):
                pass
            held = [feeds.reading(f"run-{number}") for number in range(MOST_FEEDS)]
            for one in held:
                await one.__aenter__()  # the one that nobody looks at makes room
            with pytest.raises(TooManyRuns) as caught:
                async with feeds.reading("one more"):
                    pass
            assert str(MOST_FEEDS) in str(caught.value)
            for one in held:
                await one.__aexit__(None, None, None)
            await feeds.close()

    run(main())


def test_outage_is_shown_and_ends_no_feed():
    async def main():
        async with serving() as server:
            port = int(server.addresses[0].rpartition(":")[2])
            feeds = Feeds(behind(f"tcp://127.0.0.1:{port}"))
            held = feeds.reading(RUN)
            feed = await held.__aenter__()
            state = lambda: feed.view.since(0, 0.0).state  # noqa: E731
            await eventually(lambda: state()["phase"] == "absent", "a first look")
        await eventually(lambda: state()["trouble"], "the outage is told")
        assert state()["phase"] == "absent"
        async with serving(port):
            await eventually(lambda: not state()["trouble"], "it is over")
            await held.__aexit__(None, None, None)
            await feeds.close()

    run(main())


# --- sources ----------------------------------------------------------------------------------------------------------


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


def test_directory_of_files_is_no_source():
    with pytest.raises(SettingsError):
        behind("file:///tmp/runs/")
    assert behind("file:///tmp/runs/one").only == "one"


def test_run_in_a_file_is_shown_as_any_other(tmp_path):
    async def main():
        url = f"file://{tmp_path}/one"
        node = aio.create_handler(f"{url}?min_nodes=1&name=a&last_call_timeout=0.1")
        await node.next_rendezvous()
        feeds = Feeds(behind(url))
        async with feeds.reading("one") as feed:
            await eventually(lambda: feed.view.since(0, 0.0).state["phase"] == "active", "the round")
            message = feed.view.since(0, 0.0)
            assert [(card.name, spot.rank) for card, spot in zip(message.nodes, message.node_states, strict=True)] == [
                ("a", 0)
            ]
        async with feeds.reading(None) as runs:
            await eventually(lambda: runs.view.version > 0, "the list")
            assert [run.run_id for run in runs.view.since(0, 0.0).runs] == ["one"]
        await feeds.close()
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


def test_stream_of_a_browser_that_reads_nothing_ends():
    async def main():
        async with serving() as server:
            feeds = Feeds(behind(f"tcp://{server.addresses[0]}"))
            async with feeds.reading(RUN) as feed:
                reading = Reading()
                stream = EventStream(feed, "", lambda: True, heartbeat_s=0.05, send_s=0.3, stopping=asyncio.Event())
                task = asyncio.create_task(stream({}, reading.receive, reading.send))
                await eventually(lambda: any(b": keep-alive" in body for body in reading.sent), "a word")
                reading.ready.clear()
                began = time.monotonic()
                await asyncio.wait_for(task, 30)
                assert time.monotonic() - began >= 0.2
            await feeds.close()

    run(main())


def test_slow_browser_gets_one_difference_for_all_that_it_missed():
    with Site() as site:
        site.join("a", "b")
        browser = site.browser()
        with browser.stream(f"/api/run?id={RUN}") as stream:
            seen = stream.until(lambda message: phase(message) == "active")["version"]
            browser.load_csrf()
            last = stream.last_id
        for name in ("close", "reopen", "close"):
            assert browser.post(f"/api/{name}", {"run": RUN}).status == 200
        with browser.stream(f"/api/run?id={RUN}", last_event_id=last) as stream:
            missed = stream.until(lambda message: (message.get("state") or {}).get("is_closed"))
            assert missed["version"] > seen
