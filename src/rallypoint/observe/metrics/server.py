"""The metrics of an embedded server. Its counters are read on each scrape, and only then.

Only the server's loop may read them. A scrape on another thread blocks until the loop is free; how long that took is a
metric, too. A scrape costs O(connections + runs) in plain loops, a fraction of a millisecond for a thousand.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import time
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from rallypoint._version import __version__
from rallypoint.observe.metrics import table
from rallypoint.observe.metrics.decisions import Decisions
from rallypoint.observe.metrics.families import Scrape
from rallypoint.observe.metrics.runs import numbers_of_view, show_runs
from rallypoint.observe.metrics.table import MAX_RUNS, word
from rallypoint.server.durability.journal import Journal
from rallypoint.server.durability.server import DurableServer
from rallypoint.server.server import Server

LOOP_TIMEOUT_S = 5.0
"""If the server's loop is busy for longer, the scrape fails, so that an alert fires."""


class ServerBusy(Exception):
    """The server's loop was not free in time, or has stopped."""


def server_registry(server: Server, *, max_runs: int = MAX_RUNS) -> CollectorRegistry:
    """All metrics of a server and of its process. Collecting them may raise ServerBusy.

    Call this before the server listens: decisions are counted from now on.
    """
    registry = CollectorRegistry(auto_describe=False)
    decisions = Decisions()
    server.emit.add(decisions)
    registry.register(_ServerCollector(server, decisions, max_runs))
    ProcessCollector(registry=registry)
    return registry


class _ServerCollector(Collector):
    def __init__(self, server: Server, decisions: Decisions, max_runs: int) -> None:
        self._server = server
        self._decisions = decisions
        self._max_runs = max_runs

    def collect(self) -> Iterator[Family]:
        started_at = time.monotonic()
        try:
            is_on_loop = asyncio.get_running_loop() is self._server.loop
        except RuntimeError:
            is_on_loop = False
        if is_on_loop:
            return self._read(0.0).families()
        result: concurrent.futures.Future[Scrape] = concurrent.futures.Future()

        def read() -> None:
            try:
                result.set_result(self._read(time.monotonic() - started_at))
            except Exception as error:  # a defect in metrics must not reach the server
                result.set_exception(error)

        try:
            self._server.loop.call_soon_threadsafe(read)
            return result.result(LOOP_TIMEOUT_S).families()
        except TimeoutError:
            raise ServerBusy(f"the server's event loop was busy for {LOOP_TIMEOUT_S:g} s") from None
        except RuntimeError as error:
            raise ServerBusy(f"the server has stopped: {error}") from None

    def _read(self, lag_s: float) -> Scrape:
        scrape, server = Scrape(), self._server
        scrape.put(table.SERVER_INFO, 1, __version__, server.generation)
        scrape.put(table.SERVER_UP, server.up_s)
        scrape.put(table.SERVER_LOOP_LAG, lag_s)
        self._show_clients(scrape)
        self._show_store(scrape)
        if isinstance(server, DurableServer):
            _show_data(scrape, server.journal)
        self._decisions.show(scrape)
        scrape.put(table.SERVER_RUNS, len(server.runs))
        runs = ((run_id, numbers_of_view(view)) for run_id, view in server.runs.views())
        show_runs(scrape, runs, self._max_runs)
        return scrape

    def _show_clients(self, scrape: Scrape) -> None:
        server = self._server
        clients, traffic, limits = server.clients, server.traffic, server.limits
        scrape.put(table.SERVER_CONNECTIONS, server.admission.admitted)
        scrape.put(table.SERVER_PENDING, len(server.admission.pending))
        scrape.put(table.SERVER_RECONNECTS, clients.reconnects)
        scrape.put(table.SERVER_SESSIONS, clients.session_count)
        for cause, ended in clients.ended.items():
            scrape.put(table.SERVER_SESSIONS_ENDED, ended, word(cause))
        for kind, count in server.admission.refusals.counts.items():
            scrape.put(table.SERVER_REFUSALS, count, word(kind))
        lags = [one.lag for one in server.connections]
        waits = [since for _, since in lags if since]
        scrape.put(table.SERVER_WATCH_LAG, max(0.0, server.loop.time() - min(waits)) if waits else 0.0)
        scrape.put(table.SERVER_WATCH_BACKLOG, sum(messages for messages, _ in lags))
        scrape.put(table.SERVER_RECEIVED, traffic.bytes_in)
        scrape.put(table.SERVER_SENT, traffic.bytes_out)
        scrape.put(table.SERVER_FRAMES_IN, traffic.frames_in)
        scrape.put(table.SERVER_FRAMES_OUT, traffic.frames_out)
        scrape.put(table.SERVER_MAX_CONNECTIONS, limits.max_connections)
        scrape.put(table.SERVER_MAX_RUNS, limits.max_runs)

    def _show_store(self, scrape: Scrape) -> None:
        engine_host, limits = self._server.engine_host, self._server.limits
        for kind, count in engine_host.executed.items():
            scrape.put(table.SERVER_OPERATIONS, count, _snake(kind.__name__))
        scrape.put(table.SERVER_COMMITS, engine_host.engine.revision - self._server.first_revision)
        scrape.put(table.SERVER_WATCHES, engine_host.watch_count)
        scrape.put(table.SERVER_KEYS, engine_host.engine.usage.keys)
        scrape.put(table.SERVER_STORE, engine_host.engine.usage.size)
        scrape.put(table.SERVER_LEASES, len(engine_host.engine.leases))
        scrape.put(table.SERVER_MAX_KEYS, limits.max_keys)
        scrape.put(table.SERVER_MAX_STORE, limits.max_bytes)
        scrape.put(table.SERVER_MAX_LEASES, limits.max_leases)


def _show_data(scrape: Scrape, journal: Journal) -> None:
    log_bytes, entries, snapshot_bytes = journal.size
    scrape.put(table.DATA_FAILING, journal.is_failing)
    scrape.put(table.LOG_SIZE, log_bytes)
    scrape.put(table.LOG_ENTRIES, entries)
    scrape.put(table.LOG_PENDING, journal.position - journal.durable)
    scrape.put_sum(table.LOG_COMMIT, journal.commits, journal.commit_s)
    scrape.put(table.SNAPSHOTS, journal.snapshots)
    scrape.put(table.SNAPSHOT_SIZE, snapshot_bytes)


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
