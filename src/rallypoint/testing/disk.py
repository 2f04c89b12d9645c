"""Disks for tests of whatever keeps data: one in memory that can lose power, and one that fails when it is told to.

`MemoryDisk` knows what a real one promises and nothing more. What was written and not synced, and names that were given
and not synced, may or may not be there after a loss of power; a part of a write may be. After the end of the process
alone, everything written is there. `FaultyDisk` stands before any other disk and lets chosen calls fail.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rallypoint.errors import DataError
from rallypoint.kv.log import SECTOR
from rallypoint.server.durability.disk import Disk, File


@dataclass(slots=True)
class _Content:
    data: bytearray = field(default_factory=bytearray)
    synced: int = 0


class _MemoryFile:
    def __init__(self, content: _Content, lock: threading.Lock) -> None:
        self._content = content
        self._lock = lock

    def write(self, data: bytes) -> None:
        with self._lock:
            self._content.data += data

    def sync(self) -> None:
        with self._lock:
            self._content.synced = len(self._content.data)

    def close(self) -> None:
        pass


class MemoryDisk:
    """A directory in memory. What becomes of it in a disaster is another one: the dead cannot write to that."""

    def __init__(self, where: str = "memory") -> None:
        self.where = where
        self._names: dict[str, _Content] = {}
        self._synced_names: dict[str, _Content] = {}
        self._is_locked = False
        self._lock = threading.Lock()

    # --- what can happen to it ----------------------------------------------------------------------------------------

    def after_kill(self) -> MemoryDisk:
        """What is there when whoever used it is killed now: all that was written."""
        after = MemoryDisk(self.where)
        with self._lock:
            for name, content in self._names.items():
                after.put(name, bytes(content.data))
        return after

    def after_power_loss(self, rng: random.Random) -> MemoryDisk:
        """What is there when the power goes now: whatever was not synced may be there, in part, or not."""
        after = MemoryDisk(self.where)
        with self._lock:
            names = self._names if rng.random() < 0.5 else self._synced_names
            for name in sorted(names):
                after.put(name, _after_power(names[name], rng))
        return after

    def put(self, name: str, data: bytes) -> None:
        """A file as if it had always been there."""
        self._names[name] = self._synced_names[name] = _Content(bytearray(data), len(data))

    # --- what a disk does ---------------------------------------------------------------------------------------------

    def lock(self) -> None:
        if self._is_locked:
            raise DataError(f"{self.where} is used by a server that runs")
        self._is_locked = True

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._names)

    def read(self, name: str) -> bytes:
        with self._lock:
            if name not in self._names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            return bytes(self._names[name].data)

    def create(self, name: str) -> _MemoryFile:
        with self._lock:
            content = self._names[name] = _Content()
        return _MemoryFile(content, self._lock)

    def rename(self, name: str, new: str) -> None:
        with self._lock:
            self._names[new] = self._names.pop(name)

    def remove(self, name: str) -> None:
        with self._lock:
            self._names.pop(name, None)

    def sync_names(self) -> None:
        with self._lock:
            self._synced_names = dict(self._names)

    def close(self) -> None:
        self._is_locked = False


def _after_power(content: _Content, rng: random.Random) -> bytes:
    """The synced bytes, and of the others so many, in which a sector may be missing."""
    data = bytearray(content.data[: rng.randint(content.synced, len(content.data))])
    sectors = range(-(-content.synced // SECTOR) * SECTOR, len(data), SECTOR)
    if sectors and rng.random() < 0.3:
        hole = rng.choice(sectors)
        end = min(hole + SECTOR, len(data))
        data[hole:end] = bytes(end - hole)
    return bytes(data)


@dataclass(slots=True)
class Rule:
    """Which calls fail, and how. `times` counts down; None: until the rule is lifted."""

    call: str
    error: int
    times: int | None = None
    after: int = 0
    """So many calls work first."""
    name: str = ""
    """Only for files whose name has this in it."""


class FaultyDisk:
    """Another disk with faults. Calls are `create`, `write`, `sync`, `rename`, `remove`, `sync_names` and `read`.

    A `write` that fails has written a part. It may be used by several threads, as disks are.
    """

    def __init__(self, disk: Disk, before: Callable[[str, str], None] | None = None) -> None:
        self._disk = disk
        self.where = disk.where
        self.rules: list[Rule] = []
        self.calls: list[str] = []
        """All that was called, with the name of the file: `sync log-000000000001`."""
        self._before = before
        """Called with each call and name, in the thread of it: may wait, or raise."""

    def fail(
        self, call: str, error: int = errno.EIO, *, times: int | None = None, after: int = 0, name: str = ""
    ) -> Rule:
        """Let calls fail from now on."""
        rule = Rule(call, error, times, after, name)
        self.rules.append(rule)
        return rule

    def heal(self) -> None:
        """All calls work again."""
        self.rules.clear()

    def check(self, call: str, name: str) -> None:
        """A call is made: raises if it is to fail."""
        self.calls.append(f"{call} {name}")
        if self._before is not None:
            self._before(call, name)
        for rule in self.rules:
            if rule.call != call or rule.name not in name:
                continue
            if rule.after > 0:
                rule.after -= 1
                continue
            if rule.times is not None:
                if rule.times == 0:
                    continue
                rule.times -= 1
            raise OSError(rule.error, os.strerror(rule.error), name)

    def lock(self) -> None:
        self._disk.lock()

    def names(self) -> list[str]:
        return self._disk.names()

    def read(self, name: str) -> bytes:
        self.check("read", name)
        return self._disk.read(name)

    def create(self, name: str) -> File:
        self.check("create", name)
        return _FaultyFile(self, name, self._disk.create(name))

    def rename(self, name: str, new: str) -> None:
        self.check("rename", new)
        self._disk.rename(name, new)

    def remove(self, name: str) -> None:
        self.check("remove", name)
        self._disk.remove(name)

    def sync_names(self) -> None:
        self.check("sync_names", "")
        self._disk.sync_names()

    def close(self) -> None:
        self._disk.close()


class _FaultyFile:
    def __init__(self, disk: FaultyDisk, name: str, file: File) -> None:
        self._disk = disk
        self._name = name
        self._file = file

    def write(self, data: bytes) -> None:
        try:
            self._disk.check("write", self._name)
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise
        self._file.write(data)

    def sync(self) -> None:
        self._disk.check("sync", self._name)
        self._file.sync()

    def close(self) -> None:
        self._file.close()
