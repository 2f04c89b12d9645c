"""A one-time signal with a reason, for any number of waiters: the loss of a session.

Belongs to one event loop; it must never be set from another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator


class LossSignal:
    """Set once. `await signal` returns the reason; cancelling one waiter does not affect the others."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._callbacks: list[Callable[[str], None]] = []
        self.reason: str | None = None

    def is_set(self) -> bool:
        return self.reason is not None

    def set(self, reason: str) -> None:
        """Only the first reason counts. All callbacks have run when this returns."""
        if self.reason is not None:
            return
        self.reason = reason
        self._event.set()
        for callback in self._callbacks:
            callback(reason)

    def add_callback(self, callback: Callable[[str], None]) -> None:
        """Call it when the signal is set; at once if it is set already. A callback must not raise or block."""
        if self.reason is not None:
            callback(self.reason)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[object, None, str]:
        yield from self._event.wait().__await__()
        assert self.reason is not None
        return self.reason
