"""Real `torchrun` agents on one machine, and the output of their workers. See `tests.e2e.kit` for the rules."""

import itertools
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.kit import PATIENCE_S, Fact, Process, Stage, loopback

HERE = Path(__file__).resolve().parent
TRAIN = HERE.parents[1] / "examples" / "torchrun_elastic" / "train.py"
_numbers = itertools.count(1)


class Agent(Process):
    """A process of torchrun. `facts` are those that its workers report."""

    def started(self, nodes: int, after: float = 0.0, patience_s: float = PATIENCE_S) -> Fact:
        """The first fact of a worker that started after that time in a group of so many nodes."""
        return self.wait("start", lambda fact: fact["nodes"] == nodes and fact["at"] > after, patience_s)

    def met(self, world: int, after: float = 0.0, patience_s: float = PATIENCE_S) -> Fact:
        """The first fact of a worker that has done a collective in a world of that size after that time."""
        return self.wait("met", lambda fact: fact["world"] == world and fact["at"] > after, patience_s)

    def ctrl_c(self) -> float:
        """Send SIGINT to the process group, as a terminal does. Returns the time."""
        at = time.monotonic()
        os.killpg(self.popen.pid, signal.SIGINT)
        return at

    def kill_worker(self, fact: Fact) -> float:
        """Kill the worker that reported the fact with SIGKILL. Returns the time."""
        at = time.monotonic()
        os.kill(fact["pid"], signal.SIGKILL)
        return at

    @property
    def said(self) -> str:
        """The output on stderr."""
        return "\n".join(list(self.errors))


class Job:
    """Agents of one run."""

    def __init__(self, stage: Stage, folder: Path, endpoint: str | None = None, run_id: str | None = None) -> None:
        self.stage = stage
        self.folder = folder
        self.endpoint = endpoint or loopback()
        self.run_id = run_id or f"job-{os.getpid()}-{next(_numbers)}"
        self.agents: list[Agent] = []
        self.script: Sequence[str] = ()

    def agent(
        self,
        name: str,
        nnodes: str,
        *,
        mode: str = "plain",
        conf: str = "",
        restarts: int = 3,
        env: dict[str, str] | None = None,
        backend: str = "rallypoint",
    ) -> Agent:
        """Start an agent. Its sessions are short, so that a loss is noticed soon."""
        options = ",".join(filter(None, [f"name={name}", "keep_alive_interval=1", conf]))
        flags = {
            "--rdzv-backend": backend,
            "--rdzv-endpoint": self.endpoint,
            "--rdzv-id": self.run_id,
            "--rdzv-conf": options,
            "--nnodes": nnodes,
            "--nproc-per-node": "1",
            "--max-restarts": str(restarts),
            "--local-addr": "127.0.0.1",
        }
        script = self.script or [str(HERE / "worker.py"), mode, str(self.folder)]
        variables = {"LOGLEVEL": "INFO", "OMP_NUM_THREADS": "1", **(env or {})}
        argv = [
            "env",
            *(f"{variable}={value}" for variable, value in variables.items()),
            sys.executable,
            "-m",
            "torch.distributed.run",
            *(f"{flag}={value}" for flag, value in flags.items()),
            *script,
        ]
        agent = Agent(name, argv)
        self.agents.append(agent)
        self.stage.processes.append(agent)
        return agent

    def finish(self, *agents: Agent) -> None:
        """Let the workers end. Fails unless these agents exit with 0."""
        (self.folder / "finish").touch()
        for agent in agents:
            status = agent.wait_exit()
            assert status == 0, f"{agent.name} ended with {status}\n{agent.story}"

    def check_agreement(self) -> None:
        """Check that workers with the same MASTER_ADDR and MASTER_PORT have the same world size and different ranks.

        Every round has a store of its own, so its port stands for the round.
        """
        groups: dict[tuple[str, int], list[Fact]] = defaultdict(list)
        for agent in self.agents:
            for fact in agent.all("start"):
                groups[fact["addr"], fact["port"]].append(fact)
        assert groups
        for place, facts in groups.items():
            ranks = [fact["rank"] for fact in facts]
            assert len({fact["world"] for fact in facts}) == 1, (place, facts)
            assert len(set(ranks)) == len(ranks), (place, facts)
            assert max(ranks) < facts[0]["world"], (place, facts)
