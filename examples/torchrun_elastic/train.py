"""A small training job on CPUs that survives kills: gloo, DDP on a tiny model, a checkpoint after every step.

Start on each machine, or in two terminals of one (`--nproc-per-node` is the number of workers of each agent):

    torchrun --rdzv-backend=rallypoint --rdzv-endpoint=localhost:29400 --rdzv-id=demo --nnodes=1:4 --max-restarts=100 \\
        examples/torchrun_elastic/train.py --checkpoint /tmp/demo.pt --steps 300 --step-seconds 0.1

Then kill -9 a worker or an agent, start an agent again, start a third one: the job resumes at the last checkpoint. The
last line is the same, whatever was killed:

    {"kind": "done", "rank": 0, "world": 2, "step": 300, "loss": 0.140206}

The reason: the batch of a step depends only on the step and is divided among the workers, so the sum of the gradients
is the same for every number of workers that divides the batch; and a checkpoint contains everything that the next step
depends on. The checkpoint must be on storage that all machines share.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BATCH = 24  # divisible by 1, 2, 3, 4, 6, 8, 12 and 24 workers
FEATURES = 8


def say(kind: str, **what: Any) -> None:
    """Print one JSON line in a single write, because several workers share the terminal."""
    print(json.dumps({"kind": kind, **what}), flush=True)


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This worker's part of the batch of a step."""
    draw = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, FEATURES, generator=draw, dtype=torch.float64)
    targets = torch.sin(inputs.sum(dim=1, keepdim=True))
    share = BATCH // world
    return inputs[rank * share : (rank + 1) * share], targets[rank * share : (rank + 1) * share]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the checkpoint atomically: a reader sees the old one or the new one."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one. Returns the number of finished steps."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def train(path: Path, steps: int, step_s: float) -> None:
    agent = os.getppid()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if BATCH % world:
        sys.exit(f"a batch of {BATCH} cannot be divided among {world} workers")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    done = load(path, model, optimizer)  # all workers load the same one: rank 0 writes only after the first step of all
    say("start", rank=rank, world=world, step=done, restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    parallel = nn.parallel.DistributedDataParallel(model)
    for step in range(done + 1, steps + 1):
        if os.getppid() != agent:
            sys.exit("the agent of this worker has died")
        inputs, targets = batch(step, rank, world)
        loss = nn.functional.mse_loss(parallel(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(step_s)  # simulates a larger model
        if rank == 0:
            save(path, step, model, optimizer)
            say("step", step=step, world=world)
    inputs, targets = batch(0, 0, 1)
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs), targets)
    say("done", rank=rank, world=world, step=steps, loss=round(loss.item(), 6))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file that all machines share")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how long a step takes at least")
    options = parser.parse_args()
    train(options.checkpoint, options.steps, options.step_seconds)
