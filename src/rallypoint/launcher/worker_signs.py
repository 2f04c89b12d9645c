"""Reads what the workers of one round say on their named pipe: signs of life, and timers of torch.

The pipe is in the launcher's private directory. Two kinds of lines arrive: those of
`rallypoint.alive()`, and those of `torch.distributed.elastic.timer.FileTimerClient`, which finds the pipe by
`TORCHELASTIC_TIMER_FILE`. Every line counts for the worker that sent it, or whose descendant sent it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from rallypoint._alive import PIPE, VARIABLE
from rallypoint.launcher.stall import StallWatch

READ_BYTES = 64 * 1024
MAX_PIDS = 8
"""How many processes of one worker are remembered."""


class _Line(msgspec.Struct):
    """A line of either kind: `local_rank` is ours, `scope_id` and `expiration_time` are torch's."""

    pid: int
    local_rank: int | None = None
    step: int | None = None
    note: str = ""
    within_s: float | None = None
    scope_id: str = ""
    expiration_time: float = 0.0


class WorkerSigns:
    """The pipe, in that directory, and its reader. `owner_of(pid)`: the local rank of that process's worker, if any."""

    def __init__(self, directory: Path, watch: StallWatch, owner_of: Callable[[int], int | None]) -> None:
        self._watch = watch
        self._owner_of = owner_of
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self.pids: dict[int, list[int]] = {}
        """Local rank -> the processes that have said that they are alive."""
        self.directory = directory
        os.mkfifo(self.directory / PIPE, 0o600)
        # Open for writing, too: otherwise the pipe would be at its end whenever no worker has it open.
        self._fd = os.open(self.directory / PIPE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop.add_reader(self._fd, self.read)

    def environment(self) -> dict[str, str]:
        """The variables by which the workers find the pipe."""
        found = {VARIABLE: str(self.directory)}
        if self._watch.judges:
            found["TORCHELASTIC_TIMER_FILE"] = str(self.directory / PIPE)
        return found

    def read(self) -> None:
        """Take in what has arrived. Does nothing after `close`."""
        if self._fd < 0:
            return
        with suppress(BlockingIOError):
            *lines, self._rest = (self._rest + os.read(self._fd, READ_BYTES)).split(b"\n")
            self._rest = self._rest[-READ_BYTES:]
            for line in lines:
                with suppress(msgspec.DecodeError):  # not ours: any process of this user may write
                    self._take(msgspec.json.decode(line, type=_Line))

    def _take(self, line: _Line) -> None:
        now = self._loop.time()
        if line.scope_id:
            local_rank = self._owner_of(line.pid)
            if local_rank is not None:
                # torch's clients give a time of this machine's wall clock; a negative one cancels the timer.
                left_s = None if line.expiration_time < 0 else line.expiration_time - time.time()
                self._watch.timer(local_rank, f"{line.pid} {line.scope_id}", left_s, now)
        elif line.local_rank is not None:
            self._watch.alive(line.local_rank, line.step, line.note, line.within_s, now)
            pids = self.pids.setdefault(line.local_rank, [])
            if line.pid not in pids:
                pids[:] = [*pids, line.pid][-MAX_PIDS:]

    def close(self) -> None:
        """Stop reading."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
