"""Fixtures for tests of integrations. Tests marked `slow` run only with `-m slow`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.kit import Stage
from tests.integrations.kit import Job


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in str(config.getoption("markexpr")):
        return
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Starts processes, all of which have ended when the test ends."""
    with Stage() as one:
        yield one


@pytest.fixture
def job(stage: Stage, tmp_path: Path) -> Job:
    """A run whose first agent hosts it."""
    return Job(stage, tmp_path)


@pytest.fixture
def served(stage: Stage, tmp_path: Path) -> Job:
    """A run on a dedicated server."""
    job = Job(stage, tmp_path)
    stage.serve(job.endpoint)
    return job
