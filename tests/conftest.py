"""What all tests share: how Hypothesis draws its examples, and the `--rewrite` option."""

import os

import pytest
from hypothesis import settings

# No deadline: a slow machine is not a bug. In CI the same commit draws the same examples, so a red run is the commit's.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="rewrite the expected output of text traces instead of comparing with it",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those marked `slow` run only when they are asked for: `-m slow`."""
    if "slow" in str(config.getoption("markexpr")):
        return
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
