"""An event file: one JSON object a line, rotated by size, with a bounded number of old files.

    events = JsonLines("/var/log/rallypoint/events.jsonl")
    handler = rallypoint.create_handler(url, sinks=[events])

A thread does the writing, so that emitting an event never waits for the disk. If the disk is full, slow or gone, events
are lost and the job goes on. The start of such trouble is reported once (`EventsTrouble`), and so is its end
(`EventsGoOn`, also in the file). Each process needs a file of its own: two that rotate the same file would lose lines.
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
from rallypoint.observe.event_json import event_line

MIB = 1 << 20
MAX_BYTES = 16 * MIB
KEPT = 5
MAX_QUEUED = 10_000
"""How many events may wait for the disk; further ones are lost."""
RETRY_S = 1.0
CLOSE_S = 5.0


class JsonLines:
    """A sink. It may be called from any thread; it neither blocks nor raises.

    Old files are `path.1` (the newest) to `path.N`. The constructor raises SettingsError if the file cannot be opened.
    `tell` receives the events about trouble with the file; by default they go to the `rallypoint` logger.
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
            raise SettingsError("an event file needs max_bytes above 0 and kept of at least 0")
        self.path = os.path.abspath(path)
        self.lost = 0
        """How many events were lost and not yet reported by `EventsGoOn`."""
        self._max_bytes = max_bytes
        self._kept = kept
        self._by = by
        self._tell = tell
        self._wall = wall
        self._clock = clock
        self._pid = os.getpid()
        self._file = _File(self.path)
        self._trouble = False
        self._retry_at = float("-inf")
        self._queue: deque[tuple[float, Event]] = deque()
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
            return  # in a forked child: the file belongs to the parent
        with self._changed:
            if self._is_closed:
                return
            if len(self._queue) >= MAX_QUEUED:
                self.lost += 1
                return
            self._queue.append((self._wall(), event))
            self._changed.notify_all()

    def wait_written(self, timeout_s: float = CLOSE_S) -> bool:
        """Block until all events given so far are written or lost. False if that takes longer than the limit."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_writing, timeout_s)

    def close(self) -> None:
        """Write the queued events, in CLOSE_S at most, and close the file. Later events are ignored."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    # --- the writing thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                batch = list(self._queue)
                self._queue.clear()
                self._is_writing = bool(batch)
            if not batch:
                self._file.close()
                return
            self._write(batch)
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _write(self, batch: list[tuple[float, Event]]) -> None:
        if self._trouble and self._clock() < self._retry_at:
            self._lose(len(batch))
            return
        written = 0
        try:
            self._file.reopen_if_moved()
            self._report_lost()
            for at, event in batch:
                self._put(at, event)
                written += 1
        except OSError as error:
            self._lose(len(batch) - written)
            self._fail(error)

    def _put(self, at: float, event: Event) -> None:
        try:
            line = event_line(at, event) + b"\n"
        except UnicodeEncodeError:  # for example a path that is not valid text: this event is lost
            self._lose(1)
            return
        if self._file.size and self._file.size + len(line) > self._max_bytes:
            self._file.rotate(self._kept)
        self._file.write(line)

    def _report_lost(self) -> None:
        """After trouble, or if events came too fast: write how many are missing at this place of the file."""
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
        self._retry_at = self._clock() + RETRY_S
        if not self._trouble:
            self._trouble = True
            why = error.strerror or str(error)
            self._tell(EventsTrouble(run_id="", by=self._by, where=self.path, reason=why))


class _File:
    """The file of that name. It holds whole lines, except for one that an error cut short. Raises OSError."""

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

    def reopen_if_moved(self) -> None:
        """Start a new file if another program moved or removed the open one, for example logrotate."""
        if self._fd is not None:
            opened, named = os.fstat(self._fd), None
            with suppress(FileNotFoundError):
                named = os.stat(self._path)
            if named is not None and (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino):
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
        """Rename `path` to `path.1`, `path.1` to `path.2`, and so on, and remove the file beyond the last one kept."""
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
