"""The launcher's console: copies the workers' output to stdout, stderr and log files, and adds the launcher's lines.

One thread does all the writing. A terminal that is stopped (Ctrl-S, a full pipe) therefore blocks the workers that
write, and never the launcher's event loop, which has to renew the node's session.
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

MAX_LINE = 64 * 1024
"""A longer line is split."""
REPEAT_S = 60.0
"""Without a terminal, how often an unchanged waiting reason is printed again."""
CHANGE_S = 2.0
"""Without a terminal, the least time between two lines about a changed waiting reason."""
SHOW_WAIT_S = 0.5
"""A shorter wait is not shown."""
FLUSH_S = 2.0
TAIL = 16 * 1024
"""How much of the end of a stream is kept."""
COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
OWN_PREFIX = "rallypoint run: "


@dataclass
class Stream:
    """The reading end of a pipe of a worker, and where its lines go."""

    fd: int
    prefix: bytes
    console: int | None
    """1 (stdout) or 2 (stderr); None: not shown."""
    file: int | None
    on_end: Callable[[], None]
    rest: bytes = field(default=b"")
    """The last line, as long as it is incomplete."""
    tail: bytes = field(default=b"")
    """The end of what was read."""
    read_at: float = 0.0
    """When something was read last, on the console's clock."""
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    """A deadline of a wait: the setting that it comes from, how long it still has, and what follows."""

    name: str
    left_s: float
    then: str = "gives up"


class Console:
    """The launcher's output. Every method may be called from any thread. `close` it after the last stream has ended."""

    def __init__(self, out: int = 1, err: int = 2, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fds = {1: out, 2: err}
        self._clock = clock
        self._is_terminal = {1: _is_terminal(out), 2: _is_terminal(err)}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._jobs: deque[Callable[[], None]] = deque()
        self._waits_for: str | None = None
        self._limit: tuple[Limit, float] | None = None
        """The limit of the current wait, and when it is reached."""
        self._waits_since = 0.0
        self._printed_at = float("-inf")
        self._is_printed = True
        self._is_drawn = False
        self._is_closing = False
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def colour(self, text: str, number: int, stream: int = 1) -> str:
        """The text in the colour of this number; unchanged without a terminal, or if NO_COLOR is set."""
        if not self._is_terminal[stream] or os.environ.get("NO_COLOR"):
            return text
        return f"\033[{COLOURS[number % len(COLOURS)]}m{text}\033[0m"

    def say(self, text: str) -> None:
        """Print a line of the launcher itself."""
        self._do(lambda: self._write(2, f"{OWN_PREFIX}{one_line(text)}\n".encode(errors="replace")))

    def wait_for(self, reason: str | None, limit: Limit | None = None) -> None:
        """Show what the launcher waits for, in one line, which is redrawn on a terminal. None: it no longer waits."""
        at, line = self._clock(), None if reason is None else one_line(reason)
        self._do(lambda: self._set_wait(line, at, limit))

    def follow(self, stream: Stream) -> None:
        """Copy a pipe until it ends, then close it and its file."""
        os.set_blocking(stream.fd, False)
        self._do(lambda: self._begin(stream))

    def read_tail(self, stream: Stream, then: Callable[[bytes, float], None]) -> None:
        """Read what is in the pipe. Then call, on the console's thread, with the end of the stream and its age."""

        def read() -> None:
            if not stream.has_ended:
                self._read(stream)
            then(stream.tail, self._clock() - stream.read_at)

        self._do(read)

    def close(self) -> None:
        """Write what is left and stop. Blocks for FLUSH_S at most."""
        self._do(self._stop)
        self._thread.join(FLUSH_S)

    # --- on the console's thread --------------------------------------------------------------------------------------

    def _do(self, job: Callable[[], None]) -> None:
        """Run a job on the console's thread. Called from any thread; does not block."""
        self._jobs.append(job)
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_writer, b".")

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(None if self._waits_for is None else SHOW_WAIT_S):
                if key.data is None:
                    os.read(self._wake_reader, 4096)
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
            data = os.read(stream.fd, MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            stream.tail, stream.read_at = (stream.tail + data)[-TAIL:], self._clock()
        if data and stream.file is not None:
            self._write_file(stream, data)
        if stream.console is not None:
            self._show(stream, data)
        if not data:
            stream.has_ended = True
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
            if stream.file is not None:
                os.close(stream.file)
            stream.on_end()

    def _write_file(self, stream: Stream, data: bytes) -> None:
        assert stream.file is not None
        try:
            _write_all(stream.file, data)
        except OSError as error:  # a full disk must not stop the job
            os.close(stream.file)
            stream.file = None
            self._write(2, f"{OWN_PREFIX}a log file can no longer be written: {error}\n".encode())

    def _show(self, stream: Stream, data: bytes) -> None:
        assert stream.console is not None
        lines = (stream.rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        stream.rest = lines.pop()
        if stream.rest and (not data or len(stream.rest) >= MAX_LINE):
            lines.append(stream.rest)
            stream.rest = b""
        if lines:
            self._write(stream.console, b"".join(b"%b%b\n" % (stream.prefix, line) for line in lines))

    # --- the line about the current wait ------------------------------------------------------------------------------

    def _set_wait(self, reason: str | None, at: float, limit: Limit | None = None) -> None:
        self._limit = None if limit is None else (limit, at + limit.left_s)
        if reason is None:
            self._erase()
        elif self._waits_for is None:
            self._waits_since = at
            self._printed_at = self._waits_since + SHOW_WAIT_S - CHANGE_S  # the first line is due after SHOW_WAIT_S
        if reason != self._waits_for:
            self._waits_for, self._is_printed = reason, reason is None

    def _tick(self) -> None:
        """Draw or print the line about the current wait, if it is due."""
        if self._waits_for is None or self._is_closing:
            return
        now = self._clock()
        line = f"{OWN_PREFIX}waiting for {now - self._waits_since:.0f} s: {self._waits_for}{self._limit_text(now)}"
        if self._is_terminal[2]:
            if now - self._waits_since >= SHOW_WAIT_S or self._is_drawn:
                self._draw(line)
        elif now - self._printed_at >= (REPEAT_S if self._is_printed else CHANGE_S):
            self._printed_at, self._is_printed = now, True
            self._write(2, line.encode(errors="replace") + b"\n")

    def _limit_text(self, now: float) -> str:
        if self._limit is None or now >= self._limit[1]:
            return ""
        limit, at = self._limit
        return f"; {limit.then} in {at - now:.0f} s ({limit.name})"

    def _draw(self, line: str) -> None:
        with suppress(OSError):
            width = os.get_terminal_size(self._fds[2]).columns
            if 0 < width <= len(line):  # 0: the terminal does not know its width
                line = line[: max(1, width - 2)] + "…"
        self._is_drawn = True
        self._put(2, b"\r\033[K" + line.encode(errors="replace"))

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._put(2, b"\r\033[K")

    def _write(self, stream: int, data: bytes) -> None:
        self._erase()
        self._put(stream, data)

    def _put(self, stream: int, data: bytes) -> None:
        with suppress(OSError):  # the reader has gone: the workers go on all the same
            _write_all(self._fds[stream], data)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another process that shares the file description made it non-blocking
            select.select([], [fd], [])


def fill_standard_streams() -> None:
    """Open those of 0, 1 and 2 that are closed on /dev/null: otherwise the next pipes would get these numbers."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, fd)
            if null != fd:
                os.close(null)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
