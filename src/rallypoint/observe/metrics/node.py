"""The metrics of one node: a sink of its events, and what its handler can tell.

metrics = NodeMetrics()
handler = rallypoint.create_handler(url, sinks=[metrics])
metrics.attend(handler)
listener = serve_metrics(metrics.registry, "127.0.0.1", 0)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from rallypoint.events import (
    BackendReachable,
    BackendUnreachable,
    Event,
    JoinFailed,
    JoinStarted,
    NodeLeft,
    RenewalMissed,
    RoundEntered,
    SessionLost,
    WorldChanged,
)
from rallypoint.observe.metrics import table
from rallypoint.observe.metrics.decisions import Decisions
from rallypoint.observe.metrics.families import Sheet, Tally
from rallypoint.observe.metrics.table import word
from rallypoint.rendezvous.membership import Cause
from rallypoint.settings import Settings

MOST_ERRORS = 50
"""There are fewer classes of errors; a bound all the same."""


class Told(Protocol):
    """As much of a handler, blocking or not, as metrics look at."""

    @property
    def settings(self) -> Settings:
        """Who it is."""

    def num_nodes_waiting(self) -> int:
        """From what was pushed last."""


class NodeMetrics(Collector):
    """One node. Counting costs an addition an event; `clock` tells how long joining takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._handler: Told | None = None
        self._name = ""
        self._decisions = Decisions()
        self._joins = self._entered = self._sessions_lost = self._renewals_missed = 0
        self._place = (0, -1, 0)
        self._reachable = True
        self._asked_at: float | None = None
        self._join = Tally(table.NODE_JOIN.buckets)
        self._outage = Tally()
        self._failures: dict[str, int] = {}
        self._changes = {word(cause): 0 for cause in Cause}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def attend(self, handler: Told) -> None:
        """Ask this handler, too, whenever somebody looks. It is never made to wait for anything."""
        self._handler = handler

    def __call__(self, event: Event) -> None:
        self._decisions(event)
        match event:
            case JoinStarted():
                self._joins += 1
                self._name = event.by
                self._asked_at = self._clock()
                self._place = (0, -1, 0)
            case RoundEntered():
                self._entered += 1
                self._place = (event.round, event.rank, event.world_size)
                if self._asked_at is not None:
                    self._join.add(self._clock() - self._asked_at)
                    self._asked_at = None
            case JoinFailed():
                if event.error in self._failures or len(self._failures) < MOST_ERRORS:
                    self._failures[event.error] = self._failures.get(event.error, 0) + 1
                self._asked_at = None
            case WorldChanged():
                cause = event.cause.replace(" ", "_")
                if cause in self._changes:
                    self._changes[cause] += 1
            case NodeLeft() if event.by == self._name:
                self._place = (0, -1, 0)
            case SessionLost():
                self._sessions_lost += 1
                self._place = (0, -1, 0)
            case RenewalMissed():
                self._renewals_missed += 1
            case BackendUnreachable():
                self._reachable = False
            case BackendReachable():
                self._reachable = True
                self._outage.add(event.after_s)
            case _:
                pass

    def collect(self) -> Iterator[Family]:
        sheet = Sheet()
        handler = self._handler
        if handler is not None:
            settings = handler.settings
            sheet.put(table.NODE_INFO, 1, settings.run_id, settings.name or self._name, settings.scheme)
        number, rank, size = self._place
        sheet.put(table.NODE_ROUND, number)
        sheet.put(table.NODE_RANK, rank)
        sheet.put(table.NODE_WORLD, size)
        if handler is not None and number:  # otherwise asking a blocking handler could mean to wait
            sheet.put(table.NODE_WAITING, handler.num_nodes_waiting())
        sheet.put(table.NODE_JOINS, self._joins)
        sheet.put(table.NODE_ENTERED, self._entered)
        sheet.put_tally(table.NODE_JOIN, self._join)
        for error, count in list(self._failures.items()):
            sheet.put(table.NODE_FAILURES, count, error)
        for cause, count in self._changes.items():
            sheet.put(table.NODE_CHANGES, count, cause)
        sheet.put(table.NODE_SESSIONS_LOST, self._sessions_lost)
        sheet.put(table.NODE_RENEWALS_MISSED, self._renewals_missed)
        sheet.put(table.NODE_REACHES, self._reachable)
        sheet.put_tally(table.NODE_OUTAGE, self._outage)
        self._decisions.show(sheet)
        return sheet.families()
