"""A worker that trains a tiny model with DistributedDataParallel on gloo.

    ddp_worker.py DIRECTORY

See `stepping` for what the directory is for.
"""

import os
import sys

import torch
import torch.distributed as dist
from stepping import Steps
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    steps = Steps(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        finished = torch.tensor([int(steps.is_told_to_finish())])
        dist.all_reduce(finished)
        steps.did()
        if finished.item():
            dist.destroy_process_group()
            sys.stdout.flush()
            os._exit(0)  # torch's threads sometimes abort a process that ends in the usual way


if __name__ == "__main__":
    main()
