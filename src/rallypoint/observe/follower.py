"""A run as it changes: one look, then whatever is pushed. Takes no session and renews nothing.

`look` reads a run once. `Follower` goes on: it yields a new report after every change, several at once if they arrive
together, so that a reader who is slow gets fewer and never old ones. Taking in a change costs O(1).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence

from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend, Watch
from rallypoint.errors import BackendError, HistoryGone, Rejected
from rallypoint.kv.types import Batch, Change, GotRange, Range
from rallypoint.observe.report import Report
from rallypoint.observe.scene import Scene
from rallypoint.rendezvous.keys import RunKeys

MOST_QUIETS = 8
RESTS = 4
"""With a quiet time, a reader that has taken what was there rests for such a part of it: few wakes for many changes."""


def prefixes(keys: RunKeys) -> tuple[str, ...]:
    """What a scene is drawn from."""
    return keys.control, keys.histories, keys.refusals


async def look(backend: Backend, keys: RunKeys, where: str) -> Report:
    """The run now. Raises the backend's errors."""
    loop = asyncio.get_running_loop()
    scene = Scene(keys, where, loop.time())
    result = await backend.txn((), [Range(prefix) for prefix in prefixes(keys)])
    found = [item for part in result.results if isinstance(part, GotRange) for item in part.items]
    scene.load(found, result.revision, loop.time())
    await _read_roster(backend, scene)
    return scene.report()


async def _read_roster(backend: Backend, scene: Scene) -> None:
    number = scene.wanted_roster
    if number is not None:
        items = (await backend.scan(scene.keys.roster(number))).items
        scene.set_roster(number, items, asyncio.get_running_loop().time())


def merged(batches: Sequence[Batch]) -> list[Batch]:
    """One batch for all: the last change of every key, and of a key that was removed what it held last."""
    if len(batches) < 2:
        return list(batches)
    latest: dict[str, Change] = {}
    held: dict[str, Change] = {}
    for batch in batches:
        for change in batch.changes:
            before = latest.pop(change.key, None)
            latest[change.key] = change
            if change.item is None and before is not None and before.item is not None:
                held[change.key] = before
            elif held:
                held.pop(change.key, None)
    changes: list[Change] = []
    for key, change in latest.items():
        if key in held:
            changes.append(held[key])
        changes.append(change)
    return [Batch(max(batch.revision for batch in batches), tuple(changes))]


class Follower:
    """Iterate it once; `trouble` says why the backend cannot be reached at present ("" if it can).

    An error before the first report is raised; afterwards outages are lived through, and only what is rejected for good
    is raised. `on_changes` is called with every batch once it is taken in, and with None after a scan that may have
    skipped some. With `quiet_s` it waits after a change until nothing came for so long (MOST_QUIETS times at most) and
    takes all of it in as one batch, without what was overwritten meanwhile: for those who look at large runs and need
    not see every step.
    """

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        where: str,
        *,
        pause_s: float = 0.0,
        quiet_s: float = 0.0,
        on_changes: Callable[[Scene, Sequence[Change] | None], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.trouble = ""
        self._backend = backend
        self._keys = keys
        self._pause_s = pause_s
        self._quiet_s = quiet_s
        self._on_changes = on_changes or (lambda _, __: None)
        self._loop = asyncio.get_running_loop()
        self._scene = Scene(keys, where, self._loop.time())
        self._batches: list[Batch] = []
        self._failed: BaseException | None = None
        self._woken = asyncio.Event()
        self._has_seen = False
        self._backoff = Backoff(rng or random.Random())
        backend.on_reachability(self._reached)

    async def __aiter__(self) -> AsyncIterator[Report]:
        while True:
            watches: list[Watch] = []
            try:
                watches = await self._scan()
                async for report in self._follow(watches):
                    yield report
            except HistoryGone:
                continue
            except Rejected:
                raise
            except BackendError as error:
                if not self._has_seen:
                    raise
                self.trouble = str(error)
                yield self._scene.report()
                await self._backoff.sleep()
            finally:
                for watch in watches:
                    watch.cancel()

    async def _scan(self) -> list[Watch]:
        result, watches = await self._backend.scan_and_watch(prefixes(self._keys))
        found = [item for part in result.results if isinstance(part, GotRange) for item in part.items]
        self._scene.load(found, result.revision, self._loop.time())
        await _read_roster(self._backend, self._scene)
        self._on_changes(self._scene, None)
        self._has_seen, self.trouble = True, ""
        self._backoff.reset()
        return watches

    async def _follow(self, watches: Sequence[Watch]) -> AsyncIterator[Report]:
        self._batches, self._failed = [], None
        readers = [asyncio.create_task(self._read(watch), name="follower of a run") for watch in watches]
        try:
            while True:
                yield self._scene.report()
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
                await self._woken.wait()
                if self._quiet_s:
                    await self._let_settle()
                self._woken.clear()
                batches, self._batches = self._batches, []
                if self._quiet_s:
                    batches = merged(batches)
                for batch in batches:
                    await self._apply(batch)
                if self._failed is not None:
                    raise self._failed
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _let_settle(self) -> None:
        for _ in range(MOST_QUIETS):
            seen = len(self._batches)
            await asyncio.sleep(self._quiet_s)
            if len(self._batches) == seen:
                return

    async def _apply(self, batch: Batch) -> None:
        self._scene.apply(batch.changes, batch.revision, self._loop.time())
        await _read_roster(self._backend, self._scene)
        self._on_changes(self._scene, batch.changes)

    async def _read(self, watch: Watch) -> None:
        """Collect batches until the watch fails; how it did is told by whoever takes them in."""
        rest_s = self._quiet_s / RESTS
        try:
            async for batch in watch:
                more: Batch | None = batch
                while more is not None:
                    self._batches.append(more)
                    more = watch.ready()
                self._woken.set()
                if rest_s:
                    await asyncio.sleep(rest_s)
        except BackendError as error:
            self._failed = error
            self._woken.set()

    def _reached(self, error: BackendError | None) -> None:
        self.trouble = "" if error is None else str(error)
        self._woken.set()
