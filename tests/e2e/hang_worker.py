"""A worker of a test that may hang: all ranks meet in every step, as in a collective, and say that they are alive.

    hang_worker.py DIRECTORY MODE RANK

In the first round, RANK hangs in step 5: `loop` (busy), `recv` (blocked in a system call), `stop` (stopped by SIGSTOP).
`deaf`: it ignores SIGTERM, and does not hang. `mute`: nobody says that it is alive.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import rallypoint


def hang_in_a_loop() -> None:
    while True:
        pass


def hang_in_recv() -> None:
    ours, _theirs = socket.socketpair()
    ours.recv(1)


def main() -> None:
    directory, mode, slow = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    number = int(os.environ["RALLYPOINT_ROUND"])
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fact = {"kind": "worker", "rank": rank, "at": time.monotonic(), "pid": os.getpid(), "RALLYPOINT_ROUND": number}
    fact |= {"WORLD_SIZE": size, "TORCHELASTIC_RESTART_COUNT": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
    print(json.dumps(fact), flush=True)
    step = 0
    while not (directory / "finish").exists() or mode == "deaf":
        step += 1
        if mode != "mute":
            rallypoint.alive(step, "training")
        if step == 5 and rank == slow and fact["TORCHELASTIC_RESTART_COUNT"] == 0:
            print(json.dumps({"kind": "hangs", "rank": rank}), flush=True)
            {
                "loop": hang_in_a_loop,
                "recv": hang_in_recv,
                "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
                "mute": hang_in_recv,
            }.get(mode, lambda: None)()
        (directory / f"step-{number}-{rank}-{step}").touch()
        while not all((directory / f"step-{number}-{other}-{step}").exists() for other in range(size)):
            if (directory / "finish").exists() and mode != "deaf":
                return
            time.sleep(0.01)


if __name__ == "__main__":
    main()
