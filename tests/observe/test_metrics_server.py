"""The metrics of a server are right, are computed only on a scrape, and their number is bounded."""

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.registry import CollectorRegistry

from rallypoint import aio
from rallypoint.kv.types import Grant
from rallypoint.observe.metrics import ServerBusy, exposition, serve_metrics, server, server_registry
from rallypoint.observe.metrics import listener as listening
from rallypoint.observe.metrics.table import TABLE, Exporter, Kind
from rallypoint.server.process import BindError
from rallypoint.testing.disk import MemoryDisk
from rallypoint.wire.messages import NOW, Do, Hold, WatchStart
from tests.observe.metrics_kit import Scraped, scrape
from tests.patience import PATIENCE_S
from tests.server.durability.kit import serving_from
from tests.server.kit import Raw, client_of, eventually, put, run, serving


async def gathered(server, *names, run_id="r", **options):
    query = "&".join(f"{name}={value}" for name, value in options.items())
    handlers = [
        aio.create_handler(
            f"tcp://{server.addresses[0]}/{run_id}?min_nodes={len(names)}&max_nodes=4&last_call_timeout=0.1&name={name}&{query}"
        )
        for name in names
    ]
    await asyncio.gather(*(one.next_rendezvous() for one in handlers))
    return handlers


def test_server_with_data_exposes_every_metric_defined_for_servers_with_its_type():
    async def main():
        async with serving_from(MemoryDisk()) as server:
            registry = server_registry(server)
            handlers = await gathered(server, "a", "b")
            found = scrape(registry)
            for one in handlers:
                await one.aclose()
        mine = [metric for metric in TABLE if metric.exporter is not Exporter.NODE]
        assert found.ours() == {metric.name for metric in mine}
        for metric in mine:
            family = found.families[metric.name.removesuffix("_total")]
            assert family.type == metric.kind.value
            assert family.documentation == metric.meaning
            for sample in family.samples:
                more = {"le"} if metric.kind is Kind.HISTOGRAM and sample.name.endswith("_bucket") else set()
                assert set(sample.labels) == set(metric.labels) | more

    run(main())


def test_server_without_data_exposes_no_metrics_of_a_log():
    async def main():
        async with serving() as server:
            return scrape(server_registry(server)).ours()

    assert run(main()) == {metric.name for metric in TABLE if metric.exporter in (Exporter.SERVER, Exporter.DECISIONS)}


async def counted(registry, rounds):
    """Wait until so many rounds are counted, which happens after their members have been told."""
    await eventually(
        lambda: scrape(registry)("rallypoint_rounds_total", outcome="active") == rounds, "they are counted"
    )


def test_round_is_counted_with_its_phases_and_its_run():
    async def main():
        async with serving() as server:
            registry = server_registry(server)
            handlers = await gathered(server, "a", "b")
            await counted(registry, 1)
            found = scrape(registry)
            assert found("rallypoint_round_phase_seconds_count", phase="confirm") == 1
            assert found("rallypoint_run_members", run="r") == 2
            assert found("rallypoint_run_open_places", run="r") == 2
            assert (found("rallypoint_run_active", run="r"), found("rallypoint_run_round", run="r")) == (1, 1)
            assert found("rallypoint_server_sessions") == 2
            assert found("rallypoint_server_connections") == 2
            assert found("rallypoint_server_commits_total") > 5
            assert found("rallypoint_server_operations_total", operation="grant") >= 2
            for one in handlers:
                await one.leave("done")
            await eventually(
                lambda: scrape(registry)("rallypoint_round_lasted_seconds_count") == 1, "the round is over"
            )
            found = scrape(registry)
            assert (found("rallypoint_run_active", run="r"), found("rallypoint_run_members", run="r")) == (0, 0)
            assert found("rallypoint_nodes_lost_total", standing="member") == 0
            assert found("rallypoint_round_ends_total", kind="requested") == 1
            assert found("rallypoint_round_ends_total", kind="worker_failed") == 0
            for one in handlers:
                await one.aclose()

    run(main())


