"""Many nodes in one process, each with a connection of its own, on one event loop: for numbers no machine has
processes for. They are nodes of `rallypoint.aio`; competitors have nothing like it.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from rallypoint import aio
from rallypoint.bench.crew import REPORT_S, Command, Do, Report, What
from rallypoint.bench.helper import Gone, Line
from rallypoint.bench.node import failure
from rallypoint.server.process import run_loop


def be_nodes(sock: socket.socket, nodes: tuple[int, ...], url: str) -> None:
    """Until the other end is gone. On uvloop where it is installed, as the server is."""
    run_loop(_Driver(sock, nodes, url).run())


class _Driver:
    def __init__(self, sock: socket.socket, nodes: tuple[int, ...], url: str) -> None:
        self._line = Line(sock, Command)
        self._handlers = {number: aio.create_handler(f"{url}&name=node{number}") for number in nodes}
        self._worlds: dict[int, aio.AsyncWorld] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent: list[Report] = []
        self._ended = asyncio.Event()

    async def run(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()  # it would go through the objects of thousands of nodes, a cost that no single node has
        loop = asyncio.get_running_loop()
        loop.add_reader(self._line.sock, self._read)
        for number in self._handlers:
            self._report(Report(number, What.READY, time.monotonic()))
        await self._ended.wait()

    def _read(self) -> None:
        """There is something to read, so this does not block."""
        try:
            commands = self._line.receive()
        except Gone:
            self._ended.set()
            return
        for command in commands:
            for number in command.nodes:
                self._start(number, command)

    def _start(self, number: int, command: Command) -> None:
        before = self._tasks.get(number)
        task = asyncio.create_task(self._obey(number, command, before), name=f"node {number}: {command.do.value}")
        self._tasks[number] = task

    async def _obey(self, number: int, command: Command, before: asyncio.Task[None] | None) -> None:
        """One thing after the other, but for the end of a node, which waits for nothing."""
        handler = self._handlers[number]
        if command.do is Do.ABANDON:
            await handler.abandon()
            return
        if before is not None:
            await before
        await asyncio.sleep(max(0.0, command.at - time.monotonic()))
        match command.do:
            case Do.CONNECT:
                await self._reported(number, handler.observe())
                self._report(Report(number, What.CONNECTED, time.monotonic()))
            case Do.FOLLOW:
                await self._worlds[number].changed.wait()
                await self._reported(number, self._join(number))
            case Do.JOIN:
                await self._reported(number, self._join(number))

    async def _join(self, number: int) -> None:
        called_at = time.monotonic()
        self._report(Report(number, What.INSIDE, called_at))
        world = self._worlds[number] = await self._handlers[number].next_rendezvous()
        self._report(Report(number, What.RELEASED, time.monotonic(), world.rank, world.world_size, called_at))

    async def _reported(self, number: int, call: Coroutine[Any, Any, None]) -> None:
        try:
            await call
        except Exception as error:
            self._report(failure(number, error))

    def _report(self, report: Report) -> None:
        """Together with others, later: each has its own instant."""
        if not self._unsent:
            asyncio.get_running_loop().call_later(REPORT_S, self._send)
        self._unsent.append(report)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        with suppress(Gone):  # reading notices
            self._line.send(unsent)
