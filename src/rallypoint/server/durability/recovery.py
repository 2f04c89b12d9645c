"""Recovery: reading the store from a data directory.

`snapshot-N` is the store at the start of `log-N`; `log-N` and later logs contain the changes since then. The snapshot
with the highest number is used; older files are left over from an interrupted rotation. Only the last frame of the last
log may be torn. Anything else that is missing or unreadable is refused: recovery must never lose an acknowledged
change silently. Nothing here changes the directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.errors import DataError
from rallypoint.kv.engine import Engine
from rallypoint.kv.log import (
    HEADER_SIZE,
    End,
    FormatError,
    Header,
    Kind,
    NewerFormat,
    Scanned,
    decode_entries,
    read_header,
    renew_all,
    replay,
    scan,
)
from rallypoint.kv.snapshot import SnapshotError
from rallypoint.kv.snapshot_parts import assemble
from rallypoint.server.durability.disk import Disk

TEMPORARY = ".tmp"
_NAME = re.compile(r"(snapshot|log)-([0-9]{12})")


def snapshot_name(number: int) -> str:
    return f"snapshot-{number:012d}"


def log_name(number: int) -> str:
    return f"log-{number:012d}"


@dataclass(slots=True)
class Recovered:
    """The content of a directory. An empty directory has no engine."""

    engine: Engine | None = None
    generation: str = ""
    position: int = 0
    """Number of entries since the directory was created."""
    snapshot: int = 0
    """Number of the snapshot that was read."""
    log: int = 0
    """Number of the last log; of the snapshot, if there is no log."""
    log_start: int = 0
    """The position at the start of the last log."""
    frames: bytes = b""
    """The complete frames of the last log."""
    snapshot_bytes: int = 0
    log_bytes: int = 0
    """Size of all logs."""
    replayed: int = 0
    """Number of entries read from the logs."""
    cut_bytes: int = 0
    """Size of a torn end of the last log."""
    cut_from: str = ""
    """The name of that log."""


def recover(disk: Disk, clock: Callable[[], float], history: int | None = None) -> Recovered:
    """Read all files. DataError if the store cannot be recovered; its text says what to do."""
    snapshots, logs = _numbers(disk)
    if not snapshots:
        if logs:
            raise DataError(_damaged(disk, log_name(logs[0]), "there is a log, but no snapshot before it"))
        return Recovered()
    found = Recovered(snapshot=snapshots[-1], log=snapshots[-1])
    now = clock()
    has_log = _load(disk, found, now, history)
    newer = [number for number in logs if number >= found.snapshot]
    if not newer and has_log:
        raise DataError(_damaged(disk, log_name(found.snapshot), "it is missing"))
    for expected, number in enumerate(newer, start=found.snapshot):
        if number != expected:
            raise DataError(_damaged(disk, log_name(expected), f"it is missing, and {log_name(number)} is there"))
        _replay(disk, found, number, now, is_last=number == newer[-1])
    assert found.engine is not None
    renew_all(found.engine, clock())
    return found


def _numbers(disk: Disk) -> tuple[list[int], list[int]]:
    snapshots: list[int] = []
    logs: list[int] = []
    for name in disk.names():
        match = _NAME.fullmatch(name)
        if match is not None:
            (snapshots if match[1] == "snapshot" else logs).append(int(match[2]))
    return sorted(snapshots), sorted(logs)


def _load(disk: Disk, found: Recovered, now: float, history: int | None) -> bool:
    """Read the snapshot. Returns whether its log must exist."""
    name = snapshot_name(found.snapshot)
    data = _read(disk, name)
    header = _header(disk, name, data, Kind.SNAPSHOT, found.snapshot)
    scanned = scan(data)
    if scanned.end is not End.CLEAN:
        raise DataError(_damaged(disk, name, scanned.why))
    try:
        found.engine, has_log = assemble([payload for _, payload in scanned.frames], now, history)
    except SnapshotError as error:
        raise DataError(_damaged(disk, name, str(error))) from error
    found.generation, found.position, found.log_start = header.generation, header.first, header.first
    found.snapshot_bytes = len(data)
    return has_log


def _replay(disk: Disk, found: Recovered, number: int, now: float, is_last: bool) -> None:
    name = log_name(number)
    data = _read(disk, name)
    header = _header(disk, name, data, Kind.LOG, number)
    if header.generation != found.generation:
        raise DataError(_damaged(disk, name, "it belongs to another directory"))
    scanned = scan(data)
    if is_last and header.first < found.position and scanned.end is End.CLEAN and not scanned.frames:
        return  # starting this log failed, and the one before it stayed in use
    if header.first != found.position:
        why = f"it begins with entry {header.first}, and the files before it end with {found.position - 1}"
        raise DataError(_damaged(disk, name, why))
    if scanned.end is End.DAMAGED or (scanned.end is End.TORN and not is_last):
        raise DataError(_damaged(disk, name, scanned.why, scanned))
    assert found.engine is not None
    try:
        for entries in decode_entries(scanned.frames, found.position):
            replay(found.engine, entries, now)
            found.position += len(entries)
            found.replayed += len(entries)
    except FormatError as error:
        raise DataError(_damaged(disk, name, str(error))) from error
    found.log, found.log_start = number, header.first
    found.frames = data[HEADER_SIZE : scanned.good]
    found.log_bytes += scanned.good
    if scanned.end is End.TORN:
        found.cut_bytes, found.cut_from = len(data) - scanned.good, name


def _read(disk: Disk, name: str) -> bytes:
    try:
        return disk.read(name)
    except OSError as error:
        raise DataError(f"{disk.where}/{name} cannot be read: {error.strerror or error}") from error


def _header(disk: Disk, name: str, data: bytes, kind: Kind, number: int) -> Header:
    try:
        header = read_header(data, kind)
    except NewerFormat as error:
        raise DataError(
            f"{disk.where}/{name} was written by a newer version: {error}. Upgrade, or give another directory"
        ) from error
    except FormatError as error:
        raise DataError(_damaged(disk, name, str(error))) from error
    if header.number != number:
        raise DataError(_damaged(disk, name, f"its header has number {header.number}"))
    return header


def _damaged(disk: Disk, name: str, why: str, scanned: Scanned | None = None) -> str:
    """The message for a file that is damaged or missing, with advice."""
    advice = "restore the directory from a backup, or move it away to begin without data (running rounds end)"
    if scanned is not None:
        advice += (
            f"; or give up everything since then: stop all jobs, `truncate -s {scanned.good} {disk.where}/{name}`, and "
            f"remove the logs after it"
        )
    return (
        f"{disk.where}/{name} is damaged: {why}. Recovery could lose acknowledged changes, so nothing was changed. "
        f"What to do: {advice}"
    )
