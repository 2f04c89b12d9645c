"""What a round and an idle node cost the server, by the number of nodes. The server itself counts frames and bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rallypoint.bench import usage
from rallypoint.bench.measures import Setup, started
from rallypoint.bench.node_pool import Action, NodeFailed
from rallypoint.bench.plan import (
    IDLE_AFTER_S,
    IDLE_BYTES,
    IDLE_CPU,
    KEEP_ALIVE_RATE,
    MEMORY,
    ROUND_BYTES,
    ROUND_CPU,
    ROUND_FRAMES_IN,
    ROUND_FRAMES_OUT,
    ROUND_NODES_CPU,
    SETTLED_CORES,
    Case,
    Sample,
)
from rallypoint.bench.rallypoint_side import HOST
from rallypoint.bench.sides import Implementation
from rallypoint.observe.target import open_backend, read_backend_target

TIMEOUT_S = 30.0
AFTER_S = 0.3
"""Pause after a round, until the server has sent what follows it."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals at an instant, or the difference of two."""

    at: float
    server_cpu_s: float
    nodes_cpu_s: float
    frames_in: int
    frames_out: int
    payload: int

    def since(self, before: Counters) -> Counters:
        """The difference to earlier totals."""
        return Counters(
            self.at - before.at,
            self.server_cpu_s - before.server_cpu_s,
            self.nodes_cpu_s - before.nodes_cpu_s,
            self.frames_in - before.frames_in,
            self.frames_out - before.frames_out,
            self.payload - before.payload,
        )


def scale(side: Implementation, case: Case) -> Iterator[Sample]:
    """Measure nodes that idle in a round, then a further round of the same nodes. NodeFailed if there is none."""
    with started(side, case, case.nodes, case.nodes) as setup:
        nodes, pid = setup.pool.nodes, setup.server.pid
        rss_before = usage.rss_bytes(pid)
        setup.first_round(nodes)
        time.sleep(IDLE_AFTER_S)
        usage.wait_until_idle([pid, *setup.pool.pids], SETTLED_CORES, TIMEOUT_S)
        rss = usage.rss_bytes(pid)
        begun = _counters(setup)
        time.sleep(case.seconds)
        idle = _counters(setup).since(begun)
        begun = _counters(setup)
        setup.pool.send(Action.JOIN, nodes)
        setup.pool.wait_for_world(nodes, setup.deadline())
        time.sleep(AFTER_S)
        round_ = _counters(setup).since(begun)
    frames_s, bytes_s, cpu = (total / idle.at for total in (idle.frames_in, idle.payload, idle.server_cpu_s))
    yield Sample(ROUND_CPU, round_.server_cpu_s)
    yield Sample(ROUND_NODES_CPU, round_.nodes_cpu_s)
    yield Sample(ROUND_FRAMES_IN, round_.frames_in - frames_s * round_.at)
    yield Sample(ROUND_FRAMES_OUT, round_.frames_out - frames_s * round_.at)
    yield Sample(ROUND_BYTES, round_.payload - bytes_s * round_.at)
    yield Sample(KEEP_ALIVE_RATE, frames_s)
    yield Sample(IDLE_BYTES, bytes_s)
    yield Sample(IDLE_CPU, 100.0 * cpu)
    yield Sample(MEMORY, (rss - rss_before) / _MIB)


def _counters(setup: Setup) -> Counters:
    try:
        counted = asyncio.run(_status(setup.port))
    except Exception as error:
        raise NodeFailed(f"the server could not be asked for its counters: {error}") from error
    return Counters(
        time.monotonic(),
        usage.cpu_s(setup.server.pid),
        sum(usage.cpu_s(pid) for pid in setup.pool.pids),
        int(counted["frames_in"]),
        int(counted["frames_out"]),
        int(counted["bytes_in"]) + int(counted["bytes_out"]),
    )


async def _status(port: int) -> dict[str, str]:
    async with open_backend(read_backend_target(f"tcp://{HOST}:{port}"), TIMEOUT_S) as backend:
        return dict((await backend.status()).details)
