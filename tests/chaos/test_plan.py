"""A seed is a campaign: the same worlds whoever draws them, and in time every fault there is."""

import pytest

from tests.chaos.faults import BEGIN
from tests.chaos.plan import CHOICES, FAULTS, Backend, Fault, draw


def test_world_of_a_seed_is_the_same_whenever_it_is_drawn():
    assert draw(7, 3) == draw(7, 3)
    assert draw(7, 3) != draw(8, 3)


@pytest.mark.parametrize("backends", sorted(CHOICES))
def test_every_fault_of_a_backend_is_drawn_in_a_long_campaign(backends):
    plans = [draw(1, number, backends) for number in range(120)]
    assert {plan.backend for plan in plans} == set(CHOICES[backends])
    drawn = {action.fault for plan in plans for burst in plan.bursts for action in burst.actions}
    assert drawn == {fault for backend in CHOICES[backends] for fault in FAULTS[backend]}


def test_every_fault_is_something_that_happens_on_some_backend():
    assert set(BEGIN) == set(Fault)
    assert {fault for faults in FAULTS.values() for fault in faults} == set(Fault)


def test_sizes_of_a_world_are_such_that_it_can_settle():
    for number in range(200):
        plan = draw(1, number)
        assert 2 <= plan.min_nodes <= plan.max_nodes <= plan.nodes
        assert plan.backend in Backend
