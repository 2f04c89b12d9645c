"""Watches of the engine: which watches match a change, and the bounded history for watches that start in the past.

Watches are indexed by prefix, prefixes by length: a key costs one look-up for each prefix length up to its own, not one
for each watch.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from rallypoint.kv.types import Batch, Change, WatchEvent, WatchStarted, WatchTooOld

MOST_HISTORY_BYTES = 256 * 1024 * 1024
"""The history keeps overwritten values: a large value that is written often must not fill the memory."""


MOST_CACHED = 16_384
"""The most keys for which the matching watches are cached."""


class History:
    """The last `limit` changes, by revision; always includes all changes of the last revision."""

    def __init__(self, limit: int, revision: int, limit_bytes: int = MOST_HISTORY_BYTES) -> None:
        self.limit = limit
        self.limit_bytes = limit_bytes
        self.oldest = revision
        """A watch may start after this revision or any later one: all changes since then are kept."""
        self.batches: deque[Batch] = deque()
        self._changes = 0
        self._bytes = 0

    def append(self, batch: Batch) -> None:
        """Add a batch; drop the oldest ones while a limit is exceeded (the newest always stays)."""
        changes = batch.changes
        self.batches.append(batch)
        if len(changes) == 1 and (item := changes[0].item) is not None:  # the common case
            self._changes += 1
            self._bytes += len(item.value)
        else:
            self._changes += len(changes)
            self._bytes += _value_bytes(changes)
        while (self._changes > self.limit or self._bytes > self.limit_bytes) and len(self.batches) > 1:
            self.forget_one()

    def forget_one(self) -> None:
        """Drop the oldest batch."""
        gone = self.batches.popleft()
        self._changes -= len(gone.changes)
        self._bytes -= _value_bytes(gone.changes)
        self.oldest = gone.revision

    def after(self, revision: int, prefix: str) -> tuple[Batch, ...]:
        """The changes under `prefix` after `revision`. O(batches since then)."""
        found: list[Batch] = []
        for batch in reversed(self.batches):
            if batch.revision <= revision:
                break
            changes = tuple(change for change in batch.changes if change.key.startswith(prefix))
            if changes:
                found.append(Batch(batch.revision, changes))
        found.reverse()
        return tuple(found)


class Watches:
    """The registered watches. A watch covers a prefix; a whole key is a prefix too."""

    def __init__(self) -> None:
        self._prefix_of: dict[int, str] = {}
        self._by_length: dict[int, dict[str, dict[int, None]]] = {}
        self._lengths: list[int] = []
        """In ascending order: a key is not looked up for prefixes longer than itself."""
        self._not_before: dict[int, int] = {}
        """Watches that start after a future revision."""
        self._cached: dict[str, tuple[int, ...]] = {}
        """Results of `matching` since the last registration or removal: many keys are written often."""

    def __len__(self) -> int:
        return len(self._prefix_of)

    def add(self, watch: int, prefix: str, after: int = 0) -> None:
        """Register for changes after a revision. ValueError if the id is already registered."""
        if watch in self._prefix_of:
            raise ValueError(f"watch {watch} is already registered")
        self._prefix_of[watch] = prefix
        self._cached.clear()
        if after:
            self._not_before[watch] = after
        if len(prefix) not in self._by_length:
            self._by_length[len(prefix)] = {}
            insort(self._lengths, len(prefix))
        self._by_length[len(prefix)].setdefault(prefix, {})[watch] = None

    def remove(self, watch: int) -> None:
        """Unregister, if it is registered."""
        prefix = self._prefix_of.pop(watch, None)
        if prefix is None:
            return
        self._not_before.pop(watch, None)
        self._cached.clear()
        same_length = self._by_length[len(prefix)]
        del same_length[prefix][watch]
        if not same_length[prefix]:
            del same_length[prefix]
            if not same_length:
                del self._by_length[len(prefix)]
                self._lengths.remove(len(prefix))

    def matching(self, key: str) -> tuple[int, ...]:
        """The watches that cover `key`: shorter prefixes first, in order of registration within a prefix."""
        known = self._cached.get(key)
        if known is None:
            if len(self._cached) >= MOST_CACHED:
                self._cached.clear()
            known = self._cached[key] = tuple(self._match(key))
        return known

    def _match(self, key: str) -> list[int]:
        found: list[int] = []
        for length in self._lengths:
            if length > len(key):
                break
            watches = self._by_length[length].get(key[:length])
            if watches is not None:
                found.extend(watches)
        return found

    def events(self, batch: Batch) -> list[WatchEvent]:
        """The batch as each watch sees it: only the changes that the watch covers; no event without any."""
        if len(batch.changes) == 1:
            watches = self.matching(batch.changes[0].key)
            if not watches:
                return []
            events = [WatchEvent(watch, batch) for watch in watches]
        else:
            events = []
            for prefix, changes in self._covered(batch).items():
                seen = Batch(batch.revision, tuple(changes))  # one for all watches of the prefix
                events.extend([WatchEvent(watch, seen) for watch in self._by_length[len(prefix)][prefix]])
        if self._not_before:
            return [event for event in events if self._has_begun(event.watch, batch.revision)]
        return events

    def _covered(self, batch: Batch) -> dict[str, list[Change]]:
        """The changes of a batch by watched prefix."""
        covered: dict[str, list[Change]] = {}
        for change in batch.changes:
            key = change.key
            for length in self._lengths:
                if length > len(key):
                    break
                prefix = key[:length]
                if prefix in self._by_length[length]:
                    covered.setdefault(prefix, []).append(change)
        return covered

    def _has_begun(self, watch: int, revision: int) -> bool:
        after = self._not_before.get(watch)
        if after is None:
            return True
        if revision <= after:
            return False
        del self._not_before[watch]
        return True


def _value_bytes(changes: tuple[Change, ...]) -> int:
    return sum([len(change.item.value) for change in changes if change.item is not None])


def start(
    watches: Watches, history: History, watch: int, prefix: str, after: int, now: int
) -> WatchStarted | WatchTooOld:
    """Register a watch for changes after revision `after`; `now` is the current revision.

    `after` may be in the future: the watch gets no changes up to it, as in etcd.
    """
    if after < history.oldest:
        return WatchTooOld(history.oldest)
    watches.add(watch, prefix, after if after > now else 0)
    return WatchStarted(now, history.after(after, prefix) if after < now else ())
