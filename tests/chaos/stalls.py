"""Measures how long this process got no processor although it was ready: bounds on durations are widened by that.

A thread sleeps repeatedly for a short time and measures how late it wakes up. That is time that the machine took (other
processes, a paused virtual machine), and not the code under test: slow code does not keep other threads from running.
Also delays of a few milliseconds count: the measured durations are chains of a dozen steps in several processes, each
of which has to be scheduled.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

TICK_S = 0.05
LEAST_S = 0.002
"""The normal delay of a thread on an idle machine."""
TOLD_S = 0.02
"""Accumulated delays are reported from this sum on."""
LONG_S = 0.5


class Stalls:
    """Measures from now on until `end`. `tell` is called with the length of each stall, at its end."""

    def __init__(self, tell: Callable[[float], None] = lambda length_s: None) -> None:
        self.found: list[tuple[float, float]] = []
        """The end and the length of each stall."""
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
        """The sum of stalls that ended since then."""
        return sum(length_s for over_at, length_s in list(self.found) if over_at >= at)

    @property
    def count(self) -> int:
        """The number of long stalls, as on a suspended machine."""
        return sum(length_s > LONG_S for _, length_s in list(self.found))

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


class Waited:
    """How long processes have waited for a processor since the creation of this object, by the kernel's accounting.

    `Stalls` underestimates that: a busy thread waits for a processor before each time slice.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._before = {pid: _run_delay_s(pid) for pid in pids}

    def of(self, pid: int) -> float:
        """The sum over all threads of a process; 0 if it has ended, or if the kernel does not report it."""
        return max(0.0, _run_delay_s(pid) - self._before.get(pid, 0.0))


def _run_delay_s(pid: int) -> float:
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # a thread that has just ended
            total += int(path.read_text().split()[1])
    return total / 1e9


class DiskStalls(Stalls):
    """How much longer than on an idle disk a sync of a few bytes in this directory takes."""

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
