"""A signal that can be awaited by many, any number of times, and that carries its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator


class Lost:
    """Set once with a reason. `await lost` gives the reason; cancelling one waiter does not disturb the others."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._callbacks: list[Callable[[str], None]] = []
        self.reason: str | None = None

    def is_set(self) -> bool:
        return self.reason is not None

    def set(self, reason: str) -> None:
        """Only the first reason counts. Callbacks run before this returns."""
        if self.reason is not None:
            return
        self.reason = reason
        self._event.set()
        for callback in self._callbacks:
            callback(reason)

    def add_callback(self, callback: Callable[[str], None]) -> None:
        """Call when set; at once if it is set already. A callback must not raise or block."""
        if self.reason is not None:
            callback(self.reason)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[object, None, str]:
        yield from self._event.wait().__await__()
        assert self.reason is not None
        return self.reason
