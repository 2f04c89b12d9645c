"""How fast the store is: the same calls, from one process or many, on the store of each side."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from rallypoint.bench.node import sleep_until
from rallypoint.bench.node_pool import NodeFailed
from rallypoint.bench.plan import STORE_OPS, UNSUPPORTED_OPS, Case, Sample, per_call, per_second
from rallypoint.bench.processes import ChildProcess, MessageSocket, PeerClosed, fork, kill_all, on_new_thread
from rallypoint.bench.sides import Implementation, RunConfig

VALUE = b"v" * 64
SEVERAL = 16
WARM_UP_S = 0.2
START_SIGNAL_S = 0.05
TIMEOUT_S = 60.0
MOST_TIMED = 200_000
UNSUPPORTED = "it has none"


class Work(msgspec.Struct, frozen=True):
    """Repeat a call for some seconds, beginning at an instant."""

    op: str
    at: float
    seconds: float


class Done(msgspec.Struct, frozen=True):
    """The result. `op` is empty in the first message, which says that the client is ready."""

    op: str = ""
    calls: int = 0
    seconds: float = 0.0
    median_s: float = 0.0
    error: str = ""


def store_speed(side: Implementation, case: Case) -> Iterator[Sample]:
    """All kinds of calls in turn; all processes make the same kind at the same time. NodeFailed."""
    server, port = side.start_server(case.nodes)
    processes: list[ChildProcess] = []
    try:
        config = RunConfig(f"bench-{port}", case.nodes, case.nodes, join_timeout_s=int(TIMEOUT_S))
        processes.extend(fork(on_new_thread(_client(side, port, config, number))) for number in range(case.nodes))
        sockets = [MessageSocket(process.sock, Done) for process in processes]
        _replies(sockets)
        for op in STORE_OPS:
            if op in UNSUPPORTED_OPS.get(case.side, ()):
                for measure in (per_call(op), per_second(op)):
                    yield Sample(measure, None, UNSUPPORTED)
                continue
            _measure(sockets, op, WARM_UP_S)
            done = _measure(sockets, op, case.seconds)
            yield Sample(per_call(op), statistics.median(one.median_s for one in done) * 1e6)
            yield Sample(per_second(op), sum(one.calls / one.seconds for one in done))
    finally:
        kill_all([*processes, server])


def _measure(sockets: list[MessageSocket[Done]], op: str, seconds: float) -> list[Done]:
    work = Work(op, time.monotonic() + START_SIGNAL_S, seconds)
    for messages in sockets:
        messages.send([work])
    return _replies(sockets)


def _replies(sockets: list[MessageSocket[Done]]) -> list[Done]:
    found = []
    for messages in sockets:
        try:
            done = messages.wait_one(TIMEOUT_S)
        except PeerClosed as error:
            raise NodeFailed(str(error)) from error
        if done is None or done.error:
            raise NodeFailed(done.error if done is not None else f"no answer within {TIMEOUT_S:g} s")
        found.append(done)
    return found


def _client(side: Implementation, port: int, config: RunConfig, number: int) -> Callable[[socket.socket], None]:
    def work(sock: socket.socket) -> None:
        messages = MessageSocket(sock, Work)
        own = msgspec.structs.replace(config, node=number)
        try:
            calls = _calls(side.store(port, own), f"p{number}/")
            messages.send([Done()])
            while True:
                for wanted in messages.receive():
                    messages.send([_timed(wanted, calls[wanted.op])])
        except PeerClosed:
            return
        except Exception as error:
            messages.send([Done(error=f"{type(error).__name__}: {error}")])

    return work


def _calls(store: Any, prefix: str) -> dict[str, Callable[[], object]]:
    """The calls by their names, on keys that exist."""
    keys = [f"{prefix}k{number}" for number in range(SEVERAL)]
    values = [VALUE] * SEVERAL
    one, number, same = keys[0], f"{prefix}number", f"{prefix}same"
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
    sleep_until(work.at)
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
