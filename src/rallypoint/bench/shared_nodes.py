"""Many nodes in one process, each with its own connection, on one event loop: for more nodes than a machine has room
for processes. They are nodes of `rallypoint.aio`; the competitors have no such interface.
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
from rallypoint.bench.node import failure
from rallypoint.bench.node_pool import REPORT_DELAY_S, Action, Command, Event, Report
from rallypoint.bench.processes import MessageSocket, PeerClosed
from rallypoint.server.process import run_loop


def run_nodes(sock: socket.socket, nodes: tuple[int, ...], url: str) -> None:
    """Until the other end is closed. On uvloop where it is installed, like the server."""
    run_loop(_SharedNodes(sock, nodes, url).run())


class _SharedNodes:
    def __init__(self, sock: socket.socket, nodes: tuple[int, ...], url: str) -> None:
        self._messages = MessageSocket(sock, Command)
        self._handlers = {number: aio.create_handler(f"{url}&name=node{number}") for number in nodes}
        self._worlds: dict[int, aio.AsyncWorld] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent: list[Report] = []
        self._ended = asyncio.Event()

    async def run(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection visits the objects of thousands of nodes, a cost that no single node has
        loop = asyncio.get_running_loop()
        loop.add_reader(self._messages.sock, self._read)
        for number in self._handlers:
            self._report(Report(number, Event.READY, time.monotonic()))
        await self._ended.wait()

    def _read(self) -> None:
        """Does not block: called when there is something to read."""
        try:
            commands = self._messages.receive()
        except PeerClosed:
            self._ended.set()
            return
        for command in commands:
            for number in command.nodes:
                self._start(number, command)

    def _start(self, number: int, command: Command) -> None:
        before = self._tasks.get(number)
        name = f"node {number}: {command.action.value}"
        self._tasks[number] = asyncio.create_task(self._carry_out(number, command, before), name=name)

    async def _carry_out(self, number: int, command: Command, before: asyncio.Task[None] | None) -> None:
        """After the node's previous command, except for ABANDON, which is carried out at once."""
        handler = self._handlers[number]
        if command.action is Action.ABANDON:
            await handler.abandon()
            return
        if before is not None:
            await before
        await asyncio.sleep(max(0.0, command.at - time.monotonic()))
        match command.action:
            case Action.CONNECT:
                await self._reporting_errors(number, handler.observe())
                self._report(Report(number, Event.CONNECTED, time.monotonic()))
            case Action.FOLLOW:
                await self._worlds[number].changed.wait()
                await self._reporting_errors(number, self._join(number))
            case Action.JOIN:
                await self._reporting_errors(number, self._join(number))

    async def _join(self, number: int) -> None:
        called_at = time.monotonic()
        self._report(Report(number, Event.CALLING, called_at))
        world = self._worlds[number] = await self._handlers[number].next_rendezvous()
        self._report(Report(number, Event.RELEASED, time.monotonic(), world.rank, world.world_size, called_at))

    async def _reporting_errors(self, number: int, call: Coroutine[Any, Any, None]) -> None:
        try:
            await call
        except Exception as error:
            self._report(failure(number, error))

    def _report(self, report: Report) -> None:
        """Reports are sent together, later: each carries its own instant."""
        if not self._unsent:
            asyncio.get_running_loop().call_later(REPORT_DELAY_S, self._send)
        self._unsent.append(report)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        with suppress(PeerClosed):  # `_read` notices it too
            self._messages.send(unsent)
