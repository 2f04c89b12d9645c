"""No order of events in a tiny world breaks a guarantee. All worlds: `python -m rallypoint.testing.exhaustive`."""

import subprocess
import sys

import pytest

from rallypoint.testing.exhaustive import QUICK, WORLDS, Budget, Setup, explore
from rallypoint.testing.exhaustive.__main__ import main

ENOUGH_STATES = 2_000


@pytest.mark.parametrize("setup", QUICK, ids=lambda setup: setup.name)
def test_no_order_of_events_breaks_a_guarantee(setup: Setup) -> None:
    report = explore(setup, max_states=ENOUGH_STATES)
    assert report.broke is None, str(report)
    assert report.is_complete or report.states >= ENOUGH_STATES


def test_world_without_faults_is_explored_completely() -> None:
    report = explore(Setup("plain"))
    assert report.is_complete
    assert report.states > 150
    assert report.line() == f"2 nodes, min=max=2: {report.states:,} states, depth {report.depth}, all explored, ok"


def test_exploring_twice_finds_the_same_states() -> None:
    setup = Setup("twice", begin="forming", budget=Budget(crash=1))
    first, second = explore(setup), explore(setup)
    assert (first.states, first.transitions, first.depth) == (second.states, second.transitions, second.depth)


def test_report_says_whether_the_search_was_cut() -> None:
    report = explore(Setup("cut", budget=Budget(crash=1)), max_states=50)
    assert not report.is_complete
    assert ", cut, ok" in report.line()


def test_names_of_worlds_are_all_different() -> None:
    assert len(WORLDS) > len(QUICK)
    assert all(name == setup.name for name, setup in WORLDS.items())


def test_command_reports_a_line_for_each_world() -> None:
    command = [sys.executable, "-m", "rallypoint.testing.exhaustive", "--world", "2-plain", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("2-plain: 2 nodes, min=max=2: ")
    assert done.stdout.endswith(", all explored, ok\n")


def test_command_lists_the_worlds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["exhaustive", "--list"])
    assert main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(WORLDS)
