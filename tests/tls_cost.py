"""What TLS costs: per operation and per connection, beside plain text, with `rallypoint serve` in a process of its own.

    .venv/bin/python -m tests.tls_cost [--connections 1000] [--operations 3000]

Needs the development tools (`make setup`), which make the certificates.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.dial import Secure, dial
from rallypoint.backends.tls import TlsFiles
from rallypoint.kv.types import Put
from rallypoint.server.admission.credentials import Credentials
from tests.certificates import Authority, Pair

AT_ONCE = 50
VALUE = bytes(64)


def served(folder: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A server, and where it listens."""
    command = [sys.executable, "-m", "rallypoint", "serve", "--bind", "127.0.0.1:0", *options]
    serves = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert serves.stderr is not None
    found = re.search(r"listening on (\S+)", serves.stderr.readline())
    assert found
    return serves, found[1]


def rss_kb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1])


def cpu_s(pid: int) -> float:
    """What a process has computed for so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def measure(pid: int, endpoint: str, secure: Secure | None, connections: int, operations: int) -> list[str]:
    """A row: operations of one client one after another, then many connections."""
    one = TcpBackend(endpoint, dial(endpoint, 1, secure))
    await one.txn((), (Put("/a", VALUE),))
    took: dict[str, list[float]] = {"get": [], "put": []}
    for _ in range(operations):
        for what, call in (("get", one.get("/a")), ("put", one.txn((), (Put("/a", VALUE),)))):
            began = time.perf_counter()
            await call
            took[what].append(time.perf_counter() - began)
    many = [TcpBackend(endpoint, dial(endpoint, 1, secure)) for _ in range(connections)]
    gate = asyncio.Semaphore(AT_ONCE)

    async def connect(backend: TcpBackend) -> None:
        async with gate:
            await backend.get("/a")

    before_kb, before_s, began = rss_kb(pid), cpu_s(pid), time.perf_counter()
    await asyncio.gather(*map(connect, many))
    all_s, server_s, more_kb = time.perf_counter() - began, cpu_s(pid) - before_s, rss_kb(pid) - before_kb
    for backend in (*many, one):
        await backend.close()
    p50 = {what: statistics.median(times) * 1e6 for what, times in took.items()}
    return [
        f"{p50['get']:.0f} µs",
        f"{p50['put']:.0f} µs",
        f"{all_s:.2f} s",
        f"{server_s / connections * 1e3:.2f} ms",
        f"{more_kb / connections:.0f} KiB",
    ]


def files(ca: Path | None, pair: Pair | None) -> TlsFiles:
    return TlsFiles(str(ca) if ca else None, str(pair.cert) if pair else None, str(pair.key) if pair else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=1_000)
    parser.add_argument("--operations", type=int, default=3_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority(folder)
        server, client = authority.issue("server", "127.0.0.1"), authority.issue("client")
        shows = ["--tls-cert", str(server.cert), "--tls-key", str(server.key)]
        asks = [*shows, "--tls-ca", str(authority.path)]
        cases: dict[str, tuple[list[str], TlsFiles | None]] = {
            "plain": ([], None),
            "TLS": (shows, files(authority.path, None)),
            "mutual TLS": (asks, files(authority.path, client)),
        }
        print(
            f"| | get p50 | put p50 | {args.connections} connections | server's CPU for one | server's memory for one |"
        )
        print("|---|---|---|---|---|---|")
        for what, (options, tls) in cases.items():
            serves, endpoint = served(folder, *options)
            try:
                secure = None if tls is None else Credentials(tls=tls).secure
                row = asyncio.run(measure(serves.pid, endpoint, secure, args.connections, args.operations))
                print(f"| {what} | {' | '.join(row)} |", flush=True)
            finally:
                serves.terminate()
                serves.communicate(timeout=20)


if __name__ == "__main__":
    main()
