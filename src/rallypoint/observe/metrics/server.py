"""The metrics of an embedded server. Its own counters are read when somebody asks, and only then.

Only the server's loop may look into it. Whoever asks from another thread waits until the loop has a moment; how long
that took is a metric of its own. Looking costs O(connections + runs) in plain loops, a fraction of a millisecond for a
thousand.
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
from rallypoint.observe.metrics.families import Sheet
from rallypoint.observe.metrics.runs import numbers_of_view, show_runs
from rallypoint.observe.metrics.table import MOST_RUNS, word
from rallypoint.server.durability.journal import Journal
from rallypoint.server.durability.server import DurableServer
from rallypoint.server.server import Server

PATIENCE_S = 5.0
"""A server that has no moment for so long is in trouble: the scrape fails, and that is what an alert sees."""


class ServerBusy(Exception):
    """The server did not get to answering in time, or has stopped."""


def server_registry(server: Server, *, most_runs: int = MOST_RUNS) -> CollectorRegistry:
    """All metrics of a server and of its process. Make it before the server listens: decisions are counted from now.

    Collecting it raises ServerBusy.
    """
    registry = CollectorRegistry(auto_describe=False)
    decisions = Decisions()
    server.emit.add(decisions)
    registry.register(_ServerCollector(server, decisions, most_runs))
    ProcessCollector(registry=registry)
    return registry


class _ServerCollector(Collector):
    def __init__(self, server: Server, decisions: Decisions, most_runs: int) -> None:
        self._server = server
        self._decisions = decisions
        self._most_runs = most_runs

    def collect(self) -> Iterator[Family]:
        asked_at = time.monotonic()
        try:
            is_at_home = asyncio.get_running_loop() is self._server.loop
        except RuntimeError:
            is_at_home = False
        if is_at_home:
            return self._look(0.0).families()
        looked: concurrent.futures.Future[Sheet] = concurrent.futures.Future()

        def look() -> None:
            try:
                looked.set_result(self._look(time.monotonic() - asked_at))
            except Exception as error:  # a defect of metrics is the scraper's trouble, not the server's
                looked.set_exception(error)

        try:
            self._server.loop.call_soon_threadsafe(look)
            return looked.result(PATIENCE_S).families()
        except TimeoutError:
            raise ServerBusy(f"the server had no moment for metrics within {PATIENCE_S:g} s") from None
        except RuntimeError as error:
            raise ServerBusy(f"the server has stopped: {error}") from None

    def _look(self, lag_s: float) -> Sheet:
        sheet, server = Sheet(), self._server
        sheet.put(table.SERVER_INFO, 1, __version__, server.generation)
        sheet.put(table.SERVER_UP, server.up_s)
        sheet.put(table.SERVER_LOOP_LAG, lag_s)
        self._show_clients(sheet)
        self._show_store(sheet)
        if isinstance(server, DurableServer):
            _show_data(sheet, server.journal)
        self._decisions.show(sheet)
        sheet.put(table.SERVER_RUNS, len(server.runs))
        runs = ((run_id, numbers_of_view(view)) for run_id, view in server.runs.views())
        show_runs(sheet, runs, self._most_runs)
        return sheet

    def _show_clients(self, sheet: Sheet) -> None:
        server = self._server
        clients, traffic, limits = server.clients, server.traffic, server.limits
        sheet.put(table.SERVER_CONNECTIONS, server.admission.admitted)
        sheet.put(table.SERVER_PENDING, len(server.admission.pending))
        sheet.put(table.SERVER_RECONNECTS, clients.reconnects)
        sheet.put(table.SERVER_SESSIONS, clients.session_count)
        for cause, ended in clients.ended.items():
            sheet.put(table.SERVER_SESSIONS_ENDED, ended, word(cause))
        for kind, count in server.admission.refusals.counts.items():
            sheet.put(table.SERVER_REFUSALS, count, word(kind))
        lags = [one.lag for one in server.connections]
        waits = [since for _, since in lags if since]
        sheet.put(table.SERVER_WATCH_LAG, max(0.0, server.loop.time() - min(waits)) if waits else 0.0)
        sheet.put(table.SERVER_WATCH_BACKLOG, sum(messages for messages, _ in lags))
        sheet.put(table.SERVER_RECEIVED, traffic.bytes_in)
        sheet.put(table.SERVER_SENT, traffic.bytes_out)
        sheet.put(table.SERVER_FRAMES_IN, traffic.frames_in)
        sheet.put(table.SERVER_FRAMES_OUT, traffic.frames_out)
        sheet.put(table.SERVER_MOST_CONNECTIONS, limits.max_connections)
        sheet.put(table.SERVER_MOST_RUNS, limits.max_runs)

    def _show_store(self, sheet: Sheet) -> None:
        engine_host, limits = self._server.engine_host, self._server.limits
        for kind, count in engine_host.executed.items():
            sheet.put(table.SERVER_OPERATIONS, count, _snake(kind.__name__))
        sheet.put(table.SERVER_COMMITS, engine_host.engine.revision - self._server.first_revision)
        sheet.put(table.SERVER_WATCHES, engine_host.watch_count)
        sheet.put(table.SERVER_KEYS, engine_host.engine.usage.keys)
        sheet.put(table.SERVER_STORE, engine_host.engine.usage.size)
        sheet.put(table.SERVER_LEASES, len(engine_host.engine.leases))
        sheet.put(table.SERVER_MOST_KEYS, limits.max_keys)
        sheet.put(table.SERVER_MOST_STORE, limits.max_bytes)
        sheet.put(table.SERVER_MOST_LEASES, limits.max_leases)


def _show_data(sheet: Sheet, journal: Journal) -> None:
    log_bytes, entries, snapshot_bytes = journal.size
    sheet.put(table.DATA_FAILING, journal.is_failing)
    sheet.put(table.LOG_SIZE, log_bytes)
    sheet.put(table.LOG_ENTRIES, entries)
    sheet.put(table.LOG_PENDING, journal.position - journal.durable)
    sheet.put_sum(table.LOG_COMMIT, journal.commits, journal.commit_s)
    sheet.put(table.SNAPSHOTS, journal.snapshots)
    sheet.put(table.SNAPSHOT_SIZE, snapshot_bytes)


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
