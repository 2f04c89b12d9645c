"""A TCP proxy with controllable faults: it cuts connections, drops bytes, and refuses connections."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rallypoint.server.server import Server
from tests.server.kit import port_of


class Proxy:
    """Forwards everything between clients and a server, unless a fault is set."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.connections = 0
        """Number of accepted connections."""
        self.swallows = False
        """Drop all bytes from the server."""
        self.deafens = False
        """Drop all bytes from clients."""
        self.limits: Callable[[int], tuple[float, float]] = lambda number: (float("inf"), float("inf"))
        """Number of a connection -> how many bytes from the client and from the server before it is cut."""
        self._listening: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def listen(self) -> None:
        self._listening = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Refuse new connections and cut all open ones."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self.cut()

    def cut(self) -> None:
        """Cut all connections, on both sides."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        self.refuse()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._listening is None:  # accepted just before `refuse`
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        up_limit, down_limit = self.limits(self.connections)
        self.connections += 1
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
        both = (writer, server_writer)
        self._writers.update(both)
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer, up_limit, is_down=False)),
            asyncio.create_task(self._pump(server_reader, writer, down_limit, is_down=True)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
                self._tasks.discard(pump)
            for one in both:
                one.transport.abort()
                self._writers.discard(one)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: float, *, is_down: bool
    ) -> None:
        passed = 0
        try:
            while data := await reader.read(1 << 16):
                if self.swallows if is_down else self.deafens:
                    continue
                if passed + len(data) >= limit:
                    writer.write(data[: int(limit - passed)])
                    await writer.drain()
                    return
                passed += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            return


@asynccontextmanager
async def through(server: Server) -> AsyncIterator[Proxy]:
    """A proxy in front of a server."""
    proxy = Proxy(port_of(server))
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.close()
