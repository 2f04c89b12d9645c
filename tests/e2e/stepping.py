"""What the workers of `losses` share: steps that are printed and kept, and failures that are ordered.

A worker that was left behind by its run must not overwrite the steps of its successors, so every round has a file of
its own.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEP_S = 0.02


class Steps:
    """The steps of one worker. `directory` is shared by all workers of the job."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.round = int(os.environ["RALLYPOINT_ROUND"])
        self.restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.number = max((int(kept.read_text()) for kept in self.directory.glob("steps-*[0-9]")), default=0)

    def did(self) -> None:
        """A step was done by all: rank 0 keeps it, everybody says it."""
        self.number += 1
        if self.rank == 0:
            kept = self.directory / f"steps-{self.round:08}"
            fresh = kept.with_suffix(".new")
            with fresh.open("w") as file:
                file.write(str(self.number))
                file.flush()
            fresh.rename(kept)
        fact = {"step": self.number, "round": self.round, "rank": self.rank, "size": self.size}
        print(json.dumps({"kind": "step", "at": time.monotonic(), "restarts": self.restarts, **fact}), flush=True)
        self._fail_if_told()
        time.sleep(STEP_S)

    def _fail_if_told(self) -> None:
        """Fail in the way that the file for this rank names, once."""
        order = self.directory / f"fail-{self.rank}"
        try:
            how = order.read_text()
            order.unlink()
        except OSError:
            return
        match how:
            case "exit":
                print("cannot go on", file=sys.stderr)
                sys.exit(1)
            case "signal":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exception":
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
