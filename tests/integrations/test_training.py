"""The example: a training job ends with the same loss whatever was killed. And a group that meets in our own store."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.kit import PATIENCE_S
from tests.integrations.kit import HERE, TRAIN, Agent, Job

pytest.importorskip("torch")

STEPS = 40


@pytest.fixture(scope="module")
def loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What one worker, which nobody disturbs, ends with."""
    import json

    folder = tmp_path_factory.mktemp("undisturbed")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(TRAIN)]
        + ["--checkpoint", str(folder / "checkpoint.pt"), "--steps", str(STEPS)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    return float(facts[-1]["loss"])


@pytest.fixture
def training(served: Job) -> Job:
    served.script = [
        *(str(TRAIN), "--checkpoint", str(served.folder / "checkpoint.pt")),
        *("--steps", str(STEPS), "--step-seconds", "0.05"),
    ]
    return served


def reached(agent: Agent, step: int, world: int) -> None:
    agent.wait("step", lambda fact: fact["step"] >= step and fact["world"] == world)


def ended(agent: Agent) -> float:
    assert agent.wait_exit() == 0, agent.story
    return float(agent.wait("done")["loss"])


def test_loss_is_the_same_when_a_worker_and_an_agent_are_killed(training: Job, loss: float, stage):
    agents = {name: training.agent(name, "1:2", conf="last_call_timeout=60") for name in ("a", "b")}
    reached(agents["a"], 5, world=2)
    worker = agents["b"].wait("start")
    training_pids = _workers_of(agents["b"])
    assert worker["world"] == 2
    _kill(training_pids[0])
    agents["b"].wait("start", lambda fact: fact["restarts"] == 1)
    reached(agents["a"], 12, world=2)
    agents["b"].kill()
    reached(agents["a"], 20, world=1)
    back = training.agent("b", "1:2", conf="last_call_timeout=60")
    assert [ended(agents["a"]), ended(back)] == [loss, loss]
    restarts = max(fact["restarts"] for fact in agents["a"].all("start"))
    assert restarts <= 2  # the worker's failure, and the agent's if its own worker failed first; not the growth


def _workers_of(agent: Agent) -> list[int]:
    children = Path(f"/proc/{agent.popen.pid}/task/{agent.popen.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def _kill(pid: int) -> None:
    import os
    import signal

    os.kill(pid, signal.SIGKILL)


def test_process_group_can_be_made_on_our_own_store(stage, served: Job):
    url = f"tcp://{served.endpoint}/{served.run_id}?min_nodes=3"
    members = [
        subprocess.Popen(
            [sys.executable, str(HERE / "member.py"), f"{url}&name={name}"], stdout=subprocess.PIPE, text=True
        )
        for name in ("a", "b", "c")
    ]
    try:
        said = [member.communicate(timeout=PATIENCE_S)[0].split() for member in members]
    finally:
        for member in members:
            member.kill()
            member.wait()
    assert said == [["rank", str(rank), "sum", "6.0"] for rank in range(3)]
