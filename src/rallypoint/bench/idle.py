"""What a round costs while its nodes do nothing: the server's CPU time and memory, and the bytes on the wire."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rallypoint.bench import usage
from rallypoint.bench.measures import started
from rallypoint.bench.node_pool import Action
from rallypoint.bench.plan import (
    BYTES,
    BYTES_PER_NODE,
    CPU,
    CPU_PER_NODE,
    IDLE_AFTER_S,
    RSS,
    RSS_PER_NODE,
    Case,
    Sample,
    Side,
)
from rallypoint.bench.sides import Implementation

_MIB = 1 << 20
_KIB = 1 << 10


def idle(side: Implementation, case: Case) -> Iterator[Sample]:
    """Put all nodes into a round and measure for `case.seconds`. NodeFailed if there is no round."""
    with started(side, case, case.nodes, case.nodes) as setup:
        pid = setup.server.pid
        rss_before = usage.rss_bytes(pid)
        setup.first_round(setup.pool.nodes)
        if case.side is Side.TORCH_POLLING:
            setup.pool.send(Action.FOLLOW, setup.pool.nodes)
        time.sleep(IDLE_AFTER_S)
        bytes_from = usage.payload(setup.port)
        cpu_from, from_at = usage.cpu_s(pid), time.monotonic()
        time.sleep(case.seconds)
        cpu_to, to_at = usage.cpu_s(pid), time.monotonic()
        bytes_to = usage.payload(setup.port)
        rss = usage.rss_bytes(pid)
    share = (cpu_to - cpu_from) / (to_at - from_at)
    yield Sample(CPU, 100.0 * share)
    yield Sample(CPU_PER_NODE, 1e6 * share / case.nodes)
    yield Sample(RSS, rss / _MIB)
    yield Sample(RSS_PER_NODE, (rss - rss_before) / case.nodes / _KIB)
    if bytes_from is None or bytes_to is None:
        for measure in (BYTES, BYTES_PER_NODE):
            yield Sample(measure, None, "not counted: the program `ss` is not installed")
        return
    rate = usage.grown(bytes_from, bytes_to) / (to_at - from_at)
    yield Sample(BYTES, rate)
    yield Sample(BYTES_PER_NODE, rate / case.nodes)
