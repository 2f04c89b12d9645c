"""Records what a row test observes, and compares times with the promise of the row, scaled by the machine's load."""

import os
import threading
import time
from pathlib import Path

from tests.scenarios.page import Sight

TICK_S = 0.05
MOST_TIMES = 4.0
"""A promise is never scaled by more than this, whatever the load, so that the test can fail."""


class Load:
    """Measures the load by other processes during a test, and how long the machine stood still."""

    def __init__(self) -> None:
        self._wanting = 0
        self._looks = 0
        self.still_s = 0.0
        """The total delay with which this thread was woken."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="load", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(TICK_S):
            now = time.monotonic()
            late_s = now - before - TICK_S
            self.still_s += late_s if late_s > TICK_S else 0.0
            before = now
            runnable = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]
            self._wanting += max(0, int(runnable) - 1)  # without this process
            self._looks += 1

    @property
    def per_core(self) -> float:
        """The average number of other runnable processes for each core."""
        return self._wanting / max(1, self._looks) / (os.cpu_count() or 1)

    @property
    def times(self) -> float:
        """The factor by which promises are scaled."""
        return min(1 + self.per_core, MOST_TIMES)

    def allowed_s(self, bound_s: float) -> float:
        """The time that a promise of so many seconds may take under the measured load."""
        return bound_s * self.times + 2 * self.still_s

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


class Recorder:
    """The observations of a row test. Call it with a sentence, the seconds it took, and the promised seconds."""

    def __init__(self) -> None:
        self.sights: list[Sight] = []
        self.load = Load()

    def __call__(self, what: str, seconds: float | None = None, bound_s: float | None = None) -> None:
        """Record an observation. AssertionError if it took longer than the promise, scaled by the load."""
        self.sights.append(Sight(what, None if seconds is None else round(seconds, 3), bound_s))
        if seconds is not None and bound_s is not None:
            allowed_s = self.load.allowed_s(bound_s)
            assert seconds <= allowed_s, (
                f"{what}: {seconds:.2f} s, promised {bound_s:g} s, allowed {allowed_s:.2f} s at a load of "
                f"{self.load.per_core:.1f} with {self.load.still_s:.2f} s of standing still"
            )
