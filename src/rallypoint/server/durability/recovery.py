"""What a directory of data holds: read at the start, and refused when going on from it could be a lie.

`snapshot-N` is the store as it was when `log-N` began; `log-N` and those after it are what happened since. The snapshot
with the highest number counts, older files are left over from a moment between two steps. Only the very last frame of
the last log may be torn.
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
from rallypoint.kv.parts import assemble
from rallypoint.kv.snapshot import SnapshotError
from rallypoint.server.durability.disk import Disk

TEMPORARY = ".tmp"
_NAME = re.compile(r"(snapshot|log)-([0-9]{12})")


def snapshot_name(number: int) -> str:
    return f"snapshot-{number:012d}"


def log_name(number: int) -> str:
    return f"log-{number:012d}"


@dataclass(slots=True)
class Recovered:
    """What was found. An empty directory: no engine yet."""

    engine: Engine | None = None
    generation: str = ""
    position: int = 0
    """How many entries there have been since the directory was made."""
    snapshot: int = 0
    """The number of the snapshot that counts."""
    log: int = 0
    """The number of the last log; of the snapshot, if there is none."""
    log_start: int = 0
    """The position that it begins at."""
    kept: bytes = b""
    """Its whole frames."""
    snapshot_bytes: int = 0
    log_bytes: int = 0
    """Of all logs."""
    replayed: int = 0
    cut_bytes: int = 0
    cut_from: str = ""


def recover(disk: Disk, clock: Callable[[], float], history: int | None = None) -> Recovered:
    """Read everything. DataError: it cannot be gone on from, and what to do. Changes nothing on the disk."""
    snapshots, logs = _numbers(disk)
    if not snapshots:
        if logs:
            raise DataError(_refusal(disk, log_name(logs[0]), "there is a log, but no snapshot that it goes on from"))
        return Recovered()
    found = Recovered(snapshot=snapshots[-1], log=snapshots[-1])
    now = clock()
    has_log = _load(disk, found, now, history)
    wanted = [number for number in logs if number >= found.snapshot]
    if not wanted and has_log:
        raise DataError(_refusal(disk, log_name(found.snapshot), "it is missing"))
    for expected, number in enumerate(wanted, start=found.snapshot):
        if number != expected:
            raise DataError(_refusal(disk, log_name(expected), f"it is missing, and {log_name(number)} is there"))
        _replay(disk, found, number, now, is_last=number == wanted[-1])
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
    """The snapshot; whether its log has to be there."""
    name = snapshot_name(found.snapshot)
    data = _read(disk, name)
    header = _header(disk, name, data, Kind.SNAPSHOT, found.snapshot)
    scanned = scan(data)
    if scanned.end is not End.CLEAN:
        raise DataError(_refusal(disk, name, scanned.why))
    try:
        found.engine, has_log = assemble([payload for _, payload in scanned.frames], now, history)
    except SnapshotError as error:
        raise DataError(_refusal(disk, name, str(error))) from error
    found.generation, found.position, found.log_start = header.generation, header.first, header.first
    found.snapshot_bytes = len(data)
    return has_log


def _replay(disk: Disk, found: Recovered, number: int, now: float, is_last: bool) -> None:
    name = log_name(number)
    data = _read(disk, name)
    header = _header(disk, name, data, Kind.LOG, number)
    if header.generation != found.generation:
        raise DataError(_refusal(disk, name, "it belongs to another directory"))
    scanned = scan(data)
    if is_last and header.first < found.position and scanned.end is End.CLEAN and not scanned.frames:
        return  # it was to be the next, something failed, and the one before went on
    if header.first != found.position:
        why = f"it begins with entry {header.first}, and what comes before ends with {found.position - 1}"
        raise DataError(_refusal(disk, name, why))
    if scanned.end is End.DAMAGED or (scanned.end is End.TORN and not is_last):
        raise DataError(_refusal(disk, name, scanned.why, scanned))
    assert found.engine is not None
    try:
        for entries in decode_entries(scanned.frames, found.position):
            replay(found.engine, entries, now)
            found.position += len(entries)
            found.replayed += len(entries)
    except FormatError as error:
        raise DataError(_refusal(disk, name, str(error))) from error
    found.log, found.log_start = number, header.first
    found.kept = data[HEADER_SIZE : scanned.good]
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
        raise DataError(_refusal(disk, name, str(error))) from error
    if header.number != number:
        raise DataError(_refusal(disk, name, f"it says that its number is {header.number}"))
    return header


def _refusal(disk: Disk, name: str, why: str, scanned: Scanned | None = None) -> str:
    """What is wrong and what can be done about it."""
    advice = "restore the directory from a backup, or move it away to begin without data (running rounds end)"
    if scanned is not None:
        advice += (
            f"; or give up everything since then: stop all jobs, `truncate -s {scanned.good} {disk.where}/{name}`, and "
            f"remove the logs after it"
        )
    return (
        f"{disk.where}/{name} is damaged: {why}. Going on from it could undo what was acknowledged, so nothing was "
        f"changed. What to do: {advice}"
    )
