"""Servers with data, on disks in memory or on real directories."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rallypoint.events import Emitter, Event
from rallypoint.kv.engine import DEFAULT_HISTORY
from rallypoint.server.durability.data import open_data
from rallypoint.server.durability.disk import Disk
from rallypoint.server.durability.journal import Bounds, Sync
from rallypoint.server.durability.server import DurableServer

QUICK = Bounds(stall_s=5.0, retry_s=0.05, pause_s=0.05)


def make(
    disk: Disk,
    *,
    bounds: Bounds = QUICK,
    sync: Sync = Sync.ALWAYS,
    history: int = DEFAULT_HISTORY,
    events: list[Event] | None = None,
    **options: Any,
) -> DurableServer:
    """A server with the data of a disk. Its events are appended to `events`."""
    emit = Emitter(*([events.append] if events is not None else []))
    engine, journal = open_data(disk, sync=sync, emit=emit, history=history, bounds=bounds, first_revision=1)
    return DurableServer(engine, journal, emit=emit, **options)


@asynccontextmanager
async def serving_from(disk: Disk, port: int = 0, **options: Any) -> AsyncIterator[DurableServer]:
    """A server on loopback, stopped at the end unless it was killed (`kill`)."""
    listening = socket.create_server(("127.0.0.1", port))
    server = make(disk, **options)
    await server.listen([listening])
    try:
        yield server
    finally:
        if server.addresses:
            await server.stop()


async def kill(server: DurableServer) -> None:
    """Simulate the death of its process: connections are closed and nothing more is written.

    What was written to the disk stays, and the disk can be opened again.
    """
    for acceptor in server._acceptors:
        acceptor.close()
    server.engine_host.stop()
    tasks = [run.task for run in server.runs._runs.values()]
    tasks += [server.runs._renewer] if server.runs._renewer else []
    for task in tasks:
        task.cancel()
    await asyncio.gather(server.journal.close(), *tasks, return_exceptions=True)
    for connection in list(server.connections):
        connection.abort()
    server.addresses = ()
    await asyncio.sleep(0)
