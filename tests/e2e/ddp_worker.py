"""A training job with DDP on gloo, which saves nothing: it says its first step of each round, and goes on until told.

`finish` in the directory that it is given: all workers exit with 0 after the same step.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    number, restarts = int(os.environ["RALLYPOINT_ROUND"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    is_first = True
    while True:
        model(torch.ones(2, 4)).sum().backward()
        if is_first:
            is_first = False
            facts = {"RALLYPOINT_ROUND": number, "WORLD_SIZE": size, "TORCHELASTIC_RESTART_COUNT": restarts}
            print(json.dumps({"kind": "worker", "rank": rank, "at": time.monotonic(), **facts}), flush=True)
        finished = torch.tensor([int((directory / "finish").exists())])
        dist.all_reduce(finished)
        if finished.item():
            dist.destroy_process_group()
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main()
