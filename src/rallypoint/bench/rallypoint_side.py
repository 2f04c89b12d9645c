"""Rallypoint itself: `rallypoint serve` as a program of its own, and nodes through the public API."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import rallypoint
from rallypoint import aio
from rallypoint.api import free_port
from rallypoint.bench.helper import Helper, end_all, execute
from rallypoint.bench.plan import LAST_CALL_S
from rallypoint.bench.sides import Place, Sizes

START_S = 30.0
LOOK_S = 0.01
HOST = "127.0.0.1"


def serve(*options: str) -> tuple[Helper, int]:
    """`rallypoint serve` on a free port, once it listens."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="rallypoint-bench-") as place:
        log = Path(place) / "serve.log"
        command = [sys.executable, "-m", "rallypoint", "serve", "--bind", f"{HOST}:{port}", *options]
        helper = execute(command, str(log))
        try:
            _wait_listening(helper, log, port)
        except BaseException:
            end_all([helper])
            raise
    return helper, port


class RallypointSide:
    """`rallypoint serve` is started for every sample, as it is installed."""

    def load(self) -> None:
        """Rehearse with one node, so that what is imported at first use is not imported by every node."""
        server, port = self.start_server(1)
        try:
            asyncio.run(_rehearse(run_url(port, Sizes("rehearsal", 1, 1, join_timeout_s=int(START_S)))))
        finally:
            end_all([server])

    def start_server(self, nodes: int) -> tuple[Helper, int]:
        return serve()

    def client(self, port: int, sizes: Sizes) -> RallypointClient:
        return RallypointClient(port, sizes)

    def store(self, port: int, sizes: Sizes) -> Any:
        client = RallypointClient(port, sizes)
        client.create()
        client.join()
        return client.store


class RallypointClient:
    """One node, through the blocking handler."""

    def __init__(self, port: int, sizes: Sizes, scheme: str = "tcp") -> None:
        self._port = port
        self._scheme = scheme
        self._url = run_url(port, sizes, scheme)
        self._handler: rallypoint.Handler | None = None
        self._world: rallypoint.World | None = None

    def rehearse(self) -> None:
        sizes = Sizes(f"rehearsal-{os.getpid()}", 1, 1, join_timeout_s=int(START_S))
        with rallypoint.join(run_url(self._port, sizes, self._scheme)) as run:
            next(iter(run.rounds()))

    def create(self) -> None:
        """Connects nothing: the first call does."""
        if self._handler is None:
            handler = rallypoint.create_handler(self._url)
            assert isinstance(handler, rallypoint.Handler)
            self._handler = handler

    def connect(self) -> None:
        self.create()
        assert self._handler is not None
        self._handler.is_closed()  # a look at the run opens the connection

    def join(self) -> Place:
        assert self._handler is not None
        self._world = self._handler.next_rendezvous()
        return Place(self._world.rank, self._world.world_size)

    @property
    def store(self) -> rallypoint.Store:
        """That of the round; it keeps the node alive."""
        assert self._world is not None
        return self._world.store

    def wait_told(self) -> None:
        assert self._world is not None
        self._world.changed.wait()


async def _rehearse(url: str) -> None:
    """On a loop of this thread, which leaves no thread behind."""
    async with aio.join(url) as run:
        await run.handler.next_rendezvous()


def run_url(port: int, sizes: Sizes, scheme: str = "tcp") -> str:
    """Only sizes and times that the competitors are given as well; the rest as it comes."""
    options = {
        "min_nodes": sizes.least,
        "max_nodes": sizes.most,
        "join_timeout": sizes.join_timeout_s,
        "last_call_timeout": LAST_CALL_S,
        "admission_window": 0,
        "local_addr": HOST,
    }
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{scheme}://{HOST}:{port}/{quote(sizes.run_id, safe='')}?{query}"


def _wait_listening(helper: Helper, log: Path, port: int) -> None:
    """Until the server has said so. RuntimeError, with what it said instead, if it does not or has ended."""
    deadline = time.monotonic() + START_S
    said = ""
    while time.monotonic() < deadline:
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if f"listening on {HOST}:{port}" in said:
            return
        if helper.has_ended():
            break
        time.sleep(LOOK_S)
    raise RuntimeError(f"`rallypoint serve` did not start listening on {HOST}:{port}; it said: {said.strip()[-400:]!r}")
