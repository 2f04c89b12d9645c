"""What workers that communicate share: steps that are printed and kept, and orders, by files in a directory.

`finish`: all exit with 0 after the same step. `do-RANK`: take the file away, and do what it says: `exit N`, `signal
NAME`, `raise TEXT`, `record TEXT` (as `raise`, and as torch's `@record` would write it down).

A worker that was left behind by its run must not overwrite the steps of its successors, so every round has a file of
its own.
"""

import json
import os
import signal
import sys
import time
import traceback
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
        self._has_begun = False

    def is_told_to_finish(self) -> bool:
        return (self.directory / "finish").exists()

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
        if not self._has_begun:
            self._has_begun = True
            names = ("RALLYPOINT_ROUND", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "RANK")
            say("worker", rank=self.rank, pid=os.getpid(), **{name: int(os.environ[name]) for name in names})
        say("step", step=self.number, round=self.round, rank=self.rank, size=self.size, restarts=self.restarts)
        self._obey()
        time.sleep(STEP_S)

    def _obey(self) -> None:
        """Do what the file for this rank says, if there is one."""
        order = self.directory / f"do-{self.rank}"
        try:
            verb, _, rest = order.read_text().partition(" ")
            order.unlink()
        except OSError:
            return
        match verb:
            case "exit":
                print("cannot go on", file=sys.stderr)
                sys.exit(int(rest))
            case "signal":
                os.kill(os.getpid(), signal.Signals[rest])
            case "raise":
                raise RuntimeError(rest)
            case "record":
                try:
                    raise RuntimeError(rest)
                except RuntimeError as error:
                    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
                    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
                    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))
                    raise


def say(kind: str, **facts: object) -> None:
    print(json.dumps({"kind": kind, "at": time.monotonic(), **facts}), flush=True)