def test_waiting_and_joining_nodes_are_counted():
    async def main():
        async with serving() as server:
            registry = server_registry(server)
            handlers = await gathered(server, "a", "b", admission_window=0)
            late = aio.create_handler(
                f"tcp://{server.addresses[0]}/r?min_nodes=2&max_nodes=4&name=late&admission_window=0"
            )
            alone = aio.create_handler(f"tcp://{server.addresses[0]}/other?min_nodes=2&name=alone")
            calls = [asyncio.create_task(one.next_rendezvous()) for one in (late, alone)]
            await eventually(lambda: scrape(registry)("rallypoint_run_waiting", run="r") == 1, "one waits")
            await eventually(lambda: scrape(registry)("rallypoint_run_joining", run="other") == 1, "one joins")
            assert scrape(registry)("rallypoint_run_active", run="other") == 0
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            for one in (*handlers, late, alone):
                await one.aclose()

    run(main())


def test_sessions_end_by_cause_and_losses_are_counted():
    async def main():
        async with serving() as server:
            registry = server_registry(server)
            dies, leaves, dies_too = await gathered(server, "dies", "leaves", "dies_too", disconnect_grace=0.1)
            await leaves.leave("done")
            await dies.abandon()
            await dies_too.abandon()

            def ended(cause):
                return scrape(registry)("rallypoint_server_sessions_ended_total", cause=cause)

            await eventually(lambda: ended("left") == 1, "one left")
            await eventually(lambda: ended("disconnected") == 2, "two died")
            await eventually(
                lambda: scrape(registry)("rallypoint_nodes_lost_total", standing="member") == 2, "the members are lost"
            )
            for one in (leaves, dies, dies_too):
                await one.aclose()

    run(main())


def test_session_that_is_not_renewed_ends_as_silent():
    async def main():
        async with serving() as server:
            registry = server_registry(server)
            raw, _ = await Raw.welcomed(server, run="r")
            raw.send(Do(1, Grant(0.2)))
            lease = (await raw.answer(1)).lease
            raw.send(Hold(lease, 1.0))
            await eventually(lambda: server.clients.session_count == 1, "it is a session")
            await eventually(lambda: server.engine_host.engine.leases.get(lease) is None, "it ends")
            server.clients.sweep()
            assert scrape(registry)("rallypoint_server_sessions_ended_total", cause="silent") == 1
            assert scrape(registry)("rallypoint_server_sessions") == 0

    run(main())


def test_client_that_connects_again_counts_as_a_reconnect():
    async def main():
        async with serving() as server:
            registry = server_registry(server)
            handlers = await gathered(server, "a")
            assert scrape(registry)("rallypoint_server_reconnects_total") == 0
            for connection in list(server.connections):
                connection.abort()
            await eventually(lambda: scrape(registry)("rallypoint_server_reconnects_total") == 1, "it is back")
            for one in handlers:
                await one.aclose()

    run(main())


def test_refused_client_is_counted_by_reason():
    async def main():
        async with serving(token="secret") as server:
            registry = server_registry(server)
            raw = await Raw.open(server)
            raw.writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await raw.rest()
            found = scrape(registry)
            assert found("rallypoint_server_refusals_total", reason="stranger") == 1
            assert found("rallypoint_server_refusals_total", reason="token") == 0

    run(main())


def test_client_that_does_not_read_counts_as_watch_lag_until_it_reads():
    async def main():
        async with serving() as server:
            registry = server_registry(server)
            assert scrape(registry)("rallypoint_server_watch_lag_seconds") == 0
            raw, _ = await Raw.welcomed(server)
            raw.send(WatchStart(1, "/w/", NOW))
            async with client_of(server.addresses[0]) as writer:
                for _ in range(200):
                    await put(writer, "/w/a", bytes(256 * 1024))
                    found = scrape(registry)
                    if found("rallypoint_server_watch_backlog_messages"):
                        break
                assert found("rallypoint_server_watch_backlog_messages") > 0
                assert found("rallypoint_server_watch_lag_seconds") >= 0
                await eventually(lambda: scrape(registry)("rallypoint_server_watch_lag_seconds") > 0, "it lags")
            raw.abort()
            await eventually(lambda: scrape(registry)("rallypoint_server_watch_lag_seconds") == 0, "it is gone")

    run(main())


