"""The process of one case: `python -m rallypoint.bench.case JSON`. Writes a JSON document a line; see `plan.Line`.

It imports what its side needs and starts no thread, so that nodes can be forked from it and share its memory.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator

import msgspec

from rallypoint.bench.crew import NodeFailed, NoneInTime
from rallypoint.bench.helper import allow_many_files, be_quiet, die_with_parent
from rallypoint.bench.idle import idle
from rallypoint.bench.measures import TIMED
from rallypoint.bench.plan import Bench, Case, Doing, Failed, Line, Sample
from rallypoint.bench.restart import restart
from rallypoint.bench.scale import scale
from rallypoint.bench.sides import Contender, contender
from rallypoint.bench.stores import store_speed
from rallypoint.bench.trips import trips

FAILED = "failed"


class _Output:
    """The original standard output; everything else that this process or a library writes is discarded."""

    def __init__(self) -> None:
        self._file = os.dup(1)
        be_quiet()

    def __call__(self, line: Line) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")


def main() -> None:
    """Run the case that the first argument describes; the second is the id of the process that asked for it."""
    case = msgspec.json.decode(sys.argv[1], type=Case)
    die_with_parent(int(sys.argv[2]))
    write = _Output()
    try:
        allow_many_files()
        side = contender(case.side)
        write(Doing("loading"))
        side.load()
        gc.collect()
        gc.freeze()  # forks share it longer
        if case.bench is Bench.RESTART:
            for line in restart(case):
                write(line)
        elif case.bench is Bench.IDLE:
            _run_looked_at(side, case, write, idle)
        elif case.bench is Bench.SCALE:
            _run_looked_at(side, case, write, scale)
        elif case.bench is Bench.TRIPS:
            _run_looked_at(side, case, write, trips)
        elif case.bench is Bench.STORE:
            _run_looked_at(side, case, write, store_speed)
        else:
            _run_timed(side, case, write)
    except Exception as error:
        write(Failed(f"{type(error).__name__}: {error}"))


def _run_timed(side: Contender, case: Case, write: _Output) -> None:
    for measure in case.measures:
        for repetition in range(case.repeat):
            write(Doing(f"{measure}, {repetition + 1} of {case.repeat}"))
            sample = _timed(side, case, measure, repetition)
            write(sample)
            if sample.value is None and not sample.why_none.startswith(FAILED):
                break  # it waited for as long as it may: another would too


def _timed(side: Contender, case: Case, measure: str, repetition: int) -> Sample:
    try:
        return Sample(measure, TIMED[measure](side, case, repetition))
    except NoneInTime as error:
        so_far = f" ({error})" if str(error) else ""
        return Sample(measure, None, f"none in {case.limit_s:g} s{so_far}")
    except NodeFailed as error:
        return Sample(measure, None, f"{FAILED}: {error}")


def _run_looked_at(
    side: Contender, case: Case, write: _Output, look: Callable[[Contender, Case], Iterator[Sample]]
) -> None:
    for repetition in range(case.repeat):
        write(Doing(f"{case.seconds:g} s, {repetition + 1} of {case.repeat}"))
        try:
            for sample in look(side, case):
                write(sample)
        except NodeFailed as error:
            write(Failed(str(error)))
            return


if __name__ == "__main__":
    main()
