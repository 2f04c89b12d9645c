"""Connections to cells: those of one process and loop that mean the same cell share one hub, so that the process reads,
writes and renews once for all of them.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from rallypoint.backends.contract import Backend
from rallypoint.backends.register.backend import RegisterBackend
from rallypoint.backends.register.cell import AsyncCell, BlockingCell, Cell
from rallypoint.backends.register.file import FileCell, check_path, path_of
from rallypoint.backends.register.hub import Hub
from rallypoint.settings import Settings

_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, _Shared]] = WeakKeyDictionary()


class _Shared:
    """A hub and how many connections it has."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.count = 0


def connect(key: Hashable, make: Callable[[], AsyncCell], call_timeout_s: float) -> RegisterBackend:
    """A connection to the cell that `key` means, on the running loop; `make` makes it if nobody uses it yet."""
    loop = asyncio.get_running_loop()
    shared_here = _hubs.setdefault(loop, {})
    shared = shared_here.get(key)
    if shared is None:
        shared = shared_here[key] = _Shared(Hub(make(), random.Random(secrets.randbits(64))))
    shared.count += 1

    def release() -> bool:
        shared.count -= 1
        if shared.count == 0:
            del shared_here[key]
        return shared.count == 0

    return RegisterBackend(shared.hub, call_timeout_s=call_timeout_s, on_close=release)


async def open_file(settings: Settings) -> Backend:
    """`file://`: the run's file in the directory that is the endpoint. Need not exist yet, the directory must."""
    path = path_of(settings.endpoints[0], settings.run_id)
    check_path(path)
    return connect(
        ("file", str(path)), lambda: BlockingCell(FileCell(path), endpoint=str(path)), settings.read_timeout_s
    )


async def open_cell(cell: Cell, settings: Settings) -> Backend:
    """Any cell. The same object is called by one thread at a time, whoever uses it."""
    return connect(("cell", id(cell)), lambda: BlockingCell(cell), settings.read_timeout_s)
