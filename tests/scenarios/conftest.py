"""Fixtures of the row tests, and the recording of their outcomes for the page.

The row tests run only with `-m scenarios`, which is what `make scenarios` uses. Then each outcome is written down as
soon as it is known. Tests marked `quick` also run with all other tests, on tcp only, and nothing is written down.
"""

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.etcd.kit import EtcdCluster, needs
from tests.e2e.conftest import network, stage
from tests.e2e.etcd_world import three
from tests.e2e.kit import Stage
from tests.scenarios.page import BACKENDS, FAILED, MISSED, SKIPPED, Outcome, note, verdict_of
from tests.scenarios.places import Place, on_etcd, on_tcp
from tests.scenarios.record import Recorder

__all__ = ["network", "stage"]

_recorders = pytest.StashKey[Recorder]()
_name = re.compile(r"test_row_(\d\d)_\w+")


def is_asked_for(config: pytest.Config) -> bool:
    return "scenarios" in str(config.getoption("markexpr"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_asked_for(config):
        return
    rows = [item for item in items if item.get_closest_marker("scenarios") is not None and not is_quick(item)]
    if rows:
        config.hook.pytest_deselected(items=rows)
        items[:] = [item for item in items if item not in set(rows)]


def is_quick(item: pytest.Item) -> bool:
    return item.get_closest_marker("quick") is not None and backend_of(item) == "tcp"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    matched = _name.match(item.name)
    if (
        matched
        and is_asked_for(item.config)
        and (report.when == "call" or (report.when == "setup" and report.outcome != "passed"))
    ):
        note(outcome_of(item, report, int(matched[1])))
    return report


def outcome_of(item: pytest.Item, report: pytest.TestReport, row: int) -> Outcome:
    """The outcome of a test that has ended."""
    recorder = item.stash.get(_recorders, None)
    sights = tuple(recorder.sights) if recorder is not None else ()
    why = ""
    if report.outcome != "passed":
        why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else _first_line(report)
    known = getattr(report, "wasxfail", "")
    verdict = {"passed": verdict_of(sights), "failed": FAILED, "skipped": SKIPPED}[report.outcome]
    return Outcome(
        test=item.name,
        row=row,
        backend=backend_of(item),
        verdict=MISSED if known else verdict,
        day=datetime.datetime.now(datetime.UTC).date().isoformat(),
        took_s=round(report.duration, 1),
        load=round(recorder.load.per_core, 1) if recorder is not None else 0.0,
        sights=sights,
        why=f"a known limit: {known}" if known else why,
    )


def _first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash is not None else report.longrepr).splitlines()[0][:200]


def backend_of(item: pytest.Item) -> str:
    """The backend of a test: its parameter, or etcd if it uses the fixture `cluster`, else tcp."""
    callspec = getattr(item, "callspec", None)
    named = [value for value in callspec.params.values() if value in BACKENDS] if callspec is not None else []
    return str(named[0]) if named else "etcd" if "cluster" in getattr(item, "fixturenames", ()) else "tcp"


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    """Records what a test observes: `row("what happened", seconds, promised_seconds)`."""
    recorder = request.node.stash[_recorders] = Recorder()
    yield recorder
    recorder.load.end()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A cluster of three members, shared by tests that do not disturb it."""
    one = three(needs("system"), tmp_path_factory.mktemp("etcd"))
    try:
        yield one
    finally:
        one.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """A cluster of three members for one test, which may kill and pause them."""
    one = three(needs("system"), tmp_path)
    try:
        yield one
    finally:
        one.stop()


@pytest.fixture(params=["tcp", "etcd"])
def place(request: pytest.FixtureRequest, stage: Stage) -> Place:
    """The backend of the run. The test runs on both."""
    if request.param == "tcp":
        return on_tcp(stage)
    return on_etcd(request.getfixturevalue("shared_cluster").endpoints)
