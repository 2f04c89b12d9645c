"""Runs cases one after the other, each in a process group of its own that is killed at the end, whatever happens."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rallypoint.bench.plan import Case, Doing, Failed, Line, Sample

_CHUNK = 1 << 16
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Libraries that start threads when they are imported could not be forked from."""
_DECODER = msgspec.json.Decoder(Line)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All samples of a case, and why it ended early, if it did."""

    case: Case
    samples: tuple[Sample, ...]
    failed: str = ""


@dataclass(slots=True)
class _Collected:
    samples: list[Sample] = field(default_factory=list)
    failed: str = ""


def run_case(
    case: Case, doing: Callable[[str], None], python: str = sys.executable, patience_s: float | None = None
) -> Outcome:
    """Run a case to its end or to the end of patience. `doing` is called with what it is at.

    `python` is what runs it, if the competitor is installed for another one; that one needs what Rallypoint needs.
    """
    collected = _Collected()
    patience_s = case.patience_s if patience_s is None else patience_s
    process = _start(case, python)
    try:
        for line in _lines(process, time.monotonic() + patience_s):
            match line:
                case Sample():
                    collected.samples.append(line)
                case Doing():
                    doing(line.text)
                case Failed():
                    collected.failed = line.why
    except TimeoutError:
        collected.failed = f"it was ended after {patience_s:g} s"
    finally:
        said = _end(process)
    if not collected.samples and not collected.failed:
        collected.failed = f"its process ended early: {said.strip()[-400:]}"
    return Outcome(case, tuple(collected.samples), collected.failed)


def for_python(python: str) -> dict[str, str]:
    """The environment in which another Python finds this Rallypoint."""
    if python == sys.executable:
        return dict(os.environ)
    here = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _start(case: Case, python: str) -> subprocess.Popen[bytes]:
    text = msgspec.json.encode(case).decode()
    return subprocess.Popen(
        [python, "-m", "rallypoint.bench.case", text, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**for_python(python), **_ONE_THREAD},
    )


def _lines(process: subprocess.Popen[bytes], deadline: float) -> Iterator[Line]:
    """What the process writes until it ends. TimeoutError at the deadline."""
    assert process.stdout is not None
    file = process.stdout.fileno()
    rest = b""
    while True:
        if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        data = os.read(file, _CHUNK)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        for text in whole:
            yield _DECODER.decode(text)


def _end(process: subprocess.Popen[bytes]) -> str:
    """Kill the whole group; what its first process wrote to stderr."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _, said = process.communicate()
    return said.decode(errors="replace")
