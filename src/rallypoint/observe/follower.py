"""Follows a run: one scan, then the changes that a watch pushes. Opens no session and renews nothing.

`read_report` reads a run once. `Follower` yields a new report after every change. Changes that arrive together make one
report, so that a slow reader gets fewer reports and never outdated ones. Applying a change costs O(1).
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
from rallypoint.observe.report_builder import ReportBuilder
from rallypoint.rendezvous.keys import RunKeys

MAX_QUIET_WAITS = 8
READER_PAUSES = 4
"""With `quiet_s`, a reader of a watch pauses for this fraction of it after each batch: fewer wakes for many changes."""


def prefixes(keys: RunKeys) -> tuple[str, ...]:
    """The key prefixes that a report is built from."""
    return keys.control, keys.histories, keys.events, keys.refusals


async def read_report(backend: Backend, keys: RunKeys, where: str) -> Report:
    """The current state of the run. Raises the backend's errors."""
    loop = asyncio.get_running_loop()
    builder = ReportBuilder(keys, where, loop.time())
    result = await backend.txn((), [Range(prefix) for prefix in prefixes(keys)])
    found = [item for part in result.results if isinstance(part, GotRange) for item in part.items]
    builder.load(found, result.revision, loop.time())
    await _read_roster(backend, builder)
    return builder.report()


async def _read_roster(backend: Backend, builder: ReportBuilder) -> None:
    number = builder.wanted_roster
    if number is not None:
        items = (await backend.scan(builder.keys.roster(number))).items
        builder.set_roster(number, items, asyncio.get_running_loop().time())


def merge_batches(batches: Sequence[Batch]) -> list[Batch]:
    """One batch instead of several: the last change of each key and, if that is a removal, the one before it."""
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
    """Iterate over it once. `trouble` says why the backend cannot be reached at present ("" if it can).

    An error before the first report is raised. After that, outages are survived and only `Rejected` is raised.
    `on_changes` is called with the changes of every batch after it was applied, and with None after a scan, which may
    have skipped changes. With `quiet_s`, the follower waits after a change until none has come for so long
    (MAX_QUIET_WAITS times at most) and applies them as one merged batch: for observers of large runs that do not need
    every step.
    """

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        where: str,
        *,
        pause_s: float = 0.0,
        quiet_s: float = 0.0,
        on_changes: Callable[[ReportBuilder, Sequence[Change] | None], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.trouble = ""
        self._backend = backend
        self._keys = keys
        self._pause_s = pause_s
        self._quiet_s = quiet_s
        self._on_changes = on_changes or (lambda _, __: None)
        self._loop = asyncio.get_running_loop()
        self._builder = ReportBuilder(keys, where, self._loop.time())
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
                yield self._builder.report()
                await self._backoff.sleep()
            finally:
                for watch in watches:
                    watch.cancel()

    async def _scan(self) -> list[Watch]:
        result, watches = await self._backend.scan_and_watch(prefixes(self._keys))
        found = [item for part in result.results if isinstance(part, GotRange) for item in part.items]
        self._builder.load(found, result.revision, self._loop.time())
        await _read_roster(self._backend, self._builder)
        self._on_changes(self._builder, None)
        self._builder.view.facts.clear()
        self._has_seen, self.trouble = True, ""
        self._backoff.reset()
        return watches

    async def _follow(self, watches: Sequence[Watch]) -> AsyncIterator[Report]:
        self._batches, self._failed = [], None
        readers = [asyncio.create_task(self._read(watch), name="follower of a run") for watch in watches]
        try:
            while True:
                yield self._builder.report()
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
                await self._woken.wait()
                if self._quiet_s:
                    await self._wait_quiet()
                self._woken.clear()
                batches, self._batches = self._batches, []
                if self._quiet_s:
                    batches = merge_batches(batches)
                for batch in batches:
                    await self._apply(batch)
                if self._failed is not None:
                    raise self._failed
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _wait_quiet(self) -> None:
        for _ in range(MAX_QUIET_WAITS):
            seen = len(self._batches)
            await asyncio.sleep(self._quiet_s)
            if len(self._batches) == seen:
                return

    async def _apply(self, batch: Batch) -> None:
        self._builder.apply(batch.changes, batch.revision, self._loop.time())
        await _read_roster(self._backend, self._builder)
        self._on_changes(self._builder, batch.changes)
        self._builder.view.facts.clear()

    async def _read(self, watch: Watch) -> None:
        """Collect batches until the watch fails. `_follow` raises its error, after applying the batches."""
        pause_s = self._quiet_s / READER_PAUSES
        try:
            async for batch in watch:
                more: Batch | None = batch
                while more is not None:
                    self._batches.append(more)
                    more = watch.ready()
                self._woken.set()
                if pause_s:
                    await asyncio.sleep(pause_s)
        except BackendError as error:
            self._failed = error
            self._woken.set()

    def _reached(self, error: BackendError | None) -> None:
        self.trouble = "" if error is None else str(error)
        self._woken.set()
