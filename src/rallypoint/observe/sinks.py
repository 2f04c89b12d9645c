"""A file of events, one JSON object a line, that rotates by size and keeps a bounded number of old files.

    events = JsonLines("/var/log/rallypoint/events.jsonl")
    handler = rallypoint.create_handler(url, sinks=[events])

Whoever emits an event never waits for the disk: a thread writes. When the disk is full, slow or gone, events are lost
and the job goes on; that is said once (`EventsTrouble`), and once more when it is over (`EventsGoOn`, in the file too).
One process a file: two that rotate the same one would lose lines.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rallypoint.errors import SettingsError
from rallypoint.events import Event, EventsGoOn, EventsTrouble, Sink, log_event
from rallypoint.observe.lines import event_line

MIB = 1 << 20
MAX_BYTES = 16 * MIB
KEPT = 5
MOST_WAITING = 10_000
"""Events that wait for the disk; further ones are lost."""
RETRY_S = 1.0
CLOSE_S = 5.0


class JsonLines:
    """A sink: call it with events, from any thread. It neither blocks nor raises.

    Old files are `path.1` (the youngest) to `path.N`. SettingsError if the file cannot be opened when this is made.
    `tell` is told of trouble, by default the `rallypoint` logger.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = MAX_BYTES,
        kept: int = KEPT,
        by: str = "events",
        tell: Sink = log_event,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_bytes <= 0 or kept < 0:
            raise SettingsError("a file of events needs a size above 0, and keeps 0 or more old ones")
        self.path = os.path.abspath(path)
        self.lost = 0
        """Events that were not written since the last trouble began."""
        self._max_bytes = max_bytes
        self._kept = kept
        self._by = by
        self._tell = tell
        self._wall = wall
        self._clock = clock
        self._pid = os.getpid()
        self._file = _File(self.path)
        self._trouble = False
        self._not_before = float("-inf")
        self._waiting: deque[tuple[float, Event]] = deque()
        self._changed = threading.Condition()
        self._is_writing = self._is_closed = False
        try:
            self._file.open()
        except OSError as error:
            raise SettingsError(f"events cannot be written to {self.path}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        if os.getpid() != self._pid:
            return  # the file is the parent's
        with self._changed:
            if self._is_closed:
                return
            if len(self._waiting) >= MOST_WAITING:
                self.lost += 1
                return
            self._waiting.append((self._wall(), event))
            self._changed.notify_all()

    def wait_written(self, timeout_s: float = CLOSE_S) -> bool:
        """Block until all that was given so far is written or lost; False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_writing, timeout_s)

    def close(self) -> None:
        """Write what is there, within a few seconds, and let go of the file. Later events are ignored."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    # --- the thread that writes ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                batch = list(self._waiting)
                self._waiting.clear()
                self._is_writing = bool(batch)
            if not batch:
                self._file.close()
                return
            self._write(batch)
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _write(self, batch: list[tuple[float, Event]]) -> None:
        if self._trouble and self._clock() < self._not_before:
            self._lose(len(batch))
            return
        written = 0
        try:
            self._file.follow()
            self._resume()
            for at, event in batch:
                self._put(at, event)
                written += 1
        except OSError as error:
            self._lose(len(batch) - written)
            self._fail(error)

    def _put(self, at: float, event: Event) -> None:
        try:
            line = event_line(at, event) + b"\n"
        except UnicodeEncodeError:  # such as a path that is no text: that one is lost
            self._lose(1)
            return
        if self._file.size and self._file.size + len(line) > self._max_bytes:
            self._file.rotate(self._kept)
        self._file.write(line)

    def _resume(self) -> None:
        """After trouble, or when some came too fast: the file says how many are missing here."""
        with self._changed:
            lost = self.lost
        if not (lost or self._trouble):
            return
        event = EventsGoOn(run_id="", by=self._by, where=self.path, lost=lost)
        self._put(self._wall(), event)
        self._trouble = False
        with self._changed:
            self.lost -= lost
        self._tell(event)

    def _lose(self, count: int) -> None:
        with self._changed:
            self.lost += count

    def _fail(self, error: OSError) -> None:
        self._not_before = self._clock() + RETRY_S
        if not self._trouble:
            self._trouble = True
            why = error.strerror or str(error)
            self._tell(EventsTrouble(run_id="", by=self._by, where=self.path, reason=why))


class _File:
    """The file of that name, always whole lines but for one that was torn by an error. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.size = 0
        self._path = path
        self._fd: int | None = None
        self._is_torn = False

    def open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self.size = os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def follow(self) -> None:
        """Begin a new file if ours was moved or removed by somebody else."""
        if self._fd is not None:
            ours, there = os.fstat(self._fd), None
            with suppress(FileNotFoundError):
                there = os.stat(self._path)
            if there is not None and (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                return
            self.close()
            self._is_torn = False
        self.open()

    def write(self, line: bytes) -> None:
        assert self._fd is not None
        data = b"\n" + line if self._is_torn else line
        while data:
            written = os.write(self._fd, data)
            self.size += written
            self._is_torn = written < len(data)
            data = data[written:]

    def rotate(self, kept: int) -> None:
        """`path` becomes `path.1`, that `path.2`, and so on; what would be beyond those that are kept is removed."""
        for number in range(kept - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(f"{self._path}.{number}", f"{self._path}.{number + 1}")
        if kept:
            os.replace(self._path, f"{self._path}.1")
        else:
            os.remove(self._path)
        self.close()
        self._is_torn = False
        self.open()
