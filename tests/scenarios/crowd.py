"""Many processes at one barrier: each is a node, forked from a process that has imported everything.

    python crowd.py URL N ABSENT TIMEOUT_S

Reports JSON lines: a fact `round` when a process is in a round, and `barrier` when its call of the barrier has ended.
The process of rank ABSENT never calls the barrier.
"""

import json
import os
import sys
import time

import rallypoint
import rallypoint.backends.tcp
import rallypoint.handler


def say(kind: str, **what: object) -> None:
    os.write(1, (json.dumps({"kind": kind, "at": time.monotonic(), "pid": os.getpid(), **what}) + "\n").encode())


def member(url: str, number: int, absent: int, timeout_s: float) -> None:
    """One process."""
    world = rallypoint.create_handler(f"{url}&name=rank{number}").next_rendezvous()
    say("round", rank=world.rank, size=world.world_size)
    if world.rank == absent:
        time.sleep(600)
    began_at = time.monotonic()
    try:
        world.store.barrier("epoch 7", timeout_s)
    except rallypoint.StoreTimeoutError as error:
        say("barrier", rank=world.rank, took_s=time.monotonic() - began_at, text=str(error), missing=error.missing)
    else:
        say("barrier", rank=world.rank, took_s=time.monotonic() - began_at, text="all came", missing=[])
    time.sleep(600)


if __name__ == "__main__":
    url, count, absent, timeout_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    for number in range(count):
        if os.fork() == 0:
            member(url, number, absent, timeout_s)
            os._exit(0)
    sys.stdin.read()  # until the test ends
    os.killpg(0, 9)
