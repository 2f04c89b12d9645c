"""The data directory of a server: append-only files and their names.

Content is on the disk after `sync`, and names are after `sync_names`. Every call may raise OSError. After a failed
`sync` the content of the file on the disk is unknown, and it must not be used again.
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
    """A file that is open for writing."""

    def write(self, data: bytes) -> None:
        """Append all of the data. If it raises, a part may have been appended."""

    def sync(self) -> None:
        """Return when all written data are on the disk."""

    def close(self) -> None:
        """Does not raise."""


class Disk(Protocol):
    """One directory. One server at a time has it, from `lock` to `close`."""

    where: str
    """Its path, for messages."""

    def lock(self) -> None:
        """Create the directory if necessary, and lock it. DataError if that is not possible."""

    def names(self) -> list[str]:
        """The names of all files."""

    def read(self, name: str) -> bytes:
        """The whole content of a file."""

    def create(self, name: str) -> File:
        """Create an empty file, replacing an existing one."""

    def rename(self, name: str, new: str) -> None:
        """Rename a file atomically, replacing an existing one."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def sync_names(self) -> None:
        """Return when all names are on the disk."""

    def close(self) -> None:
        """Unlock the directory."""


class RealFile:
    """A file of the operating system."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def sync(self) -> None:
        _sync(self._descriptor)

    def close(self) -> None:
        with suppress(OSError):  # only `sync` gives guarantees
            os.close(self._descriptor)


class Directory:
    """A directory of the operating system."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.where = str(path)
        self._lock: int | None = None

    def lock(self) -> None:
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataError(self._describe(error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise DataError(f"{self.where} cannot be locked: {error.strerror}") from error
            holder = f"process {pid}" if pid.isdecimal() else "another process"
            raise DataError(
                f"{self.where} is used by a server that runs ({holder}): stop that one first, or give another directory"
            ) from None
        with suppress(OSError):  # only for the message above; later writes will show whether the disk works
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        self._lock = descriptor

    def _describe(self, error: OSError) -> str:
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
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
