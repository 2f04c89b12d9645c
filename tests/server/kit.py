"""Helpers for tests of the server and its clients: servers on loopback, and clients that send raw bytes."""

import asyncio
import importlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.dial import dial
from rallypoint.kv.types import Put
from rallypoint.server.server import Server
from rallypoint.wire.frames import GREETING, Framer, frame
from rallypoint.wire.messages import (
    Answer,
    ClientFrame,
    Hello,
    Welcome,
    encoder,
    server_decoder,
    welcome_decoder,
)

PATIENCE_S = 20.0
_raws: list["Raw"] = []
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], patience_s: float = 2 * PATIENCE_S) -> T:
    """Run a coroutine on a real event loop, with a time-out."""

    async def bounded() -> T:
        try:
            async with asyncio.timeout(patience_s):
                return await main
        finally:
            while _raws:
                _raws.pop().abort()
            await asyncio.sleep(0)  # transports close in the next iteration of the loop

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(bounded())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """asyncio's own event loop, or uvloop with RALLYPOINT_TEST_UVLOOP=1.

    `rallypoint serve` runs on uvloop where it is installed.
    """
    if os.environ.get("RALLYPOINT_TEST_UVLOOP") != "1":
        return None
    return importlib.import_module("uvloop").new_event_loop


async def eventually(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until a condition is true."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while not condition():
        assert loop.time() < deadline, f"not within {patience_s:g} s: {what}"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def serving(port: int = 0, **options: Any) -> AsyncIterator[Server]:
    """A server on loopback; its endpoint is `addresses[0]`."""
    listening = socket.create_server(("127.0.0.1", port))
    server = Server(**options)
    await server.listen([listening])
    try:
        yield server
    finally:
        await server.stop()


def port_of(server: Server) -> int:
    return int(server.addresses[0].rpartition(":")[2])


@asynccontextmanager
async def client_of(endpoint: str, **options: Any) -> AsyncIterator[TcpBackend]:
    """A client, closed afterwards."""
    backend = TcpBackend(endpoint, dial(endpoint, 1), **options)
    try:
        yield backend
    finally:
        await backend.close()


async def put(backend: TcpBackend, key: str, value: bytes = b"", lease: int = 0) -> int:
    return (await backend.txn((), (Put(key, value, lease),))).revision


async def take(watch: Any, count: int) -> list[int]:
    """The revisions of the next batches."""
    async with asyncio.timeout(PATIENCE_S):
        return [(await anext(watch)).revision for _ in range(count)]


class Raw:
    """A client connection that sends arbitrary bytes, and reads only when a test asks for it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.framer = Framer(1 << 31)
        self.frames: list[bytes] = []
        self.messages: list[Any] = []
        _raws.append(self)

    @classmethod
    async def open(cls, server: Server, limit: int = 1 << 16) -> "Raw":
        return cls(*await asyncio.open_connection("127.0.0.1", port_of(server), limit=limit))

    @classmethod
    async def welcomed(cls, server: Server, client: str = "raw", **fields: Any) -> tuple["Raw", Welcome]:
        """A connection after its handshake."""
        raw = await cls.open(server)
        raw.send_bytes(GREETING + frame(encoder.encode(Hello(oldest=1, newest=1, client=client, **fields))))
        welcome = welcome_decoder.decode(await raw.next_frame())
        assert isinstance(welcome, Welcome), welcome
        return raw, welcome

    def send_bytes(self, data: bytes) -> None:
        self.writer.write(data)

    def send(self, *messages: Any, acked: int = 0) -> None:
        self.send_bytes(frame(encoder.encode(ClientFrame(acked, messages))))

    async def next_frame(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            while not self.frames:
                data = await self.reader.read(1 << 16)
                assert data, "the connection was closed"
                self.frames.extend(self.framer.feed(data))
        return self.frames.pop(0)

    async def next_message(self) -> Any:
        while not self.messages:
            self.messages.extend(server_decoder.decode(await self.next_frame()))
        return self.messages.pop(0)

    async def answer(self, seq: int) -> Any:
        """The answer to a request. Earlier messages are skipped."""
        while True:
            message = await self.next_message()
            if isinstance(message, Answer) and message.seq == seq:
                return message.result

    async def rest(self) -> bytes:
        """Everything until the server closes or resets the connection."""
        found = b""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    data = await self.reader.read(1 << 16)
                except ConnectionError:
                    return found
                if not data:
                    return found
                found += data

    def close(self) -> None:
        """Close as a process that ends does: buffered bytes are sent, nothing more is read."""
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()
