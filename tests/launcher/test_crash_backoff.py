"""Pauses between starts of workers that fail at once, and programs that do not exist."""

import sys

import pytest

from rallypoint.launcher.crash_backoff import FIRST_S, MOST_S, CrashBackoff
from rallypoint.launcher.program_check import find_missing


def pauses(lifetimes: list[float], fraction: float = 0.5) -> list[float]:
    """The pause after each failure of workers that lived so long."""
    backoff, now, found = CrashBackoff(), 0.0, []
    for lifetime in lifetimes:
        backoff.started(now)
        now += lifetime
        backoff.failed(now)
        backoff.round_ended(now + 1.0 if lifetime > 2 else now)
        found.append(backoff.pause_s(fraction))
        now += found[-1]
    return found


def test_workers_that_fail_at_once_are_started_again_later_each_time():
    assert pauses([0.3] * 9) == [0, 0, 4, 8, 16, 32, MOST_S, MOST_S, MOST_S]


def test_workers_that_worked_for_a_while_are_started_again_at_once():
    assert pauses([0.3, 0.3, 30.0, 0.3, 0.3, 0.3]) == [0, 0, 0, 0, 0, FIRST_S]
    assert pauses([30.0] * 5) == [0] * 5


def test_round_that_ended_for_another_reason_begins_anew():
    backoff = CrashBackoff()
    for start in (0.0, 1.0, 2.0):
        backoff.started(start)
        backoff.failed(start + 0.5)
    assert backoff.pause_s(0.5) == FIRST_S
    backoff.started(10.0)
    backoff.round_ended(100.0)  # a node was lost after 90 s
    assert backoff.pause_s(0.5) == 0


def test_failure_counts_however_long_the_other_workers_take_to_stop():
    backoff = CrashBackoff()
    for start in (0.0, 100.0, 200.0):
        backoff.started(start)
        backoff.failed(start + 0.5)
        backoff.round_ended(start + 15.5)
    assert backoff.pause_s(0.5) == FIRST_S


def test_round_in_which_no_worker_could_be_started_counts():
    backoff = CrashBackoff()
    backoff.started(0.0)
    backoff.round_ended(100.0)
    for now in (200.0, 300.0, 400.0):
        backoff.failed(now)
        backoff.round_ended(now)
    assert backoff.pause_s(0.5) == FIRST_S


def test_pause_is_jittered_and_the_sentence_has_it():
    assert (pauses([0.3] * 3, 0.0)[-1], pauses([0.3] * 3, 1.0)[-1]) == (3, 5)
    backoff = CrashBackoff()
    for _ in range(3):
        backoff.started(0.0)
        backoff.failed(1.0)
    assert backoff.why(4.0) == "the workers failed 3 times within 2 s of their start: the next start is in 4 s"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ((sys.executable, "-u", "no-such.py", "--x"), 2, "the script 'no-such.py' does not exist in /"),
        ((sys.executable, "-u", "/no/such.py"), 2, "the script '/no/such.py' does not exist"),
        (("no-such-program",), 127, "cannot start 'no-such-program': there is no such program"),
        (("./no-such-program",), 127, "cannot start './no-such-program': there is no such program in /"),
        ((__file__,), 126, f"cannot start {__file__!r}: it is not executable"),
    ],
)
def test_program_that_is_not_there_is_found_before_the_node_joins(argv, code, words):
    found = find_missing(argv)
    assert found is not None
    assert found.code == code
    assert found.why.startswith(words)


@pytest.mark.parametrize(
    "argv",
    [
        (sys.executable, "-u", __file__),
        (sys.executable, "-u", "-m", "x"),
        (sys.executable, "-u", "."),
        ("sh", "-c", "x"),
    ],
)
def test_program_that_is_there_or_that_only_python_can_find_is_started(argv):
    assert find_missing(argv) is None
