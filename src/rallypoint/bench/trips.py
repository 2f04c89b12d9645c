"""How many round trips a rendezvous takes: the same sample with and without a delay on the wire.

A forwarder in front of the server delays all data in both directions. The additional time of a sample, divided by that
of a round trip, is the number of round trips. Opening a TCP connection is not delayed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

from rallypoint.bench.measures import TIMED
from rallypoint.bench.node_pool import DeadlinePassed, NodeFailed
from rallypoint.bench.plan import TRIPS_OF, Case, Sample
from rallypoint.bench.processes import ChildProcess, kill_all
from rallypoint.bench.rallypoint_side import HOST
from rallypoint.bench.sides import Client, Implementation, RunConfig
from rallypoint.bench.torch_side import send_port, start_forked

DELAY_S = 0.1
"""One way. Much longer than everything else takes, so that a busy machine does not matter."""


class _Delayed:
    """A side whose server is behind the forwarder."""

    def __init__(self, side: Implementation) -> None:
        self._side = side

    def load(self) -> None:
        self._side.load()

    def start_server(self, nodes: int) -> tuple[ChildProcess, int]:
        server, port = self._side.start_server(nodes)
        try:
            forwarder, delayed_port = start_forked(lambda sock: asyncio.run(_forward(sock, port)))
        except BaseException:
            kill_all([server])
            raise
        return _Pair(server, forwarder), delayed_port

    def client(self, port: int, config: RunConfig) -> Client:
        return self._side.client(port, config)

    def store(self, port: int, config: RunConfig) -> Any:
        return self._side.store(port, config)


class _Pair(ChildProcess):
    """A server and its forwarder."""

    def __init__(self, server: ChildProcess, forwarder: ChildProcess) -> None:
        super().__init__(server.pid, server.sock)
        self._forwarder = forwarder

    def kill(self) -> None:
        super().kill()
        self._forwarder.kill()

    def reap(self) -> None:
        super().reap()
        self._forwarder.reap()


def trips(side: Implementation, case: Case) -> Iterator[Sample]:
    """A sample of each kind, without and with the delay. NodeFailed."""
    delayed = _Delayed(side)
    for measure, timed in TRIPS_OF.items():
        try:
            plain_s, delayed_s = (TIMED[timed](one, case, 0) for one in (side, delayed))
        except DeadlinePassed as error:
            raise NodeFailed(f"no round in {case.limit_s:g} s ({error})") from error
        yield Sample(measure, (delayed_s - plain_s) / (2 * DELAY_S))


async def _forward(sock: socket.socket, port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _FromNode(port), HOST, 0)
    send_port(sock, server.sockets[0].getsockname()[1])
    await server.serve_forever()


class _Pipe(asyncio.Protocol):
    """One of two connections; received data is written to the other after the delay."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Pipe | None = None
        self._early: list[bytes] = []
        """Data that was due before the other connection was open."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        asyncio.get_running_loop().call_later(DELAY_S, self._pass_on, data)

    def _pass_on(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def pair_with(self, other: _Pipe) -> None:
        self.other = other
        early, self._early = self._early, []
        for data in early:
            self._pass_on(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class _FromNode(_Pipe):
    """The connection of a node; it opens the one to the server."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._task = asyncio.create_task(self._connect(), name="forwarder")

    async def _connect(self) -> None:
        _, to_server = await asyncio.get_running_loop().create_connection(_Pipe, HOST, self._port)
        to_server.pair_with(self)
        self.pair_with(to_server)
