"""Creating the files of a data directory: each is written under a temporary name, synced, and then renamed.

A file must never have its final name before its content is durable.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.kv.log import Header, Kind, frame
from rallypoint.kv.snapshot_parts import Captured
from rallypoint.server.durability.disk import Disk, File
from rallypoint.server.durability.recovery import TEMPORARY, log_name, snapshot_name

CHUNK = 1024 * 1024


def begin_log(disk: Disk, number: int, first: int, generation: str, frames: bytes) -> File:
    """A new log that contains these frames, durable with its name. OSError if it could not be created."""
    name = log_name(number)
    file = disk.create(name + TEMPORARY)
    try:
        file.write(Header(Kind.LOG, number, first, generation).encode() + frames)
        file.sync()
        disk.rename(name + TEMPORARY, name)
        disk.sync_names()
    except BaseException:
        file.close()
        raise
    return file


def snapshot_chunks(number: int, first: int, generation: str, captured: Captured, has_log: bool) -> Iterator[bytes]:
    """The bytes of a snapshot, encoded lazily. An empty chunk is a point at which the caller may yield."""
    waiting = [Header(Kind.SNAPSHOT, number, first, generation).encode()]
    size = 0
    for index, part in enumerate(captured.parts(has_log)):
        waiting.append(frame(index, part))
        size += len(part)
        if size >= CHUNK:
            yield b"".join(waiting)
            waiting, size = [], 0
        else:
            yield b""
    yield b"".join(waiting)


def finish_snapshot(disk: Disk, file: File, number: int) -> None:
    """Close a snapshot whose content is durable, and give it its name."""
    file.close()
    disk.rename(snapshot_name(number) + TEMPORARY, snapshot_name(number))
    disk.sync_names()


def write_snapshot(disk: Disk, number: int, first: int, generation: str, captured: Captured) -> int:
    """Write a snapshot that has no log yet. Returns its size. Blocks."""
    file = disk.create(snapshot_name(number) + TEMPORARY)
    size = 0
    for chunk in snapshot_chunks(number, first, generation, captured, has_log=False):
        file.write(chunk)
        size += len(chunk)
    file.sync()
    finish_snapshot(disk, file, number)
    return size


def remove_before(disk: Disk, number: int) -> None:
    """Remove files older than a durable snapshot. A file that cannot be removed does no harm."""
    for name in disk.names():
        kind, _, rest = name.partition("-")
        digits = rest.removesuffix(TEMPORARY)
        if kind in ("snapshot", "log") and digits.isdecimal() and int(digits) < number:
            try:
                disk.remove(name)
            except OSError:
                continue
