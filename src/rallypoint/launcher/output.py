"""What workers say, on the launcher's own output and in files, and the launcher's own words among it.

One thread does all of it, so that a terminal that stands still (Ctrl-S, a full pipe) holds back the workers that want
to say something, and never the launcher's event loop, which has a session to keep.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from rallypoint._plain import one_line

LONGEST_LINE = 64 * 1024
"""What has no end by then is shown without."""
AGAIN_S = 60.0
"""Without a terminal, what is waited for is said again so often."""
SOON_S = 2.0
"""... and a change of it not more often than this."""
PATIENT_S = 0.5
FLUSH_S = 2.0
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
OWN_PREFIX = "rallypoint run: "


@dataclass
class Stream:
    """One pipe of a worker, and where its lines go."""

    fd: int
    prefix: bytes
    console: int | None
    """1 or 2; None: not shown."""
    file: int | None
    on_end: Callable[[], None]
    rest: bytes = field(default=b"")


class Console:
    """The launcher's output. Safe to be called from any thread; `close` when the last stream has ended."""

    def __init__(self, out: int = 1, err: int = 2, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fds = {1: out, 2: err}
        self._clock = clock
        self._is_terminal = {1: _is_terminal(out), 2: _is_terminal(err)}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._jobs: deque[Callable[[], None]] = deque()
        self._streams = 0
        self._waits_for: str | None = None
        self._waits_since = 0.0
        self._said_at = float("-inf")
        self._is_said = True
        self._is_drawn = False
        self._is_closing = False
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def colour(self, text: str, number: int, to: int = 1) -> str:
        """In a colour of its own, on a terminal that is not told otherwise."""
        if not self._is_terminal[to] or os.environ.get("NO_COLOR"):
            return text
        return f"\033[{COLOURS[number % len(COLOURS)]}m{text}\033[0m"

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._do(lambda: self._write(2, f"{OWN_PREFIX}{one_line(text)}\n".encode(errors="replace")))

    def wait_for(self, what: str | None) -> None:
        """What is waited for now: one line, which is kept up to date on a terminal. None: nothing any more."""
        at, line = self._clock(), None if what is None else one_line(what)
        self._do(lambda: self._set_wait(line, at))

    def follow(self, stream: Stream) -> None:
        """Take over a pipe (and its file), until it ends."""
        os.set_blocking(stream.fd, False)
        self._do(lambda: self._begin(stream))

    def close(self) -> None:
        """Say what is still to be said, if that can be, and stop."""
        self._do(self._stop)
        self._thread.join(FLUSH_S)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _do(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        with suppress(BlockingIOError, OSError):
            os.write(self._waker, b".")

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(self._patience_s()):
                if key.data is None:
                    os.read(self._woken, 4096)
                else:
                    self._read(key.data)
            while self._jobs:
                self._jobs.popleft()()
            self._tick()

    def _stop(self) -> None:
        self._set_wait(None, self._clock())
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._read(key.data)
        self._is_closing = True

    def _begin(self, stream: Stream) -> None:
        self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _read(self, stream: Stream) -> None:
        try:
            data = os.read(stream.fd, LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data and stream.file is not None:
            self._keep(stream, data)
        if stream.console is not None:
            self._show(stream, data)
        if not data:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
            if stream.file is not None:
                os.close(stream.file)
            stream.on_end()

    def _keep(self, stream: Stream, data: bytes) -> None:
        assert stream.file is not None
        try:
            _write_all(stream.file, data)
        except OSError as error:  # a full disk must not stop the job; it is said once
            os.close(stream.file)
            stream.file = None
            self._write(2, f"{OWN_PREFIX}a log file is not written any more: {error}\n".encode())

    def _show(self, stream: Stream, data: bytes) -> None:
        assert stream.console is not None
        lines = (stream.rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        stream.rest = lines.pop()
        if stream.rest and (not data or len(stream.rest) >= LONGEST_LINE):
            lines.append(stream.rest)
            stream.rest = b""
        if lines:
            self._write(stream.console, b"".join(b"%b%b\n" % (stream.prefix, line) for line in lines))

    # --- the line that says what is waited for ------------------------------------------------------------------------

    def _set_wait(self, what: str | None, at: float) -> None:
        if what is None:
            self._erase()
        elif self._waits_for is None:
            self._waits_since = at
            self._said_at = self._waits_since + PATIENT_S - SOON_S  # a wait of a moment is not worth a line
        if what != self._waits_for:
            self._waits_for, self._is_said = what, what is None

    def _patience_s(self) -> float | None:
        if self._waits_for is None:
            return None
        return PATIENT_S

    def _tick(self) -> None:
        if self._waits_for is None or self._is_closing:
            return
        now = self._clock()
        line = f"{OWN_PREFIX}waits for {now - self._waits_since:.0f} s: {self._waits_for}"
        if self._is_terminal[2]:
            if now - self._waits_since >= PATIENT_S or self._is_drawn:
                self._draw(line)
        elif now - self._said_at >= (AGAIN_S if self._is_said else SOON_S):
            self._said_at, self._is_said = now, True
            self._write(2, line.encode(errors="replace") + b"\n")

    def _draw(self, line: str) -> None:
        with suppress(OSError):
            width = os.get_terminal_size(self._fds[2]).columns
            if 0 < width <= len(line):  # 0: it does not know
                line = line[: max(1, width - 2)] + "…"
        self._is_drawn = True
        self._put(2, b"\r\033[K" + line.encode(errors="replace"))

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._put(2, b"\r\033[K")

    def _write(self, to: int, data: bytes) -> None:
        self._erase()
        self._put(to, data)

    def _put(self, to: int, data: bytes) -> None:
        with suppress(OSError):  # nobody reads it any more: the workers go on all the same
            _write_all(self._fds[to], data)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # somebody else made it so
            select.select([], [fd], [])


def fill_standard_streams() -> None:
    """Let those that were closed lead nowhere: else the next pipes would take their places, and be written to."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, fd)
            if nothing != fd:
                os.close(nothing)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
