"""Opening the data directory of a server: recovery of its store, and the start of its log.

The last log is rewritten before the server starts: what was read from it may not have reached the disk, and the server
must never acknowledge anything that depends on it before it has.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from rallypoint._marks import mark
from rallypoint.errors import DataError
from rallypoint.events import DataLoaded, Emitter, LogCut
from rallypoint.kv.engine import DEFAULT_HISTORY, Engine
from rallypoint.kv.snapshot_parts import capture
from rallypoint.server.durability.disk import Disk, File
from rallypoint.server.durability.disk_thread import Thread, Worker
from rallypoint.server.durability.files import begin_log, remove_before, write_snapshot
from rallypoint.server.durability.journal import Bounds, Journal, Sync
from rallypoint.server.durability.recovery import TEMPORARY, Recovered, log_name, recover


def open_data(
    disk: Disk,
    *,
    sync: Sync = Sync.ALWAYS,
    emit: Emitter | None = None,
    by: str = "server",
    history: int = DEFAULT_HISTORY,
    first_revision: int = 1,
    generation: Callable[[], str] = lambda: secrets.token_hex(8),
    workers: tuple[Worker, Worker] | None = None,
    bounds: Bounds | None = None,
) -> tuple[Engine, Journal]:
    """The engine and the journal of a directory, which is created if it does not exist. Needs a running loop; blocks.

    DataError if the directory cannot be used. `first_revision` and `generation` are for a new store.
    """
    emit = emit or Emitter()
    loop = asyncio.get_running_loop()
    started_at = time.perf_counter()
    disk.lock()
    try:
        found = recover(disk, loop.time, history)
        engine = found.engine
        is_new = engine is None
        if engine is None:
            engine = Engine(history, first=first_revision)
            found = Recovered(engine=engine, generation=generation(), snapshot=1, log=1)
        file = _prepare(disk, engine, found, is_new)
    except OSError as error:
        disk.close()
        raise DataError(f"{disk.where} cannot be used: {error.strerror or error}") from error
    except BaseException:
        disk.close()
        raise
    if found.cut_bytes:
        mark("recovery.cut")
        emit(LogCut(run_id="", by=by, file=f"{disk.where}/{found.cut_from}", bytes=found.cut_bytes))
    if not is_new:
        took_s = time.perf_counter() - started_at
        counts = {"keys": len(engine.items), "leases": len(engine.leases), "replayed": found.replayed}
        emit(DataLoaded(run_id="", by=by, where=disk.where, took_s=took_s, **counts))
    workers = workers or (Thread("rallypoint log"), Thread("rallypoint snapshots"))
    return engine, Journal(disk, engine, found, file, sync=sync, workers=workers, emit=emit, by=by, bounds=bounds)


def _prepare(disk: Disk, engine: Engine, found: Recovered, is_new: bool) -> File:
    """Write the files that the journal continues with, and remove obsolete ones. Returns the log to append to."""
    for name in disk.names():
        if name.endswith(TEMPORARY):
            disk.remove(name)
    if is_new:
        found.snapshot_bytes = write_snapshot(disk, 1, 0, found.generation, capture(engine))
    disk.remove(log_name(found.log + 1))  # left over from an interrupted rotation
    file = begin_log(disk, found.log, found.log_start, found.generation, found.frames)
    remove_before(disk, found.snapshot)
    found.frames = b""
    return file
