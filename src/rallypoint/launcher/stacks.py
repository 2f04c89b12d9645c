"""Writes the stacks of worker processes to files, before workers that hang are killed.

For each process, the first of these that gives a stack: `py-spy` (Python and native; if it is installed and allowed to
attach), `faulthandler` (Python; if the process has called `rallypoint.alive()`). Otherwise the file has what the kernel
shows of each thread, and says why there is nothing more. A signal is sent only to a process that has a handler for it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rallypoint._alive import STACK_SIGNAL, stack_file
from rallypoint.backends.resolver_threads import run_in_thread

FILE = "stacks.txt"
PY_SPY_S = 3.0
ANSWER_S = 2.0
"""How long to wait until a process has begun to write its stacks."""
SETTLED_S = 0.1
"""A file that has not grown for so long is complete."""
MAX_THREADS = 64
MAX_TROUBLE = 200


@dataclass(frozen=True, slots=True)
class Target:
    """One worker: its own process, and those of it that have said that they are alive."""

    rank: int
    local_rank: int
    pids: tuple[int, ...]


async def write_stacks(targets: Sequence[Target], scratch: Path, directory: Path, why: str) -> None:
    """Append the stacks of each worker to `directory/LOCAL_RANK/stacks.txt`. OSError if a file cannot be written.

    On daemon threads, because /proc and a shared file system may not answer: that may be what the workers hang in.
    """
    await asyncio.gather(
        *(run_in_thread(partial(_write_one, target, scratch, directory, why), "stacks") for target in targets)
    )


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal."""
    return _field(pid, "State").startswith("T")


def _write_one(target: Target, scratch: Path, directory: Path, why: str) -> None:
    parts = [f"=== rank {target.rank}: {why}\n"]
    for pid in target.pids:
        command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        state = _field(pid, "State") or "ended"
        parts.append(f"--- process {pid} ({command}), state {state}\n{_of(pid, scratch)}")
    path = directory / str(target.local_rank) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("\n".join(parts) + "\n\n")


def _of(pid: int, scratch: Path) -> str:
    """The stacks of one process."""
    stack, no_py_spy = _py_spy(pid)
    if stack is not None:
        return stack
    stack, no_dump = _faulthandler(pid, scratch)
    if stack is not None:
        return stack
    return f"no Python stack: {no_py_spy}; {no_dump}. The kernel's view of its threads:\n{_threads(pid)}"


def _py_spy(pid: int) -> tuple[str | None, str]:
    """What py-spy shows, or None and the reason."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return None, "py-spy is not installed"
    if is_stopped(pid):
        return None, "py-spy cannot attach to a stopped process"
    trouble = ""
    for more in (["--native"], []):
        command = [program, "dump", "--pid", str(pid), *more]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PY_SPY_S, check=False, text=True
            )
        except subprocess.TimeoutExpired:
            trouble = f"py-spy gave no answer within {PY_SPY_S:g} s"
            continue
        except OSError as error:
            return None, f"py-spy could not be started: {error}"
        if done.returncode == 0 and done.stdout:
            return done.stdout, ""
        trouble = f"py-spy: {' '.join(done.stderr.split())[:MAX_TROUBLE]}"
    return None, trouble


def _faulthandler(pid: int, scratch: Path) -> tuple[str | None, str]:
    """What `faulthandler` in the process writes at the signal, or None and the reason."""
    path = Path(stack_file(str(scratch), pid))
    if not STACK_SIGNAL or not path.exists() or not _catches(pid, STACK_SIGNAL):
        return None, "the process has not called rallypoint.alive()"
    before = path.stat().st_size
    try:
        os.kill(pid, STACK_SIGNAL)
        if is_stopped(pid):
            os.kill(pid, signal.SIGCONT)  # a stopped process handles no signal
    except OSError as error:
        return None, f"the process cannot be signalled: {error.strerror}"
    size, deadline = before, time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        if path.stat().st_size == size > before:
            break
        size = path.stat().st_size
    if size == before:
        return None, f"the process did not answer the signal within {ANSWER_S:g} s"
    with path.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace"), ""


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal."""
    return bool(int(_field(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def _threads(pid: int) -> str:
    lines = []
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return "  none: it has ended, or /proc does not show it\n"
    for thread in threads[:MAX_THREADS]:
        base = f"/proc/{pid}/task/{thread}"
        stat = _read(f"{base}/stat").rpartition(")")[2].split()
        name, waits_in = _read(f"{base}/comm").strip(), _read(f"{base}/wchan").strip("0")
        lines.append(f"  thread {thread} ({name}): state {stat[0] if stat else '?'}, waits in {waits_in or '-'}\n")
    return "".join(lines)


def _field(pid: int, name: str) -> str:
    """A field of /proc/PID/status; empty if there is none."""
    lines = _read(f"/proc/{pid}/status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
