"""A toy of an elastic job, for `rallypoint run`: counts steps, and goes on from the last one when it is restarted.

    rallypoint run --standalone --nproc-per-node 2 examples/job.py /tmp/checkpoints --steps 20

Like a training script it knows its place from the environment (RANK, WORLD_SIZE), writes a checkpoint now and then
(rank 0 does), and begins at the checkpoint. It knows nothing of Rallypoint.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="a toy of an elastic job")
    parser.add_argument("checkpoints", type=Path, help="a directory that all workers see")
    parser.add_argument("--steps", type=int, default=10**9, help="how many steps there are to do")
    parser.add_argument("--step-s", type=float, default=0.2, help="how long a step takes")
    arguments = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    checkpoint, enough = arguments.checkpoints / "step", arguments.checkpoints / "enough"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print(f"worker {rank} of {size} goes on from step {step}", flush=True)
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
