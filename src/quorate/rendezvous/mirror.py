"""A local copy of the keys under a prefix, kept current by a watch: pushed, never polled.

What it shows may be old, but only goes forward. Losing the backend leaves the last known values in place.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from quorate._marks import mark
from quorate.backends.backoff import Backoff
from quorate.backends.contract import Backend, Watch
from quorate.errors import BackendError, HistoryGone, Unavailable
from quorate.kv.types import Batch, Item


class Mirror:
    """Follows one prefix in a task of its own until `stop()`; `on_change` is called after every change it takes in."""

    def __init__(
        self,
        backend: Backend,
        prefix: str,
        rng: random.Random,
        on_change: Callable[[], None],
        on_trouble: Callable[[BackendError | None], None],
    ) -> None:
        self.items: dict[str, Item] = {}
        self.revision = 0
        """What is here is at least as new as this."""
        self.synced = asyncio.Event()
        """Set once the first scan is in."""
        self._backend = backend
        self._prefix = prefix
        self._backoff = Backoff(rng)
        self._on_change = on_change
        self._on_trouble = on_trouble
        self._task = asyncio.create_task(self._follow(), name=f"mirror of {prefix}")

    def stop(self) -> None:
        """Stop following; the values stay as they are."""
        self._task.cancel()

    async def _follow(self) -> None:
        while True:
            try:
                scanned = await self._backend.scan(self._prefix)
                self._on_trouble(None)
                self._backoff.reset()
                self.items = {item.key: item for item in scanned.items}
                self.revision = scanned.revision
                self.synced.set()
                self._on_change()
                await self._watch(scanned.revision)
            except HistoryGone:
                mark("mirror.rescanned")
            except BackendError as error:
                self._on_trouble(error)
                await self._backoff.sleep()
            except Exception as error:
                # A defect of the backend or of a listener must not blind the node for good.
                self._on_trouble(Unavailable(f"following {self._prefix} failed: {error!r}"))
                await self._backoff.sleep()

    async def _watch(self, revision: int) -> None:
        watch = self._backend.watch(self._prefix, revision)
        watch.notify(lambda: self._take_ready(watch))
        try:
            async for batch in watch:
                self._take(batch)
                self._on_change()
        finally:
            watch.cancel()

    def _take_ready(self, watch: Watch) -> None:
        """Take in what is there without being woken for it."""
        while (batch := watch.ready()) is not None:
            self._take(batch)
        try:
            self._on_change()
        except Exception as error:  # as in `_follow`
            self._on_trouble(Unavailable(f"following {self._prefix} failed: {error!r}"))

    def _take(self, batch: Batch) -> None:
        for change in batch.changes:
            if change.item is None:
                self.items.pop(change.key, None)
            else:
                self.items[change.key] = change.item
        self.revision = batch.revision
