"""Processes that do not outlive the measurement: forked from one that has no threads, killed at its end.

Should the parent die without having killed them, the kernel does it (where it can: Linux).
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")
M = TypeVar("M")

_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23
_CHUNK = 1 << 16


class Gone(Exception):
    """The process at the other end has ended."""


class Line(Generic[M]):
    """Messages of one type over a socket, a JSON document each."""

    def __init__(self, sock: socket.socket, kind: type[M]) -> None:
        self.sock = sock
        self._decoder = msgspec.json.Decoder(kind)
        self._buffer = b""

    def send(self, messages: Iterable[msgspec.Struct]) -> None:
        """Blocks while the other end does not read, even if an event loop has the socket. Gone if there is none."""
        left = memoryview(b"".join(msgspec.json.encode(message) + b"\n" for message in messages))
        while left:
            try:
                left = left[self.sock.send(left) :]
            except BlockingIOError:
                select.select([], [self.sock], [])
            except OSError as error:
                raise Gone(f"the process at the other end has ended: {error}") from error

    def receive(self) -> list[M]:
        """Block until something can be read; the whole messages of it. Gone at the end."""
        try:
            data = self.sock.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            raise Gone("the process at the other end has ended")
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        return [self._decoder.decode(text) for text in whole]

    def wait_one(self, patience_s: float) -> M | None:
        """The first message, or None if there was none in time."""
        deadline = time.monotonic() + patience_s
        while (left_s := deadline - time.monotonic()) > 0:
            if select.select([self.sock], [], [], left_s)[0] and (messages := self.receive()):
                return messages[0]
        return None


class Helper:
    """A process of ours, by its id. `sock` is the way to talk with it."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self._reaped = False

    def kill(self) -> None:
        """Without a word, as a crash does. Does not wait for its end: see `reap`."""
        if not self._reaped:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return bool(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def reap(self) -> None:
        """Wait for the end of one that was killed."""
        if not self._reaped:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._reaped = True
            self.sock.close()


def end_all(helpers: Iterable[Helper]) -> None:
    """Kill all, then wait for all."""
    ended = list(helpers)
    for helper in ended:
        helper.kill()
    for helper in ended:
        helper.reap()


def fork(work: Callable[[socket.socket], None]) -> Helper:
    """A child that does that work and ends. What it says is discarded; the socket is its only way to speak."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Helper(pid, ours)
    try:
        ours.close()
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees to the end
        be_quiet()
        work(theirs)
    finally:
        os._exit(0)  # nothing of the parent's is to be cleaned up here


def own_memory() -> bool:
    """Have a copy of all memory that this process shares with the one it was forked from; whether it has.

    Else every page is copied when something on it is first written to, a reference count most often: some microseconds
    each, in the middle of what is measured, which a process that was not forked never pays for. Linux can, from 5.14
    on; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps", encoding="utf-8") as maps:
        spans = [_span(line) for line in maps if line.split()[1] == "rw-p"]
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    is_own = True
    for begin, end in spans:
        is_own &= advise(begin, end - begin, _MADV_POPULATE_WRITE) == 0
    return is_own


def _span(line: str) -> tuple[int, int]:
    begin, _, end = line.split()[0].partition("-")
    return int(begin, 16), int(end, 16)


def with_a_stack_of_its_own(work: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """The same work on a new thread: whoever inspects its stack there does not see the frames of the measurement."""

    def start(sock: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(sock,), name="node")
        thread.start()
        thread.join()

    return start


def execute(arguments: list[str], log_path: str) -> Helper:
    """A child that is another program; what it writes goes into a file."""

    def replace(sock: socket.socket) -> None:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.execv(arguments[0], arguments)

    return fork(replace)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent is gone. On Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died while we said so
            os._exit(1)


def be_quiet() -> None:
    """Nothing of this process reaches the terminal any more."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
