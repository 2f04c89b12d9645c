"""What watching costs a server: its processor time for a round, with watchers and a scraper, and without.

    .venv/bin/python bench/watching.py                      # 1,000 nodes, ten followers, ten pairs
    .venv/bin/python bench/watching.py --watchers pages     # ten pages of `rallypoint serve --http`
    .venv/bin/python bench/watching.py --watchers outside   # ten pages of one `rallypoint dashboard` beside the server

Two servers, each with its own nodes: one is watched all the time, the other is not. They take turns, a round each, and
in every other pair the other one begins, so that a slow moment of the machine affects both. A turn counts the server's
processor time, of all its threads, from the command to join until the end of the turn, so that delayed pushes count
too. A sample of a pair is the mean of eight turns. Every five seconds each node renews its session, which costs half as
much as a round: the eight turns are spread evenly over those five seconds. The scraper reads `/metrics` every five
seconds, too. Followers are connections that draw the whole run, each for itself, as `rallypoint watch` does; pages read
the events that browsers read. The processor time of `rallypoint dashboard`, or of the page process of
`rallypoint serve --http`, is printed beside the ratio and not part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from rallypoint.api import free_port
from rallypoint.bench import usage
from rallypoint.bench.node_pool import Action, Event, NodePool
from rallypoint.bench.processes import ChildProcess, MessageSocket, fork, kill_all, raise_file_limit, spawn
from rallypoint.bench.rallypoint_side import HOST, run_url, serve
from rallypoint.bench.shared_nodes import run_nodes
from rallypoint.bench.sides import RunConfig
from rallypoint.observe.follower import Follower
from rallypoint.observe.target import open_backend, read_target
from rallypoint.server.process import run_loop

TARGET = 1.10
RUN = "bench-watching"
PROCESSES = 4
LIMIT_S = 120.0
KEEP_ALIVE_S = 5.0
TURNS = 8
TURN_S = KEEP_ALIVE_S * 5 / 16
"""Two turns take five eighths of the interval: eight turns of each are spread evenly over it."""
SCRAPE_S = KEEP_ALIVE_S
PAUSE_S = 0.1
SETTLED_CORES = 0.3


class Ready(msgspec.Struct):
    """The number of watchers that have seen the run."""

    watchers: int


class Needed(NamedTuple):
    """CPU time of a server, and of the process that shows its runs."""

    server_s: float
    beside_s: float


# --- watchers, each kind in a process of its own ----------------------------------------------------------------------


def follow(url: str, count: int, sock: socket.socket) -> None:
    """Follow the run, on `count` connections, until the process is killed."""

    async def one(seen: list[int]) -> None:
        target = read_target(url)
        async with open_backend(target, LIMIT_S) as backend:
            is_first = True
            async for _ in Follower(backend, target.keys, target.where, pause_s=PAUSE_S):
                if is_first:
                    is_first = False
                    seen.append(1)
                    if len(seen) == count:
                        MessageSocket(sock, Ready).send([Ready(count)])

    async def all_of_them() -> None:
        seen: list[int] = []
        await asyncio.gather(*(one(seen) for _ in range(count)))

    run_loop(all_of_them())


def read_pages(address: str, count: int, sock: socket.socket) -> None:
    """Read the events of a page, as `count` browsers do, until the process is killed."""

    async def one(seen: list[int]) -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
        writer.write(f"GET /api/run?id={RUN} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
        is_first = True
        while data := await reader.read(1 << 20):
            if is_first and b"data:" in data:
                is_first = False
                seen.append(1)
                if len(seen) == count:
                    MessageSocket(sock, Ready).send([Ready(count)])

    async def all_of_them() -> None:
        seen: list[int] = []
        await asyncio.gather(*(one(seen) for _ in range(count)))

    run_loop(all_of_them())


def scrape(address: str, sock: socket.socket) -> None:
    """Scrape `/metrics` until the process is killed."""
    is_first = True
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            answer.read()
            if is_first:
                is_first = False
                MessageSocket(sock, Ready).send([Ready(1)])
        time.sleep(SCRAPE_S)


@contextmanager
def working(*works: Callable[[socket.socket], None]) -> Iterator[None]:
    """Run each work in a process of its own; the block begins when all are ready, and they are killed at its end."""
    processes: list[ChildProcess] = []
    try:
        processes += [fork(work) for work in works]
        for process in processes:
            if MessageSocket(process.sock, Ready).wait_one(LIMIT_S) is None:
                raise SystemExit("a watcher has not seen the run in time")
        yield
    finally:
        kill_all(processes)


# --- one server and its nodes -----------------------------------------------------------------------------------------


class ServerWithNodes:
    """A server and its nodes, in a round."""

    def __init__(self, nodes: int, stack: ExitStack, *options: str) -> None:
        self.beside: ChildProcess | None = None
        """A process that shows this server's runs."""
        self._server, self.port = serve(*options)
        stack.callback(kill_all, [self._server])
        config = RunConfig(RUN, nodes, nodes, join_timeout_s=int(LIMIT_S))
        self.url = run_url(self.port, config)
        hosted = [tuple(range(first, nodes, PROCESSES)) for first in range(min(PROCESSES, nodes))]
        start = [partial(run_nodes, nodes=mine, url=self.url) for mine in hosted]
        self._pool = stack.enter_context(NodePool(hosted, lambda index: fork(start[index])))
        self._pool.wait_for(Event.READY, self._pool.nodes, self._deadline())
        self.round()  # connects all nodes and fills caches

    def _deadline(self) -> float:
        return time.monotonic() + LIMIT_S

    def round(self) -> None:
        """All nodes join and are in a new round."""
        self._pool.send(Action.JOIN, self._pool.nodes)
        self._pool.wait_for_world(self._pool.nodes, self._deadline())

    def wait_until_idle(self) -> None:
        usage.wait_until_idle([self._server.pid, *self._pool.pids], SETTLED_CORES, LIMIT_S)

    def turn(self, until: float) -> Needed:
        """The CPU time of one round and of what follows it, until that instant."""
        before = self._needed()
        self.round()
        time.sleep(max(0.0, until - time.monotonic()))
        after = self._needed()
        return Needed(after.server_s - before.server_s, after.beside_s - before.beside_s)

    def _needed(self) -> Needed:
        beside = _children(self._server.pid) if self.beside is None else [self.beside.pid]
        return Needed(usage.cpu_s(self._server.pid), sum(map(usage.cpu_s, beside)))


