"""What a round, and an idle node, cost the server, by the number of nodes: counted by the server itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rallypoint.bench import usage
from rallypoint.bench.crew import Do, NodeFailed
from rallypoint.bench.measures import Stage, stage
from rallypoint.bench.plan import (
    CALM_CORES,
    IDLE_AFTER_S,
    KEPT_BYTES,
    KEPT_CPU,
    KEPT_RATE,
    MEMORY,
    ROUND_BYTES,
    ROUND_CPU,
    ROUND_FRAMES_IN,
    ROUND_FRAMES_OUT,
    ROUND_NODES_CPU,
    Case,
    Sample,
)
from rallypoint.bench.rallypoint_side import HOST
from rallypoint.bench.sides import Contender
from rallypoint.observe.target import open_backend, read_backend_target

ASK_S = 30.0
AFTER_S = 0.3
"""After a round, until what is sent after it has been sent."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Look:
    """What there was at an instant."""

    at: float
    server_cpu_s: float
    nodes_cpu_s: float
    frames_in: int
    frames_out: int
    payload: int

    def since(self, before: Look) -> Look:
        """What came in between."""
        return Look(
            self.at - before.at,
            self.server_cpu_s - before.server_cpu_s,
            self.nodes_cpu_s - before.nodes_cpu_s,
            self.frames_in - before.frames_in,
            self.frames_out - before.frames_out,
            self.payload - before.payload,
        )


def scale(side: Contender, case: Case) -> Iterator[Sample]:
    """Look at nodes that idle in a round, then at a further round of the same nodes. NodeFailed if there is none."""
    with stage(side, case, case.nodes, case.nodes) as there:
        nodes, pid = there.crew.nodes, there.server.pid
        rss_before = usage.rss_bytes(pid)
        there.first_round(nodes)
        _calm(there)
        rss = usage.rss_bytes(pid)
        begun = _look(there)
        time.sleep(case.seconds)
        kept = _look(there).since(begun)
        begun = _look(there)
        there.crew.tell(Do.JOIN, nodes)
        there.crew.gather(nodes, there.deadline())
        time.sleep(AFTER_S)
        round_ = _look(there).since(begun)
    kept_in, kept_bytes, kept_cpu = (total / kept.at for total in (kept.frames_in, kept.payload, kept.server_cpu_s))
    yield Sample(ROUND_CPU, round_.server_cpu_s)
    yield Sample(ROUND_NODES_CPU, round_.nodes_cpu_s)
    yield Sample(ROUND_FRAMES_IN, round_.frames_in - kept_in * round_.at)
    yield Sample(ROUND_FRAMES_OUT, round_.frames_out - kept_in * round_.at)
    yield Sample(ROUND_BYTES, round_.payload - kept_bytes * round_.at)
    yield Sample(KEPT_RATE, kept_in)
    yield Sample(KEPT_BYTES, kept_bytes)
    yield Sample(KEPT_CPU, 100.0 * kept_cpu)
    yield Sample(MEMORY, (rss - rss_before) / _MIB)


def _calm(there: Stage) -> None:
    time.sleep(IDLE_AFTER_S)
    usage.wait_calm([there.server.pid, *there.crew.pids], CALM_CORES, ASK_S)


def _look(there: Stage) -> Look:
    try:
        told = asyncio.run(_ask(there.port))
    except Exception as error:
        raise NodeFailed(f"the server could not be asked for its counters: {error}") from error
    return Look(
        time.monotonic(),
        usage.cpu_s(there.server.pid),
        sum(usage.cpu_s(pid) for pid in there.crew.pids),
        int(told["frames_in"]),
        int(told["frames_out"]),
        int(told["bytes_in"]) + int(told["bytes_out"]),
    )


async def _ask(port: int) -> dict[str, str]:
    async with open_backend(read_backend_target(f"tcp://{HOST}:{port}"), ASK_S) as backend:
        return dict((await backend.status()).details)
