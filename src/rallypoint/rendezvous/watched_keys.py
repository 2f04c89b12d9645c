"""A local copy of the keys under some prefixes, kept current by watches: pushed, never polled.

What it shows may be old, but only goes forward under each prefix (different watches have no order between them). Losing
the backend leaves the last known values in place.
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
    """Follows prefixes in a task of its own until `stop()`.

    `on_change` is called after every change it takes in, with the keys that changed; None: any of them may have.
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
        """What is here under the first prefix is at least as new as this."""
        self.synced = asyncio.Event()
        """Set once the first scan is in, or when none is to come any more."""
        self._backend = backend
        self._prefixes = tuple(prefixes)
        self._backoff = Backoff(rng)
        self._on_change = on_change
        self._on_trouble = on_trouble
        self._is_stopped = False
        self._task = asyncio.create_task(self._follow(), name=f"watched of {self._prefixes[0]}")

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
                # A defect of the backend or of a listener must not blind the node for good.
                self._tell_defect(error)
                await self._backoff.sleep()

    async def _scan(self) -> list[Watch]:
        """Take in everything under the prefixes, at one revision; the watches that go on from there."""
        result, watches = await self._backend.scan_and_watch(self._prefixes)
        self.items = {item.key: item for part in result.results if isinstance(part, GotRange) for item in part.items}
        self.revision = result.revision
        return watches

    async def _watch(self, watches: Sequence[Watch]) -> None:
        """Until a watch fails. Those that call back need nobody to wait for them; each of the others has a task."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        readers: list[asyncio.Task[None]] = []
        take = self._reader(watches, failed)
        try:
            for index, watch in enumerate(watches):
                if not watch.follow(take):
                    reader = asyncio.create_task(self._read(watch, index), name=f"watch {self._prefixes[index]}")
                    reader.add_done_callback(lambda reader: _pass_on(reader, failed))
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
        """Takes in what is there when it is called, of all watches at once."""

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
            except Exception as error:  # as in `_follow`; nothing was missed
                self._tell_defect(error)

        return take

    def _take(self, batch: Batch, is_first: bool, changed: list[str]) -> None:
        """Take it in, and note the keys."""
        for change in batch.changes:
            changed.append(change.key)
            if change.item is None:
                self.items.pop(change.key, None)
            else:
                self.items[change.key] = change.item
        if is_first:
            self.revision = batch.revision

    def _tell_defect(self, error: Exception) -> None:
        self._on_trouble(Unavailable(f"following {self._prefixes[0]} failed: {error!r}"))


def _pass_on(reader: asyncio.Task[None], failed: asyncio.Future[None]) -> None:
    """What ended one watch ends them all."""
    error = None if reader.cancelled() else reader.exception()
    if failed.done() or reader.cancelled():
        return
    if error is None:
        failed.set_result(None)  # the watch was closed
    else:
        failed.set_exception(error)
