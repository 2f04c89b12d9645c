"""A local copy of the keys under some prefixes: one scan, then one watch per prefix. It never polls.

The copy may be out of date, but under one prefix it never goes back. Different watches have no order between them, so
nothing may be concluded from values under two prefixes being seen together. While the backend is unreachable the last
known values stay.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend, Watch
from rallypoint.errors import BackendError, HistoryGone, Rejected, Unavailable
from rallypoint.kv.types import Batch, GotRange, Item


class WatchedKeys:
    """Follows the prefixes in a task of its own until `stop()`.

    `on_change` is called after every change, with the keys that changed; None: any key may have changed (after a scan).
    `on_trouble` is called with the error when the backend fails, and with None when it has answered.
    """

    def __init__(
        self,
        backend: Backend,
        prefixes: Sequence[str],
        rng: random.Random,
        on_change: Callable[[Sequence[str] | None], None],
        on_trouble: Callable[[BackendError | None], None],
    ) -> None:
        self.items: dict[str, Item] = {}
        self.revision = 0
        """The values under the first prefix are at least as new as this revision."""
        self.synced = asyncio.Event()
        """Set after the first scan, and by `stop()`."""
        self._backend = backend
        self._prefixes = tuple(prefixes)
        self._backoff = Backoff(rng)
        self._on_change = on_change
        self._on_trouble = on_trouble
        self._is_stopped = False
        self._task = asyncio.create_task(self._follow(), name=f"watched keys {self._prefixes[0]}")

    def stop(self) -> None:
        """Stop following; the values stay as they are."""
        self._is_stopped = True
        self._task.cancel()
        self.synced.set()

    async def _follow(self) -> None:
        while True:
            try:
                watches = await self._scan()
                self._on_trouble(None)
                self._backoff.reset()
                self.synced.set()
                try:
                    self._on_change(None)
                    await self._watch(watches)
                finally:
                    for watch in watches:
                        watch.cancel()
            except HistoryGone:
                mark("watched_keys.rescanned")
            except BackendError as error:
                self._on_trouble(error)
                await self._backoff.sleep()
            except Exception as error:
                # After a defect in the backend or in a listener the node must still see later changes.
                self._report_defect(error)
                await self._backoff.sleep()

    async def _scan(self) -> list[Watch]:
        """Read everything under the prefixes at one revision; returns the watches that continue from it."""
        result, watches = await self._backend.scan_and_watch(self._prefixes)
        self.items = {item.key: item for part in result.results if isinstance(part, GotRange) for item in part.items}
        self.revision = result.revision
        return watches

    async def _watch(self, watches: Sequence[Watch]) -> None:
        """Apply batches until a watch fails. A watch that calls back (`Watch.follow`) needs no task; others get one."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        readers: list[asyncio.Task[None]] = []
        take = self._reader(watches, failed)
        try:
            for index, watch in enumerate(watches):
                if not watch.follow(take):
                    reader = asyncio.create_task(self._read(watch, index), name=f"watch {self._prefixes[index]}")
                    reader.add_done_callback(lambda reader: _forward_result(reader, failed))
                    readers.append(reader)
            await failed
        finally:
            for reader in readers:
                reader.cancel()

    async def _read(self, watch: Watch, index: int) -> None:
        async for batch in watch:
            if self._is_stopped:
                return
            changed: list[str] = []
            self._take(batch, index == 0, changed)
            self._on_change(changed)

    def _reader(self, watches: Sequence[Watch], failed: asyncio.Future[None]) -> Callable[[], None]:
        """A callback that applies all batches that are ready, of all watches."""

        first = watches[0]

        def take() -> None:
            if self._is_stopped or failed.done():
                return
            changed: list[str] = []
            try:
                for watch in watches:
                    if watch.is_idle:
                        continue
                    while (batch := watch.ready()) is not None:
                        self._take(batch, watch is first, changed)
            except Rejected as error:
                failed.set_exception(error)
                return
            try:
                self._on_change(changed)
            except Exception as error:  # as in `_follow`, but without a new scan: all changes were applied
                self._report_defect(error)

        return take

    def _take(self, batch: Batch, is_first: bool, changed: list[str]) -> None:
        """Apply the batch and add its keys to `changed`."""
        for change in batch.changes:
            changed.append(change.key)
            if change.item is None:
                self.items.pop(change.key, None)
            else:
                self.items[change.key] = change.item
        if is_first:
            self.revision = batch.revision

    def _report_defect(self, error: Exception) -> None:
        self._on_trouble(Unavailable(f"following {self._prefixes[0]} failed: {error!r}"))


def _forward_result(reader: asyncio.Task[None], failed: asyncio.Future[None]) -> None:
    """The end of one watch, or its error, ends them all."""
    error = None if reader.cancelled() else reader.exception()
    if failed.done() or reader.cancelled():
        return
    if error is None:
        failed.set_result(None)  # the watch was closed
    else:
        failed.set_exception(error)
