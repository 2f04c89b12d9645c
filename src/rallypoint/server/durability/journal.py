"""The write-ahead log of a server with data: executed operations are appended, and reported when they are durable.

Durable means on the disk (`always`) or written to the operating system (`os`). Entries that are appended during a write
are written together with the next one (group commit). When the log has grown, the store is captured, a new log is
started, and a snapshot is written beside it; older files are removed when the snapshot is durable.

A file must never be written again after a write or sync failed on it: what it contains is unknown then. Until the disk
works again no operation may be executed (`is_failing`), and a snapshot of the whole store is written to new files,
repeated until it succeeds. Then the callbacks of `when_durable` are called. A disk that does not answer counts as
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
from rallypoint.kv.snapshot_parts import Captured, capture
from rallypoint.server.durability.disk import Disk, File
from rallypoint.server.durability.disk_thread import Worker
from rallypoint.server.durability.files import begin_log, finish_snapshot, remove_before, snapshot_chunks
from rallypoint.server.durability.recovery import TEMPORARY, Recovered, snapshot_name

FIRST_RETRY_S = 0.05
CLOSE_WITHIN_S = 5.0


class Sync(enum.Enum):
    """When entries count as durable. The value is that of the option `--sync`."""

    ALWAYS = "always"
    """They are on the disk."""
    OS = "os"
    """They were written to the operating system."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The length of the log that starts a snapshot, and time limits of the disk."""

    log_bytes: int = 16 * 1024 * 1024
    log_entries: int = 100_000
    stall_s: float = 5.0
    """A disk that does not answer for this time counts as failing."""
    retry_s: float = 1.0
    """The longest pause between attempts to write to a failing disk."""
    pause_s: float = 10.0
    """The pause after a failed snapshot, while the log can be written."""