def _children(pid: int) -> list[int]:
    """The child processes of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def watched_server(nodes: int, watchers: str, count: int, stack: ExitStack) -> ServerWithNodes:
    """One with watchers and a scraper that have seen the run."""
    metrics, page = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    server = ServerWithNodes(nodes, stack, "--metrics", metrics, *(("--http", page) if watchers == "pages" else ()))
    if watchers == "outside":
        command = [sys.executable, "-m", "rallypoint", "dashboard", f"tcp://{HOST}:{server.port}", "--http", page]
        server.beside = spawn(command, os.devnull)
        stack.callback(kill_all, [server.beside])
        _wait_listening(page)
    watch = partial(follow, server.url, count) if watchers == "followers" else partial(read_pages, page, count)
    stack.enter_context(working(*([watch] if count else []), partial(scrape, metrics)))
    return server


def _wait_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(0.05)
    raise SystemExit(f"no page is served on {address}")


def take_turns(servers: Sequence[ServerWithNodes], rounds: int) -> dict[ServerWithNodes, Needed]:
    """The CPU time that each of them needed for a round."""
    for server in servers:
        server.wait_until_idle()
    turns: dict[ServerWithNodes, list[Needed]] = {server: [] for server in servers}
    until = time.monotonic()
    for _ in range(rounds):
        for server in servers:
            until = max(until, time.monotonic()) + TURN_S
            turns[server].append(server.turn(until))
    return {one: Needed(*(sum(part) / rounds for part in zip(*some, strict=True))) for one, some in turns.items()}


def measure(nodes: int, watchers: str, count: int, pairs: int, rounds: int) -> dict[str, object]:
    """All pairs, and their ratio."""
    plain: list[float] = []
    watched: list[float] = []
    beside: list[float] = []
    with ExitStack() as stack:
        alone = ServerWithNodes(nodes, stack)
        observed = watched_server(nodes, watchers, count, stack)
        take_turns([alone, observed], 1)  # fills the caches of both
        for pair in range(pairs):
            both = [alone, observed] if pair % 2 == 0 else [observed, alone]
            needed = take_turns(both, rounds)
            plain.append(needed[alone].server_s)
            watched.append(needed[observed].server_s)
            beside.append(needed[observed].beside_s)
            said = f"pair {pair + 1}: {plain[-1]:.3f} s alone, {watched[-1]:.3f} s watched"
            print(said, file=sys.stderr, flush=True)
    ratios = [one / other for one, other in zip(watched, plain, strict=True)]
    ratio = statistics.median(watched) / statistics.median(plain)
    return {
        "bench": "watching",
        "nodes": nodes,
        "watchers": f"{count} {watchers}",
        "rounds_a_sample": rounds,
        "alone_s": plain,
        "watched_s": watched,
        "beside_s": beside if watchers != "followers" else None,
        "ratio": ratio,
        "ratio_of_pairs": {"least": min(ratios), "median": statistics.median(ratios), "most": max(ratios)},
        "target": TARGET,
        "met": ratio <= TARGET,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--watchers", choices=["followers", "pages", "outside"], default="followers")
    parser.add_argument("--count", type=int, default=10, help="how many watchers (%(default)s); 0: the scraper alone")
    parser.add_argument("--repetitions", type=int, default=10, help="pairs of samples (%(default)s)")
    parser.add_argument("--rounds", type=int, default=TURNS, help="rounds of a sample (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--assert-target", action="store_true", help="exit with 1 if the target is missed")
    given = parser.parse_args()
    raise_file_limit()
    found = measure(given.nodes, given.watchers, given.count, given.repetitions, given.rounds)
    if given.json:
        print(json.dumps(found))
    else:
        spread = found["ratio_of_pairs"]
        assert isinstance(spread, dict)
        alone, watched = found["alone_s"], found["watched_s"]
        assert isinstance(alone, list)
        assert isinstance(watched, list)
        print(f"{given.nodes} nodes, {found['watchers']} and a scraper, {given.repetitions} pairs")
        print(f"alone    {statistics.median(alone):.3f} s a round ({min(alone):.3f} to {max(alone):.3f})")
        print(f"watched  {statistics.median(watched):.3f} s a round ({min(watched):.3f} to {max(watched):.3f})")
        beside = found["beside_s"]
        if isinstance(beside, list):
            print(f"beside   {statistics.median(beside):.3f} s a round, of the process of the page")
        print(f"ratio    {found['ratio']:.3f}; of pairs {spread['least']:.3f} to {spread['most']:.3f}")
        print(f"target   at most {TARGET}: {'met' if found['met'] else 'missed'}")
    return 1 if given.assert_target and not found["met"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
