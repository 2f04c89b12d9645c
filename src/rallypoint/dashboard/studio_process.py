"""The process that draws the runs of a server: `python -m rallypoint.dashboard.studio_process CONTROL SERVER`.

Two sockets are given by number. On the one it is told which runs to draw and asked for differences; the other is a
connection to the server on which it follows them, as any observer does. It ends when either is closed, so it does not
outlive the server, however that ends; whoever tells all processes of a service to stop means the server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rallypoint.backends.contract import Backend
from rallypoint.backends.tcp import TcpBackend
from rallypoint.backends.tcp_link import Connector, Link
from rallypoint.dashboard.places import Place, of_server
from rallypoint.dashboard.studio_words import (
    BEAT_S,
    Ask,
    Beat,
    Begin,
    FromStudio,
    Leave,
    Look,
    News,
    Over,
    Told,
    packed,
    receive,
    to_studio,
)
from rallypoint.dashboard.watching import Channel, draw
from rallypoint.observe.target import Target
from rallypoint.server.process import run_loop


async def serve(control: socket.socket, server: socket.socket) -> None:
    """Until one of them is closed."""
    reader, writer = await asyncio.open_unix_connection(sock=control)
    begin = await receive(reader, to_studio)
    if not isinstance(begin, Begin):
        return
    lost = asyncio.Event()
    backend = TcpBackend(begin.where, _once(server, lost))

    @asynccontextmanager
    async def shared(target: Target) -> AsyncIterator[Backend]:
        yield backend

    studio = _Studio(of_server(begin.where, shared), writer)
    works = [
        asyncio.create_task(studio.obey(reader), name="what it is told"),
        asyncio.create_task(studio.beat(), name="signs of life"),
        asyncio.create_task(lost.wait(), name="the connection to the server"),
    ]
    try:
        await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for work in works:
            work.cancel()
        await studio.close()
        await backend.close()
        writer.close()


def _once(server: socket.socket, lost: asyncio.Event) -> Connector:
    """A connector to what is connected already. There is no second time."""
    left = [server]

    async def connect(make: Callable[[], Link]) -> None:
        if not left:
            lost.set()
            raise ConnectionError("the server has closed the connection")
        await asyncio.get_running_loop().create_unix_connection(make, sock=left.pop())

    return connect


class _Studio:
    """Runs by their number."""

    def __init__(self, place: Place, writer: asyncio.StreamWriter) -> None:
        self._place = place
        self._writer = writer
        self._drawn: dict[int, tuple[Channel, asyncio.Task[None]]] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def _say(self, message: FromStudio) -> None:
        self._writer.write(packed(message))

    async def beat(self) -> None:
        while True:
            self._say(Beat())
            await asyncio.sleep(BEAT_S)

    async def obey(self, reader: asyncio.StreamReader) -> None:
        while (message := await receive(reader, to_studio)) is not None:
            match message:
                case Look(number, run_id):
                    channel = draw(self._place, run_id)
                    self._drawn[number] = channel, asyncio.create_task(self._tell(number, channel), name="news")
                case Leave(number) if number in self._drawn:
                    self._stop(number)
                case Ask(number, since) if number in self._drawn:
                    version, data = self._drawn[number][0].message(since)
                    self._say(Told(number, since, version, data))
                case _:
                    pass  # of a run that it has left
            await self._writer.drain()

    async def _tell(self, number: int, channel: Channel) -> None:
        while not channel.is_over:
            news = channel.news
            self._say(News(number, channel.version))
            await news.wait()
        self._say(Over(number))

    def _stop(self, number: int) -> None:
        channel, task = self._drawn.pop(number)
        task.cancel()
        stopping = asyncio.create_task(channel.stop(), name="end of a picture")
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        for number in list(self._drawn):
            self._stop(number)
        await asyncio.gather(*self._stopping, return_exceptions=True)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:  # the server's, before which nothing is to be drawn
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    control, server = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    run_loop(serve(control, server))


if __name__ == "__main__":
    main()
