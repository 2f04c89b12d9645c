"""`rallypoint serve` with controllable faults of its disk and file descriptors, which records all of its commits.

    python -m tests.chaos.server honest|forgetful AUDIT ENTRIES serve --bind ...

AUDIT is a file to which every revision is appended before any client is told of it: with data once it is durable,
without data at once. Each start of the server adds a line that identifies its store. Revisions that clients were told
of at an earlier start and that are missing at this one are counted (`lost`). ENTRIES: changes between snapshots. A
forgetful server does not write its log, to check that this is noticed.

Commands on stdin: `disk full`, `disk broken`, `disk slow SECONDS`, `disk heal`, `fds LEFT` (the number of descriptors
that may still be opened), `fds heal`. Reports executed commands and its events as JSON lines.
"""

import contextlib
import errno
import os
import resource
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec

import rallypoint.server.durability.disk
import rallypoint.server.durability.server
from rallypoint.cli import main
from rallypoint.events import Event
from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Batch
from rallypoint.server import process
from rallypoint.server.durability import journal
from rallypoint.server.durability.disk import File
from rallypoint.server.durability.server import DurableServer
from rallypoint.server.engine_host import EngineHost
from rallypoint.server.server import Server
from rallypoint.testing.disk import FaultyDisk
from tests.chaos.stalls import DiskStalls, Stalls
from tests.e2e.node import say


class ServerStart(msgspec.Struct, frozen=True, tag="life"):
    """The server started with this store at this revision. `lost`: the number of later revisions told before."""

    at: float
    generation: str
    revision: int
    lost: int = 0


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """A revision that clients may see from now on."""

    at: float
    batch: Batch


AuditLine = ServerStart | Committed
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AuditLine)


def read_audit(path: Path) -> list[AuditLine]:
    """All lines. A line that was torn by a kill is left out: no client was told of it."""
    found: list[AuditLine] = []
    for raw in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(_decoder.decode(raw))
    return found


class Audit:
    """Appends to the file; written lines survive the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def begin(self, generation: str, engine: Engine) -> None:
        """Record a start. Revisions that an earlier start kept but did not record here are added first."""
        told, same = self._told(generation)
        lost = max(0, told - engine.revision) if same else 0
        if same:
            for batch in engine.history.after(told, ""):
                self.commit(batch)
        self.add(ServerStart(time.monotonic(), generation, engine.revision, lost))
        say("begins", generation=generation, revision=engine.revision, lost=lost)

    def _told(self, generation: str) -> tuple[int, bool]:
        """The last recorded revision, and whether it belongs to this store."""
        os.write(self._file, b"\n")  # after a torn line
        revision, same = 0, False
        for line in read_audit(self._path):
            if isinstance(line, ServerStart):
                revision, same = line.revision, line.generation == generation
            else:
                revision = line.batch.revision
        return revision, same

    def commit(self, batch: Batch) -> None:
        self.add(Committed(time.monotonic(), batch))

    def add(self, line: AuditLine) -> None:
        os.write(self._file, _encoder.encode(line) + b"\n")


class Seen:
    """A listener of the engine host, registered before all others."""

    def __init__(self, push) -> None:
        self.push = push


def watch_all(engine_host: EngineHost, push) -> None:
    engine_host.watch(Seen(push), "", engine_host.engine.revision)


def audited(audit: Audit) -> tuple[type[Server], type[DurableServer]]:
    """The two server classes, recording their commits."""

    class Plain(Server):
        def make_engine_host(self, engine: Engine) -> EngineHost:
            engine_host = super().make_engine_host(engine)
            audit.begin(f"{os.getpid()}-{time.monotonic_ns()}", engine)
            watch_all(engine_host, audit.commit)
            return engine_host

    class Durable(DurableServer):
        def make_engine_host(self, engine: Engine) -> EngineHost:
            engine_host = super().make_engine_host(engine)
            audit.begin(self.journal.generation, engine)
            watch_all(engine_host, lambda batch: self.journal.when_durable(partial(audit.commit, batch)))
            return engine_host

    return Plain, Durable


class Timed:
    """A file on the real disk that reports slow syncs as stalls, which are not the server's fault."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.write, self.close = file.write, file.close

    def sync(self) -> None:
        began_at = time.monotonic()
        self._file.sync()
        took_s = time.monotonic() - began_at
        if took_s > DiskStalls.FAST_S:
            say("stall", length_s=took_s, of="disk")


class TimedDirectory(rallypoint.server.durability.disk.Directory):
    """A directory of `Timed` files."""

    def create(self, name: str) -> Timed:  # type: ignore[override]
        return Timed(super().create(name))


class Steering:
    """Executes the commands."""

    def __init__(self) -> None:
        self.slow_s = 0.0
        self.disk: FaultyDisk | None = None
        self._fds = resource.getrlimit(resource.RLIMIT_NOFILE)

    def make_disk(self, path: str) -> FaultyDisk:
        self.disk = FaultyDisk(TimedDirectory(path), self._before)
        return self.disk

    def _before(self, call: str, name: str) -> None:
        assert self.disk is not None
        if len(self.disk.calls) > 1000:
            self.disk.calls.clear()
        if self.slow_s and call in ("write", "sync", "rename", "sync_names"):
            threading.Event().wait(self.slow_s)  # time.sleep sometimes fails with libfaketime 0.9.10

    def obey(self, word: str) -> None:
        match word.split():
            case ["disk", "heal"]:
                self.slow_s = 0.0
                if self.disk is not None:
                    self.disk.heal()
            case ["disk", "slow", seconds]:
                self.slow_s = float(seconds)
            case ["disk", kind] if self.disk is not None:
                error = {"full": errno.ENOSPC, "broken": errno.EIO}[kind]
                for call in ("create", "write") if kind == "full" else ("write", "sync", "sync_names"):
                    self.disk.fail(call, error)
            case ["fds", "heal"]:
                resource.setrlimit(resource.RLIMIT_NOFILE, self._fds)
            case ["fds", left]:
                highest = max(int(name) for name in os.listdir("/proc/self/fd"))
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + int(left), self._fds[1]))
            case _:
                raise ValueError(word)

    def listen(self) -> None:
        for line in sys.stdin:
            self.obey(line.strip())
            say(line.strip())
        os._exit(3)  # the parent process has ended


_print_event = process.print_event


def tell(event: Event) -> None:
    """Print the event as usual, and report it for the timeline."""
    _print_event(event)
    if event.level >= 20:
        say("event", level=event.level, text=str(event))


def begin() -> None:
    if sys.argv.pop(1) == "forgetful":
        journal._write = lambda file, data, and_sync: None
    audit = Audit(Path(sys.argv.pop(1)))
    journal.Bounds = partial(journal.Bounds, log_entries=int(sys.argv.pop(1)))
    steering = Steering()
    rallypoint.server.durability.disk.Directory = steering.make_disk
    process.Server, rallypoint.server.durability.server.DurableServer = audited(audit)
    process.print_event = tell
    threading.Thread(target=steering.listen, name="steering", daemon=True).start()
    Stalls(lambda length_s: say("stall", length_s=length_s))
    main()


if __name__ == "__main__":
    begin()
