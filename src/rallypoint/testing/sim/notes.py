"""What happened in a world: everything goes into a digest, and the last of it is kept for whoever asks what went wrong.

Nothing is put into words before somebody asks: most worlds are fine, and nobody does.
"""

from __future__ import annotations

import hashlib
from collections import deque

KEPT = 80
LINES_AT_ONCE = 256


class Notes:
    """Equal digests mean that the same things happened at the same times."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[tuple[float, str, str, object]] = deque(maxlen=KEPT)
        """Time, kind, who, and what it is about."""
        self._digest = hashlib.blake2b(digest_size=16)
        self._lines: list[str] = []
        """What is yet to go into the digest."""
        self._at = -1.0
        self._written_at = ""

    def add(self, now: float, kind: str, who: str, what: object, revision: int) -> None:
        """One event. Of what is no text only the type counts."""
        self.count += 1
        if now != self._at:
            self._at = now
            self._written_at = repr(now)
        said = what if isinstance(what, str) else type(what).__name__
        self._lines.append(f"{self._written_at} {kind} {who} {said} {revision}\n")
        if len(self._lines) == LINES_AT_ONCE:
            self._hash()
        self.last.append((now, kind, who, what))

    @property
    def digest(self) -> str:
        """Of everything so far."""
        self._hash()
        return self._digest.hexdigest()

    def _hash(self) -> None:
        self._digest.update("".join(self._lines).encode())
        self._lines.clear()
