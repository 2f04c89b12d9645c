"""What a register costs by number of nodes: `python bench/register.py [--idle SECONDS] [--json] [N ...]`.

All nodes live in this one process, each with a view of the file of its own, as processes on machines of their own would
have; so calls and bytes are what they would be there, and the times are those of one core that does the work of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from rallypoint.backends.register.backend import RegisterBackend
from rallypoint.backends.register.cell import BlockingCell
from rallypoint.backends.register.file import FileCell
from rallypoint.backends.register.hub import Hub
from rallypoint.events import Emitter
from rallypoint.rendezvous.membership import Identity
from rallypoint.rendezvous.node import Node
from rallypoint.settings import Settings

SIZES = (2, 4, 8, 16, 32, 64)
COLUMNS = (
    *("nodes", "first round", "next round", "its CPU, all nodes", "its writes a node", "lost races", "reads"),
    *("largest content", "idle: writes/s a node", "reads/s a node", "CPU a node"),
)


class Counted(FileCell):
    """Counts what is asked of the file."""

    def __init__(self, path: Path, counts: Counter[str]) -> None:
        super().__init__(path)
        self._counts = counts

    def get_state(self) -> tuple[bytes, bytes] | None:
        self._counts["reads"] += 1
        return super().get_state()

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, bytes, bool] | None:
        self._counts["reads"] -= 1  # its own look under the lock
        answer = super().set_state(state, token)
        self._counts["writes" if answer is not None and answer[2] else "lost"] += 1
        self._counts["bytes"] = max(self._counts["bytes"], len(state))
        return answer


async def publish(number: int, size: int) -> tuple[str, int]:
    return "127.0.0.1", 29500


def make_node(index: int, size: int, path: Path, counts: Counter[str]) -> Node:
    rng = random.Random(index)
    backend = RegisterBackend(Hub(BlockingCell(Counted(path, counts)), rng), rng=rng)
    settings = Settings.build(scheme="file", endpoints="/", run_id="bench", min_nodes=size, name=f"n{index}")
    identity = Identity(f"{rng.getrandbits(64):016x}", f"n{index}", f"n{index}", index, 0, {})
    return Node(backend, settings, identity, bootstrap=publish, emit=Emitter(lambda _: None), rng=rng, wall=time.time)


async def measure(size: int, idle_s: float) -> list[str]:
    """One row of the table."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        nodes = [make_node(index, size, Path(folder) / "bench", counts) for index in range(size)]
        rows = []
        for _ in range(2):
            counts.clear()
            began_at, cpu_at = time.monotonic(), time.process_time()
            await asyncio.gather(*(node.next_round() for node in nodes))
            rows.append((time.monotonic() - began_at, time.process_time() - cpu_at, counts.copy()))
        await asyncio.sleep(10.0)  # until it is quiet
        counts.clear()
        cpu_at = time.process_time()
        await asyncio.sleep(idle_s)
        idle, idle_cpu = counts.copy(), time.process_time() - cpu_at
        for node in nodes:
            node.abandon()
            await node.backend.close()
    (first_s, _, _), (again_s, again_cpu, again) = rows
    per_round = [f"{again[what] / size:.1f}" for what in ("writes", "lost", "reads")]
    per_second = [f"{idle[what] / idle_s / size:.2f}" for what in ("writes", "reads")]
    return [
        f"{size}",
        f"{first_s:.2f} s",
        f"{again_s:.2f} s",
        f"{again_cpu:.2f} s",
        *per_round,
        f"{again['bytes'] / 1000:.1f} kB",
        *per_second,
        f"{idle_cpu / idle_s / size * 100:.2f} %",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--idle", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, _ = parser.parse_known_args()  # bench/run.py passes options of others
    if options.json:
        rows = [dict(zip(COLUMNS, asyncio.run(measure(size, options.idle)), strict=True)) for size in options.sizes]
        print(json.dumps({"benchmark": "register", "rows": rows}))
        return
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for size in options.sizes:
        print(f"| {' | '.join(asyncio.run(measure(size, options.idle)))} |", flush=True)


if __name__ == "__main__":
    main()