def test_log_metrics_of_a_server_with_data_grow_and_show_a_failure():
    async def main():
        disk = MemoryDisk()
        async with serving_from(disk) as server:
            registry = server_registry(server)
            async with client_of(server.addresses[0]) as writer:
                await put(writer, "/w/a", b"x" * 100)
                found = scrape(registry)
                assert found("rallypoint_server_log_bytes") > 100
                assert found("rallypoint_server_log_entries") >= 1
                assert found("rallypoint_server_log_commit_seconds_count") >= 1
                assert found("rallypoint_server_data_failing") == 0
                server.journal._set_trouble("a test says so")
                assert scrape(registry)("rallypoint_server_data_failing") == 1
                server.journal._recovered()

    run(main())


def test_runs_beyond_the_maximum_share_their_series():
    async def main():
        async with serving() as server:
            handlers = []
            for number in range(6):
                handlers += await gathered(server, "a", run_id=f"run{number}")
            registry = server_registry(server, max_runs=2)
            await eventually(
                lambda: scrape(registry)("rallypoint_run_active", run="") == 4, "all are known to be active"
            )
            few = scrape(registry)
            members = few.families["rallypoint_run_members"].samples
            assert {sample.labels["run"]: sample.value for sample in members} == {"run0": 1, "run1": 1, "": 4}
            assert {s.labels["run"] for s in few.families["rallypoint_run_round"].samples} == {"run0", "run1"}
            for one in handlers:
                await one.aclose()

    run(main())


# --- over HTTP, from another thread -----------------------------------------------------------------------------------


def fetch(address, path="/metrics", **headers):
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}{path}", headers=headers), timeout=20) as got:
        return got.read().decode(), got.headers["Content-Type"]


def test_listener_serves_metrics_and_nothing_else():
    async def main():
        async with serving() as server:
            listener = serve_metrics(server_registry(server), "127.0.0.1", 0)
            text, kind = await asyncio.to_thread(fetch, listener.address)
            assert kind == "text/plain; version=0.0.4; charset=utf-8"
            assert Scraped(text)("rallypoint_server_runs") == 0
            assert Scraped(text)("rallypoint_server_loop_lag_seconds") > 0
            assert Scraped(text)("process_open_fds") > 0
            _, kind = await asyncio.to_thread(fetch, listener.address, Accept="application/openmetrics-text")
            assert kind.startswith("application/openmetrics-text")
            with pytest.raises(urllib.error.HTTPError) as refused:
                await asyncio.to_thread(fetch, listener.address, "/")
            assert refused.value.code == 404
            refused.value.close()
            listener.close()
            with pytest.raises(urllib.error.URLError):
                await asyncio.to_thread(fetch, listener.address)

    run(main())


def test_connection_of_a_slow_scraper_is_closed(monkeypatch):
    monkeypatch.setattr(listening, "REQUEST_S", 0.5)
    listener = serve_metrics(CollectorRegistry(), "127.0.0.1", 0)
    host, _, port = listener.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as slow:
            began = time.monotonic()
            with contextlib.suppress(OSError):  # it has hung up
                slow.sendall(b"GET /metrics HTTP/1.0\r\nx: ")
                while time.monotonic() - began < 5:
                    slow.sendall(b"x")
                    time.sleep(0.1)
            assert time.monotonic() - began < 5
    finally:
        listener.close()


def test_scrape_of_a_busy_server_fails_with_the_reason(monkeypatch):
    monkeypatch.setattr(server, "LOOP_TIMEOUT_S", 0.1)
    failed = []

    async def main():
        async with serving() as one:
            registry = server_registry(one)

            def ask():
                try:
                    exposition(registry)
                except ServerBusy as error:
                    failed.append(str(error))

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(20)  # blocks the loop: it cannot answer

    run(main())
    assert failed == ["the server's event loop was busy for 0.1 s"]


def test_address_in_use_is_an_error_that_names_it():
    async def main():
        async with serving() as server:
            registry = server_registry(server)
            listener = serve_metrics(registry, "127.0.0.1", 0)
            try:
                with pytest.raises(BindError) as error:
                    serve_metrics(registry, "127.0.0.1", int(listener.address.rpartition(":")[2]))
            finally:
                listener.close()
            assert listener.address in str(error.value)

    run(main())
