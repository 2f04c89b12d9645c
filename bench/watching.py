"""What being watched costs a server: its processor time for a round, with watchers and a scraper, and with none.

    .venv/bin/python bench/watching.py                      # 1,000 nodes, ten followers, ten pairs
    .venv/bin/python bench/watching.py --watchers pages     # ten pages of `rallypoint serve --http`
    .venv/bin/python bench/watching.py --watchers outside   # ten pages of one `rallypoint dashboard` beside the server

Two servers, each with its own nodes: one is watched all the time, the other is not. They take turns, a round each, and
in every other pair the other one begins: a machine that is slow for a while is so for both. What counts is the server's
processor time, of all its threads, from telling the nodes to join again until its turn is over, so that what is told
late counts too; a sample of a pair is the sum of eight turns, for a round. Every five seconds each node renews its
session, which costs half as much as a round: the eight turns are at eight different moments of those five seconds, as
far from each other as can be. The scraper reads `/metrics` every five seconds, too. Followers are connections that draw
the whole run, each for itself, as `rallypoint watch` does; pages read the events that browsers read. What `rallypoint
dashboard` needs, or the process that draws for `rallypoint serve --http`, is no part of the ratio, and is told beside
it.
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
from rallypoint.bench.crew import Crew, Do, What
from rallypoint.bench.driver import be_nodes
from rallypoint.bench.helper import Helper, Line, allow_many_files, end_all, execute, fork
from rallypoint.bench.rallypoint_side import HOST, run_url, serve
from rallypoint.bench.sides import Sizes
from rallypoint.observe.follower import Follower
from rallypoint.observe.target import open_backend, read_target
from rallypoint.server.process import run_loop

TARGET = 1.10
RUN = "bench-watching"
DRIVERS = 4
LIMIT_S = 120.0
BEAT_S = 5.0
TURNS = 8
TURN_S = BEAT_S * 5 / 16
"""Two turns are five eighths of a beat: after eight of each the beat has been met everywhere."""
SCRAPE_S = BEAT_S
PAUSE_S = 0.1
CALM_CORES = 0.3


class Ready(msgspec.Struct):
    """So many watchers have seen the run."""

    watchers: int


class Needed(NamedTuple):
    """Processor time of a server, and of a process that shows its runs."""

    server_s: float
    beside_s: float


# --- watchers, each kind in a process of its own ----------------------------------------------------------------------


def follow(url: str, count: int, sock: socket.socket) -> None:
    """Followers of the run, each with a connection, until the process is ended."""

    async def one(seen: list[int]) -> None:
        target = read_target(url)
        async with open_backend(target, LIMIT_S) as backend:
            is_first = True
            async for _ in Follower(backend, target.keys, target.where, pause_s=PAUSE_S):
                if is_first:
                    is_first = False
                    seen.append(1)
                    if len(seen) == count:
                        Line(sock, Ready).send([Ready(count)])

    async def all_of_them() -> None:
        seen: list[int] = []
        await asyncio.gather(*(one(seen) for _ in range(count)))

    run_loop(all_of_them())


def read_pages(address: str, count: int, sock: socket.socket) -> None:
    """Readers of the events of a page, as browsers are, until the process is ended."""

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
                    Line(sock, Ready).send([Ready(count)])

    async def all_of_them() -> None:
        seen: list[int] = []
        await asyncio.gather(*(one(seen) for _ in range(count)))

    run_loop(all_of_them())


def scrape(address: str, sock: socket.socket) -> None:
    """A scraper, until the process is ended."""
    is_first = True
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            answer.read()
            if is_first:
                is_first = False
                Line(sock, Ready).send([Ready(1)])
        time.sleep(SCRAPE_S)


@contextmanager
def working(*works: Callable[[socket.socket], None]) -> Iterator[None]:
    """Processes that do that, from when all have begun until the end of the block."""
    helpers: list[Helper] = []
    try:
        helpers += [fork(work) for work in works]
        for helper in helpers:
            if Line(helper.sock, Ready).wait_one(LIMIT_S) is None:
                raise SystemExit("a watcher has not seen the run in time")
        yield
    finally:
        end_all(helpers)


# --- one server and its nodes -----------------------------------------------------------------------------------------


class Stage:
    """A server and its nodes, in a round."""

    def __init__(self, nodes: int, stack: ExitStack, *options: str) -> None:
        self.beside: Helper | None = None
        """A process that shows this server's runs."""
        self._server, self.port = serve(*options)
        stack.callback(end_all, [self._server])
        sizes = Sizes(RUN, nodes, nodes, join_timeout_s=int(LIMIT_S))
        self.url = run_url(self.port, sizes)
        hosted = [tuple(range(first, nodes, DRIVERS)) for first in range(min(DRIVERS, nodes))]
        start = [partial(be_nodes, nodes=mine, url=self.url) for mine in hosted]
        self._crew = stack.enter_context(Crew(hosted, lambda number: fork(start[number])))
        self._crew.wait(What.READY, self._crew.nodes, self._deadline())
        self.round()  # connects everybody, and fills whatever is filled once

    def _deadline(self) -> float:
        return time.monotonic() + LIMIT_S

    def round(self) -> None:
        """All nodes join (again), and are in a round."""
        self._crew.tell(Do.JOIN, self._crew.nodes)
        self._crew.gather(self._crew.nodes, self._deadline())

    def wait_calm(self) -> None:
        usage.wait_calm([self._server.pid, *self._crew.pids], CALM_CORES, LIMIT_S)

    def turn(self, until: float) -> Needed:
        """One round, and what happens until then."""
        before = self._needed()
        self.round()
        time.sleep(max(0.0, until - time.monotonic()))
        after = self._needed()
        return Needed(after.server_s - before.server_s, after.beside_s - before.beside_s)

    def _needed(self) -> Needed:
        beside = _children(self._server.pid) if self.beside is None else [self.beside.pid]
        return Needed(usage.cpu_s(self._server.pid), sum(map(usage.cpu_s, beside)))


