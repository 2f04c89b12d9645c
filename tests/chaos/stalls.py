"""How long this process was not let run, though it wanted to: what a bound on time has to be widened by.

A thread sleeps for a moment, again and again, and sees how much later than asked for it wakes up. That is time which
the machine took (other processes, a virtual machine that stood still), and not the code whose times are judged: code
that is slow lets other threads run. All of it counts, also a few milliseconds each time: what is judged is a chain of a
dozen steps in several processes, each of which has to be let run.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

TICK_S = 0.05
LEAST_S = 0.002
"""What any thread is late by on an idle machine."""
TOLD_S = 0.02
"""So much together is told."""
LONG_S = 0.5


class Stalls:
    """Runs from now on until it is told to end. `tell` is called with each length, when it is over."""

    def __init__(self, tell: Callable[[float], None] = lambda length_s: None) -> None:
        self.found: list[tuple[float, float]] = []
        """When each was over, and its length."""
        self._tell = tell
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        before = time.monotonic()
        late_s = 0.0
        while not self._is_over.wait(TICK_S):
            now = time.monotonic()
            late_s += max(0.0, now - before - TICK_S - LEAST_S)
            if late_s > TOLD_S:
                self.found.append((now, late_s))
                self._tell(late_s)
                late_s = 0.0
            before = time.monotonic()

    def since(self, at: float) -> float:
        """So many seconds in sum, since then."""
        return sum(length_s for over_at, length_s in list(self.found) if over_at >= at)

    @property
    def count(self) -> int:
        """How often it was long: as on a machine that is suspended."""
        return sum(length_s > LONG_S for _, length_s in list(self.found))

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


class Waited:
    """How long processes have waited for a processor since this was made, as the kernel counts it.

    A thread that sleeps and wakes sees little of that: one that has work to do waits behind all others for each slice.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._before = {pid: _run_delay_s(pid) for pid in pids}

    def of(self, pid: int) -> float:
        """Of all threads of one together; 0 for one that is gone, or where the kernel does not say."""
        return max(0.0, _run_delay_s(pid) - self._before.get(pid, 0.0))


def _run_delay_s(pid: int) -> float:
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # a thread that has just ended
            total += int(path.read_text().split()[1])
    return total / 1e9


class DiskStalls(Stalls):
    """How long the disk of this directory took to keep a few bytes, beyond what one does that is not busy."""

    FAST_S = 0.02
    EVERY_S = 0.2

    def __init__(self, directory: Path) -> None:
        self._path = directory / "disk.probe"
        super().__init__()

    def _watch(self) -> None:
        number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not self._is_over.wait(self.EVERY_S):
                began_at = time.monotonic()
                os.pwrite(number, b"%f" % began_at, 0)
                os.fdatasync(number)
                now = time.monotonic()
                if now - began_at > self.FAST_S:
                    self.found.append((now, now - began_at))
        finally:
            os.close(number)
