"""A toy elastic job for `rallypoint run`: it counts steps, and after a restart it resumes at the last one.

    rallypoint run --standalone --nproc-per-node 2 examples/job.py /tmp/checkpoints --steps 20

Like a training script it reads its rank and world size from the environment, rank 0 writes checkpoints, and all workers
start from the last checkpoint. It does not import Rallypoint.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="a toy elastic job")
    parser.add_argument("checkpoints", type=Path, help="a directory that all workers share")
    parser.add_argument("--steps", type=int, default=10**9, help="the number of steps")
    parser.add_argument("--step-s", type=float, default=0.2, help="how long a step takes")
    arguments = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpoint, enough = arguments.checkpoints / "step", arguments.checkpoints / "enough"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print(f"worker {rank} of {size} resumes at step {step}", flush=True)
    while step < arguments.steps and not enough.exists():
        time.sleep(arguments.step_s)
        step += 1
        if rank == 0:
            part = checkpoint.with_suffix(".part")
            part.write_text(str(step))
            part.rename(checkpoint)
    print(f"worker {rank} of {size} is done at step {step}", flush=True)


if __name__ == "__main__":
    main()
