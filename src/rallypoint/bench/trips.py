"""How many round trips a rendezvous takes: the same sample with and without a delay on the wire.

A forwarder stands before the server and keeps every piece of data back for a while, in both directions. What a sample
takes longer, by what a round trip takes longer, is the number of trips. Opening a TCP connection is not delayed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

from rallypoint.bench.crew import NodeFailed, NoneInTime
from rallypoint.bench.helper import Helper, end_all
from rallypoint.bench.measures import TIMED
from rallypoint.bench.plan import TRIPS_OF, Case, Sample
from rallypoint.bench.rallypoint_side import HOST
from rallypoint.bench.sides import Client, Contender, Sizes
from rallypoint.bench.torch_side import say_port, start_forked

DELAY_S = 0.1
"""One way. Much more than what anything else takes, so that a busy machine does not matter."""


class _Delayed:
    """A server that is far away."""

    def __init__(self, side: Contender) -> None:
        self._side = side

    def load(self) -> None:
        self._side.load()

    def start_server(self, nodes: int) -> tuple[Helper, int]:
        server, port = self._side.start_server(nodes)
        try:
            forwarder, far = start_forked(lambda sock: asyncio.run(_forward(sock, port)))
        except BaseException:
            end_all([server])
            raise
        return _Pair(server, forwarder), far

    def client(self, port: int, sizes: Sizes) -> Client:
        return self._side.client(port, sizes)

    def store(self, port: int, sizes: Sizes) -> Any:
        return self._side.store(port, sizes)


class _Pair(Helper):
    """A server, and what stands before it."""

    def __init__(self, server: Helper, forwarder: Helper) -> None:
        super().__init__(server.pid, server.sock)
        self._forwarder = forwarder

    def kill(self) -> None:
        super().kill()
        self._forwarder.kill()

    def reap(self) -> None:
        super().reap()
        self._forwarder.reap()


def trips(side: Contender, case: Case) -> Iterator[Sample]:
    """A sample of each kind near and far. NodeFailed."""
    far = _Delayed(side)
    for measure, timed in TRIPS_OF.items():
        try:
            near_s, far_s = (TIMED[timed](one, case, 0) for one in (side, far))
        except NoneInTime as error:
            raise NodeFailed(f"no round in {case.limit_s:g} s ({error})") from error
        yield Sample(measure, (far_s - near_s) / (2 * DELAY_S))


async def _forward(sock: socket.socket, port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Near(port), HOST, 0)
    say_port(sock, server.sockets[0].getsockname()[1])
    await server.serve_forever()


class _Pipe(asyncio.Protocol):
    """One end; what it gets is written to the other a while later."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Pipe | None = None
        self._early: list[bytes] = []

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

    def meet(self, other: _Pipe) -> None:
        """From now on there is somebody to pass on to."""
        self.other = other
        early, self._early = self._early, []
        for data in early:
            self._pass_on(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class _Near(_Pipe):
    """The end of a node; it connects to the server for it."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._task = asyncio.create_task(self._connect(), name="forwarder")

    async def _connect(self) -> None:
        _, far = await asyncio.get_running_loop().create_connection(_Pipe, HOST, self._port)
        far.meet(self)
        self.meet(far)
