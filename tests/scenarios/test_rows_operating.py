"""Rows about operating: reused ids, worlds of one, ignored options, silent waits, shared machines."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.e2e import test_endpoints as endpoints
from tests.e2e import test_operating_scenarios as operating
from tests.e2e.kit import Process, Stage, loopback
from tests.e2e.operating import ask, ask_json, until_said
from tests.integrations.kit import Job
from tests.scenarios.places import QUICK, Place
from tests.scenarios.record import Recorder
from tests.scenarios.test_rows_members import one_round

pytestmark = pytest.mark.scenarios

HERE = Path(__file__).resolve().parent


def test_row_11_closed_run_is_reopened_and_a_dead_one_frees_its_id(row: Recorder, stage: Stage, place: Place):
    run, reopen_s, ttl_s = place.run(), 2.0, 3.0
    url = place.url(f"min_nodes=1&max_nodes=2&reopen_after={reopen_s:g}", run, ttl_s=ttl_s)
    first = stage.node(url, "a")
    first.round()
    first.call("store.set", "of", "the first life")
    assert ask_json("close", run, "--reason", "wrong dataset")["changed"]
    late = stage.node(url, "b", "hand")
    refused = late.outcome(late.ask("next"))
    assert refused["error"] == "RendezvousClosedError"
    assert re.search(r"by \S+@\S+:\d+: wrong dataset", refused["text"]), "who and why"
    row("a node that came to a closed run was told by whom and why it was closed")
    assert ask_json("reopen", run, "--reason", "dataset mended")["changed"]
    late.ask("next")
    until_said("status", run, parts=("b", "reopened by"))
    first.round(size=2)
    row("`rallypoint reopen`: the node was taken in")
    ask_json("close", run, "--reason", "done for today")
    died_at = first.kill()
    late.kill()
    again = stage.node(url, "c", "hand")
    again.wait("ready")
    while (outcome := again.outcome(again.ask("next")))["kind"] == "failed":
        assert outcome["error"] == "RendezvousClosedError", outcome
        assert time.monotonic() - died_at < 60, again.story
        time.sleep(0.1)
    lease_s = 1.0 if place.is_told_of_deaths else ttl_s
    row(
        f"closed again, and all its nodes killed: until the id was free, with reopen_after = {reopen_s:g} s",
        time.monotonic() - died_at,
        lease_s + reopen_s + 3,
    )
    report = ask_json("status", run)
    assert report["closing"] is None
    assert again.call("store.check", ["of"]) is False
    row("the new life of the id saw nothing of the old one: not its closing, not its store")


@pytest.mark.parametrize("place", ["tcp", "etcd"], indirect=True)
def test_row_11_torchrun_without_an_id_is_refused_where_others_are(
    row: Recorder, stage: Stage, place: Place, tmp_path: Path
):
    pytest.importorskip("torch")
    job = Job(stage, tmp_path, endpoint=place.root.removeprefix("tcp://"), run_id="none")
    agent = job.agent("a", "1")
    assert agent.wait_exit() != 0
    assert "--rdzv-id" in agent.said
    row("torchrun's default id, “none”, was refused, and --rdzv-id asked for")


def test_row_20_node_that_serves_itself_says_where_and_for_whom(row: Recorder, stage: Stage):
    endpoints.test_scenario_20_node_that_hosts_itself_says_loudly_where_and_for_whom(stage)
    row("a warning on stderr, and an event, with the address and that at least one more node must reach it there")
    operating.test_why_on_a_node_that_hosts_its_server_says_what_it_waits_for(stage)
    row("`rallypoint why` from outside says: 1 of at least 2 nodes joined, and to start one node more")


def test_row_21_options_are_aliases_or_errors_but_never_ignored(row: Recorder, stage: Stage, place: Place):
    run = place.run()
    node = stage.node(f"{run}?min_nodes=2&timeout=3&{QUICK}", "a", "hand")
    node.wait("ready")
    outcome = node.outcome(node.ask("next"))
    assert outcome["error"] == "RendezvousTimeoutError"
    row("timeout=3 is the join time-out: a node without a peer gave up after", outcome["took_s"], 3 + 1)
    said = ask("why", f"{run}?tiemout=900", code=2)
    assert "unknown option 'tiemout': did you mean timeout?" in said
    row("tiemout=900 is an error: did you mean timeout?")


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
def test_row_21_rdzv_conf_of_torchrun_is_never_ignored(row: Recorder, stage: Stage, place: Place, tmp_path: Path):
    pytest.importorskip("torch")
    job = Job(stage, tmp_path, endpoint=place.root.removeprefix("tcp://"))
    wrong = job.agent("a", "1", conf="last_cal_timeout=3")
    short = job.agent("b", "2", conf="timeout=3")
    asked_at = short.wait_line("asks to join") and time.monotonic()
    assert wrong.wait_exit() != 0
    assert "did you mean last_call_timeout?" in wrong.said
    row("torchrun --rdzv-conf last_cal_timeout=3: did you mean last_call_timeout?")
    assert short.wait_exit() != 0
    assert "RendezvousTimeoutError" in short.said
    assert time.monotonic() - asked_at > 2
    row("torchrun --rdzv-conf timeout=3: it gave up at its deadline, with a RendezvousTimeoutError")


def test_row_22_error_event_and_why_say_the_same(row: Recorder, stage: Stage, place: Place):
    run, ttl_s = place.run(), 3.0
    patient = stage.node(place.url("min_nodes=4", run, ttl_s=ttl_s), "a", "hand")
    patient.ask("next")
    patient.event(
        "WaitingFor", lambda fact: "1 of at least 4" in fact["reason"]
    )  # where a node decides, it is this one
    lost = stage.node(place.url("min_nodes=4", run, ttl_s=ttl_s), "c")
    hasty = stage.node(place.url("min_nodes=4&join_timeout=20", run, ttl_s=ttl_s), "b", "hand")
    hasty.wait("ready")
    until_said("why", run, parts=("2 of at least 4 nodes joined",))
    lost.kill()
    until_said("why", run, parts=("1 of at least 4", "lost: c"))
    asked = hasty.ask("next")
    said = json.loads(until_said("why", run, "--json", parts=("2 of at least 4", "lost: c")))
    patient.event("WaitingFor", lambda fact: fact["reason"] == said["reason"])
    error = hasty.outcome(asked)
    assert error["error"] == "RendezvousTimeoutError"
    assert said["reason"] in error["text"]
    row(f"`rallypoint why`, the event and the error of the node that gave up have the same sentence: {said['reason']}")
    row("its time-out was 20 s, and it gave up after", error["took_s"], 20 + 1)


@pytest.mark.parametrize("place", ["etcd"], indirect=True)
def test_row_22_loss_of_the_coordinator_before_the_first_round_is_named(row: Recorder, stage: Stage, place: Place):
    url = place.url("min_nodes=3", ttl_s=3.0)
    lost = stage.node(url, "c")
    lost.event("CoordinatorElected")
    heir = stage.node(url, "a")
    heir.event("WaitingFor", lambda fact: "2 of at least 3" in fact["reason"])
    lost.kill()
    heir.event("CoordinatorElected")
    said = heir.event("WaitingFor", lambda fact: "1 of at least 3 nodes joined: a" in fact["reason"])["reason"]
    row(f"the node that decided was lost before the first round; the other said: {said}")
    assert "gone: c (it was the coordinator before this one)" in said


@pytest.mark.quick
def test_row_23_jobs_with_different_ids_do_not_mix(row: Recorder, stage: Stage, place: Place):
    runs = [place.run(), place.run()]
    jobs = [stage.nodes(place.url("min_nodes=2", run), "a", "b") for run in runs]
    for job, run in zip(jobs, runs, strict=True):
        one_round(job)
        job[0].call("store.set", "whose", run)
    assert [job[1].call("store.get", "whose") for job in jobs] == runs
    jobs[0][0].call("set_closed")
    assert jobs[1][1].call("is_closed") is False
    row("two jobs, the same names, sizes and moment: two runs with two stores; closing one did not close the other")


def test_row_23_second_server_on_a_taken_port_says_who_has_it(row: Recorder, stage: Stage):
    first = stage.serve(loopback())
    second = stage.serve(first.wait_listening(), listens=False)
    began_at = time.monotonic()
    assert second.wait_exit() != 0
    (line,) = second.errors
    for part in ("taken", "rallypoint serve", "--bind"):
        assert part in line
    row("it ended at once", time.monotonic() - began_at)
    row(f"it said: {line}".replace(first.wait_listening(), "HOST:PORT"))
    with Stage() as other:
        endpoints.test_scenario_23_self_hosted_jobs_of_one_endpoint_share_the_first_ones_server(other)
    row("two jobs that nobody serves share the server of the first, which stays until the second is done")


@pytest.mark.parametrize("place", ["tcp", "etcd"], indirect=True)
def test_row_24_barrier_of_64_processes_names_the_one_that_is_absent(row: Recorder, stage: Stage, place: Place):
    count, absent, timeout_s = 64, 37, 10.0
    url = place.url(f"min_nodes={count}&join_timeout=300&confirm_timeout=60", ttl_s=60.0)
    argv = [sys.executable, str(HERE / "crowd.py"), url, str(count), str(absent), str(timeout_s)]
    crowd = Process("crowd", argv)
    stage.processes.append(crowd)
    try:
        crowd.until(lambda: len(crowd.all("round")) == count, "all are in", 240)
        crowd.until(lambda: len(crowd.all("barrier")) == count - 1, "all were told", 240)
        facts = crowd.all("barrier")
        assert {tuple(fact["missing"]) for fact in facts} == {(absent,)}, facts[0]
        assert {fact["size"] for fact in crowd.all("round")} == {count}
        row(f"{count} processes, rank {absent} never came: each of the others was told: {facts[0]['text']}")
        row(
            f"the slowest of them, with a time-out of {timeout_s:g} s",
            max(fact["took_s"] for fact in facts),
            timeout_s + 1,
        )
    finally:
        os.killpg(crowd.popen.pid, 9)
