"""`rallypoint serve` whose disk and file descriptors are steered from outside, and which writes down all that it
commits.

    python -m tests.chaos.server honest|forgetful AUDIT ENTRIES serve --bind ...

AUDIT is a file that every revision is appended to before anybody is told of it, as in the simulator: with data once it
is kept, without data at once. A life begins with a line that says which store it goes on with. What was told in an
earlier life and is not in this one is said, too (`lost`). ENTRIES: so many changes make a snapshot. A forgetful server
writes nothing of what it says it has written: to see that this is found.

Obeys words on stdin: `disk full`, `disk broken`, `disk slow SECONDS`, `disk heal`, `fds LEFT` (so many descriptors may
still be opened), `fds heal`. Says each when it is done, and in JSON lines what happens to it.
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
from rallypoint.server import journal, process
from rallypoint.server.durability.disk import File
from rallypoint.server.durability.server import DurableServer
from rallypoint.server.engine_host import EngineHost
from rallypoint.server.server import Server
from rallypoint.testing.disk import FaultyDisk
from tests.chaos.stalls import DiskStalls, Stalls
from tests.e2e.node import say


class Life(msgspec.Struct, frozen=True, tag="life"):
    """A server began: with this store, at this revision. `lost`: so much had been told beyond it."""

    at: float
    generation: str
    revision: int
    lost: int = 0


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """A revision that may be told of."""

    at: float
    batch: Batch


Line = Life | Committed
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


def read_audit(path: Path) -> list[Line]:
    """All that was written. A line that a kill has torn was told to nobody, and is left out."""
    found: list[Line] = []
    for raw in path.read_bytes().split(b"\n") if path.exists() else []:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(_decoder.decode(raw))
    return found


class Audit:
    """Appends to the file; what is written survives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def begin(self, generation: str, engine: Engine) -> None:
        """A life begins. What an earlier one of the same store kept and did not write here comes first."""
        told, same = self._told(generation)
        lost = max(0, told - engine.revision) if same else 0
        if same:
            for batch in engine.history.after(told, ""):
                self.commit(batch)
        self.add(Life(time.monotonic(), generation, engine.revision, lost))
        say("begins", generation=generation, revision=engine.revision, lost=lost)

    def _told(self, generation: str) -> tuple[int, bool]:
        """The last revision that was told of, and whether that was in this store."""
        os.write(self._file, b"\n")  # after a torn line
        revision, same = 0, False
        for line in read_audit(self._path):
            if isinstance(line, Life):
                revision, same = line.revision, line.generation == generation
            else:
                revision = line.batch.revision
        return revision, same

    def commit(self, batch: Batch) -> None:
        self.add(Committed(time.monotonic(), batch))

    def add(self, line: Line) -> None:
        os.write(self._file, _encoder.encode(line) + b"\n")


class Seen:
    """A listener of the engine_host: before anybody else is."""

    def __init__(self, push) -> None:
        self.push = push


def watch_all(engine_host: EngineHost, push) -> None:
    engine_host.watch(Seen(push), "", engine_host.engine.revision)


def audited(audit: Audit) -> tuple[type[Server], type[DurableServer]]:
    """The two kinds of server, writing down what they commit."""

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
    """A file of a real disk; what its sync takes beyond what one does that is not busy is no fault of the server's."""

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
    """A directory of such files."""

    def create(self, name: str) -> Timed:  # type: ignore[override]
        return Timed(super().create(name))


class Steering:
    """What the words do."""

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
            threading.Event().wait(self.slow_s)  # libfaketime 0.9.10 lets time.sleep fail now and then

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
        os._exit(3)  # whoever started this is gone


_print_event = process.print_event


def tell(event: Event) -> None:
    """The server's words, for people as ever, and for the timeline."""
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
