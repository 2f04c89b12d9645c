"""What the tests of real processes are given."""

import os
from collections.abc import Iterator

import pytest

from tests.e2e.kit import Stage, why_no_machines


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Where processes are started; all of them have ended afterwards."""
    with Stage() as one:
        yield one


@pytest.fixture
def network(stage: Stage) -> Stage:
    """A stage that can make machines. CI must be able to; elsewhere the test is skipped, and says why."""
    why = why_no_machines()
    if why is not None and not os.environ.get("CI"):
        pytest.skip(why)
    assert why is None, f"this must run in CI: {why}"
    return stage
