"""The log of a server that keeps its data: what was executed is written, and nobody is told before it is.

Entries that come while a write is under way go out together with the next one. `when_durable` calls back once all that
was executed up to now is on the disk (`always`), or with the operating system (`os`). When the log has grown, the store
is captured, a new log is begun, and the snapshot is written beside it; what came before is removed when that is
durable.

A write that fails is never tried again on the same file: after a failed sync nobody knows what the disk holds. From
then on nothing is executed (`is_failing`), and everything is written anew, as a snapshot of the store as it is now,
again and again until the disk takes it. Then those who waited are told. A disk that does not come back counts as
failing, too.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rallypoint._marks import mark
from rallypoint.events import DataGoesOn, DataTrouble, Emitter, SnapshotTaken
from rallypoint.kv.engine import Engine
from rallypoint.kv.log import Entry, encode_entries
from rallypoint.kv.parts import Captured, capture
from rallypoint.server.durability.disk import Disk, File
from rallypoint.server.durability.disk_thread import Worker
from rallypoint.server.durability.files import begin_log, finish_snapshot, remove_before, snapshot_chunks
from rallypoint.server.durability.recovery import Recovered, snapshot_name

FIRST_RETRY_S = 0.05
CLOSE_WITHIN_S = 5.0


class Sync(enum.Enum):
    """When what was executed counts as kept: the value is the word of the option."""

    ALWAYS = "always"
    OS = "os"


@dataclass(frozen=True, slots=True)
class Bounds:
    """When the log is long enough for a snapshot, and how long a disk may take."""

    log_bytes: int = 16 * 1024 * 1024
    log_entries: int = 100_000
    stall_s: float = 5.0
    retry_s: float = 1.0
    pause_s: float = 10.0
    """Before a snapshot that failed is tried again, while the log itself can be written."""


class Journal:
    """Belongs to the loop it is made on. The store is the caller's; it appends what it has executed, in order."""

    def __init__(
        self,
        disk: Disk,
        engine: Engine,
        found: Recovered,
        file: File,
        *,
        sync: Sync,
        workers: tuple[Worker, Worker],
        emit: Emitter,
        by: str,
        bounds: Bounds | None = None,
    ) -> None:
        self.disk = disk
        self.sync = sync
        self.generation = found.generation
        self.position = found.position
        """So many entries there are."""
        self.durable = found.position
        """So many of them are kept."""
        self.trouble = ""
        """Why nothing can be kept just now; empty: it can."""
        self.on_able: Callable[[], None] = lambda: None
        """Called when it can be again."""
        self._engine = engine
        self._file = file
        self._number = found.log
        self._snapshot_bytes = found.snapshot_bytes
        self._log_bytes = found.log_bytes
        self._log_entries = found.replayed
        self._committer, self._snapshotter = workers
        self._emit = emit
        self._by = by
        self._bounds = bounds or Bounds()
        self._loop = asyncio.get_running_loop()
        self._pending: list[Entry] = []
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_busy = False
        self._is_closed = False
        self._stall: asyncio.TimerHandle | None = None
        self._failed_at = 0.0
        self._able = asyncio.Event()
        self._able.set()
        self._snapshotting: asyncio.Task[None] | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._not_before = float("-inf")
        self.commits = 0
        self.commit_s = 0.0
        """So long all commits together have taken."""
        self.snapshots = 0
        self._began_at = 0.0

    # --- for whoever executes -----------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """All that was executed is kept."""
        return self.durable == self.position

    @property
    def is_failing(self) -> bool:
        """Nothing may be executed that has to be kept."""
        return bool(self.trouble)

    @property
    def size(self) -> tuple[int, int, int]:
        """Bytes and entries of the log since the last snapshot, and bytes of that."""
        return self._log_bytes, self._log_entries, self._snapshot_bytes

    def append(self, entry: Entry) -> None:
        """It was executed just now."""
        self._pending.append(entry)
        self.position += 1
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._commit)

    def when_durable(self, call: Callable[[], None]) -> None:
        """Call when all that was executed up to now is kept: at once if it is. In the order of asking."""
        if self.durable == self.position:
            call()
        else:
            self._waiting.append((self.position, call))

    async def wait_durable(self) -> None:
        """Return when all that was executed up to now is kept."""
        if self.durable == self.position:
            return
        kept: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self.position, lambda: None if kept.done() else kept.set_result(None)))
        await kept

    async def wait_able(self) -> None:
        """Return when something may be executed."""
        while self.trouble:
            await self._able.wait()

    # --- commits ------------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Write all that is there. One at a time: what comes meanwhile goes together."""
        if not self._pending or self._reviving is not None or self._is_closed:
            self._is_busy = False
            return
        entries, self._pending = self._pending, []
        upto = self.position
        data = encode_entries(upto - len(entries), entries)
        self._log_bytes += len(data)
        self._log_entries += len(entries)
        captured = capture(self._engine) if self._wants_snapshot() else None
        self._began_at = self._loop.time()
        self._stall = self._loop.call_later(self._bounds.stall_s, self._stalled)
        self._committer.submit(
            partial(_write, self._file, data, self.sync is Sync.ALWAYS), partial(self._committed, upto, captured)
        )

    def _committed(self, upto: int, captured: Captured | None, error: Exception | None) -> None:
        if self._stall is not None:
            self._stall.cancel()
        if self._is_closed:
            return
        if error is not None:
            self._fail(error)
            return
        self.commits += 1
        self.commit_s += self._loop.time() - self._began_at
        self._keep(upto)
        if captured is not None:
            self._rotate(upto, captured)
        else:
            self._commit()

    def _keep(self, upto: int) -> None:
        self.durable = upto
        waiting = self._waiting
        while waiting and waiting[0][0] <= upto:
            call = waiting.popleft()[1]
            try:
                call()
            except Exception as error:  # a defect of one must not keep the others waiting for ever
                self._loop.call_exception_handler({"message": "telling what is kept failed", "exception": error})
        if self.trouble:
            self._recovered()

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _wants_snapshot(self) -> bool:
        if self._snapshotting is not None or self._loop.time() < self._not_before:
            return False
        bounds = self._bounds
        most_bytes = max(bounds.log_bytes, self._snapshot_bytes)  # writing it must not cost more than the log does
        most_entries = max(bounds.log_entries, len(self._engine.items) // 2)
        return self._log_bytes > most_bytes or self._log_entries > most_entries

    def _rotate(self, first: int, captured: Captured) -> None:
        """Begin a new log, which a snapshot of all that came before will belong to."""
        number = self._number + 1
        made: list[File] = []

        def work() -> None:
            if self.sync is Sync.OS:
                self._file.sync()  # so that at most the last log is torn when the power goes
            made.append(begin_log(self.disk, number, first, self.generation, b""))

        def done(error: Exception | None) -> None:
            if self._stall is not None:
                self._stall.cancel()
            if self._is_closed:
                return
            if self.trouble:
                self._recovered()
            if error is not None:
                self._no_snapshot(error)  # the log that there is will do
            else:
                self._file.close()
                self._file, self._number = made[0], number
                self._log_bytes = self._log_entries = 0
                self._snapshotting = asyncio.create_task(self._snapshot(number, first, captured), name="snapshot")
            self._commit()

        self._stall = self._loop.call_later(self._bounds.stall_s, self._stalled)
        self._committer.submit(work, done)

    async def _snapshot(self, number: int, first: int, captured: Captured) -> None:
        """A task of its own. One that fails is tried again later: the log has everything."""
        try:
            await self._write_snapshot(number, first, captured, has_log=True)
        except Exception as error:
            self._no_snapshot(error)
        finally:
            self._snapshotting = None

    def _no_snapshot(self, error: Exception) -> None:
        mark("journal.snapshot_failed")
        self._not_before = self._loop.time() + self._bounds.pause_s
        why = f"a snapshot could not be written: {_words(error)}. The log grows until one can be"
        self._emit(DataTrouble(run_id="", by=self._by, where=self.disk.where, reason=why))

    async def _write_snapshot(self, number: int, first: int, captured: Captured, *, has_log: bool) -> None:
        """In pieces, so that nobody waits for more than one of them. What is raised: it is not there."""
        began_at = self._loop.time()
        disk, temporary = self.disk, snapshot_name(number) + ".tmp"
        made: list[File] = []
        await self._on_the_side(lambda: made.append(disk.create(temporary)))
        file, size = made[0], 0
        try:
            for chunk in snapshot_chunks(number, first, self.generation, captured, has_log):
                if chunk:
                    size += len(chunk)
                    await self._on_the_side(partial(_write, file, chunk, True))
                else:
                    await asyncio.sleep(0)
            await self._on_the_side(partial(finish_snapshot, disk, file, number))
        except Exception:
            await self._on_the_side(partial(_discard, disk, file, temporary))
            raise
        self.snapshots += 1
        self._snapshot_bytes = size
        await self._on_the_side(partial(remove_before, disk, number))
        took_s = self._loop.time() - began_at
        self._emit(SnapshotTaken(run_id="", by=self._by, keys=len(captured.items), bytes=size, took_s=took_s))

    async def _on_the_side(self, work: Callable[[], None]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def tell(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self._snapshotter.submit(work, tell)
        await done

    # --- trouble ------------------------------------------------------------------------------------------------------

    def _stalled(self) -> None:
        """The disk has not come back. It may yet: then all is well."""
        mark("journal.stalled")
        self._troubled(f"it has not answered for {self._bounds.stall_s:g} s")

    def _fail(self, error: Exception) -> None:
        mark("journal.failed")
        self._troubled(_words(error))
        self._reviving = asyncio.create_task(self._revive(), name="reviving the log")

    def _troubled(self, why: str) -> None:
        if not self.trouble:
            self._failed_at = self._loop.time()
            self._able.clear()
        if why != self.trouble:
            self.trouble = why
            waiting = self.position - self.durable
            reason = f"{why}. Nothing is acknowledged or executed until it can be written ({waiting} changes wait)"
            self._emit(DataTrouble(run_id="", by=self._by, where=self.disk.where, reason=reason))

    def _recovered(self) -> None:
        after_s = self._loop.time() - self._failed_at
        self.trouble = ""
        self._able.set()
        self._emit(DataGoesOn(run_id="", by=self._by, where=self.disk.where, after_s=after_s))
        self.on_able()

    async def _revive(self) -> None:
        """Write everything anew until that works."""
        pause_s = FIRST_RETRY_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._bounds.retry_s)
            if self._snapshotting is not None:
                await asyncio.wait([self._snapshotting])
            try:
                await self._begin_afresh()
            except Exception as error:
                self._troubled(_words(error))
                continue
            break
        self._reviving = None
        self._is_busy = True
        self._commit()

    async def _begin_afresh(self) -> None:
        """The store as it is, and a log that begins there. What was not durable is in it."""
        self._number += 1
        number, upto = self._number, self.position
        covered = len(self._pending)
        await self._write_snapshot(number, upto, capture(self._engine), has_log=False)
        made: list[File] = []
        await self._on_the_side(lambda: made.append(begin_log(self.disk, number, upto, self.generation, b"")))
        self._file.close()
        self._file = made[0]
        self._log_bytes = self._log_entries = 0
        del self._pending[:covered]
        self._keep(upto)

    async def settle(self) -> None:
        """Return when everything is kept, or when that has taken too long. What is not kept was told to nobody."""
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                while not self.is_settled:
                    await self.wait_durable()
        except TimeoutError:
            waiting = self.position - self.durable
            reason = f"{self.trouble or 'it is too slow'}. {waiting} changes that nobody was told of are lost"
            self._emit(DataTrouble(run_id="", by=self._by, where=self.disk.where, reason=reason))

    async def close(self) -> None:
        """Let go of the directory. What is not written yet is not written any more; `settle` first."""
        self._is_closed = True
        if self._stall is not None:
            self._stall.cancel()
        for task in (self._snapshotting, self._reviving):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._committer.close()
        self._snapshotter.close()
        self._file.close()
        self.disk.close()


def _write(file: File, data: bytes, and_sync: bool) -> None:
    file.write(data)
    if and_sync:
        file.sync()


def _discard(disk: Disk, file: File, name: str) -> None:
    file.close()
    with suppress(OSError):  # it is in nobody's way
        disk.remove(name)


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or repr(error)
