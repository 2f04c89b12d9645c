"""The metrics of one node, from its events and its handler.

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
from rallypoint.observe.metrics.families import Scrape, Tally
from rallypoint.observe.metrics.table import word
from rallypoint.rendezvous.membership import Cause
from rallypoint.settings import Settings

NO_ROUND = (0, -1, 0)
"""(round, rank, world size) of a node that is in no round."""
MAX_ERRORS = 50
"""A bound on label values. There are fewer error classes."""


class ObservedHandler(Protocol):
    """The part of a handler, blocking or async, that metrics read."""

    @property
    def settings(self) -> Settings: ...

    def num_nodes_waiting(self) -> int: ...


class NodeMetrics(Collector):
    """The metrics of one node, and a sink for its events. An event costs one addition."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._handler: ObservedHandler | None = None
        self._name = ""
        self._decisions = Decisions()
        self._joins = self._entered = self._sessions_lost = self._renewals_missed = 0
        self._membership = NO_ROUND
        self._reachable = True
        self._join_started_at: float | None = None
        self._join = Tally(table.NODE_JOIN.buckets)
        self._outage = Tally()
        self._failures: dict[str, int] = {}
        self._changes = {word(cause): 0 for cause in Cause}
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def attend(self, handler: ObservedHandler) -> None:
        """Read this handler, too, on every scrape. That never blocks."""
        self._handler = handler

    def __call__(self, event: Event) -> None:
        self._decisions(event)
        match event:
            case JoinStarted():
                self._joins += 1
                self._name = event.by
                self._join_started_at = self._clock()
                self._membership = NO_ROUND
            case RoundEntered():
                self._entered += 1
                self._membership = (event.round, event.rank, event.world_size)
                if self._join_started_at is not None:
                    self._join.add(self._clock() - self._join_started_at)
                    self._join_started_at = None
            case JoinFailed():
                if event.error in self._failures or len(self._failures) < MAX_ERRORS:
                    self._failures[event.error] = self._failures.get(event.error, 0) + 1
                self._join_started_at = None
            case WorldChanged():
                cause = event.cause.replace(" ", "_")
                if cause in self._changes:
                    self._changes[cause] += 1
            case NodeLeft() if event.by == self._name:
                self._membership = NO_ROUND
            case SessionLost():
                self._sessions_lost += 1
                self._membership = NO_ROUND
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
        scrape = Scrape()
        handler = self._handler
        if handler is not None:
            settings = handler.settings
            scrape.put(table.NODE_INFO, 1, settings.run_id, settings.name or self._name, settings.scheme)
        number, rank, size = self._membership
        scrape.put(table.NODE_ROUND, number)
        scrape.put(table.NODE_RANK, rank)
        scrape.put(table.NODE_WORLD, size)
        if handler is not None and number:  # outside of a round, this call of a blocking handler could block
            scrape.put(table.NODE_WAITING, handler.num_nodes_waiting())
        scrape.put(table.NODE_JOINS, self._joins)
        scrape.put(table.NODE_ENTERED, self._entered)
        scrape.put_tally(table.NODE_JOIN, self._join)
        for error, count in list(self._failures.items()):
            scrape.put(table.NODE_FAILURES, count, error)
        for cause, count in self._changes.items():
            scrape.put(table.NODE_CHANGES, count, cause)
        scrape.put(table.NODE_SESSIONS_LOST, self._sessions_lost)
        scrape.put(table.NODE_RENEWALS_MISSED, self._renewals_missed)
        scrape.put(table.NODE_REACHES, self._reachable)
        scrape.put_tally(table.NODE_OUTAGE, self._outage)
        self._decisions.show(scrape)
        return scrape.families()
