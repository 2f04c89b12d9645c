"""A worker that trains a tiny model with DistributedDataParallel on gloo.

rallypoint run ... losses_ddp.py DIRECTORY
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
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")  # the host's name is no address of its namespace
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        steps.did()


if __name__ == "__main__":
    main()
