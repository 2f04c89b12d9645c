"""Runs cases, each in a process group of its own that is killed at the end, whatever happens.

Cases that are compared take turns sample by sample: whatever slows the machine down for a while slows down all sides.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rallypoint.bench.plan import FAILED, Case, Failed, Loaded, Message, Progress, Sample, Turn, TurnEnded, schedule

_CHUNK = 1 << 16
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A process whose libraries started threads at their import could not be forked from."""
ENDED_EARLY = "its process ended early"
_DECODER = msgspec.json.Decoder(Message)

Show = Callable[[Case, str], None]
"""Called with a case and what it is doing."""


@dataclass(frozen=True, slots=True)
class Job:
    """A case, the Python that runs it (which needs what Rallypoint needs, too), and how long its turns may take."""

    case: Case
    python: str = sys.executable
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """All samples of a case, why it ended early if it did, and how long its turns took."""

    case: Case
    samples: tuple[Sample, ...]
    failed: str = ""
    took_s: float = 0.0


def run_case(case: Case, show: Callable[[str], None]) -> Outcome:
    """Run one case to its end or its time-out."""
    return run_cases([Job(case)], lambda _, text: show(text))[0]


def run_cases(jobs: Sequence[Job], show: Show) -> list[Outcome]:
    """Run the cases of one comparison, in turns; their outcomes in the same order."""
    processes: list[_CaseProcess] = []
    try:
        processes.extend(_CaseProcess(job) for job in jobs)
        for process in processes:
            show(process.case, "loading")
            process.wait_loaded()
        for index, turn in schedule([job.case for job in jobs]):
            processes[index].take(turn, show)
    finally:
        outcomes = [process.end() for process in processes]
    return outcomes


class _CaseProcess:
    def __init__(self, job: Job) -> None:
        self.case = job.case
        self._timeout_s = job.case.timeout_s if job.timeout_s is None else job.timeout_s
        self._took_s = 0.0
        self._samples: list[Sample] = []
        self._failed = ""
        self._given_up: set[str] = set()
        self._rest = b""
        self._process = subprocess.Popen(
            [job.python, "-m", "rallypoint.bench.case", msgspec.json.encode(job.case).decode(), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**environment_for(job.python), **_ONE_THREAD},
        )

    def wait_loaded(self) -> None:
        """Until it is ready for its first turn, or has failed."""
        self._read_until(Loaded, lambda _: None)

    def take(self, turn: Turn, show: Show) -> None:
        """One turn, if the case has not failed. A measure that took too long once is not tried again."""
        if self._failed or turn.measure in self._given_up:
            return
        what = f"{turn.measure}, " if turn.measure else ""
        show(self.case, f"{what}{turn.repetition + 1} of {self.case.repeat}")
        assert self._process.stdin is not None
        before = len(self._samples)
        with suppress(OSError):  # it has ended: reading notices
            self._process.stdin.write(msgspec.json.encode(turn) + b"\n")
        self._read_until(TurnEnded, lambda text: show(self.case, text))
        self._given_up |= {
            sample.measure
            for sample in self._samples[before:]
            if turn.measure and sample.value is None and not sample.why_none.startswith(FAILED)
        }

    def _read_until(self, last: type[Message], show: Callable[[str], None]) -> None:
        started_at = time.monotonic()
        try:
            for message in self._messages(started_at + self._timeout_s - self._took_s):
                match message:
                    case Sample():
                        self._samples.append(message)
                    case Progress():
                        show(message.text)
                    case Failed():
                        self._failed = message.why
                        return
                if isinstance(message, last):
                    return
            self._failed = ENDED_EARLY
        except TimeoutError:
            self._failed = f"it was ended after {self._timeout_s:g} s"
        finally:
            self._took_s += time.monotonic() - started_at

    def _messages(self, deadline: float) -> Iterator[Message]:
        """The messages of the process until it ends. TimeoutError at the deadline."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                yield _DECODER.decode(line)
                continue
            if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(file, _CHUNK)
            if not data:
                return
            self._rest += data

    def end(self) -> Outcome:
        """Kill the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        _, errors = self._process.communicate()
        if self._failed == ENDED_EARLY:
            self._failed += f": {errors.decode(errors='replace').strip()[-400:]}"
        return Outcome(self.case, tuple(self._samples), self._failed, self._took_s)


def environment_for(python: str) -> dict[str, str]:
    """The environment in which another Python finds this Rallypoint."""
    if python == sys.executable:
        return dict(os.environ)
    here = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
