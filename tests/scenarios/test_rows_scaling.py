"""Rows about many arrivals and losses: failure loops, batches, too few nodes, a thousand at once."""

import sys
import time
from pathlib import Path

import pytest

from rallypoint.bench.plan import Bench, Case, Side
from rallypoint.bench.runner import run_case
from tests.e2e.kit import Fact, Process, Stage
from tests.e2e.operating import command, until_said
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
    row(f"after three losses in a row `rallypoint why` says: {line.strip()}")
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
    """Five nodes join while a round of two is active: that makes one further round, not five."""
    url = place.url(f"min_nodes=2&max_nodes=8&admission_window={window_s:g}")
    a, b = stage.nodes(url, "a", "b")
    number = one_round([a, b])[0]["round"]
    new = stage.nodes(url, "c", "d", "e", "f", "g", mode="hand")
    for node in new:
        node.wait("ready")  # the start of processes is not measured
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
            row("`rallypoint why` says meanwhile: 2 of at least 3 nodes joined")
        c = stage.node(url, "c")
        asked_at = c.event("JoinStarted")["at"]
        facts = one_round([a, b, c], above=number)
        number = facts[0]["round"]
    row(
        "three times below the minimum and back; the last time from asking to join until the round",
        last(facts) - asked_at,
    )


# --- row 12 -----------------------------------------------------------------------------------------------------------


def test_row_12_thousand_nodes_start_at_once_and_the_cost_is_linear(row: Recorder, stage: Stage, place: Place):
    few, many, crews = 200, 1000, 4
    took: dict[int, float] = {}
    for count in (few, many):
        url = place.url(f"min_nodes={count}&join_timeout=180&confirm_timeout=60", ttl_s=60.0)
        nodes = [stage.node(url, f"crew{number}", "many", str(count // crews)) for number in range(crews)]
        took[count] = form(nodes, count)
        row(f"{count} nodes, each with a session of its own, join at once: until the last was in", took[count])
        for node in nodes:
            node.kill()
    row(f"{many // few} times as many nodes took {took[many] / took[few]:.1f} times as long")
    assert took[many] < 2 * row.load.times * took[few] * many / few, took


def test_row_12_last_of_a_thousand_nodes_releases_all(row: Recorder):
    """Measured by `rallypoint bench rendezvous`."""
    outcome = run_case(Case(Bench.RENDEZVOUS, Side.RALLYPOINT, nodes=1000, repeat=1), lambda text: None)
    assert outcome.failed == ""
    released, together = outcome.samples
    for sample in (released, together):
        assert sample.value is not None, sample.why_none
        row(f"`rallypoint bench rendezvous --nodes 1000`, {sample.measure}", sample.value)


# --- row 19 -----------------------------------------------------------------------------------------------------------

WORKER = """
import json, os, pathlib, sys, time
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(json.dumps({"kind": "worker", "at": time.monotonic(), "rank": rank, "restarts": restarts}), flush=True)
fail = pathlib.Path(sys.argv[1]) / f"fail-{restarts}"
launcher = os.getppid()
while os.getppid() == launcher:
    if rank == 1 and fail.exists():
        sys.exit(17)
    time.sleep(0.02)
"""


class Launcher(Process):
    """A process of `rallypoint run`. `facts` are those of its workers, without the prefixes of the launcher."""

    def _take_fact(self, line: str) -> None:
        _, brace, rest = line.partition("{")
        super()._take_fact(brace + rest if brace else line)

    def worker(self, restarts: int, after: float = 0.0) -> Fact:
        """The first worker that started after that time with that restart count."""
        fact = self.wait("worker", lambda fact: fact["at"] > after)
        assert fact["restarts"] == restarts, self.story
        return fact


def has_run_command() -> bool:
    return command("run", "--help").returncode == 0


def test_row_19_restart_budget_is_one_number_for_the_run(row: Recorder, stage: Stage, place: Place, tmp_path: Path):
    assert has_run_command(), "there is no `rallypoint run` here: this row cannot be played without it"
    script, budget = tmp_path / "worker.py", 3
    script.write_text(WORKER, encoding="utf-8")
    _, _, endpoint = place.root.partition("://")
    flags = ["--nnodes", "2:2", "--nproc-per-node", "1", "--max-restarts", str(budget), "--local-addr", "127.0.0.1"]
    flags += ["--rdzv-backend", place.backend, "--rdzv-endpoint", endpoint, "--rdzv-id", tmp_path.name]

    def launch(name: str) -> Launcher:
        conf = ["--rdzv-conf", f"name={name},last_call_timeout=0.3,join_timeout=120"]
        program = [sys.executable, str(script), str(tmp_path)]
        one = Launcher(name, [sys.executable, "-m", "rallypoint", "run", *flags, *conf, "--", *program])
        stage.processes.append(one)
        return one

    a, b = launch("a"), launch("b")
    at = last([a.worker(0), b.worker(0)])
    for used in range(1, budget):
        (tmp_path / f"fail-{used - 1}").touch()
        at = last([one.worker(used, after=at) for one in (a, b)])
    row(f"after {budget - 1} failures of one worker both nodes count {budget - 1} restarts")
    b.interrupt()
    b.wait_exit()
    b = launch("b")
    at = last([a.worker(budget - 1, after=at), b.worker(budget - 1)])
    row("one launcher was stopped by Ctrl-C and started again: the count stays, for both")
    (tmp_path / f"fail-{budget - 1}").touch()
    for one in (a, b):
        one.worker(budget, after=at)
    (tmp_path / f"fail-{budget}").touch()
    failed_at = time.monotonic()
    statuses = [one.wait_exit() for one in (a, b)]
    assert 0 not in statuses, [one.story for one in (a, b)]
    row(
        f"the failure after {budget} restarts in all ended both launchers, with {statuses}",
        time.monotonic() - failed_at,
    )
