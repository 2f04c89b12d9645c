"""The process of one case: `python -m rallypoint.bench.case CASE PARENT`, with a case as JSON and the parent's pid.

It imports what its side needs, then reads turns from standard input and writes messages to standard output, a JSON
document a line each (`plan.Turn`, `plan.Message`). It starts no thread, so that nodes can be forked from it and share
its memory.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator

import msgspec

from rallypoint.bench.idle import idle
from rallypoint.bench.measures import TIMED
from rallypoint.bench.node_pool import DeadlinePassed, NodeFailed
from rallypoint.bench.plan import FAILED, Bench, Case, Failed, Loaded, Message, Progress, Sample, Turn, TurnEnded
from rallypoint.bench.processes import die_with_parent, raise_file_limit, silence_output
from rallypoint.bench.restart import restart
from rallypoint.bench.scale import scale
from rallypoint.bench.sides import Implementation, implementation
from rallypoint.bench.store_speed import store_speed
from rallypoint.bench.trips import trips

SAMPLED: dict[Bench, Callable[[Implementation, Case], Iterator[Sample]]] = {
    Bench.IDLE: idle,
    Bench.SCALE: scale,
    Bench.TRIPS: trips,
    Bench.STORE: store_speed,
}
"""The benches that take samples of all their measures in one turn."""


def main() -> None:
    """Take turns until the parent closes standard input."""
    case = msgspec.json.decode(sys.argv[1], type=Case)
    die_with_parent(int(sys.argv[2]))
    requests, answers = os.dup(0), os.dup(1)
    silence_output()  # of libraries and of this process, from here on

    def write(message: Message) -> None:
        os.write(answers, msgspec.json.encode(message) + b"\n")

    try:
        raise_file_limit()
        side = implementation(case.side)
        side.load()
        gc.collect()
        gc.freeze()  # objects that no collection visits stay shared with forked processes
        write(Loaded())
        with os.fdopen(requests, "rb") as lines:
            for line in lines:
                for message in _samples(side, case, msgspec.json.decode(line, type=Turn)):
                    write(message)
                write(TurnEnded())
    except Exception as error:
        write(Failed(str(error) if isinstance(error, NodeFailed) else f"{type(error).__name__}: {error}"))


def _samples(side: Implementation, case: Case, turn: Turn) -> Iterator[Sample | Progress]:
    if case.bench is Bench.RESTART:
        yield from restart(case)
    elif case.bench in SAMPLED:
        yield from SAMPLED[case.bench](side, case)
    else:
        yield _timed(side, case, turn)


def _timed(side: Implementation, case: Case, turn: Turn) -> Sample:
    try:
        return Sample(turn.measure, TIMED[turn.measure](side, case, turn.repetition))
    except DeadlinePassed as error:
        so_far = f" ({error})" if str(error) else ""
        return Sample(turn.measure, None, f"none in {case.limit_s:g} s{so_far}")
    except NodeFailed as error:
        return Sample(turn.measure, None, f"{FAILED}: {error}")


if __name__ == "__main__":
    main()
