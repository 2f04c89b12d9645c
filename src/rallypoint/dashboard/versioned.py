"""Values by key that remember when they changed, so that any reader can be brought up to date from any version. Pure.

A reader needs no queue: however slow it is, what it gets next is one difference. What was removed is remembered for a
while; a reader from before that gets everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_REMOVED = 4_096


class Versioned(Generic[K, V]):
    """A mapping in order of insertion. Versions are given by whoever writes, and never fall."""

    def __init__(self) -> None:
        self._values: dict[K, tuple[V, int]] = {}
        self._removed: deque[tuple[K, int]] = deque()
        self._forgotten = 0
        """Removals up to this version are not known any more."""

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def get(self, key: K) -> V | None:
        found = self._values.get(key)
        return None if found is None else found[0]

    def put(self, key: K, value: V, version: int) -> bool:
        """Whether that is another value than before."""
        before = self._values.get(key)
        if before is not None and before[0] == value:
            return False
        self._values[key] = (value, version)
        return True

    def touch(self, key: K, version: int) -> None:
        """The value of this key changed inside."""
        self._values[key] = (self._values[key][0], version)

    def remove(self, key: K, version: int) -> None:
        """It has to be there."""
        del self._values[key]
        self._removed.append((key, version))
        if len(self._removed) > MOST_REMOVED:
            self._forgotten = self._removed.popleft()[1]

    def knows(self, version: int) -> bool:
        """Whether a reader of this version can be told the difference."""
        return version >= self._forgotten

    def changed(self, since: int) -> dict[K, V]:
        """Whatever was written after a version; -1: everything."""
        return {key: value for key, (value, version) in self._values.items() if version > since}

    def removed(self, since: int) -> list[K]:
        """Every key that was removed after a version and is not there again."""
        return [key for key, version in self._removed if version > since and key not in self._values]
