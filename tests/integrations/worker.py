"""A worker of torchrun that reports its environment as JSON lines, and works until a file appears.

    worker.py plain FOLDER    does nothing; it needs no torch and so starts quickly
    worker.py gloo FOLDER     calls all_reduce all the time; it fails when a peer fails

It exits with 0 once FOLDER/finish exists, and at once when its agent has gone.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

NAMES = {
    "rank": "RANK",
    "world": "WORLD_SIZE",
    "node": "GROUP_RANK",
    "nodes": "GROUP_WORLD_SIZE",
    "restarts": "TORCHELASTIC_RESTART_COUNT",
    "port": "MASTER_PORT",
}


def say(kind: str, **what: Any) -> None:
    line = json.dumps({"kind": kind, "at": time.monotonic(), "pid": os.getpid(), **what})
    os.write(1, f"{line}\n".encode())


def plain(finish: Path, agent: int) -> None:
    while not finish.exists() and os.getppid() == agent:
        time.sleep(0.01)


def gloo(finish: Path, agent: int) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    ranks = torch.zeros(world)
    ranks[dist.get_rank()] = 1
    dist.all_reduce(ranks)
    say("met", met=ranks.tolist(), world=world, rank=dist.get_rank())
    done = torch.zeros(1)
    while done.item() < world:  # so that all of them end in the same step
        if os.getppid() != agent:
            sys.exit("the agent is gone")
        done.fill_(1 if finish.exists() else 0)
        dist.all_reduce(done)
        time.sleep(0.01)
    dist.destroy_process_group()


if __name__ == "__main__":
    mode, folder = sys.argv[1:]
    ppid = os.getppid()
    given = {name: int(os.environ[variable]) for name, variable in NAMES.items()}
    shared = os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    say("start", mode=mode, addr=os.environ["MASTER_ADDR"], shared=shared, **given)
    {"plain": plain, "gloo": gloo}[mode](Path(folder) / "finish", ppid)
    say("end", **given)
