"""Nodes that come and go in numbers: loops of failures, batches, falling below the minimum, a thousand at once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quorate.bench.plan import Bench, Case, Side
from quorate.bench.runner import run_case
from tests.e2e.kit import HERE, Process, Stage
from tests.e2e.operating import until_said
from tests.e2e.test_many import form
from tests.scenarios.places import Place
from tests.scenarios.record import Recorder
from tests.scenarios.test_rows_members import last, one_round, told

pytestmark = pytest.mark.scenarios


def test_row_10_node_that_fails_in_a_loop_is_held_back_with_the_reason(row: Recorder, stage: Stage, place: Place):
    run, hold_s = place.run(), 8.0
    url = place.url(f"min_nodes=2&max_nodes=3&hold_back_losses=3&hold_back={hold_s:g}", run, ttl_s=6.0)
    a, b = stage.nodes(url, "a", "b")
    number = one_round([a, b])[0]["round"]
    for _ in range(3):
        flaky = stage.node(url, "flaky")
        number = one_round([a, b, flaky], above=number)[0]["round"]
        flaky.kill()
        number = one_round([a, b], above=number)[0]["round"]
    lost_at = last(a.all("round"))
    rounds = len(a.all("round"))
    flaky = stage.node(url, "flaky")
    said = until_said("why", run, parts=("flaky", "lost 3 times"))
    (line,) = [line for line in said.splitlines() if "lost 3 times" in line][:1]
    row(f"after three losses in a row `quorate why` says: {line.strip()}")
    assert len(a.all("round")) == rounds, "it has disturbed nobody since"
    again = one_round([a, b, flaky], above=number)
    row(
        f"it was held back, while the others worked on, for {hold_s:g} s as set; it got in after", last(again) - lost_at
    )
    assert last(again) - lost_at > hold_s - 1


def test_row_10_arrivals_are_admitted_in_batches(row: Recorder, stage: Stage, place: Place):
    batch(row, stage, place, window_s=1.0, pause_s=0.3)


def test_row_18_nodes_of_an_autoscaler_are_admitted_in_one_batch(row: Recorder, stage: Stage, place: Place):
    time_running = 10.0
    batch(row, stage, place, window_s=1.0, pause_s=0.0, before_s=time_running)


def batch(row: Recorder, stage: Stage, place: Place, window_s: float, pause_s: float, before_s: float = 0.0) -> None:
    """Five nodes come while a round of two is active: there is one more round, and not five."""
    url = place.url(f"min_nodes=2&max_nodes=8&admission_window={window_s:g}")
    a, b = stage.nodes(url, "a", "b")
    number = one_round([a, b])[0]["round"]
    new = stage.nodes(url, "c", "d", "e", "f", "g", mode="hand")
    for node in new:
        node.wait("ready")  # what starting a process costs is not what is played here
    time.sleep(before_s)
    assert [a.all("changed"), b.all("changed")] == [[], []]
    asked_at = time.monotonic()
    for node in new:
        node.ask("next")
        time.sleep(pause_s)
    facts = one_round([a, b, *new], above=number)
    assert [len(node.all("round")) for node in (a, b)] == [2, 2], "one restart for all five"
    when = f"{before_s:g} s later " if before_s else ""
    row(f"five nodes came {when}{pause_s:g} s apart: one new round of seven, so one restart")
    row("the first of them asked until all were in", last(facts) - asked_at, 5 * pause_s + window_s + 1)


def test_row_17_round_forms_when_the_minimum_is_back(row: Recorder, stage: Stage, place: Place):
    run = place.run()
    url = place.url("min_nodes=3&max_nodes=4&hold_back_losses=0", run)
    a, b, c = stage.nodes(url, "a", "b", "c")
    number = one_round([a, b, c])[0]["round"]
    for turn in range(3):
        killed_at = c.kill()
        facts = told([a, b], number)
        if turn == 0:
            row(
                "kill -9 of one of three, where three are the minimum, until the others were told",
                last(facts) - killed_at,
                place.loss_s,
            )
            until_said("why", run, parts=("2 of at least 3 nodes joined",))
            row("`quorate why` says meanwhile: 2 of at least 3 nodes joined")
        c = stage.node(url, "c")
        asked_at = c.event("JoinStarted")["at"]
        facts = one_round([a, b, c], above=number)
        number = facts[0]["round"]
    row(
        "three times below the minimum and back; the last time from asking to join until the round",
        last(facts) - asked_at,
    )


# --- row 12 -----------------------------------------------------------------------------------------------------------


def test_row_12_thousand_nodes_start_at_once_and_the_cost_is_linear(row: Recorder):
    took: dict[int, float] = {}
    for nodes in (250, 1000):
        outcome = run_case(Case(Bench.RENDEZVOUS, Side.QUORATE, nodes=nodes, repeat=1), lambda text: None)
        assert outcome.failed == ""
        released, together = outcome.samples
        assert released.value is not None, released.why_none
        assert together.value is not None, together.why_none
        row(f"{nodes} nodes: last arrival until all were released", released.value / 1000)
        took[nodes] = together.value / 1000
        row(f"{nodes} nodes connect and join at once: until the last was in", took[nodes])
    row(f"four times as many nodes took {took[1000] / took[250]:.1f} times as long")
    assert took[1000] < 4 * took[250] * (2 + row.load.per_core), took


def test_row_12_many_nodes_start_at_once_on_etcd(row: Recorder, stage: Stage, place: Place):
    count, crews = (400, 4)
    url = place.url(f"min_nodes={count}&join_timeout=180", ttl_s=30.0)
    nodes = [stage.node(url, f"crew{number}", "many", str(count // crews)) for number in range(crews)]
    row(f"{count} nodes in {crews} processes connect and join at once: until the last was in", form(nodes, count))


# --- row 19 -----------------------------------------------------------------------------------------------------------


def has_run_command() -> bool:
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    argv = [sys.executable, "-m", "quorate", "run", "--help"]
    return subprocess.run(argv, capture_output=True, timeout=60, env=env, check=False).returncode == 0


WORKER = """
import os, sys, time
print("worker", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
time.sleep(0.5)
sys.exit(17 if os.environ["RANK"] == "1" else 0 if os.path.exists(sys.argv[1]) else time.sleep(600))
"""


def test_row_19_restart_budget_is_one_number_for_the_run(row: Recorder, stage: Stage, place: Place, tmp_path: Path):
    assert has_run_command(), "there is no `quorate run` in this tree yet: the row cannot be kept without it"
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER, encoding="utf-8")
    budget = 3
    run_id = f"budget-{os.getpid()}-{place.backend}"

    def launcher(name: str) -> Process:
        words = [
            "--nnodes=2:2",
            "--nproc-per-node=1",
            f"--rdzv-endpoint={place.root.removeprefix('tcp://')}",
            f"--rdzv-id={run_id}",
        ]
        words += [f"--max-restarts={budget}", f"--rdzv-conf=name={name}", "--local-addr=127.0.0.1"]
        argv = [
            sys.executable,
            "-m",
            "quorate",
            "run",
            *words,
            "--",
            sys.executable,
            str(worker),
            str(tmp_path / "end"),
        ]
        one = Process(name, argv)
        stage.processes.append(one)
        return one

    began_at = time.monotonic()
    both = [launcher("a"), launcher("b")]
    statuses = [one.wait_exit(180) for one in both]
    assert all(status != 0 for status in statuses), [one.story for one in both]
    said = "\n".join(line for one in both for line in (*one.errors, *(str(fact) for fact in one.facts)))
    starts = said.count("worker 1 ")
    assert starts == budget + 1, said
    row(f"--max-restarts {budget}: a worker that always fails was started {starts} times in all, on two nodes")
    row("both launchers gave up", time.monotonic() - began_at)
    again = launcher("a")
    assert again.wait_exit(60) != 0, "leaving and joining again gives no new budget"
    row("a launcher that was started again got no budget of its own")
