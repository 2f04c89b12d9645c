"""How long this process was not let run, though it wanted to: what a bound on time has to be widened by.

A thread sleeps for a moment, again and again, and sees how much later than asked for it wakes up. That is time which
the machine took (other processes, a virtual machine that stood still), and not the code whose times are judged: code
that is slow lets other threads run.
"""

import threading
import time
from collections.abc import Callable

TICK_S = 0.05
NOTABLE_S = 0.05
LONG_S = 0.5


class Stalls:
    """Runs from now on until it is told to end. `tell` is called with when one began, and its length."""

    def __init__(self, tell: Callable[[float, float], None] = lambda at, length_s: None) -> None:
        self.found: list[tuple[float, float]] = []
        self._tell = tell
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(TICK_S):
            now = time.monotonic()
            late_s = now - before - TICK_S
            if late_s > NOTABLE_S:
                self.found.append((before, late_s))
                self._tell(before, late_s)
            before = time.monotonic()

    def since(self, at: float) -> float:
        """So many seconds in sum, since then."""
        return sum(length_s for began_at, length_s in list(self.found) if began_at + length_s >= at)

    @property
    def count(self) -> int:
        """How often it was long: as on a machine that is suspended."""
        return sum(length_s > LONG_S for _, length_s in list(self.found))

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()
