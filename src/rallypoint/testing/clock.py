"""A monotonic clock that only the test advances."""

from __future__ import annotations


class ManualClock:
    """Call it for the time in seconds; `advance` moves it. It never goes back."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> float:
        """Let this much time pass; the new time. ValueError for a negative or infinite amount or NaN."""
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"a monotonic clock cannot be moved by {seconds} s")
        self._now_s += seconds
        return self._now_s

    def __repr__(self) -> str:
        return f"ManualClock({self._now_s})"
