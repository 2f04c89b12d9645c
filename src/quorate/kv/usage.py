"""What the keys of an engine take up, in total and by run, kept up to date at O(1) a change.

A run is what a key has between its second and its third slash: `/quorate/my-run/config` and
`/quorate/my-run:data/store/1/a` are both of `my-run`. Keys of any other shape are of the run "".
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

    __slots__ = ("keys", "runs", "size")

    def __init__(self) -> None:
        self.keys = self.size = 0
        self.runs: dict[str, Used] = {}

    def change(self, key: str, keys: int, size: int) -> None:
        """A key came (1), went (-1) or changed (0), and so many bytes with it."""
        self.keys += keys
        self.size += size
        run = run_of(key)
        used = self.runs.get(run)
        if used is None:
            used = self.runs[run] = Used()
        used.keys += keys
        used.size += size
        if not used.keys:
            del self.runs[run]


def run_of(key: str) -> str:
    """The run that a key counts for."""
    parts = key.split("/", 3)
    return parts[2].removesuffix(DATA) if len(parts) == 4 else ""