def _children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def watched_stage(nodes: int, watchers: str, count: int, stack: ExitStack) -> Stage:
    """One with watchers and a scraper, which have seen the run."""
    metrics, page = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    stage = Stage(nodes, stack, "--metrics", metrics, *(("--http", page) if watchers == "pages" else ()))
    if watchers == "outside":
        command = [sys.executable, "-m", "rallypoint", "dashboard", f"tcp://{HOST}:{stage.port}", "--http", page]
        stage.beside = execute(command, os.devnull)
        stack.callback(end_all, [stage.beside])
        _wait_listening(page)
    watch = partial(follow, stage.url, count) if watchers == "followers" else partial(read_pages, page, count)
    stack.enter_context(working(*([watch] if count else []), partial(scrape, metrics)))
    return stage


def _wait_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(0.05)
    raise SystemExit(f"nobody serves a page on {address}")


def take_turns(stages: Sequence[Stage], rounds: int) -> dict[Stage, Needed]:
    """What each of them needed for a round."""
    for stage in stages:
        stage.wait_calm()
    turns: dict[Stage, list[Needed]] = {stage: [] for stage in stages}
    until = time.monotonic()
    for _ in range(rounds):
        for stage in stages:
            until = max(until, time.monotonic()) + TURN_S
            turns[stage].append(stage.turn(until))
    return {stage: Needed(*(sum(part) / rounds for part in zip(*some, strict=True))) for stage, some in turns.items()}


def measure(nodes: int, watchers: str, count: int, pairs: int, rounds: int) -> dict[str, object]:
    """All pairs, and what they come to."""
    plain: list[float] = []
    watched: list[float] = []
    beside: list[float] = []
    with ExitStack() as stack:
        alone = Stage(nodes, stack)
        looked_at = watched_stage(nodes, watchers, count, stack)
        take_turns([alone, looked_at], 1)  # warms both
        for pair in range(pairs):
            both = [alone, looked_at] if pair % 2 == 0 else [looked_at, alone]
            needed = take_turns(both, rounds)
            plain.append(needed[alone].server_s)
            watched.append(needed[looked_at].server_s)
            beside.append(needed[looked_at].beside_s)
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
    allow_many_files()
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
            print(f"beside   {statistics.median(beside):.3f} s a round, of the process that draws")
        print(f"ratio    {found['ratio']:.3f}; of pairs {spread['least']:.3f} to {spread['most']:.3f}")
        print(f"target   at most {TARGET}: {'met' if found['met'] else 'missed'}")
    return 1 if given.assert_target and not found["met"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
