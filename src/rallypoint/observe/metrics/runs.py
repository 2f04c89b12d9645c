"""The gauges of runs, from the reports of followers (any backend) or from the coordinators of a server.

At most `MAX_RUNS` runs have series of their own: the first ones, so that no series comes and goes. The others are added
up under the empty run id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from rallypoint.observe.metrics import table
from rallypoint.observe.metrics.families import Scrape
from rallypoint.observe.metrics.table import MAX_RUNS, Metric
from rallypoint.observe.report import Report
from rallypoint.rendezvous.view import View


class RunNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one run, or the sums of several."""

    members: int = 0
    joining: int = 0
    waiting: int = 0
    spares: int = 0
    held_back: int = 0
    gone: int = 0
    open_places: int = 0
    active: int = 0
    closed: int = 0
    restarts: int = 0
    restarts_limit: int = 0
    round: int = 0

    def __add__(self, other: RunNumbers) -> RunNumbers:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        names = self.__struct_fields__
        return RunNumbers(**{name: a + b for name, a, b in zip(names, mine, theirs, strict=True)})


_SHOWN: dict[str, Metric] = {
    "members": table.RUN_MEMBERS,
    "joining": table.RUN_JOINING,
    "waiting": table.RUN_WAITING,
    "spares": table.RUN_SPARES,
    "held_back": table.RUN_HELD_BACK,
    "gone": table.RUN_GONE,
    "open_places": table.RUN_OPEN_PLACES,
    "active": table.RUN_ACTIVE,
    "closed": table.RUN_CLOSED,
    "restarts": table.RUN_RESTARTS,
    "restarts_limit": table.RUN_RESTARTS_LIMIT,
}


def numbers_of_report(report: Report) -> RunNumbers:
    """The values of a run, from its report."""
    counts = report.counts
    return RunNumbers(
        members=counts.member,
        joining=counts.joining + counts.confirming + counts.confirmed,
        waiting=counts.waiting,
        spares=counts.spare,
        held_back=counts.held_back,
        gone=counts.gone,
        open_places=report.open_places,
        active=report.has_round,
        closed=report.is_closed,
        restarts=report.restarts.used if report.restarts is not None else 0,
        restarts_limit=report.restarts.limit if report.restarts is not None else 0,
        round=report.round.number if report.round is not None else 0,
    )


def numbers_of_view(view: View) -> RunNumbers:
    """The values of a run, from its coordinator's view. O(1): a scrape stays cheap whatever the size of the runs."""
    number = view.round.number if view.round is not None else 0
    told = view.waiting if view.waiting is not None and view.waiting.number == number else None
    members = len(view.members)
    return RunNumbers(
        members=members,
        joining=0 if members else len(view.nodes) - len(view.excluded),
        waiting=told.waiting if told is not None and members else 0,
        spares=told.spare if told is not None and members else 0,
        held_back=told.held_back if told is not None else 0,
        gone=told.lost if told is not None and members else 0,
        open_places=max(0, view.rules.max_nodes - members) if view.rules is not None else 0,
        active=bool(members),
        closed=view.is_closed,
        restarts=view.budget.used if view.budget is not None else 0,
        restarts_limit=view.budget.limit if view.budget is not None else 0,
        round=number,
    )


def show_runs(scrape: Scrape, runs: Iterable[tuple[str, RunNumbers]], max_runs: int = MAX_RUNS) -> None:
    """Put the metrics of all runs. The first `max_runs` have series of their own, the others are added up."""
    rest: RunNumbers | None = None
    for index, (run_id, numbers) in enumerate(runs):
        if index < max_runs:
            _show(scrape, run_id, numbers)
            scrape.put(table.RUN_ROUND, numbers.round, run_id)
        else:
            rest = numbers if rest is None else rest + numbers
    if rest is not None:
        _show(scrape, "", rest)


def _show(scrape: Scrape, run_id: str, numbers: RunNumbers) -> None:
    for name, metric in _SHOWN.items():
        scrape.put(metric, getattr(numbers, name), run_id)


class RunMetrics(Collector):
    """The metrics of the runs that a process follows. Call `take` with each report; `forget` a run at the end.

    Taking a report costs an assignment. A run that does not exist has no metrics.
    """

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self._reports: dict[str, Report] = {}
        self._max_runs = max_runs
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def take(self, report: Report) -> None:
        """Set the current state of a run."""
        self._reports[report.run_id] = report

    def forget(self, run_id: str) -> None:
        """Remove a run that is no longer followed."""
        self._reports.pop(run_id, None)

    def collect(self) -> Iterator[Family]:
        scrape = Scrape()
        reports = [report for report in list(self._reports.values()) if report.exists]
        show_runs(scrape, ((report.run_id, numbers_of_report(report)) for report in reports), self._max_runs)
        return scrape.families()
