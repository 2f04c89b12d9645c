"""The data of a simulated server: the real log, snapshots and recovery, on a memory disk that can lose power.

A write takes time. The machine may fail before it, in the middle of it, or after it and before its completion is
reported; the content of the disk is then drawn at random within the guarantees of a disk.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable
from contextlib import suppress

from rallypoint.events import DataGoesOn, Emitter, Event
from rallypoint.kv.engine import Engine
from rallypoint.kv.watches import History
from rallypoint.server.durability.data import open_data
from rallypoint.server.durability.disk_thread import Done
from rallypoint.server.durability.journal import Bounds, Journal
from rallypoint.testing.disk import FaultyDisk, MemoryDisk

QUICK_S = (0.0001, 0.004)
SLOW_S = (0.05, 0.3)
SLOW = 0.02
"""The probability that a write is slow."""
LATE = 0.5
"""The probability that a pending write was executed, in part, when the server dies."""
FAILS = (0.0, 0.003, 0.03)
"""The probability that a write or a sync fails: one of these per world."""
EVERYTHING = 1_000_000
"""Changes: more than any world has."""


class SimWorker:
    """A worker in virtual time: a job takes time until it is executed, and again until its completion is reported."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._jobs: list[tuple[Callable[[], None], Done]] = []

    def submit(self, work: Callable[[], None], done: Done) -> None:
        self._jobs.append((work, done))
        if len(self._jobs) == 1:
            self._begin()

    def _begin(self) -> None:
        low, high = SLOW_S if self._rng.random() < SLOW else QUICK_S
        self._loop.call_later(self._rng.uniform(low, high), self._do)

    def _do(self) -> None:
        work, done = self._jobs[0]
        self._jobs[0] = (lambda: None, done)
        error: Exception | None = None
        try:
            work()
        except Exception as raised:
            error = raised
        self._loop.call_later(self._rng.uniform(*QUICK_S), self._tell, done, error)

    def _tell(self, done: Done, error: Exception | None) -> None:
        del self._jobs[0]
        if self._jobs:
            self._begin()
        done(error)

    def close(self) -> None:
        """Pending jobs are not executed."""

    def die(self) -> None:
        """The server is dead: the current job is executed, or not."""
        if self._jobs and self._rng.random() < LATE:
            with suppress(OSError):  # its last sync never came
                self._jobs[0][0]()


class SimData:
    """The data directory of a server through all of its restarts."""

    def __init__(self, seed: int, history: int) -> None:
        self._rng = random.Random(f"data {seed}")
        self._history = history
        self._bounds = Bounds(log_entries=self._rng.choice((25, 100, 100_000)), stall_s=0.25, retry_s=0.1, pause_s=0.5)
        self._memory = MemoryDisk("memory")
        self._is_dying = False
        self._workers: tuple[SimWorker, SimWorker] | None = None
        self._fails = self._rng.choice(FAILS)
        self._journal: Journal | None = None
        self._back_at = float("-inf")
        """When the disk last worked again after a failure."""
        self.found = History(0, 0)
        """The whole history that the server recovered at its last start, even if the server itself keeps less."""

    @property
    def may_fail(self) -> bool:
        """Whether its disk fails sometimes: all sessions are extended when it works again, also those of dead nodes."""
        return self._fails > 0

    @property
    def begun_anew_at(self) -> float:
        """When all sessions were last extended because the disk worked again; infinite while it fails."""
        return float("inf") if self._journal is not None and self._journal.is_failing else self._back_at

    def open(self, by: str, emit: Emitter, first_revision: int) -> tuple[Engine, Journal]:
        """Recover the engine at a start of the server. Call it on the server's machine."""
        disk = FaultyDisk(self._memory, self._before)
        self._workers = (SimWorker(self._rng), SimWorker(self._rng))
        self._is_dying, fails, self._fails = False, self._fails, 0.0
        engine, journal = open_data(
            disk,
            emit=Emitter(emit, self._seen),
            by=by,
            history=EVERYTHING,
            first_revision=first_revision,
            generation=lambda: f"{self._rng.getrandbits(64):016x}",
            workers=self._workers,
            bounds=self._bounds,
        )
        self._fails, self._journal = fails, journal
        self.found, engine.history = engine.history, History(self._history, engine.history.oldest)
        for batch in self.found.batches:
            engine.history.append(batch)
        return engine, journal

    def _seen(self, event: Event) -> None:
        if isinstance(event, DataGoesOn):
            self._back_at = asyncio.get_running_loop().time()

    def _before(self, call: str, name: str) -> None:
        if self._is_dying and call == "sync":
            raise OSError(errno.EIO, "the power is gone")
        if call in ("write", "sync") and self._rng.random() < self._fails:
            raise OSError(errno.EIO, "Input/output error")

    def crash(self, is_machine: bool) -> None:
        """The server dies, and perhaps its machine."""
        assert self._workers is not None
        self._is_dying = is_machine
        for worker in self._workers:
            worker.die()
        self._memory = self._memory.after_power_loss(self._rng) if is_machine else self._memory.after_kill()

    def wipe(self) -> None:
        """The directory is removed."""
        self._memory = MemoryDisk("memory")
