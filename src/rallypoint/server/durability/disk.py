"""The directory of a server's data, as far as the server needs one: files that are only appended to, and their names.

What is written is on the disk after `sync`, and a name is after `sync_names`. Everything may raise OSError, at any
time; after a `sync` that failed nobody knows what is on the disk, and the file must not be trusted again.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rallypoint.errors import DataError

LOCK = "lock"
_sync = getattr(os, "fdatasync", os.fsync)


class File(Protocol):
    """A file that is being written."""

    def write(self, data: bytes) -> None:
        """Append all of it, or raise; then a part of it may be there."""

    def sync(self) -> None:
        """Return when all that was written is on the disk."""

    def close(self) -> None:
        """Does not raise."""


class Disk(Protocol):
    """One directory. It belongs to one server at a time, from `lock` to `close`."""

    where: str
    """For people."""

    def lock(self) -> None:
        """Make the directory, if need be, and make it ours. DataError says why that is not possible."""

    def names(self) -> list[str]:
        """What is in it."""

    def read(self, name: str) -> bytes:
        """A whole file."""

    def create(self, name: str) -> File:
        """A new file, in the place of one of that name."""

    def rename(self, name: str, new: str) -> None:
        """In one step; what was there is gone."""

    def remove(self, name: str) -> None:
        """Fine if it is not there."""

    def sync_names(self) -> None:
        """Return when all names are on the disk as they are."""

    def close(self) -> None:
        """Let go of the directory."""


class RealFile:
    """A file descriptor."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._number, left) :]

    def sync(self) -> None:
        _sync(self._number)

    def close(self) -> None:
        with suppress(OSError):  # whatever was promised was promised by `sync`
            os.close(self._number)


class Directory:
    """A directory of this machine."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.where = str(path)
        self._lock: int | None = None

    def lock(self) -> None:
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            number = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataError(self._why_not(error)) from error
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(number, 32, 0).decode("ascii", "replace").strip()
            os.close(number)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise DataError(f"{self.where} cannot be locked: {error.strerror}") from error
            who = f"process {holder}" if holder.isdecimal() else "another process"
            raise DataError(
                f"{self.where} is used by a server that runs ({who}): stop that one first, or give another directory"
            ) from None
        with suppress(OSError):  # only a help for people; whether the disk can be written is found out soon enough
            os.ftruncate(number, 0)
            os.pwrite(number, b"%d\n" % os.getpid(), 0)
        self._lock = number

    def _why_not(self, error: OSError) -> str:
        if isinstance(error, FileExistsError | NotADirectoryError):
            return f"{self.where} is not a directory: give --data a directory, which is made if it does not exist"
        if isinstance(error, PermissionError):
            return f"{self.where} cannot be written by this user: give it to user {os.geteuid()}, or give another one"
        return f"{self.where} cannot be used for data: {error.strerror or error}"

    def names(self) -> list[str]:
        return sorted(os.listdir(self._path))

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def create(self, name: str) -> RealFile:
        return RealFile(self._path / name)

    def rename(self, name: str, new: str) -> None:
        os.replace(self._path / name, self._path / new)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def sync_names(self) -> None:
        number = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
