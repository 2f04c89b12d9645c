"""Rows of docs/scenarios.md with the commands: closed ids, worlds of one, ignored options, silent time-outs."""

import json
import os
import re
import subprocess
import sys
import time

from tests.e2e.kit import HERE, PATIENCE_S, Process, loopback
from tests.e2e.operating import ask, ask_json, command, until_said


def test_closed_run_is_reopened_and_a_dead_one_frees_its_id(stage):
    """Scenario 11."""
    endpoint = loopback()
    stage.serve(endpoint)
    url = f"tcp://{endpoint}/job"
    options = "min_nodes=1&reopen_after=1&keep_alive_interval=0.5"
    first = stage.node(f"{url}?{options}", "a")
    first.round()
    assert "job" in ask("ls", f"tcp://{endpoint}")
    assert ask_json("close", url, "--reason", "wrong dataset")["changed"]
    late = stage.node(f"{url}?{options}", "b", "hand")
    refused = late.outcome(late.ask("next"))
    assert refused["error"] == "RendezvousClosedError"
    assert "wrong dataset" in refused["text"]
    assert re.search(r"by \S+@\S+:\d+: wrong dataset", refused["text"]), "who and why"
    assert ask_json("reopen", url, "--reason", "dataset fixed")["changed"]
    assert not ask_json("reopen", url)["changed"]
    late.ask("next")
    until_said("status", url, parts=("b", "reopened by"))
    first.kill()
    late.kill()
    until_said("ls", f"tcp://{endpoint}", parts=("there are no runs",))
    again = stage.node(f"{url}?min_nodes=1&max_nodes=2", "c", "hand")
    again.ask("next")
    report = json.loads(until_said("status", url, "--json", parts=('"c"',)))
    assert report["closing"] is None, "nothing is left of the earlier incarnation"


def test_why_on_a_node_that_hosts_its_server_says_what_it_waits_for(stage):
    """Scenario 20."""
    endpoint = loopback()
    node = stage.node(f"tcp://{endpoint}/solo?min_nodes=2", "a")
    told = node.event("Hosting")["text"]
    assert "at least 1 more node must reach it" in told
    said = until_said("why", f"tcp://{endpoint}/solo", parts=("1 of at least 2 nodes joined: a",))
    assert said.startswith("Start 1 more node with the same URL.")
    assert "hosted by a node" in ask("doctor", f"tcp://{endpoint}/solo")


def test_unknown_option_is_refused_with_a_suggestion():
    """Scenario 21."""
    said = ask("why", "tcp://head:29400/run?tiemout=900", code=2)
    assert "unknown option 'tiemout': did you mean timeout?" in said
    assert "did you mean token_file?" in ask("status", "tcp://head:29400/run", "-o", "tokenfile=x", code=2)
    failed = ask_json("doctor", "tcp://head:29400/run?tiemout=900", code=1)["checks"]
    assert [check["verdict"] for check in failed] == ["failed"]


def test_time_out_event_and_why_have_the_same_sentence(stage):
    """Scenario 22."""
    endpoint = loopback()
    stage.serve(endpoint)
    url = f"tcp://{endpoint}/late"
    lost = stage.node(f"{url}?min_nodes=4", "c")
    patient = stage.node(f"{url}?min_nodes=4", "a", "hand")
    patient.ask("next")
    hasty = stage.node(f"{url}?min_nodes=4&join_timeout=15", "b", "hand")
    asked = hasty.ask("next")
    until_said("why", url, parts=("3 of at least 4 nodes joined",))
    lost.kill()
    said = json.loads(until_said("why", url, "--json", parts=("2 of at least 4", "lost: c")))
    patient.event("WaitingFor", lambda fact: fact["reason"] == said["reason"])
    error = hasty.outcome(asked)
    assert error["error"] == "RendezvousTimeoutError"
    assert said["reason"] in error["text"]


def test_two_jobs_on_one_server_are_two_runs(stage):
    """Scenario 23."""
    endpoint = loopback()
    stage.serve(endpoint)
    nodes = [stage.node(f"tcp://{endpoint}/{run}?min_nodes=1", run) for run in ("blue", "green")]
    for node in nodes:
        assert node.round()["size"] == 1
    runs = {run["run_id"]: run for run in ask_json("ls", f"tcp://{endpoint}")["runs"]}
    assert {run_id: run["nodes"] for run_id, run in runs.items()} == {"blue": 1, "green": 1}
    second = stage.serve(endpoint, listens=False)
    assert second.wait_exit() != 0
    said = "\n".join(second.errors)
    assert "is taken: another `rallypoint serve`" in said
    assert "one server takes any number of runs" in said


