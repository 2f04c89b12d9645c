"""The inspect and operator commands on `file://`, with real nodes."""

import json

import pytest

from tests.e2e.kit import Stage
from tests.e2e.operating import ask, ask_json, checks, command, until_said


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in a file with an active round of a and b, and a waiting node c: its URL, and a's process."""
    folder = tmp_path_factory.mktemp("shared")
    url = f"file://{folder}/run"
    options = "min_nodes=1&max_nodes=2&last_call_timeout=2&keep_alive_interval=2"
    with Stage() as stage:
        nodes = [stage.node(f"{url}?{options}", name, "hand") for name in ("a", "b")]
        for node in nodes:
            node.ask("next")
        for node in nodes:
            node.round(size=2)
        stage.node(f"{url}?{options}", "c")
        yield url, nodes


def test_status_and_why_show_the_standing_of_each_node(run):
    url, _ = run
    said = until_said("why", url, parts=("round 1 is active with 2 of 2 members", "spare (full): c"))
    assert "a spare takes the place of a member that goes" in said
    report = ask_json("status", url)
    standing = {node["name"]: node["standing"] for node in report["nodes"]}
    assert standing == {"a": "member", "b": "member", "c": "spare"}
    assert sorted(node["rank"] for node in report["nodes"] if node["standing"] == "member") == [0, 1]
    assert "member" in ask("status", url)


def test_history_and_events_show_the_round(run):
    url, _ = run
    until_said("why", url, parts=("spare (full): c",))
    (first,) = ask_json("history", url)["rounds"]
    assert (first["number"], first["size"]) == (1, 2)
    assert "1" in ask("history", url)
    lines = [json.loads(line) for line in ask("events", url, "--json").splitlines()]
    assert any("round 1 is active" in str(line) for line in lines), lines


def test_doctor_accepts_a_good_url_and_finds_a_missing_directory(run, tmp_path):
    url, _ = run
    found = checks(ask_json("doctor", url))
    assert found["backend"]["verdict"] == "ok"
    assert "round 1 is active" in found["run"]["found"]
    missing = command("doctor", f"file://{tmp_path}/nowhere/run")
    assert missing.returncode == 1
    assert f"{tmp_path}/nowhere" in missing.stdout


def test_close_is_recorded_with_its_reason(run):
    url, _ = run
    assert ask_json("close", url, "--reason", "the data set is wrong")["changed"]
    assert "the data set is wrong" in ask("why", url)
    assert ask_json("reopen", url)["changed"]
    assert ask_json("status", url)["closing"]["is_closed"] is False
