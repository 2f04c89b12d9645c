"""Events that are told a moment later, because whoever they are about is still waiting for the same processor.

In order, and each of them once. A warning is told at once, behind all that happened before it.
"""

from __future__ import annotations

import asyncio
import logging

from rallypoint.events import Event, Sink

LATER_S = 0.02
"""When a round is active its members go on first: that takes milliseconds, however few they are."""


class Later:
    """A sink in front of another one. Belongs to the loop it is made on; leaving it tells what there still is."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._events.append(event)
        if event.level >= logging.WARNING:
            self.flush()
        elif len(self._events) == 1:
            self._loop.call_later(LATER_S, self.flush)

    def flush(self) -> None:
        """Tell what there is to tell."""
        events, self._events = self._events, []
        for event in events:
            self._sink(event)

    def __enter__(self) -> Later:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
