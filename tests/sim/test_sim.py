"""The simulator: correct worlds, reproducible seeds, reduction and replay of failing worlds, and its command."""

import ast
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from rallypoint._marks import ETCD_MARKS, MARKS, REGISTER_MARKS
from rallypoint.cli import main
from rallypoint.testing.sim.campaign import Sum, replay_command, run_many, shrink
from rallypoint.testing.sim.plan import FEWEST_ACTIONS, Fault, draw
from rallypoint.testing.sim.run import run_plan, run_seed
from tests.sim.mutants import MUTANTS
from tests.sim.test_mutants import recorded
from tests.tidy.sources import modules

QUICK = range(200)


def sim(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["sim", *arguments])


@pytest.fixture
def broken_seed():
    """A seed whose world breaks Detection, because a mutant does not count losses during the test."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "lost members are not counted")
    with mutant.applied():
        yield recorded()[mutant.name]


# --- worlds -----------------------------------------------------------------------------------------------------------


def test_every_guarantee_holds_in_two_hundred_worlds():
    total = Sum()
    for seed in QUICK:
        total.add(run_seed(seed))
    assert not total.broken, "\n".join(f"{replay_command(v.seed)}: {v.broke}: {v.why}" for v in total.broken)
    assert total.fewest_faults >= FEWEST_ACTIONS
    assert len(total.missed) < len(MARKS) / 3


def test_world_does_not_depend_on_the_hash_seed():
    program = "from rallypoint.testing.sim.run import run_seed\nfor seed in (1, 7, 9): print(run_seed(seed).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1
    assert digests.pop().split() == [run_seed(seed).digest for seed in (1, 7, 9)]


def test_different_seeds_give_different_worlds():
    assert len({run_seed(seed).digest for seed in range(5)}) == 5


def test_worlds_in_other_processes_are_the_same():
    digests = {verdict.seed: verdict.digest for verdict in run_many(range(3), workers=1)}
    assert digests == {seed: run_seed(seed).digest for seed in range(3)}


# --- plans ------------------------------------------------------------------------------------------------------------


def test_plan_of_a_seed_is_always_the_same():
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]


def test_plans_are_consistent_and_contain_every_fault():
    plans = [draw(seed) for seed in range(500)]
    for plan in plans:
        assert 1 <= plan.min_nodes <= plan.max_nodes
        assert plan.min_nodes % plan.step == plan.max_nodes % plan.step == 0
        assert plan.min_nodes <= plan.nodes
        assert len(plan.actions) >= FEWEST_ACTIONS
        assert list(plan.actions) == sorted(plan.actions, key=lambda action: action.at_s)
    assert {action.fault for plan in plans for action in plan.actions} == set(Fault)
    assert sum(plan.nodes >= 20 for plan in plans) > 100


def test_plan_that_keeps_some_faults_is_otherwise_the_same():
    plan = draw(3)
    kept = plan.keeping(frozenset({0, 2}))
    assert kept.actions == (plan.actions[0], plan.actions[2])
    assert kept.nodes == plan.nodes
    assert plan.keeping(frozenset(range(len(plan.actions)))) == plan


# --- failing worlds ---------------------------------------------------------------------------------------------------


def test_failing_world_is_reduced_and_still_breaks_the_same_guarantee(broken_seed):
    plan, kept, verdict = shrink(broken_seed)
    assert verdict.broke == "Detection"
    assert len(plan.actions) == len(kept) < len(draw(broken_seed).actions)
    again = run_plan(draw(broken_seed).keeping(kept))
    assert (again.broke, again.digest) == ("Detection", verdict.digest)


def test_correct_world_is_not_reduced():
    plan, kept, verdict = shrink(1)
    assert plan == draw(1)
    assert len(kept) == len(plan.actions)
    assert verdict.broke == ""


# --- the command ------------------------------------------------------------------------------------------------------


def test_range_of_seeds_prints_a_summary():
    result = sim("--seeds", "0:4", "--workers", "1")
    assert result.exit_code == 0, result.output
    assert "4 worlds, 0 broken" in result.output
    assert "marks hit" in result.output


def test_one_seed_shows_its_faults_and_its_digest():
    result = sim("--seed", "1")
    assert result.exit_code == 0, result.output
    assert result.output.count("fault ") == len(draw(1).actions)
    assert run_seed(1).digest in result.output
    assert "every guarantee held" in result.output


@pytest.mark.parametrize(("keep", "count"), [("0,2", 2), ("none", 0)])
def test_one_seed_can_be_run_with_some_of_its_faults(keep, count):
    result = sim("--seed", "1", "--keep", keep)
    assert result.exit_code == 0, result.output
    assert f" {count} faults" in result.output
    assert run_plan(draw(1).keeping(frozenset(range(0, 2 * count, 2)))).digest in result.output


def test_failing_world_shows_its_last_events_in_columns(broken_seed):
    result = sim("--seed", str(broken_seed))
    assert result.exit_code == 1
    assert "broke Detection: " in result.output
    lines = result.output.splitlines()
    head = lines.index(next(line for line in lines if line.split()[:3] == ["seconds", "what", "who"]))
    rows = [line for line in lines[head + 1 :] if line[:1] == " " and line.split()[0].replace(".", "").isdigit()]
    assert len(rows) > 20
    assert len({row.index(row.split()[1]) for row in rows}) == 1, "the second column is a column"


def test_failing_worlds_of_a_range_print_their_replay_commands(broken_seed, monkeypatch):
    monkeypatch.setattr(
        "rallypoint.testing.sim.campaign.run_many", lambda seeds, workers, register: map(run_seed, seeds)
    )
    result = sim("--seeds", f"{broken_seed}:{broken_seed + 1}", "--shrink")
    assert result.exit_code == 1
    assert f"seed {broken_seed} broke Detection: " in result.output
    assert f"replay it: rallypoint sim --seed {broken_seed}\n" in result.output
    assert f"rallypoint sim --seed {broken_seed} --keep " in result.output
    assert "the last events" in result.output
    assert "1 worlds, 1 broken" in result.output


def test_reduced_world_is_printed_as_a_replay_command(broken_seed):
    result = sim("--seed", str(broken_seed), "--shrink")
    assert result.exit_code == 1
    command = next(line for line in result.output.splitlines() if line.startswith("reduced to")).split(": ")[1]
    again = CliRunner().invoke(main, command.split()[1:])
    assert again.exit_code == 1
    assert "broke Detection: " in again.output


def test_unreached_marks_fail_if_all_are_required():
    result = sim("--seeds", "0:1", "--workers", "1", "--all-marks")
    assert result.exit_code == 1
    assert "marks that no world reached: " in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give either --seeds A:B or --seed N"),
        (("--seeds", "0:2", "--seed", "1"), "give either --seeds A:B or --seed N"),
        (("--seeds", "5"), "'5' is not a range of seeds: give A:B with A < B"),
        (("--seeds", "5:5"), "not a range of seeds"),
        (("--seeds", "-1:5"), "not a range of seeds"),
        (("--seed", "-1"), "-1 is not in the range"),
        (("--seed", "x"), "'x' is not a valid integer"),
        (("--seed", "1", "--keep", "0,x"), "'0,x' is not a list of faults"),
        (("--seeds", "0:2", "--workers", "0"), "0 is not in the range"),
    ],
)
def test_invalid_arguments_are_explained(arguments, said):
    result = sim(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


# --- marks ------------------------------------------------------------------------------------------------------------


def marks_in(source: str) -> list[str]:
    return [
        str(node.args[0].value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "mark"
        and isinstance(node.args[0], ast.Constant)
    ]


def test_every_mark_of_the_table_is_used_once():
    used = [name for source in modules().values() for name in marks_in(source)]
    assert sorted(used) == sorted({**MARKS, **REGISTER_MARKS, **ETCD_MARKS})


def test_marks_in_the_table_are_unique_and_explained():
    table = modules()["rallypoint._marks"]
    names = [
        str(key.value)
        for node in ast.walk(ast.parse(table))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    ]
    assert len(names) == len(set(names)) == len(MARKS) + len(REGISTER_MARKS) + len(ETCD_MARKS)
    assert all([*MARKS.values(), *REGISTER_MARKS.values(), *ETCD_MARKS.values()])
