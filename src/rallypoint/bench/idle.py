"""What a round costs while nobody does anything: the server's processor time and memory, and the bytes on the wire."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rallypoint.bench import usage
from rallypoint.bench.crew import Do
from rallypoint.bench.measures import stage
from rallypoint.bench.plan import BYTES, BYTES_PER_NODE, CPU, IDLE_AFTER_S, RSS, RSS_PER_NODE, Case, Sample, Side
from rallypoint.bench.sides import Contender

_MIB = 1 << 20
_KIB = 1 << 10


def idle(side: Contender, case: Case) -> Iterator[Sample]:
    """Put all nodes into a round, look, wait, look again. NodeFailed if there is no round."""
    with stage(side, case, case.nodes, case.nodes) as there:
        pid = there.server.pid
        rss_before = usage.rss_bytes(pid)
        there.first_round(there.crew.nodes)
        if case.side is Side.TORCH_POLLING:
            there.crew.tell(Do.FOLLOW, there.crew.nodes)
        time.sleep(IDLE_AFTER_S)
        bytes_from = usage.payload(there.port)
        cpu_from, from_at = usage.cpu_s(pid), time.monotonic()
        time.sleep(case.seconds)
        cpu_to, to_at = usage.cpu_s(pid), time.monotonic()
        bytes_to = usage.payload(there.port)
        rss = usage.rss_bytes(pid)
    yield Sample(CPU, 100.0 * (cpu_to - cpu_from) / (to_at - from_at))
    yield Sample(RSS, rss / _MIB)
    yield Sample(RSS_PER_NODE, (rss - rss_before) / case.nodes / _KIB)
    if bytes_from is None or bytes_to is None:
        for measure in (BYTES, BYTES_PER_NODE):
            yield Sample(measure, None, "not counted: the program `ss` is not installed")
        return
    rate = usage.grown(bytes_from, bytes_to) / (to_at - from_at)
    yield Sample(BYTES, rate)
    yield Sample(BYTES_PER_NODE, rate / case.nodes)
