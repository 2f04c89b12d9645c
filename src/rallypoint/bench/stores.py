"""How fast the store is: the same calls, from one process or many, on the store of either side."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from rallypoint.bench.crew import NodeFailed
from rallypoint.bench.helper import Gone, Helper, Line, end_all, fork, with_a_stack_of_its_own
from rallypoint.bench.node import wait_until
from rallypoint.bench.plan import LACKING, STORE_OPS, Case, Sample, per_call, per_second
from rallypoint.bench.sides import Contender, Sizes

VALUE = b"v" * 64
SEVERAL = 16
WARM_S = 0.2
AHEAD_S = 0.05
PATIENCE_S = 60.0
MOST_TIMED = 200_000
LACKS = "it has none"


class Work(msgspec.Struct, frozen=True):
    """Make that call again and again, from that instant on, for so long."""

    op: str
    at: float
    seconds: float


class Done(msgspec.Struct, frozen=True):
    """What came of it. `op` is empty at the beginning; `error` is not if it failed."""

    op: str = ""
    calls: int = 0
    seconds: float = 0.0
    median_s: float = 0.0
    error: str = ""


def store_speed(side: Contender, case: Case) -> Iterator[Sample]:
    """All calls, one kind after the other; all processes make the same at the same time. NodeFailed."""
    server, port = side.start_server(case.nodes)
    helpers: list[Helper] = []
    try:
        sizes = Sizes(f"bench-{port}", case.nodes, case.nodes, join_timeout_s=int(PATIENCE_S))
        helpers.extend(
            fork(with_a_stack_of_its_own(_client(side, port, sizes, number))) for number in range(case.nodes)
        )
        lines = [Line(helper.sock, Done) for helper in helpers]
        _replies(lines)
        for op in STORE_OPS:
            if op in LACKING.get(case.side, ()):
                for measure in (per_call(op), per_second(op)):
                    yield Sample(measure, None, LACKS)
                continue
            _measure(lines, op, WARM_S)
            done = _measure(lines, op, case.seconds)
            yield Sample(per_call(op), statistics.median(one.median_s for one in done) * 1e6)
            yield Sample(per_second(op), sum(one.calls / one.seconds for one in done))
    finally:
        end_all([*helpers, server])


def _measure(lines: list[Line[Done]], op: str, seconds: float) -> list[Done]:
    work = Work(op, time.monotonic() + AHEAD_S, seconds)
    for line in lines:
        line.send([work])
    return _replies(lines)


def _replies(lines: list[Line[Done]]) -> list[Done]:
    found = []
    for line in lines:
        try:
            done = line.wait_one(PATIENCE_S)
        except Gone as error:
            raise NodeFailed(str(error)) from error
        if done is None or done.error:
            raise NodeFailed(done.error if done is not None else f"no answer within {PATIENCE_S:g} s")
        found.append(done)
    return found


def _client(side: Contender, port: int, sizes: Sizes, number: int) -> Callable[[socket.socket], None]:
    def work(sock: socket.socket) -> None:
        line = Line(sock, Work)
        own = msgspec.structs.replace(sizes, number=number)
        try:
            calls = _calls(side.store(port, own), f"p{number}/")
            line.send([Done()])
            while True:
                for wanted in line.receive():
                    line.send([_timed(wanted, calls[wanted.op])])
        except Gone:
            return
        except Exception as error:
            line.send([Done(error=f"{type(error).__name__}: {error}")])

    return work


def _calls(store: Any, place: str) -> dict[str, Callable[[], object]]:
    """What each kind of call is; the keys are there."""
    keys = [f"{place}k{number}" for number in range(SEVERAL)]
    values = [VALUE] * SEVERAL
    one, number, same = keys[0], f"{place}number", f"{place}same"
    for key in (*keys, same):
        store.set(key, VALUE)
    store.add(number, 1)
    return {
        "get": lambda: store.get(one),
        "wait": lambda: store.wait([one]),
        "check": lambda: store.check([one]),
        "add": lambda: store.add(number, 1),
        "compare_set": lambda: store.compare_set(same, VALUE, VALUE),
        f"multi_get of {SEVERAL}": lambda: store.multi_get(keys),
        "set": lambda: store.set(one, VALUE),
        f"multi_set of {SEVERAL}": lambda: store.multi_set(keys, values),
    }


def _timed(work: Work, call: Callable[[], object]) -> Done:
    wait_until(work.at)
    clock = time.perf_counter
    took: list[float] = []
    calls = 0
    begun = before = clock()
    until = begun + work.seconds
    while before < until:
        call()
        now = clock()
        if calls < MOST_TIMED:
            took.append(now - before)
        before = now
        calls += 1
    return Done(work.op, calls, before - begun, statistics.median(took))
