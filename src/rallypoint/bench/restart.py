"""What `--data` costs: how long a server takes to restart from its data, and what a write takes with and without it.

The data directory is written here with the server's own code: everything in a snapshot, or everything in the log, which
is the most that a log holds before a snapshot replaces it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rallypoint.backends.session import FIRST_RANDOM_LEASE
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.dial import dial
from rallypoint.bench.plan import (
    FROM_LOG,
    FROM_SNAPSHOT,
    LATENCY_ALWAYS,
    LATENCY_NONE,
    LATENCY_OS,
    RATE_ALWAYS,
    RATE_NONE,
    RATE_OS,
    Case,
    Progress,
    Sample,
)
from rallypoint.bench.processes import kill_all
from rallypoint.bench.rallypoint_side import HOST, serve
from rallypoint.kv.engine import Engine
from rallypoint.kv.log import Entry, encode_entries
from rallypoint.kv.snapshot_parts import capture
from rallypoint.kv.types import Grant, Origin, Put, Txn
from rallypoint.server.durability.disk import Directory
from rallypoint.server.durability.files import begin_log, write_snapshot

GENERATION = "be" * 8
VALUE = b"v" * 64
TTL_S = 3600.0
IN_FLIGHT = 64
CONNECTIONS = 8
COMMIT_ENTRIES = 50
MODES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (RATE_NONE, LATENCY_NONE, ()),
    (RATE_OS, LATENCY_OS, ("--sync", "os")),
    (RATE_ALWAYS, LATENCY_ALWAYS, ("--sync", "always")),
)


def restart(case: Case) -> Iterator[Sample | Progress]:
    """All measures, `case.repeat` times."""
    with tempfile.TemporaryDirectory(prefix="rallypoint-bench-") as folder:
        yield Progress(f"writing {case.keys} keys of {case.nodes} sessions")
        whole, logged = Path(folder) / "snapshot", Path(folder) / "log"
        entries = _entries(case.nodes, case.keys)
        _write_as_snapshot(whole, entries)
        _write_as_log(logged, entries)
        for repetition in range(case.repeat):
            for measure, data in ((FROM_SNAPSHOT, whole), (FROM_LOG, logged)):
                yield Progress(f"{measure}, {repetition + 1} of {case.repeat}")
                yield Sample(measure, _ready_s(data, case.keys))
            for rate, latency, options in MODES:
                yield Progress(f"{rate}, {repetition + 1} of {case.repeat}")
                data = Path(folder) / f"writes {repetition} {rate}"
                yield from _writes(rate, latency, ("--data", str(data), *options) if options else (), case.seconds)


def _entries(sessions: int, keys: int) -> list[Entry]:
    """The requests that fill the store: a lease for each session, then keys under the leases in turn."""
    clients = [f"{number:024x}" for number in range(sessions)]
    entries = [
        Entry(Grant(TTL_S, FIRST_RANDOM_LEASE + number), Origin(client, 1)) for number, client in enumerate(clients)
    ]
    for number in range(keys):
        session, turn = number % sessions, number // sessions
        put = Put(_key(number), VALUE, FIRST_RANDOM_LEASE + session)
        entries.append(Entry(Txn((), (put,)), Origin(clients[session], turn + 2, turn + 1)))
    return entries


def _key(number: int) -> str:
    return f"/rallypoint/bench:data/store/000000000001/key-{number:08d}"


def _write_as_snapshot(path: Path, entries: list[Entry]) -> None:
    engine = Engine()
    for entry in entries:
        engine.apply(entry.op, 0.0, entry.origin)
    disk = Directory(path)
    disk.lock()
    write_snapshot(disk, 1, 0, GENERATION, capture(engine))
    begin_log(disk, 1, 0, GENERATION, b"").close()
    disk.close()


def _write_as_log(path: Path, entries: list[Entry]) -> None:
    disk = Directory(path)
    disk.lock()
    write_snapshot(disk, 1, 0, GENERATION, capture(Engine()))
    frames = [encode_entries(at, entries[at : at + COMMIT_ENTRIES]) for at in range(0, len(entries), COMMIT_ENTRIES)]
    begin_log(disk, 1, 0, GENERATION, b"".join(frames)).close()
    disk.close()


def _ready_s(data: Path, keys: int) -> float:
    """From the start of the process until it has answered a read of the last key."""
    began_at = time.monotonic()
    with _serving("--data", str(data)) as endpoint:
        return asyncio.run(_first_answer(endpoint, _key(keys - 1))) - began_at


async def _first_answer(endpoint: str, key: str) -> float:
    backend = TcpBackend(endpoint, dial(endpoint, 1))
    try:
        got = await backend.get(key)
        answered_at = time.monotonic()
    finally:
        await backend.close()
    if got.item is None or got.item.value != VALUE:
        raise RuntimeError(f"{key} was lost")
    return answered_at


def _writes(rate: str, latency: str, options: tuple[str, ...], seconds: float) -> Iterator[Sample]:
    with _serving(*options) as endpoint:
        a_second, median_s = asyncio.run(_write(endpoint, seconds))
    yield Sample(rate, a_second)
    yield Sample(latency, median_s)


async def _write(endpoint: str, seconds: float) -> tuple[float, float]:
    """Acknowledged writes a second with many in flight; and the median time of one, one after the other."""
    backends = [TcpBackend(endpoint, dial(endpoint, 1)) for _ in range(CONNECTIONS)]
    loop = asyncio.get_running_loop()
    numbers = count()
    done = 0

    async def write(backend: TcpBackend, until: float) -> None:
        nonlocal done
        while loop.time() < until:
            await backend.txn((), (Put(_key(next(numbers) % 10_000), VALUE),))
            done += 1

    try:
        for backend in backends:
            await backend.get("ready")
        began_at = loop.time()
        await asyncio.gather(*(write(backends[n % CONNECTIONS], began_at + seconds) for n in range(IN_FLIGHT)))
        a_second = done / (loop.time() - began_at)
        took: list[float] = []
        until = loop.time() + seconds
        while loop.time() < until:
            sent_at = time.perf_counter()
            await backends[0].txn((), (Put("one", VALUE),))
            took.append(time.perf_counter() - sent_at)
        return a_second, statistics.median(took)
    finally:
        for backend in backends:
            await backend.close()


@contextmanager
def _serving(*options: str) -> Iterator[str]:
    server, port = serve(*options)
    try:
        yield f"{HOST}:{port}"
    finally:
        kill_all([server])
