"""The plan of a seed is deterministic, and a long campaign contains every fault."""

import pytest

from tests.chaos.faults import BEGIN
from tests.chaos.plan import CHOICES, FAULTS, Backend, Fault, draw


def test_same_seed_gives_the_same_world():
    assert draw(7, 3) == draw(7, 3)
    assert draw(7, 3) != draw(8, 3)


@pytest.mark.parametrize("backends", sorted(CHOICES))
def test_long_campaign_contains_every_fault_of_the_backend(backends):
    plans = [draw(1, number, backends) for number in range(120)]
    assert {plan.backend for plan in plans} == set(CHOICES[backends])
    drawn = {action.fault for plan in plans for burst in plan.bursts for action in burst.actions}
    assert drawn == {fault for backend in CHOICES[backends] for fault in FAULTS[backend]}


def test_every_fault_is_implemented_and_used_on_some_backend():
    assert set(BEGIN) == set(Fault)
    assert {fault for faults in FAULTS.values() for fault in faults} == set(Fault)


def test_sizes_of_a_world_allow_it_to_settle():
    for number in range(200):
        plan = draw(1, number)
        assert 2 <= plan.min_nodes <= plan.max_nodes <= plan.nodes
        assert plan.backend in Backend
