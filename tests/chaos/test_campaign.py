"""The campaign: a short one breaks nothing, a forgetful server is noticed, and Ctrl-C leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign, Failure, why_not
from tests.chaos.plan import Action, Burst, Fault, Probe, draw
from tests.e2e.kit import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SEED, WORLD = 1696, 1
"""A server with data that is paused, killed, and has a full disk; nodes are killed and paused. About half a minute."""


@pytest.fixture(autouse=True)
def able() -> None:
    """Skips where campaigns cannot run; in CI that is a failure."""
    why = why_not("tcp")
    if why is not None and not os.environ.get("CI"):
        pytest.skip(why)
    assert why is None, f"this must run in CI: {why}"


def campaign(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.chaos.campaign", "--backend", "tcp", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.startswith(f"chaos{pid}x")]


def inside(names: list[str]) -> list[int]:
    """The processes of namespaces."""
    pids: list[int] = []
    for name in names:
        command = ["ip", "netns", "pids", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        pids += map(int, done.stdout.split())
    return pids


def test_short_campaign_breaks_nothing_and_reports_its_work(tmp_path):
    report = tmp_path / "report.json"
    logs = str(tmp_path / "logs")
    options = ("--seed", str(SEED), "--world", str(WORLD), "--bursts", "1", "--json", str(report), "--logs", logs)
    running = campaign(*options)
    said, _ = running.communicate(timeout=300)
    assert running.returncode == 0, said
    found = json.loads(report.read_text())
    assert found["broken"] == ""
    assert found["bursts"] == 1
    drawn = [action.fault.name.lower() for burst in draw(SEED, WORLD, "tcp", 1).bursts for action in burst.actions]
    assert sum(found["faults"].values()) == len(drawn)
    assert found["seen"]["rounds"] > 0
    assert found["seen"]["commits"] > 50
    assert found["seen"]["store_calls"] > 20
    assert namespaces(running.pid) == []


def test_server_that_loses_acknowledged_writes_is_noticed(tmp_path):
    kill = Action(at_s=0.5, fault=Fault.SERVER_KILL, target=0, length_s=0.1, strength=0.5)
    one = draw(SEED, 1, "tcp", 1)
    plan = replace(one, nodes=2, min_nodes=2, max_nodes=2, bursts=(Burst((kill,), Probe.NOTHING, 0),))
    told: list[str] = []
    chaos = Campaign(SEED, tmp_path, told.append, character="forgetful")
    try:
        with pytest.raises(Failure) as caught:
            chaos.play(plan)
    finally:
        chaos.end()
    assert "BrokeOutageTolerance" in str(caught.value)
    assert caught.value.last
    assert {"timeline.txt", "plan.txt", "audit.jsonl"} <= {path.name for path in caught.value.directory.iterdir()}
    assert namespaces(os.getpid()) == []


def test_interrupted_campaign_leaves_no_process_and_no_namespace(tmp_path):
    running = campaign("--seed", str(SEED), "--logs", str(tmp_path))
    assert running.stdout is not None
    assert "nodes" in running.stdout.readline()
    deadline = time.monotonic() + PATIENCE_S
    while len(pids := inside(namespaces(running.pid))) < 4:  # the server, the proxy, and nodes
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert "interrupted" in said
    assert namespaces(running.pid) == []
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
