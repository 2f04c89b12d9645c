"""Jittered, bounded pauses between retries."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """A pause is between half of a bound and all of it; the bound doubles with each pause until `reset`."""

    def __init__(self, rng: random.Random, first_s: float = 0.05, most_s: float = 1.0) -> None:
        self._rng = rng
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def reset(self) -> None:
        """After a success: the next pause is short again."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """The length of the next pause."""
        pause_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, self._most_s)
        return pause_s

    async def sleep(self) -> None:
        """Pause."""
        await asyncio.sleep(self.next_s())
