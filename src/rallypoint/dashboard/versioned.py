"""A mapping that knows when each value changed, so that any reader can be brought up to date from any version. Pure.

Readers need no queues: the next update of a reader is one difference, however slow it is. Removals are remembered for a
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
    """In order of insertion. The writer gives the versions, which never fall."""

    def __init__(self) -> None:
        self._values: dict[K, tuple[V, int]] = {}
        self._removed: deque[tuple[K, int]] = deque()
        self._forgotten = 0
        """Removals up to this version are not remembered."""

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
        """Whether the value has changed."""
        before = self._values.get(key)
        if before is not None and before[0] == value:
            return False
        self._values[key] = (value, version)
        return True

    def touch(self, key: K, version: int) -> None:
        """The value of this key was changed in place."""
        self._values[key] = (self._values[key][0], version)

    def remove(self, key: K, version: int) -> None:
        """The key must be there."""
        del self._values[key]
        self._removed.append((key, version))
        if len(self._removed) > MOST_REMOVED:
            self._forgotten = self._removed.popleft()[1]

    def knows(self, version: int) -> bool:
        """Whether the difference to this version is known."""
        return version >= self._forgotten

    def changed(self, since: int) -> dict[K, V]:
        """What was written after a version; -1: everything."""
        return {key: value for key, (value, version) in self._values.items() if version > since}

    def removed(self, since: int) -> list[K]:
        """The keys that were removed after a version and are not there again."""
        return [key for key, version in self._removed if version > since and key not in self._values]
