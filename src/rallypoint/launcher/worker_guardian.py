"""The guardian: a small process between a launcher and its workers, so that no worker outlives the launcher.

The launcher runs this file as a program of its own, without the rest of the package: it must start quickly, stay small
and have one thread. It reads the workers' specifications as one JSON document from its standard input, starts every
worker in a session of its own, and reports on its standard output, one line each:

    started RANK PID     exited RANK STATUS     left PID...     empty

The line `t` on its input asks the workers to end (SIGTERM to their process groups); the line `k` kills everything. The
end of its input means that the launcher has ended, for whatever reason, and also kills everything; then the launcher's
private directory, which is the argument, is removed. The guardian is a subreaper, so it becomes the parent of orphaned
descendants of a worker and finds also those that started a session of their own. It ends when no descendant is left.

If the guardian itself is killed, its workers die with it (PR_SET_PDEATHSIG), and their orphans become children of the
launcher, which is a subreaper too.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_FOUND, NOT_EXECUTABLE = 127, 126
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The launcher receives them, too, and decides when the workers end."""
KILL_AGAIN_S = 0.02
STUCK_S = 5.0
"""Processes that are still there after so many seconds of killing are reported."""
MAX_REPORTED = 100


def prctl(option: int, value: int) -> None:
    """Linux only. Other systems have no such call: there, orphans that left their process group are not found."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def parent_of(pid: int) -> int | None:
    """The parent of a process; None if /proc does not show the process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def descendants(of: int) -> list[int]:
    """The descendants of a process that /proc shows, children first."""
    children: dict[int, list[int]] = {}
    try:
        found = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    for pid in found:
        parent = parent_of(pid)
        if parent is not None:  # else it has ended in the meantime
            children.setdefault(parent, []).append(pid)
    below = list(children.get(of, ()))
    for pid in below:  # the list grows while it is read
        below += children.get(pid, ())
    return below


def kill_below(of: int) -> list[int]:
    """Kill every descendant of a process. Returns those that were found."""
    below = descendants(of)
    for pid in below:
        with suppress(ProcessLookupError, PermissionError):  # a process of another user cannot be killed
            os.kill(pid, signal.SIGKILL)
    return below


def reap_all(pids: list[int]) -> None:
    """Reap those that are children of this process and have ended."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


class Guardian:
    """Starts the workers, reports on them and kills their descendants."""

    def __init__(self, private: str = "") -> None:
        self.private = private
        self.running: dict[int, int] = {}
        """pid -> local rank."""
        self.starting: dict[int, int] = {}
        """A pipe that reaches its end when a worker's program has started -> its pid."""
        self.is_killing = False
        self._is_terminating = False
        self._has_reported_stuck = False
        self._ticks = 0

    def report(self, line: str) -> None:
        with suppress(OSError):  # the launcher has ended
            os.write(1, line.encode() + b"\n")

    def start(self, spec: dict[str, object]) -> None:
        argv, env = spec["argv"], spec["env"]
        rank, out, err = spec["local_rank"], spec["stdout"], spec["stderr"]
        assert isinstance(argv, list)
        assert isinstance(env, dict)
        assert isinstance(rank, int)
        assert isinstance(out, int)
        assert isinstance(err, int)
        guardian = os.getpid()
        reader, writer = os.pipe()  # close-on-exec: the reader sees the end when the program starts
        pid = os.fork()
        if pid == 0:
            become_worker(guardian, argv, env, out, err)
        os.close(writer)
        self.running[pid] = rank
        self.starting[reader] = pid
        self.report(f"started {rank} {pid}")

    def program_started(self, reader: int) -> None:
        """A worker's program has started, or could not be started."""
        os.close(reader)
        pid = self.starting.pop(reader)
        if self._is_terminating and pid in self.running:
            self._terminate(pid)

    def terminate(self) -> None:
        """Send SIGTERM to every worker whose program has started; the others get it when theirs starts.

        Before that, a worker may not have its own process group yet and ignores the signals that the guardian ignores.
        """
        self._is_terminating = True
        for pid in self.running.keys() - self.starting.values():
            self._terminate(pid)

    def _terminate(self, pid: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGTERM)
            os.killpg(pid, signal.SIGCONT)  # a stopped process would not receive it

    def reap(self) -> bool:
        """Reap all children that have ended, and report the workers among them. Returns whether any child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid in self.running:
                code = os.waitstatus_to_exitcode(status)
                self.report(f"exited {self.running.pop(pid)} {code if code >= 0 else 128 - code}")

    def kill(self) -> None:
        """Kill all descendants. Called again until none is left."""
        self.is_killing = True
        left = kill_below(os.getpid())
        self._ticks += 1
        if left and self._ticks * KILL_AGAIN_S > STUCK_S and not self._has_reported_stuck:
            self._has_reported_stuck = True
            self.report("left " + " ".join(map(str, left[:MAX_REPORTED])))

    def run(self, specs: list[dict[str, object]], commands: int) -> None:
        """Start the workers and obey the commands from that file descriptor until no descendant is left."""
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        outputs = {fd for spec in specs for fd in (spec["stdout"], spec["stderr"]) if isinstance(fd, int)}
        for fd in outputs:
            os.set_inheritable(fd, False)  # each worker gets its own outputs (by dup2), not those of the others
        for spec in specs:
            self.start(spec)
        for fd in outputs:
            os.close(fd)
        launcher_is_there = True
        while self.reap():
            if not self.running:
                self.kill()  # all workers have ended: kill the processes that they left behind
            ready, _, _ = select.select(
                [woken, *self.starting, *([commands] if launcher_is_there else [])],
                [],
                [],
                KILL_AGAIN_S if self.is_killing else None,
            )
            if woken in ready:
                os.read(woken, 4096)
            for reader in self.starting.keys() & ready:
                self.program_started(reader)
            if commands in ready:
                received = os.read(commands, 4096)
                launcher_is_there = bool(received)
                if not received or b"k" in received:
                    self.kill()
                elif b"t" in received:
                    self.terminate()
            elif self.is_killing:
                self.kill()
        if not launcher_is_there:
            remove_directory(self.private)
        self.report("empty")


def become_worker(guardian: int, argv: list[str], env: dict[str, str], out: int, err: int) -> NoReturn:
    """Runs in the forked child and replaces it by the worker's program. Never returns."""
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)  # the guardian died before PR_SET_PDEATHSIG was in force
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, stream in ((null, 0), (out, 1), (err, 2)):
            os.dup2(fd, stream)
        for number in (*IGNORED_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)  # ignored signals stay ignored across exec
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"rallypoint run: cannot start {argv[0]!r}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
    finally:
        os._exit(1)


def remove_directory(path: str) -> None:
    """Remove a directory and all that is in it. Nothing for an empty path."""
    for directory, below, files in os.walk(path, topdown=False):  # not shutil: it takes as long to import as all else
        for name in (*files, *below):
            with suppress(OSError):  # a directory below is gone already, unless it is a link
                os.unlink(os.path.join(directory, name))
        with suppress(OSError):
            os.rmdir(directory)


def read_line(fd: int) -> bytes:
    """Read one line, and no byte beyond it."""
    parts: list[bytes] = []
    while True:
        part = os.read(fd, 1)  # the rest must stay in the pipe, for `select`
        if part in (b"", b"\n"):
            return b"".join(parts)
        parts.append(part)


def main() -> None:
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    size = int(read_line(0))
    text = b""
    while len(text) < size:
        part = os.read(0, size - len(text))
        if not part:
            return
        text += part
    Guardian(*sys.argv[1:]).run(json.loads(text), 0)


if __name__ == "__main__":
    main()
