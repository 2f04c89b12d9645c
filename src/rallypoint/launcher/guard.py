"""A small process between a launcher and its workers, which makes sure that no worker outlives the launcher.

The launcher runs this file as a program of its own, without the rest of the package: it has to start quickly, to be
small, and to have one thread. It is told what to start as one line of JSON on its standard input, starts every worker
in a session of its own, and says on its standard output what becomes of them, one line each:

    started RANK PID     exited RANK STATUS     left PID...     empty

A line `t` asks the workers to end (SIGTERM to their process groups), a line `k` kills everything. The end of its input
is the end of the launcher, however it came about, and kills everything too. As a subreaper it is the parent of whatever
a worker leaves behind, so that also children that went into a session of their own are found. It ends when nothing is
left.

If the guard itself is killed, its workers die with it (PR_SET_PDEATHSIG), and what they leave becomes the launcher's.
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
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The launcher says when."""
LOOK_AGAIN_S = 0.02
STUCK_S = 5.0
"""After so long what does not die is named."""
MOST_NAMED = 100


def prctl(option: int, value: int) -> None:
    """On Linux; elsewhere there is no such thing, and the groups have to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(of: int) -> list[int]:
    """The processes below one, nearest first, as far as they can be seen."""
    children: dict[int, list[int]] = {}
    try:
        found = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    for pid in found:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it has ended meanwhile
        parent = int(stat.rpartition(b")")[2].split()[1])
        children.setdefault(parent, []).append(pid)
    below = list(children.get(of, ()))
    for pid in below:  # which grows as it goes
        below += children.get(pid, ())
    return below


def kill_below(of: int) -> list[int]:
    """Kill every descendant of a process; those there were."""
    below = descendants(of)
    for pid in below:
        with suppress(ProcessLookupError, PermissionError):  # what has become somebody else's is named, and waited for
            os.kill(pid, signal.SIGKILL)
    return below


def reap_all(pids: list[int]) -> None:
    """Take note of the end of those that are children of this process and have ended."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


class Guard:
    """The workers, and what is said of them."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        """pid -> local rank."""
        self.starting: dict[int, int] = {}
        """A pipe that ends when a worker's program has begun -> its pid."""
        self.is_killing = False
        self._is_terminating = False
        self._has_left = False
        self._ticks = 0

    def say(self, line: str) -> None:
        with suppress(OSError):  # the launcher is gone: nobody to tell
            os.write(1, line.encode() + b"\n")

    def start(self, spec: dict[str, object]) -> None:
        argv, env = spec["argv"], spec["env"]
        rank, out, err = spec["local_rank"], spec["stdout"], spec["stderr"]
        assert isinstance(argv, list)
        assert isinstance(env, dict)
        assert isinstance(rank, int)
        assert isinstance(out, int)
        assert isinstance(err, int)
        guard = os.getpid()
        begun, begins = os.pipe()  # not inherited: its end is the beginning of the program
        pid = os.fork()
        if pid == 0:
            become_worker(guard, argv, env, out, err)
        os.close(begins)
        self.running[pid] = rank
        self.starting[begun] = pid
        self.say(f"started {rank} {pid}")

    def has_begun(self, begun: int) -> None:
        """A worker's program has begun, or never will."""
        os.close(begun)
        pid = self.starting.pop(begun)
        if self._is_terminating and pid in self.running:
            self._terminate(pid)

    def terminate(self) -> None:
        """Before its program has begun, a worker has no group of its own and ignores what the guard ignores."""
        self._is_terminating = True
        for pid in self.running.keys() - self.starting.values():
            self._terminate(pid)

    def _terminate(self, pid: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGTERM)

    def reap(self) -> bool:
        """Take note of all that has ended; whether anything is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid in self.running:
                code = os.waitstatus_to_exitcode(status)
                self.say(f"exited {self.running.pop(pid)} {code if code >= 0 else 128 - code}")

    def kill(self) -> None:
        """Everything; called again until nothing is left."""
        self.is_killing = True
        left = kill_below(os.getpid())
        self._ticks += 1
        if left and self._ticks * LOOK_AGAIN_S > STUCK_S and not self._has_left:
            self._has_left = True
            self.say("left " + " ".join(map(str, left[:MOST_NAMED])))

    def run(self, specs: list[dict[str, object]], words: int) -> None:
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        places = {fd for spec in specs for fd in (spec["stdout"], spec["stderr"]) if isinstance(fd, int)}
        for fd in places:
            os.set_inheritable(fd, False)  # each worker has its own, and none of the others'
        for spec in specs:
            self.start(spec)
        for fd in places:
            os.close(fd)
        is_told = True
        while self.reap():
            if not self.running:
                self.kill()  # the workers have ended: what they have left behind goes too
            ready, _, _ = select.select(
                [woken, *self.starting, *([words] if is_told else [])],
                [],
                [],
                LOOK_AGAIN_S if self.is_killing else None,
            )
            if woken in ready:
                os.read(woken, 4096)
            for begun in self.starting.keys() & ready:
                self.has_begun(begun)
            if words in ready:
                said = os.read(words, 4096)
                is_told = bool(said)
                if not said or b"k" in said:
                    self.kill()
                elif b"t" in said:
                    self.terminate()
            elif self.is_killing:
                self.kill()
        self.say("empty")


def become_worker(guard: int, argv: list[str], env: dict[str, str], out: int, err: int) -> NoReturn:
    """In the child: never returns."""
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)  # it died before it could matter
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, place in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(fd, place)
        for number in (*IGNORED, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)  # what is ignored would stay ignored
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"rallypoint run: cannot start {argv[0]!r}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
    finally:
        os._exit(1)


def read_line(fd: int) -> bytes:
    """One line, and nothing beyond it."""
    parts: list[bytes] = []
    while True:
        part = os.read(fd, 1)  # what follows is for `select`
        if part in (b"", b"\n"):
            return b"".join(parts)
        parts.append(part)


def main() -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    size = int(read_line(0))
    text = b""
    while len(text) < size:
        part = os.read(0, size - len(text))
        if not part:
            return
        text += part
    Guard().run(json.loads(text), 0)


if __name__ == "__main__":
    main()
