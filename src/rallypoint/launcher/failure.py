"""What is known of a worker's failure: where, how the process ended, its last message, its traceback, and when. Pure.

The message and the traceback come from the file that torch's `@record` writes (`TORCHELASTIC_ERROR_FILE`), or else from
the last lines of the worker's stderr. Both come from the worker's program: nothing here trusts their form or length.

The failures of one round follow each other within milliseconds, because the peers of a worker notice that it is gone;
and a program that fails closes its connections first and takes a while to end. So a failure that speaks of a peer
(`may_be_echo`) is reported a moment later than others: if it is the echo of another failure, that one comes first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from rallypoint.rendezvous.records import LeaveKind

MAX_MESSAGE = 300
MAX_LINES = 30
MAX_LINE = 200
LAST_LINES = 10
"""Without a traceback, so many of the last lines of stderr are shown."""
LAST_SIGNAL = 64
"""The highest signal number of Linux: a code above 128 + 64 is a program's own, such as 255 for exit(-1)."""
TERMINATED = frozenset((129, 130, 143))
"""Ended by SIGHUP, SIGINT or SIGTERM: somebody told the process to go, perhaps together with its launcher."""
_CRASHES = frozenset(128 + number for number in (4, 7, 8, 9, 11))
"""Killed by SIGILL, SIGBUS, SIGFPE, SIGKILL or SIGSEGV."""
FRESH_S = 1.0
"""A traceback at the end of stderr that is older than that need not be the end of the worker."""
_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL, perhaps for want of memory",
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
_OF_A_PEER = re.compile(
    r"connection|\bpeer|broken ?pipe|socket|timed ?out|timeout|\beof|unreachable|nccl|gloo|\bucc\b|\bmpi|c10d|"
    r"tcpstore|dist(backend|network|store)error|unavailable|remote process",
    re.IGNORECASE,
)
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
    stalled: str = ""
    """Of a worker that stalled, and was stopped for it: the sentence about it."""

    @property
    def kind(self) -> LeaveKind:
        """What it means for the round."""
        return LeaveKind.STALLED if self.stalled else LeaveKind.WORKER_FAILED

    @property
    def sentence(self) -> str:
        """The failure in one sentence, as all launchers of the run say it."""
        if self.stalled:
            return self.stalled
        return f"{worker_name(self.rank, self.node)} {ended(self.code)}" + (f": {self.message}" if self.message else "")

    @property
    def may_be_echo(self) -> bool:
        """Whether it may be the echo of another failure: its last words are about a connection or a peer."""
        if self.stalled:
            return False
        return self.code not in _CRASHES and _OF_A_PEER.search(self.message or "\n".join(self.trace)) is not None


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


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a worker left behind, and how old it is. `code`: None if the worker has not ended by itself."""

    rank: int
    local_rank: int
    code: int | None
    ended_s: float = 0.0
    recorded: bytes = b""
    """The content of the worker's error file; empty if there is none."""
    stderr: bytes = b""
    """The end of the worker's stderr."""
    stderr_s: float | None = None
    """None: not known. The launcher does not see when a file was written that the worker itself writes."""


def describe(evidence: Evidence, node: str) -> tuple[Failure, float] | None:
    """The failure of a worker, and how long ago it was; None if it has not failed.

    A worker that has not ended has failed if it has written a record, or if its stderr ends with a fresh traceback.
    """
    rank, local_rank, code = evidence.rank, evidence.local_rank, evidence.code
    if code == 0:
        return None
    told_s: float | None = None
    known = read_record(evidence.recorded)
    has_failed = known is not None or code is not None
    if known is None:
        known, ends_with_traceback = read_stderr(evidence.stderr, is_signal=code is not None and is_signal(code))
        if ends_with_traceback:
            told_s = evidence.stderr_s
            has_failed = has_failed or (told_s is not None and told_s < FRESH_S)
    if not has_failed:
        return None
    message, trace = known
    failure = Failure(
        rank=rank,
        local_rank=local_rank,
        node=node,
        code=1 if code is None else code,
        message=message,
        trace=trace,
    )
    return failure, max(told_s or 0.0, evidence.ended_s)


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


def read_stderr(content: bytes, *, is_signal: bool) -> tuple[tuple[str, tuple[str, ...]], bool]:
    """Message and traceback from the end of a worker's stderr, and whether it ends with the traceback.

    The message is the last line of the last traceback. Without one it is the last line; but the last line of a process
    that was killed by a signal need not be about its end.
    """
    lines = [_TAG.sub("", line.rstrip()) for line in content.decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    if is_signal:
        fatal = [at for at, line in enumerate(lines) if line.startswith(_FATAL)]
        if fatal:
            return (_short(lines[fatal[-1]].removeprefix(_FATAL)), _bounded(lines[fatal[-1] :][:MAX_LINES])), False
        return ("", _bounded(lines[-LAST_LINES:])), False
    headers = [at for at, line in enumerate(lines) if line.startswith(_HEADER)]
    if headers:
        block = lines[headers[-1] :]
        end = next((at for at, line in enumerate(block[1:], 1) if not line.startswith(" ")), len(block) - 1)
        return (_short(block[end]), _bounded(block[: end + 1])), end == len(block) - 1
    return (_short(lines[-1] if lines else ""), _bounded(lines[-LAST_LINES:])), False


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def _bounded(lines: list[str]) -> tuple[str, ...]:
    """The lines, shortened; of many, the last ones: the innermost calls and the error."""
    kept = lines if len(lines) <= MAX_LINES else ["…", *lines[-MAX_LINES + 1 :]]
    return tuple(line if len(line) <= MAX_LINE else line[: MAX_LINE - 1] + "…" for line in kept)