class Journal:
    """The log of one engine, to which the caller appends executed operations in order.

    Must be created and used on one event loop. Blocking work is done by the `workers`.
    """

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
        """Number of entries since the directory was created."""
        self.durable = found.position
        """Number of durable entries."""
        self.trouble = ""
        """Why the disk is failing; empty if it is not."""
        self.on_recovered: Callable[[], None] = lambda: None
        """Called when the disk is no longer failing."""
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
        """A commit is due or running, or the files are being rewritten."""
        self._is_closed = False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._failed_at = 0.0
        self._working = asyncio.Event()
        """The disk is not failing."""
        self._working.set()
        self._snapshotting: asyncio.Task[None] | None = None
        self._rewriting: asyncio.Task[None] | None = None
        self._no_snapshot_before = float("-inf")
        self.commits = 0
        self.commit_s = 0.0
        """Total duration of all commits."""
        self.snapshots = 0
        self._commit_began_at = 0.0

    # --- appending ----------------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """All entries are durable."""
        return self.durable == self.position

    @property
    def is_failing(self) -> bool:
        """The disk is failing: operations that need to be durable must not be executed."""
        return bool(self.trouble)

    @property
    def size(self) -> tuple[int, int, int]:
        """Bytes and entries of the log since the last snapshot, and bytes of that snapshot."""
        return self._log_bytes, self._log_entries, self._snapshot_bytes

    def append(self, entry: Entry) -> None:
        """Log an operation that was just executed."""
        self._pending.append(entry)
        self.position += 1
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._commit)

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Call back when all current entries are durable: at once if they are. Callbacks are called in order."""
        if self.durable == self.position:
            callback()
        else:
            self._waiting.append((self.position, callback))

    async def wait_durable(self) -> None:
        """Return when all current entries are durable."""
        if self.durable == self.position:
            return
        durable: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self.position, lambda: None if durable.done() else durable.set_result(None)))
        await durable

    async def wait_working(self) -> None:
        """Return when the disk is not failing."""
        while self.trouble:
            await self._working.wait()

    # --- commits ------------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Write all pending entries. One commit at a time: entries that are appended meanwhile form the next one."""
        if not self._pending or self._rewriting is not None or self._is_closed:
            self._is_busy = False
            return
        entries, self._pending = self._pending, []
        position = self.position
        data = encode_entries(position - len(entries), entries)
        self._log_bytes += len(data)
        self._log_entries += len(entries)
        captured = capture(self._engine) if self._needs_snapshot() else None
        self._commit_began_at = self._loop.time()
        self._stall_timer = self._loop.call_later(self._bounds.stall_s, self._stalled)
        self._committer.submit(
            partial(_write, self._file, data, self.sync is Sync.ALWAYS), partial(self._committed, position, captured)
        )

    def _committed(self, position: int, captured: Captured | None, error: Exception | None) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if self._is_closed:
            return
        if error is not None:
            self._fail(error)
            return
        self.commits += 1
        self.commit_s += self._loop.time() - self._commit_began_at
        self._set_durable(position)
        if captured is not None:
            self._rotate(position, captured)
        else:
            self._commit()

    def _set_durable(self, position: int) -> None:
        """All entries before this position are durable: call the callbacks that wait for them."""
        self.durable = position
        waiting = self._waiting
        while waiting and waiting[0][0] <= position:
            _, callback = waiting.popleft()
            try:
                callback()
            except Exception as error:  # a bug in one callback must not prevent the others
                self._loop.call_exception_handler({"message": "a durability callback failed", "exception": error})
        if self.trouble:
            self._recovered()

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _needs_snapshot(self) -> bool:
        if self._snapshotting is not None or self._loop.time() < self._no_snapshot_before:
            return False
        bounds = self._bounds
        most_bytes = max(bounds.log_bytes, self._snapshot_bytes)  # so that snapshots at most double what is written
        most_entries = max(bounds.log_entries, len(self._engine.items) // 2)
        return self._log_bytes > most_bytes or self._log_entries > most_entries

    def _rotate(self, first: int, captured: Captured) -> None:
        """Start a new log from entry `first`, and a snapshot of everything before it."""
        number = self._number + 1
        created: list[File] = []

        def work() -> None:
            if self.sync is Sync.OS:
                self._file.sync()  # so that only the last log can be torn after a power failure
            created.append(begin_log(self.disk, number, first, self.generation, b""))

        def done(error: Exception | None) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
            if self._is_closed:
                return
            if self.trouble:
                self._recovered()
            if error is not None:
                self._snapshot_failed(error)  # the current log stays in use
            else:
                self._file.close()
                self._file, self._number = created[0], number
                self._log_bytes = self._log_entries = 0
                self._snapshotting = asyncio.create_task(self._snapshot(number, first, captured), name="snapshot")
            self._commit()

        self._stall_timer = self._loop.call_later(self._bounds.stall_s, self._stalled)
        self._committer.submit(work, done)

    async def _snapshot(self, number: int, first: int, captured: Captured) -> None:
        """Write a snapshot. If that fails nothing is lost, because the older files are still there."""
        try:
            await self._write_snapshot(number, first, captured, has_log=True)
        except Exception as error:
            self._snapshot_failed(error)
        finally:
            self._snapshotting = None

    def _snapshot_failed(self, error: Exception) -> None:
        mark("journal.snapshot_failed")
        self._no_snapshot_before = self._loop.time() + self._bounds.pause_s
        why = f"a snapshot could not be written: {_describe(error)}. The log grows until one can be"
        self._emit(DataTrouble(run_id="", by=self._by, where=self.disk.where, reason=why))

    async def _write_snapshot(self, number: int, first: int, captured: Captured, *, has_log: bool) -> None:
        """Write it in small pieces, so that the event loop is never blocked for long. May raise any disk error."""
        began_at = self._loop.time()
        disk, temporary = self.disk, snapshot_name(number) + TEMPORARY
        created: list[File] = []
        await self._run_snapshot_work(lambda: created.append(disk.create(temporary)))
        file, size = created[0], 0
        try:
            for chunk in snapshot_chunks(number, first, self.generation, captured, has_log):
                if chunk:
                    size += len(chunk)
                    await self._run_snapshot_work(partial(_write, file, chunk, True))
                else:
                    await asyncio.sleep(0)
            await self._run_snapshot_work(partial(finish_snapshot, disk, file, number))
        except Exception:
            await self._run_snapshot_work(partial(_discard, disk, file, temporary))
            raise
        self.snapshots += 1
        self._snapshot_bytes = size
        await self._run_snapshot_work(partial(remove_before, disk, number))
        took_s = self._loop.time() - began_at
        self._emit(SnapshotTaken(run_id="", by=self._by, keys=len(captured.items), bytes=size, took_s=took_s))

    async def _run_snapshot_work(self, work: Callable[[], None]) -> None:
        """Run a blocking call on the worker for snapshots, which never delays commits. Raises what it raises."""
        done: asyncio.Future[None] = self._loop.create_future()

        def set_result(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self._snapshotter.submit(work, set_result)
        await done

    # --- a failing disk -----------------------------------------------------------------------------------------------

    def _stalled(self) -> None:
        """The disk has not answered in time. If its answer comes later and is no error, the file stays in use."""
        mark("journal.stalled")
        self._set_trouble(f"it has not answered for {self._bounds.stall_s:g} s")

    def _fail(self, error: Exception) -> None:
        mark("journal.failed")
        self._set_trouble(_describe(error))
        self._rewriting = asyncio.create_task(self._rewrite(), name="rewriting the log")

    def _set_trouble(self, why: str) -> None:
        if not self.trouble:
            self._failed_at = self._loop.time()
            self._working.clear()
        if why != self.trouble:
            self.trouble = why
            waiting = self.position - self.durable
            reason = f"{why}. Nothing is acknowledged or executed until it can be written ({waiting} changes wait)"
            self._emit(DataTrouble(run_id="", by=self._by, where=self.disk.where, reason=reason))

    def _recovered(self) -> None:
        after_s = self._loop.time() - self._failed_at
        self.trouble = ""
        self._working.set()
        self._emit(DataGoesOn(run_id="", by=self._by, where=self.disk.where, after_s=after_s))
        self.on_recovered()

    async def _rewrite(self) -> None:
        """Write the whole store to new files, repeated until that succeeds."""
        pause_s = FIRST_RETRY_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._bounds.retry_s)
            if self._snapshotting is not None:
                await asyncio.wait([self._snapshotting])
            try:
                await self._write_new_files()
            except Exception as error:
                self._set_trouble(_describe(error))
                continue
            break
        self._rewriting = None
        self._is_busy = True
        self._commit()

    async def _write_new_files(self) -> None:
        """Write a snapshot of the store, with the entries that are not durable yet, and start a log after it."""
        self._number += 1
        number, position = self._number, self.position
        covered = len(self._pending)
        await self._write_snapshot(number, position, capture(self._engine), has_log=False)
        created: list[File] = []
        await self._run_snapshot_work(
            lambda: created.append(begin_log(self.disk, number, position, self.generation, b""))
        )
        self._file.close()
        self._file = created[0]
        self._log_bytes = self._log_entries = 0
        del self._pending[:covered]
        self._set_durable(position)

    # --- closing ------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Return when all entries are durable, or after `CLOSE_WITHIN_S`. The others were never acknowledged."""
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                while not self.is_settled:
                    await self.wait_durable()
        except TimeoutError:
            waiting = self.position - self.durable
            reason = f"{self.trouble or 'it is too slow'}. {waiting} unacknowledged changes are lost"
            self._emit(DataTrouble(run_id="", by=self._by, where=self.disk.where, reason=reason))

    async def close(self) -> None:
        """Close the directory. Entries that are not written yet are lost: `settle` first."""
        self._is_closed = True
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        for task in (self._snapshotting, self._rewriting):
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
    with suppress(OSError):  # it is removed at the next start
        disk.remove(name)


def _describe(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or repr(error)
