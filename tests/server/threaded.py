"""A server behind a proxy, on an event loop in a thread of its own: for tests of blocking clients."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from rallypoint.backends.tcp.client import LIMITS
from rallypoint.backends.tcp.direct import DirectPool, connect
from rallypoint.kv.types import Add, Op, Put, Result, Txn
from rallypoint.server.server import Server
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.server.proxy import Proxy

T = TypeVar("T")


class ThreadedServer:
    """A server behind a proxy. `ask` runs a coroutine or a function on their event loop."""

    server: Server
    proxy: Proxy

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server of a test", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.ask(self._open())
        return self

    def __exit__(self, *exc: object) -> None:
        self.ask(self.proxy.close())
        self.ask(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _open(self) -> None:
        await self._serve(free_port())
        self.proxy = Proxy(self.port)
        await self.proxy.listen()

    async def _serve(self, port: int) -> None:
        self.port = port
        self.server = Server(**self._options)
        await self.server.listen([socket.create_server(("127.0.0.1", port))])

    def ask(self, what: Coroutine[Any, Any, T] | Callable[[], T]) -> T:
        async def call() -> T:
            return what() if callable(what) else await what

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE_S)

    def restart(self, **options: Any) -> None:
        """Replace the server by a new one without its data."""

        async def again() -> None:
            await self.server.stop()
            self._options |= options
            await self._serve(self.port)

        self.ask(again())

    @property
    def items(self) -> dict[str, Any]:
        """The items of the server's engine. Reading is safe, but copying is not while a client writes."""
        return self.server.engine_host.engine.items

    @property
    def watches(self) -> int:
        return self.server.engine_host.watch_count

    @property
    def awaiting(self) -> int:
        """Number of requests that wait for keys."""
        return self.ask(
            lambda: sum(len(one._awaiting) for one in list(self.server.connections) if one._awaiting is not None)
        )

    @property
    def frames(self) -> tuple[int, int]:
        """Number of received and sent frames."""
        return self.server.traffic.frames_in, self.server.traffic.frames_out

    @contextmanager
    def pool(self, port: int | None = None, **options: Any) -> Iterator[DirectPool]:
        """A pool of direct connections, through the proxy if no port is given."""
        with pool_to(port or self.proxy.port, **options) as pool:
            yield pool


@contextmanager
def pool_to(port: int, **options: Any) -> Iterator[DirectPool]:
    options = {"token": str, "limits": LIMITS} | options
    pool = DirectPool(f"127.0.0.1:{port}", partial(connect, "127.0.0.1", port), **options)
    try:
        yield pool
    finally:
        pool.close("the test is over")


@contextmanager
def listening(answer: bytes = b"", closes: bool = False, accepts: bool = True):
    """A peer that accepts connections, sends `answer` and nothing more. Yields its port and the connections."""
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    accepted: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            accepted.append(sock)
            sock.sendall(answer)
            if closes:
                sock.close()

    if accepts:
        threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1], accepted
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for sock in accepted:
            sock.close()


def soon(limit_s: float = PATIENCE_S) -> float:
    return time.monotonic() + limit_s


def put(key: str, value: bytes = b"") -> Txn:
    return Txn((), (Put(key, value),))


def do(pool: DirectPool, op: Op, limit_s: float = PATIENCE_S) -> Result:
    return pool.execute(op, soon(limit_s))


def add(pool: DirectPool, key: str, amount: int = 1) -> int:
    return do(pool, Add(key, amount)).value  # type: ignore[union-attr]


def values(pool: DirectPool, *keys: str, limit_s: float = PATIENCE_S) -> list[bytes | None]:
    """The values of the keys once all exist, or after `limit_s`."""
    result = pool.await_keys(keys, soon(limit_s), soon(limit_s + PATIENCE_S))
    return [got.item and got.item.value for got in result.results]  # type: ignore[union-attr]


def sockets() -> int:
    """Number of open sockets of this process."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:
            continue
    return count
