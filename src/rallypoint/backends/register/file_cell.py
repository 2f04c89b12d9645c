"""A cell in a file that all nodes can reach. `file://` keeps a run in such a file in a directory.

A write replaces the content as a whole: it writes a new file beside the old one, syncs it, and renames it over the old
one, while it holds a lock on a third file. So a reader sees either the old or the new content and needs no lock, and a
process that dies at any moment leaves one of the two (and at most a file named `*.new`, which the next writer on its
machine removes). The token is the number of the write and the checksum of the content.

It is safe on one machine, and on network file systems where `flock` excludes processes of other machines. NFS does
(version 4, or 3 with lockd; not mounted with `nolock` or `local_lock`), with one limit: a machine that is cut off from
the NFS server between comparing and renaming, for longer than the server keeps locks, loses its lock without knowing;
its rename may then replace a newer content. docs/register.md describes the consequences.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from rallypoint.errors import RendezvousStateError, SettingsError

MAGIC = b"rallypoint cell 1"
HEAD = re.compile(rb"rallypoint cell (\d{1,9}) (\d{1,18}) ([0-9a-f]{32}) (\d{1,12})\n")
LONGEST_HEAD = 128
LOCK_S = 10.0
"""How long a write waits for the lock, which is held for milliseconds unless its owner is stopped or its disk hangs."""
LOCK_PAUSE_S = (0.0005, 0.004)
TURN_S = 2.0
TURN_PAUSE_S = (0.002, 0.02)
SUFFIX = ".rallypoint"
_numbers = itertools.count(1)


class FileCell:
    """A cell in the file `path`, whose directory must exist. May be used by any number of processes and threads."""

    name = "file"

    def __init__(self, path: str | os.PathLike[str], lock_timeout_s: float = LOCK_S) -> None:
        self.path = Path(path)
        self._lock_path = Path(f"{self.path}.lock")
        self._lock_timeout_s = lock_timeout_s

    def get_state(self) -> tuple[bytes, bytes] | None:
        """The content and its token; None without a file. RendezvousStateError if the file is damaged or foreign."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            self._check_directory()
            return None
        return self._parsed(data)

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, bytes, bool] | None:
        """Write if `token` is current (None: the cell is empty); the content afterwards, and whether it was written."""
        with self._locked():
            found = self.get_state()
            if (found[1] if found is not None else None) != token:
                return None if found is None else (*found, False)  # None: the file that the token is for was removed
            version = _version_of(found[1]) + 1 if found is not None else 1
            new_token = b"%d %s" % (version, _digest(state))
            self._replace(b"%s %s %d\n" % (MAGIC, new_token, len(state)) + state)
            return state, new_token, True

    def _parsed(self, data: bytes) -> tuple[bytes, bytes]:
        head = HEAD.match(data[:LONGEST_HEAD])
        if head is None:
            what = f"it begins with {data[:16]!r}" if data else "it is empty"
            raise self._unusable(f"it was not written by Rallypoint ({what})")
        if head[1] != MAGIC.rpartition(b" ")[2]:
            raise self._unusable(f"it has format {head[1].decode()}, written by a newer version: upgrade this one")
        state = data[head.end() :]
        if len(state) != int(head[4]) or _digest(state) != head[3]:
            raise self._unusable("it is damaged or truncated: its length or checksum does not match its header")
        return state, b"%s %s" % (head[2], head[3])

    def _unusable(self, why: str) -> RendezvousStateError:
        return RendezvousStateError(
            f"{self.path} cannot be used: {why}. It was not changed: remove it, or use another path",
            key=str(self.path),
        )

    def _check_directory(self) -> None:
        if not self.path.parent.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "the directory does not exist (is it mounted on this machine?)", str(self.path.parent)
            )

    @property
    def _mine(self) -> str:
        return f"{quote(socket.gethostname(), safe='')}.{os.getpid()}"

    def take_turn(self) -> Callable[[], None] | None:
        """Wait for the turn; the function that releases it, or None after TURN_S or without access to the file.

        Writers that lost a race queue here, so that they do not compete again at once. Only an optimisation: the lock
        and the token protect the content.
        """
        try:
            descriptor = os.open(f"{self.path}.turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return None
        deadline = time.monotonic() + TURN_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(random.uniform(*TURN_PAUSE_S))
            else:
                return lambda: os.close(descriptor)
        os.close(descriptor)
        return None

    # --- writing ------------------------------------------------------------------------------------------------------

    def _replace(self, data: bytes) -> None:
        new = Path(f"{self.path}.{self._mine}.{next(_numbers)}.new")
        try:
            with new.open("xb", buffering=0) as file:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
            new.replace(self.path)
        except BaseException:
            with suppress(OSError):
                new.unlink()
            raise
        _sync_directory(self.path.parent)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of all writers. TimeoutError if another process holds it for too long."""
        deadline = time.monotonic() + self._lock_timeout_s
        try:
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            self._check_directory()
            raise
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK):
                        raise
                if time.monotonic() > deadline:
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "an unknown process"
                    raise TimeoutError(
                        f"{self._lock_path} has been locked for {self._lock_timeout_s:g} s by {holder}: if that "
                        f"process is stopped, continue or end it"
                    )
                time.sleep(random.uniform(*LOCK_PAUSE_S))
            self._write_owner(descriptor)
            yield
        finally:
            os.close(descriptor)  # releases the lock

    def _write_owner(self, descriptor: int) -> None:
        """Write the owner of the lock into the lock file, for error messages.

        If the previous owner is a dead process of this machine, its temporary files are removed.
        """
        said = os.pread(descriptor, 200, 0)
        mine = self._mine.encode()
        if said == mine:
            return
        host, _, pid = said.decode(errors="replace").rpartition(".")
        if said and self._mine.startswith(f"{host}.") and pid.isdecimal() and not _is_alive(int(pid)):
            for left in self.path.parent.glob(f"{_escaped(self.path.name)}.{_escaped(host)}.{pid}.*.new"):
                left.unlink(missing_ok=True)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, mine, 0)


def path_of(directory: str, run_id: str) -> Path:
    """The file of a run."""
    return Path(directory) / f"{quote(run_id, safe='')}{SUFFIX}"


def check_path(path: Path) -> None:
    """SettingsError if the name of the file, or of a temporary one beside it, is too long for a file system."""
    longest = 255 - len(f".{quote(socket.gethostname(), safe='')}.{2**22}.{10**9}.new")
    if len(path.name.encode()) > longest:
        raise SettingsError(
            f"the run id is too long for the name of a file: {path.name!r} has more than {longest} bytes",
            option="run_id",
        )


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(directory: Path) -> None:
    """Make the rename durable. Some file systems cannot sync a directory; errors are ignored."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]*?])", r"[\1]", text)


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=16).hexdigest().encode()


def _version_of(token: bytes) -> int:
    return int(token.partition(b" ")[0])
