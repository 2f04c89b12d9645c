"""The example training job ends with the same loss whatever was killed; and a process group on a TorchStore."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.kit import PATIENCE_S
from tests.integrations.kit import HERE, TRAIN, Agent, Job

pytest.importorskip("torch")

STEPS = 200


@pytest.fixture(scope="module")
def loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The final loss of a single undisturbed worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    script = [str(TRAIN), "--checkpoint", str(folder / "checkpoint.pt"), "--steps", str(STEPS)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *script],
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


@pytest.mark.slow
def test_loss_is_the_same_when_workers_and_agents_are_killed(training: Job, loss: float):
    first, second = (training.agent(name, "1:2", conf="last_call_timeout=60") for name in ("a", "b"))
    reached(first, 5, world=2)
    spare = training.agent("c", "1:2", conf="last_call_timeout=60", env={"LOGLEVEL": "DEBUG"})
    spare.wait_line("spare (full)")
    os.kill(_worker_of(second), signal.SIGKILL)
    restarted = second.wait("start", lambda fact: fact["restarts"] == 1)["step"]
    reached(first, restarted + 3, world=2)
    second.kill()
    promoted = spare.wait("start")
    assert promoted["world"] == 2
    reached(first, promoted["step"] + 3, world=2)
    spare.kill()
    first.wait("start", lambda fact: fact["world"] == 1)
    assert ended(first) == loss
    assert not spare.all("done")
    # Only a failed worker costs a restart. A worker may fail because of a loss before its agent is told of the loss.
    assert max(fact["restarts"] for fact in first.all("start")) <= 3


def _worker_of(agent: Agent) -> int:
    (child,) = Path(f"/proc/{agent.popen.pid}/task/{agent.popen.pid}/children").read_text().split()
    return int(child)


def test_process_group_can_use_a_torch_store(stage, served: Job):
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
