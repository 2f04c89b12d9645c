"""Number and size of an engine's keys, in total and by run, updated in O(1) a change.

The run of a key is the part between its second and its third slash, without `:data`: `/rallypoint/my-run/config` and
`/rallypoint/my-run:data/store/1/a` both belong to `my-run`. Keys of any other form belong to the run "".
"""

from __future__ import annotations

DATA = ":data"


class Used:
    """The number of keys, and the bytes of keys and values."""

    __slots__ = ("keys", "size")

    def __init__(self) -> None:
        self.keys = self.size = 0


class Usage:
    """The sums of one engine."""

    __slots__ = ("_last", "_last_prefix", "keys", "runs", "size")

    def __init__(self) -> None:
        self.keys = self.size = 0
        self.runs: dict[str, Used] = {}
        self._last_prefix = "/"
        """The last key up to its third slash, and (`_last`) its run: the next key often belongs to the same run."""
        self._last: Used | None = None

    def change(self, key: str, keys: int, size: int) -> None:
        """A key was added (`keys` 1), removed (-1) or rewritten (0); `size` is the change in bytes."""
        self.keys += keys
        self.size += size
        used = self._last
        if used is None or not key.startswith(self._last_prefix):
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
        self._last_prefix = key[: -len(parts[3])] if is_of_a_run and parts[3] else key
        return used


def run_of(key: str) -> str:
    """The run that a key belongs to."""
    parts = key.split("/", 3)
    return parts[2].removesuffix(DATA) if len(parts) == 4 else ""
