"""A worker of a test: it reports its environment, then obeys files in a directory until it is stopped.

    worker.py DIRECTORY [children] [deaf]

`finish` (or `finish-NODE`): exit with 0. `fail-RANK`: take it away, and exit with the code in it. `children`: have one
child in the same session and one in another. `deaf`: ignore SIGTERM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "RALLYPOINT_ROUND",
)


def say(kind: str, **more: object) -> None:
    print(json.dumps({"kind": kind, "rank": int(os.environ["RANK"]), "at": time.monotonic(), **more}), flush=True)


def main() -> None:
    directory, *words = Path(sys.argv[1]), *sys.argv[2:]
    rank, node = os.environ["RANK"], os.environ["RALLYPOINT_NODE"]
    if "children" in words:
        subprocess.Popen(["sleep", "300"])
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    if "deaf" in words:
        signal.signal(signal.SIGTERM, lambda *_: say("deaf"))
    else:
        signal.signal(signal.SIGTERM, lambda *_: (say("told"), os._exit(0)))
    say("worker", node=node, pid=os.getpid(), addr=os.environ["MASTER_ADDR"], **{n: int(os.environ[n]) for n in NAMES})
    while True:
        if (directory / "finish").exists() or (directory / f"finish-{node}").exists():
            say("done")
            return
        failure = directory / f"fail-{rank}"
        try:
            code = int(failure.read_text())
            failure.unlink()
        except (OSError, ValueError):
            time.sleep(0.02)
        else:
            sys.exit(code)


if __name__ == "__main__":
    main()
