"""Child processes that do not outlive a measurement: forked from a process without threads, killed at its end.

If the parent dies without having killed them, the kernel does it (on Linux).
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

M = TypeVar("M")

_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23
_CHUNK = 1 << 16


class PeerClosed(Exception):
    """The process at the other end of a socket has ended."""


class MessageSocket(Generic[M]):
    """Messages over a socket, one JSON document a line. Received messages have one type."""

    def __init__(self, sock: socket.socket, received: type[M]) -> None:
        self.sock = sock
        self._decoder = msgspec.json.Decoder(received)
        self._buffer = b""

    def send(self, messages: Iterable[msgspec.Struct]) -> None:
        """Blocks while the peer does not read, also if an event loop made the socket non-blocking. PeerClosed."""
        left = memoryview(b"".join(msgspec.json.encode(message) + b"\n" for message in messages))
        while left:
            try:
                left = left[self.sock.send(left) :]
            except BlockingIOError:
                select.select([], [self.sock], [])
            except OSError as error:
                raise PeerClosed(f"the process at the other end has ended: {error}") from error

    def receive(self) -> list[M]:
        """Block until there is something to read; the complete messages of it. PeerClosed at the end."""
        try:
            data = self.sock.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            raise PeerClosed("the process at the other end has ended")
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        return [self._decoder.decode(text) for text in whole]

    def wait_one(self, timeout_s: float) -> M | None:
        """The first message, or None if none came in time. PeerClosed."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if select.select([self.sock], [], [], left_s)[0] and (messages := self.receive()):
                return messages[0]
        return None


class ChildProcess:
    """A forked process, and the socket to talk to it."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self._reaped = False

    def kill(self) -> None:
        """SIGKILL, as in a crash. Does not wait for its end: see `reap`."""
        if not self._reaped:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether it ended by itself."""
        return bool(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def reap(self) -> None:
        """Wait until the killed process has ended."""
        if not self._reaped:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._reaped = True
            self.sock.close()


def kill_all(processes: Iterable[ChildProcess]) -> None:
    """Kill all of them, then wait until all have ended."""
    ended = list(processes)
    for process in ended:
        process.kill()
    for process in ended:
        process.reap()


def fork(work: Callable[[socket.socket], None]) -> ChildProcess:
    """A child that does the work and ends. Its output is discarded; the socket connects it to the parent."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return ChildProcess(pid, ours)
    try:
        ours.close()
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
        silence_output()
        work(theirs)
    finally:
        os._exit(0)  # run no clean-up of the parent's here


def copy_shared_memory() -> bool:
    """Copy all memory that this process shares with the one it was forked from; whether that worked.

    Otherwise every page is copied at the first write to it, mostly of a reference count: some microseconds each, inside
    the measured interval, which a process that was not forked never pays. Linux 5.14 and later; elsewhere it does
    nothing.
    """
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps", encoding="utf-8") as maps:
        spans = [_address_range(line) for line in maps if line.split()[1] == "rw-p"]
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    is_copied = True
    for begin, end in spans:
        is_copied &= advise(begin, end - begin, _MADV_POPULATE_WRITE) == 0
    return is_copied


def _address_range(line: str) -> tuple[int, int]:
    begin, _, end = line.split()[0].partition("-")
    return int(begin, 16), int(end, 16)


def on_new_thread(work: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """The same work on a new thread: code that inspects its stack does not see the frames of the measurement."""

    def start(sock: socket.socket) -> None:
        thread = threading.Thread(target=work, args=(sock,), name="node")
        thread.start()
        thread.join()

    return start


def spawn(arguments: list[str], log_path: str) -> ChildProcess:
    """A child that runs another program; its output goes into a file."""

    def replace(sock: socket.socket) -> None:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.execv(arguments[0], arguments)

    return fork(replace)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent has ended. On Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def silence_output() -> None:
    """Connect standard input, output and error of this process to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