def test_store_is_read_and_written_by_commands(stage):
    endpoint = loopback()
    stage.serve(endpoint)
    url = f"tcp://{endpoint}/store"
    node = stage.node(f"{url}?min_nodes=1", "a", "hand")
    node.call("next")
    watching = start("store", "watch", url, "progress", "--json")
    stage.processes.append(watching)
    node.call("store.set", "progress", "1")
    watching.until(lambda: [fact for fact in watching.facts if fact.get("value") == "1"], "the first value")
    assert ask("store", "get", url, "progress") == "1\n"
    assert "wrote 2 bytes" in ask("store", "set", url, "progress", "12")
    assert node.call("store.get", "progress") == "12"
    assert command("store", "set", url, "blob", "-", stdin="from stdin").returncode == 0
    assert [key["key"] for key in ask_json("store", "ls", url)["keys"]] == ["blob", "progress"]
    watching.until(lambda: [fact for fact in watching.facts if fact.get("value") == "12"], "the second value")
    assert "has no key 'nothing'" in ask("store", "get", url, "nothing", code=3)


def test_events_are_followed_and_history_is_kept(stage):
    endpoint = loopback()
    stage.serve(endpoint)
    url = f"tcp://{endpoint}/events"
    options = "min_nodes=1&max_nodes=2&last_call_timeout=0.1&admission_window=0"
    first = stage.node(f"{url}?{options}", "a")
    first.round()
    following = start("events", url, "--follow", "--json")
    stage.processes.append(following)
    following.until(lambda: _told(following, "RoundActive"), "what was before")
    second = stage.node(f"{url}?{options}", "b")
    first.round(size=2)
    second.kill()
    following.until(lambda: _told(following, "NodeLost"), "the loss")
    first.round(above=2, size=1)
    following.until(lambda: len(_told(following, "RoundActive")) >= 3, "the next round")
    lost = _told(following, "NodeLost")[0]
    assert (lost["node"], lost["reason"]) == ("b", "its session ended")
    assert any(fact["by"] == "b" for fact in _told(following, "JoinStarted"))
    following.interrupt()
    assert following.wait_exit() == 130
    assert not [line for line in following.errors if "Traceback" in line]
    rounds = ask_json("history", url)["rounds"]
    assert [one["size"] for one in rounds] == [1, 2, 1]
    assert "b was lost (its session ended)" in rounds[1]["ended"]
    assert rounds[1]["last_arrivals"][-1][0] in ("a", "b")
    shown = ask("history", url)
    assert "not over" in shown
    assert "b was lost (its session ended)" in shown


def test_command_ends_when_the_reader_of_its_output_goes_away(stage):
    endpoint = loopback()
    stage.serve(endpoint)
    node = stage.node(f"tcp://{endpoint}/pipe?min_nodes=1", "a")
    node.round()
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    argv = [sys.executable, "-m", "rallypoint", "events", f"tcp://{endpoint}/pipe", "--follow"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as following:
        assert following.stdout is not None
        assert any("round 1 is active" in line for line in iter(following.stdout.readline, ""))
        following.stdout.close()
        ask("close", f"tcp://{endpoint}/pipe")
        assert following.wait(PATIENCE_S) != 0
        assert following.stderr is not None
        assert following.stderr.read() == ""


def test_observing_is_not_joining(stage):
    """An observer is not a node, does not create the run, and does not keep it alive."""
    endpoint = loopback()
    stage.serve(endpoint)
    watching = start("watch", f"tcp://{endpoint}/seen")
    stage.processes.append(watching)
    watching.until(lambda: [fact for fact in watching.facts if "no such run" in fact["kind"]], "that there is none")
    began_at = time.monotonic()
    node = stage.node(f"tcp://{endpoint}/seen?min_nodes=1&reopen_after=1&keep_alive_interval=0.5", "a")
    node.round()
    assert time.monotonic() - began_at < PATIENCE_S
    watching.until(lambda: [fact for fact in watching.facts if "1 member" in fact["kind"]], "the round")
    assert ask_json("status", f"tcp://{endpoint}/seen")["counts"]["member"] == 1
    node.kill()
    watching.until(
        lambda: [fact for fact in watching.facts[2:] if "absent" in fact["kind"]], "that its id is free again"
    )


def _told(process: Process, kind: str):
    return [fact for fact in process.facts if fact.get("event") == kind]


def start(*words: str) -> Process:
    return Process(" ".join(words), [sys.executable, "-m", "rallypoint", *words])
