"""The examples of docs/writing-a-backend.md work as printed."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rallypoint
from rallypoint.backends import schemes
from rallypoint.testing.conformance.backend import backend_checks

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"
CELL_LINES = 30
BACKEND_LINES = 200


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """The namespace after all examples have been run in order."""
    found: dict[str, object] = {"__name__": "docs"}
    for example in examples():
        exec(compile(example, str(PAGE), "exec"), found)
    yield found
    schemes._openers.pop("sqlite-cell", None)


def lines_of(name: str) -> int:
    (example,) = [one for one in examples() if name in one]
    return len([line for line in example.splitlines() if line.strip()])


def test_cell_of_the_page_keeps_the_contract(names, tmp_path):
    names["check_my_cell"](tmp_path)
    assert lines_of("class SqliteCell") <= CELL_LINES


def test_cell_of_the_page_forms_a_round(names, tmp_path):
    with ThreadPoolExecutor(2) as threads:
        joins = [threads.submit(names["join"], str(tmp_path / "runs.db"), "run", 2) for _ in range(2)]
        joined = [one.result(120) for one in joins]
    assert sorted(info.rank for _, info in joined) == [0, 1]
    for handler, _ in joined:
        assert handler.shutdown()


def test_scheme_of_the_page_opens_the_cell(names, tmp_path):
    target = rallypoint.Settings.build(
        scheme="sqlite-cell", endpoints=str(tmp_path / "runs.db"), run_id="run", min_nodes=1, last_call_timeout=1
    )
    with rallypoint.join(target) as run:
        world = next(run.rounds())
        assert (world.rank, world.world_size) == (0, 1)


def test_backend_of_the_page_keeps_the_contract(names):
    report = names["check_my_backend"]()
    assert report.conforming, str(report)
    assert len(report.passed) == len(backend_checks())
    assert lines_of("class ServiceBackend") <= BACKEND_LINES
