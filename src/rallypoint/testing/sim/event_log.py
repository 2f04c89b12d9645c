"""The event log of a world: a digest of all events, and the last events for error reports.

Events are formatted only on demand: most worlds are correct.
"""

from __future__ import annotations

import hashlib
from collections import deque

KEPT = 80
LINES_AT_ONCE = 256


class EventLog:
    """Equal digests mean the same events at the same times."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[tuple[float, str, str, object]] = deque(maxlen=KEPT)
        """Time, kind, process, and content."""
        self._digest = hashlib.blake2b(digest_size=16)
        self._lines: list[str] = []
        """Lines that are not in the digest yet."""
        self._at = -1.0
        self._written_at = ""

    def add(self, now: float, kind: str, actor: str, content: object, revision: int) -> None:
        """Add an event. If `content` is not text, only its type goes into the digest."""
        self.count += 1
        if now != self._at:
            self._at = now
            self._written_at = repr(now)
        text = content if isinstance(content, str) else type(content).__name__
        self._lines.append(f"{self._written_at} {kind} {actor} {text} {revision}\n")
        if len(self._lines) == LINES_AT_ONCE:
            self._hash()
        self.last.append((now, kind, actor, content))

    @property
    def digest(self) -> str:
        """The digest of all events so far."""
        self._hash()
        return self._digest.hexdigest()

    def _hash(self) -> None:
        self._digest.update("".join(self._lines).encode())
        self._lines.clear()
