"""Every mutant is detected, for the right reason, in the world that is recorded for it."""

import json
from pathlib import Path

import pytest

from rallypoint.rendezvous.view import View
from rallypoint.testing.exhaustive import explore
from rallypoint.testing.sim.plan import draw
from rallypoint.testing.sim.run import run_seed
from tests.sim.edits import Edit, edited
from tests.sim.mutants import GUARANTEES, MUTANTS, RULES, Mutant

CAUGHT = Path(__file__).with_name("caught.json")
SEEDS = range(4_000)
MOST_EVENTS = 10_000
"""Worlds with more events are too slow for a test."""
IN_SIMULATION = [mutant for mutant in MUTANTS if mutant.world is None]
EXHAUSTIVE = [mutant for mutant in MUTANTS if mutant.world is not None]


def recorded() -> dict[str, int]:
    return dict(json.loads(CAUGHT.read_text(encoding="utf-8"))) if CAUGHT.exists() else {}


def find_seed(mutant: Mutant) -> int | None:
    """The first seed whose world detects the mutant."""
    for seed in SEEDS:
        if (mutant.is_wired and not draw(seed).wired) or (mutant.has_data and not draw(seed).has_data):
            continue
        verdict = run_seed(seed)
        if verdict.broke in mutant.breaks and verdict.events <= MOST_EVENTS:
            return seed
    return None


def record(mutant: Mutant) -> None:
    """Search the seed again, and remove mutants that no longer exist from the record."""
    seed = find_seed(mutant)
    assert seed is not None, f"no seed of {SEEDS} detects that {mutant.name}"
    names = [each.name for each in IN_SIMULATION]
    caught = {name: at for name, at in (recorded() | {mutant.name: seed}).items() if name in names}
    lines = json.dumps(dict(sorted(caught.items(), key=lambda pair: names.index(pair[0]))), indent=2)
    CAUGHT.write_text(lines + "\n", encoding="utf-8")


@pytest.mark.parametrize("mutant", IN_SIMULATION, ids=lambda mutant: mutant.name)
def test_mutant_is_detected_by_the_simulator(mutant, request):
    with mutant.applied():
        if request.config.getoption("--rewrite"):
            record(mutant)
        verdict = run_seed(recorded()[mutant.name])
    advice = "if the code has changed: pytest tests/sim/test_mutants.py --rewrite"
    assert verdict.broke in mutant.breaks, f"broke {verdict.broke or 'nothing'}: {verdict.why}; {advice}"


@pytest.mark.parametrize("mutant", EXHAUSTIVE, ids=lambda mutant: mutant.name)
def test_mutant_is_detected_in_an_exhaustive_world(mutant):
    assert mutant.world is not None
    with mutant.applied():
        report = explore(mutant.world, max_states=50_000, seconds=60)
    assert type(report.broke).__name__.removeprefix("Broke") in mutant.breaks, str(report)


@pytest.mark.parametrize("mutant", EXHAUSTIVE, ids=lambda mutant: mutant.name)
def test_exhaustive_world_of_a_mutant_is_correct_without_it(mutant):
    assert mutant.world is not None
    report = explore(mutant.world, max_states=2_000, seconds=60)
    assert report.broke is None, str(report)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.second_line], ids=lambda mutant: mutant.name)
def test_second_line_of_defence_holds_without_the_first(mutant):
    with edited(mutant.edits[0]):
        if mutant.world is None:
            assert run_seed(recorded()[mutant.name]).broke == ""
        else:
            report = explore(mutant.world, max_states=10_000, seconds=60)
            assert report.broke is None, str(report)


def test_world_of_every_recorded_seed_is_correct_without_its_mutant():
    broken = {seed: verdict for seed in set(recorded().values()) if (verdict := run_seed(seed)).broke}
    assert not broken


def test_every_guarantee_has_its_mutant():
    assert {guarantee for mutant in MUTANTS for guarantee in mutant.breaks[:1]} == set(GUARANTEES)


def test_every_rule_has_its_mutant():
    assert {mutant.rule for mutant in MUTANTS if mutant.rule is not None} == set(RULES)


def test_names_of_mutants_are_unique_and_recorded():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert recorded().keys() == {mutant.name for mutant in IN_SIMULATION}


def test_mutant_that_no_longer_applies_is_an_error():
    with pytest.raises(AssertionError, match="0 times"), edited(Edit(View, "next_number", "no such snippet", "")):
        pass


def test_edit_is_undone_even_after_an_error():
    before = View.next_number.__code__
    edit = Edit(View, "next_number", "return 1 +", "return 2 +")
    during = None
    try:
        with edited(edit):
            during = View.next_number.__code__
            raise KeyError
    except KeyError:
        pass
    assert during is not before
    assert View.next_number.__code__ is before
