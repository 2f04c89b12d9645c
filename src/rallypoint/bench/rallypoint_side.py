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
from rallypoint.bench.plan import LAST_CALL_S
from rallypoint.bench.processes import ChildProcess, kill_all, spawn
from rallypoint.bench.sides import Place, RunConfig

START_TIMEOUT_S = 30.0
POLL_S = 0.01
HOST = "127.0.0.1"


def serve(*options: str) -> tuple[ChildProcess, int]:
    """Start `rallypoint serve` on a free port and wait until it listens."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="rallypoint-bench-") as folder:
        log = Path(folder) / "serve.log"
        command = [sys.executable, "-m", "rallypoint", "serve", "--bind", f"{HOST}:{port}", *options]
        server = spawn(command, str(log))
        try:
            _wait_listening(server, log, port)
        except BaseException:
            kill_all([server])
            raise
    return server, port


class RallypointSide:
    """Each sample starts its own `rallypoint serve`, as installed."""

    def load(self) -> None:
        """Also go through a round with one node: modules imported at first use are then not imported by every node."""
        server, port = self.start_server(1)
        try:
            asyncio.run(_join_alone(run_url(port, RunConfig("warm-up", 1, 1, join_timeout_s=int(START_TIMEOUT_S)))))
        finally:
            kill_all([server])

    def start_server(self, nodes: int) -> tuple[ChildProcess, int]:
        return serve()

    def client(self, port: int, config: RunConfig) -> RallypointClient:
        return RallypointClient(port, config)

    def store(self, port: int, config: RunConfig) -> Any:
        client = RallypointClient(port, config)
        client.create()
        client.join()
        return client.store


class RallypointClient:
    """One node, through the blocking handler."""

    def __init__(self, port: int, config: RunConfig, scheme: str = "tcp") -> None:
        self._port = port
        self._scheme = scheme
        self._url = run_url(port, config, scheme)
        self._handler: rallypoint.Handler | None = None
        self._world: rallypoint.World | None = None

    def warm_up(self) -> None:
        config = RunConfig(f"warm-up-{os.getpid()}", 1, 1, join_timeout_s=int(START_TIMEOUT_S))
        with rallypoint.join(run_url(self._port, config, self._scheme)) as run:
            next(iter(run.rounds()))

    def create(self) -> None:
        """Does not connect: the first call does."""
        if self._handler is None:
            handler = rallypoint.create_handler(self._url)
            assert isinstance(handler, rallypoint.Handler)
            self._handler = handler

    def connect(self) -> None:
        self.create()
        assert self._handler is not None
        self._handler.is_closed()  # reads from the server

    def join(self) -> Place:
        assert self._handler is not None
        self._world = self._handler.next_rendezvous()
        return Place(self._world.rank, self._world.world_size)

    @property
    def store(self) -> rallypoint.Store:
        """The store of the round."""
        assert self._world is not None
        return self._world.store

    def wait_changed(self) -> None:
        assert self._world is not None
        self._world.changed.wait()


async def _join_alone(url: str) -> None:
    """On an event loop of this thread: leaves no thread behind."""
    async with aio.join(url) as run:
        await run.handler.next_rendezvous()


def run_url(port: int, config: RunConfig, scheme: str = "tcp") -> str:
    """A URL with the sizes and times that the competitors get as well; everything else has its default."""
    options = {
        "min_nodes": config.min_nodes,
        "max_nodes": config.max_nodes,
        "join_timeout": config.join_timeout_s,
        "last_call_timeout": LAST_CALL_S,
        "admission_window": 0,
        "local_addr": HOST,
    }
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{scheme}://{HOST}:{port}/{quote(config.run_id, safe='')}?{query}"


def _wait_listening(server: ChildProcess, log: Path, port: int) -> None:
    """Until the server's log says so. RuntimeError, with the end of the log, if it ends or never does."""
    deadline = time.monotonic() + START_TIMEOUT_S
    text = ""
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if f"listening on {HOST}:{port}" in text:
            return
        if server.has_ended():
            break
        time.sleep(POLL_S)
    end = text.strip()[-400:]
    raise RuntimeError(f"`rallypoint serve` did not start listening on {HOST}:{port}; its log ends: {end!r}")
