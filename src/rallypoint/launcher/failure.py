"""What is known of a worker's failure: where, how the process ended, its last message, its traceback. Pure.

The message and the traceback come from the file that torch's `@record` writes (`TORCHELASTIC_ERROR_FILE`), or else from
the last lines of the worker's stderr. Both come from the worker's program: nothing here trusts their form or length.
"""

from __future__ import annotations

import re

import msgspec

MAX_MESSAGE = 300
MAX_LINES = 30
MAX_LINE = 200
LAST_LINES = 10
"""Without a traceback, so many of the last lines of stderr are shown."""
LAST_SIGNAL = 64
"""The highest signal number of Linux: a code above 128 + 64 is a program's own, such as 255 for exit(-1)."""
TERMINATED = frozenset((129, 130, 143))
"""Ended by SIGHUP, SIGINT or SIGTERM: somebody told the process to go, perhaps together with its launcher."""
_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL (perhaps the kernel was out of memory)",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
    31: "SIGSYS",
}
"""Signal numbers of Linux. Numbers, not `signal.Signals`: the report is read on other machines, too."""
_TAG = re.compile(r"^\[(default|rank)\d+\]:\s?")
"""The tag that torch puts before each line of a traceback."""
_HEADER = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one worker."""

    rank: int
    local_rank: int
    node: str
    code: int
    """The exit code; of a worker killed by a signal, 128 + the signal's number."""
    message: str = ""
    trace: tuple[str, ...] = ()
    """The traceback, or the last lines of stderr."""

    @property
    def sentence(self) -> str:
        """The failure in one sentence, as all launchers of the run say it."""
        return f"{worker_name(self.rank, self.node)} {ended(self.code)}" + (f": {self.message}" if self.message else "")


def worker_name(rank: int, node: str) -> str:
    """A worker, by its rank and its node."""
    return f"rank {rank} on {node}" if node else f"rank {rank}"


def is_signal(code: int) -> bool:
    """Whether this is the code of a process that was killed by a signal."""
    return 128 < code <= 128 + LAST_SIGNAL


def ended(code: int) -> str:
    """How a process ended, in words."""
    if not is_signal(code):
        return f"exited with {code}"
    return f"was killed by {_SIGNALS.get(code - 128, f'signal {code - 128}')}"


def describe(rank: int, local_rank: int, node: str, code: int, recorded: bytes, stderr: bytes) -> Failure:
    """A failure, from the content of the worker's error file (empty if there is none) and the end of its stderr."""
    message, trace = read_record(recorded) or read_stderr(stderr, is_signal=is_signal(code))
    return Failure(rank=rank, local_rank=local_rank, node=node, code=code, message=message, trace=trace)


def read_record(content: bytes) -> tuple[str, tuple[str, ...]] | None:
    """Message and traceback from a file that torch's `@record` wrote. None if it is no such file."""
    try:
        message = msgspec.json.decode(content)["message"]
        trace = ""
        if isinstance(message, dict):
            trace = message.get("extraInfo", {}).get("py_callstack", "")
            message = message["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
        return None
    lines = str(message).strip().splitlines()
    return _short(lines[0] if lines else ""), _bounded(str(trace).splitlines())


def read_stderr(content: bytes, *, is_signal: bool) -> tuple[str, tuple[str, ...]]:
    """Message and traceback from the end of a worker's stderr.

    The message is the last line of the last traceback. Without one it is the last line; but the last line of a process
    that was killed by a signal need not be about its end.
    """
    lines = [_TAG.sub("", line.rstrip()) for line in content.decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    if is_signal:
        fatal = [at for at, line in enumerate(lines) if line.startswith(_FATAL)]
        if not fatal:
            return "", _bounded(lines[-LAST_LINES:])
        return _short(lines[fatal[-1]].removeprefix(_FATAL)), _bounded(lines[fatal[-1] :][:MAX_LINES])
    headers = [at for at, line in enumerate(lines) if line.startswith(_HEADER)]
    if headers:
        block = lines[headers[-1] :]
        end = next((at for at, line in enumerate(block[1:], 1) if not line.startswith(" ")), len(block) - 1)
        return _short(block[end]), _bounded(block[: end + 1])
    return _short(lines[-1] if lines else ""), _bounded(lines[-LAST_LINES:])


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def _bounded(lines: list[str]) -> tuple[str, ...]:
    """The lines, shortened; of many, the last ones: the innermost calls and the error."""
    kept = lines if len(lines) <= MAX_LINES else ["…", *lines[-MAX_LINES + 1 :]]
    return tuple(line if len(line) <= MAX_LINE else line[: MAX_LINE - 1] + "…" for line in kept)
