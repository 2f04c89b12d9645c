"""How the files of a server's data come to be: written under a temporary name, made durable, then given their own."""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.kv.log import Header, Kind, frame
from rallypoint.kv.parts import Captured
from rallypoint.server.durability.disk import Disk, File
from rallypoint.server.durability.recovery import TEMPORARY, log_name, snapshot_name

CHUNK = 1024 * 1024


def begin_log(disk: Disk, number: int, first: int, generation: str, kept: bytes) -> File:
    """A log that is durable with its name and holds these frames already. OSError: it is not there."""
    name = log_name(number)
    file = disk.create(name + TEMPORARY)
    try:
        file.write(Header(Kind.LOG, number, first, generation).encode() + kept)
        file.sync()
        disk.rename(name + TEMPORARY, name)
        disk.sync_names()
    except BaseException:
        file.close()
        raise
    return file


def snapshot_chunks(number: int, first: int, generation: str, captured: Captured, has_log: bool) -> Iterator[bytes]:
    """The bytes of a snapshot, encoded while they are asked for. An empty chunk: nothing to write yet."""
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
    """Give a snapshot its name, for good. It is durable already."""
    file.close()
    disk.rename(snapshot_name(number) + TEMPORARY, snapshot_name(number))
    disk.sync_names()


def write_snapshot(disk: Disk, number: int, first: int, generation: str, captured: Captured) -> int:
    """All of it at once, of a store without a log; how many bytes."""
    file = disk.create(snapshot_name(number) + TEMPORARY)
    size = 0
    for chunk in snapshot_chunks(number, first, generation, captured, has_log=False):
        file.write(chunk)
        size += len(chunk)
    file.sync()
    finish_snapshot(disk, file, number)
    return size


def remove_before(disk: Disk, number: int) -> None:
    """Remove what a durable snapshot has made useless. What cannot be removed is in nobody's way."""
    for name in disk.names():
        kind, _, rest = name.partition("-")
        digits = rest.removesuffix(TEMPORARY)
        if kind in ("snapshot", "log") and digits.isdecimal() and int(digits) < number:
            try:
                disk.remove(name)
            except OSError:
                continue
