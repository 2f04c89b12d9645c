"""Register worlds: every guarantee holds, the same seed gives the same world, and mutants are caught."""

import pytest

from rallypoint.backends.register.lease_expiry import LeaseExpiry
from rallypoint.backends.register.shared_cell import SharedCell
from rallypoint.testing.sim.campaign import replay_command
from rallypoint.testing.sim.plan import draw, draw_register
from rallypoint.testing.sim.run import run_plan, run_seed
from tests.sim.edits import Edit, edited

SEEDS = (0, 1, 2, 3, 4, 5, 6, 12, 33, 39, 41, 48)
"""Seed 1, and later the last five with slow cells, once broke Outage tolerance."""
MUTANTS = {
    "a renewed lease is ended": (
        Edit(LeaseExpiry, "observe", "known is not None and known[0] == counter", "known is not None"),
        0,
    ),
    "nobody waits for an overdue renewal of another": (
        Edit(SharedCell, "_is_less_urgent", "others > OVERDUE and", "False and"),
        1955,
    ),
    "leases are never ended": (Edit(SharedCell, "_attempt", "self._expiry.due(self._loop.time())", "()"), 0),
}


@pytest.mark.parametrize("seed", [185, 294, 870, 1955])
def test_register_world_that_found_a_bug_is_correct_now(seed):
    verdict = run_seed(seed, register=True)
    assert not verdict.broke, f"{verdict.broke}: {verdict.why}; {replay_command(seed, register=True)}"


def test_guarantees_hold_in_register_worlds():
    marks: set[str] = set()
    for seed in SEEDS:
        verdict = run_seed(seed, register=True)
        assert not verdict.broke, f"{verdict.broke}: {verdict.why}; {replay_command(seed, register=True)}"
        assert verdict.faults >= 6
        marks |= verdict.marks
    assert marks >= {"register.expired", "register.contended"}


def test_nodes_are_refused_in_a_world_that_is_too_slow_for_its_time_outs():
    plan = draw_register(47)
    assert (plan.keep_alive_interval_s, plan.slowest_s, plan.nodes) == (0.5, 0.05, 8)
    verdict = run_plan(plan)
    assert not verdict.broke, f"{verdict.broke}: {verdict.why}; {replay_command(47, register=True)}"
    assert "register.too_slow" in verdict.marks


def test_same_seed_gives_the_same_register_world():
    plan = draw_register(4)
    assert run_plan(plan).digest == run_plan(plan).digest


def test_register_world_has_the_same_faults_as_the_ordinary_world_of_its_seed():
    plan, register = draw(7), draw_register(7)
    assert register.actions == plan.actions
    assert register.register
    assert not plan.register


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_of_the_register_is_detected(name):
    edit, seed = MUTANTS[name]
    with edited(edit):
        verdict = run_seed(seed, register=True)
    assert verdict.broke
