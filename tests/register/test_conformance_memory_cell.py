"""The conformance suite of backends on a memory cell in virtual time, without faults and with a faulty cell."""

import random

import pytest

from rallypoint.testing.cells import CellFaults, FaultyCell, MemoryCell
from rallypoint.testing.conformance.backend import backend_checks, run_checks
from rallypoint.testing.conformance.backend_random import check_random_history
from rallypoint.testing.loop import run
from tests.register.kit import backend_kit

BOUND = 60


@pytest.mark.parametrize("check", backend_checks())
def test_register_conforms_on_virtual_time(check):
    cell = MemoryCell()
    run(check(backend_kit(lambda: cell)), limit_s=100.0)


def test_register_with_a_short_history_says_so():
    cell = MemoryCell()
    (check,) = set(backend_checks(bounded_history=True)) - set(backend_checks())
    run(check(backend_kit(lambda: cell, history=BOUND, history_limit=BOUND)), limit_s=100.0)


@pytest.mark.parametrize("seed", range(5))
def test_register_conforms_in_any_order_of_tasks(seed):
    cell = MemoryCell()
    report = run(run_checks(backend_kit(lambda: cell)), seed=seed, limit_s=3_000.0)
    assert report.conforming, str(report)


@pytest.mark.parametrize("seed", range(20))
def test_register_gives_the_answers_of_the_model(seed):
    cell = MemoryCell()
    run(check_random_history(backend_kit(lambda: cell, seed=seed)), limit_s=100.0)


@pytest.mark.parametrize("seed", range(20))
def test_write_whose_outcome_is_unknown_is_executed_once(seed):
    """The model has no faults, so every answer must be the same as without faults."""
    cell = MemoryCell()
    faults = CellFaults(unknown=0.1, broken=0.05, late=0.1)
    rng = random.Random(seed)
    run(
        check_random_history(backend_kit(lambda: FaultyCell(cell, random.Random(rng.random()), faults), seed=seed)),
        limit_s=1_000.0,
    )
