"""What the keys of an engine take up, in total and by run, kept up to date at O(1) a change.

A run is what a key has between its second and its third slash: `/rallypoint/my-run/config` and
`/rallypoint/my-run:data/store/1/a` are both of `my-run`. Keys of any other shape are of the run "".
"""

from __future__ import annotations

DATA = ":data"


class Used:
    """How many keys, and how many bytes of keys and values."""

    __slots__ = ("keys", "size")

    def __init__(self) -> None:
        self.keys = self.size = 0


class Usage:
    """The sums of one engine."""

    __slots__ = ("_last", "_place", "keys", "runs", "size")

    def __init__(self) -> None:
        self.keys = self.size = 0
        self.runs: dict[str, Used] = {}
        self._place = "/"
        """What the last key began with, up to its third slash, and what it counted for: the next is often like it."""
        self._last: Used | None = None

    def change(self, key: str, keys: int, size: int) -> None:
        """A key came (1), went (-1) or changed (0), and so many bytes with it."""
        self.keys += keys
        self.size += size
        used = self._last
        if used is None or not key.startswith(self._place):
            used = self._find(key)
        used.keys += keys
        used.size += size
        if not used.keys:
            del self.runs[run_of(key)]
            self._last = None

    def _find(self, key: str) -> Used:
        parts = key.split("/", 3)
        run = run_of(key)
        used = self.runs.get(run)
        if used is None:
            used = self.runs[run] = Used()
        is_of_a_run = len(parts) == 4
        self._last = used if is_of_a_run else None
        self._place = key[: -len(parts[3])] if is_of_a_run and parts[3] else key
        return used


def run_of(key: str) -> str:
    """The run that a key counts for."""
    parts = key.split("/", 3)
    return parts[2].removesuffix(DATA) if len(parts) == 4 else ""
