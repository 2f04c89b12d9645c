"""`rallypoint.alive()`: a worker says that it makes progress, and lets the launcher see its Python stacks.

`rallypoint run` gives each worker a directory (`RALLYPOINT_ALIVE`) with a named pipe. A call writes one short line to
it and never blocks. The first call registers `faulthandler` on a signal, so that the launcher can ask for the stacks of
all threads, even while the interpreter is blocked in a call. Without the launcher, a call does nothing.

This module is imported by programs of users: it must import nothing heavy, and must not raise because of
its connection to the launcher.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from typing import IO

VARIABLE = "RALLYPOINT_ALIVE"
PIPE = "pipe"
STACK_SIGNAL = signal.SIGRTMIN + 8 if sys.platform == "linux" else 0
"""A real-time signal, which programs and schedulers do not use. 0: stacks cannot be asked for."""
LEAST_S = 0.1
"""How often an unchanged step and note are written: a tight loop may call this, too. A change is written at once."""
MAX_NOTE = 200
MOST_S = 1e9
"""JSON has no infinity."""


def stack_file(directory: str, pid: int) -> str:
    """The file to which a process writes its stacks at `STACK_SIGNAL`."""
    return os.path.join(directory, f"{pid}.stacks")


class _Reporter:
    """The connection of this process to its launcher."""

    def __init__(self, directory: str, pid: int) -> None:
        self.pid = pid
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._pipe = os.open(os.path.join(directory, PIPE), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._stacks: IO[str] | None = None
        self._written: tuple[int | None, str] | None = None
        self._written_at = 0.0
        if STACK_SIGNAL and signal.getsignal(STACK_SIGNAL) is signal.SIG_DFL:
            self._stacks = open(stack_file(directory, pid), "w")  # noqa: SIM115 - faulthandler writes to it later
            faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)

    def write(self, step: int | None, note: str, within_s: float | None) -> None:
        now = time.monotonic()
        if (step, note) == self._written and now - self._written_at < LEAST_S and within_s is None:
            return
        message = {"local_rank": self._local_rank, "pid": self.pid, "step": step, "note": note}
        os.write(self._pipe, json.dumps(message | {"within_s": within_s}).encode() + b"\n")
        self._written, self._written_at = (step, note), now


_reporter: _Reporter | None = None
_given_up_by = 0
"""The process that found no launcher."""


def alive(step: int | None = None, note: str = "", *, within_s: float | None = None) -> None:
    """Tell the launcher that this worker makes progress. Call it in each step of the program's own loop.

    With `rallypoint run --stall-timeout`, a worker that has called this once must go on calling it. `step` and `note`
    say where the program is, for people: if a run stalls, the ranks that are behind the others are named. `within_s`:
    the next call may take that long, if it is longer than the time-out (a checkpoint, an evaluation).

    Never blocks, and raises only for arguments that are not numbers or text. Outside `rallypoint run` it does nothing.
    """
    global _reporter, _given_up_by
    pid = os.getpid()
    limit_s = None if within_s is None else min(float(within_s), MOST_S)
    message = (None if step is None else int(step), str(note)[:MAX_NOTE], limit_s)
    if _given_up_by == pid:
        return
    try:
        if _reporter is None or _reporter.pid != pid:  # the first call, or the first one after a fork
            _reporter = _Reporter(os.environ[VARIABLE], pid)
        _reporter.write(*message)
    except BlockingIOError:
        pass  # the launcher is stopped, and does not read
    except (OSError, KeyError, ValueError):
        _reporter, _given_up_by = None, pid
