"""Opens connections to cells. Connections of one event loop to the same cell share one `SharedCell`, so that the
process polls, writes and renews once for all of them.
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
from rallypoint.backends.register.file_cell import FileCell, check_path, path_of
from rallypoint.backends.register.shared_cell import SharedCell
from rallypoint.settings import Settings

_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, _Users]] = WeakKeyDictionary()


class _Users:
    """A shared cell and the number of its connections."""

    def __init__(self, shared: SharedCell) -> None:
        self.shared = shared
        self.count = 0


def connect(key: Hashable, make: Callable[[], AsyncCell], call_timeout_s: float) -> RegisterBackend:
    """A connection on the running loop to the cell identified by `key`; `make` creates the cell for the first one."""
    users_by_key = _by_loop.setdefault(asyncio.get_running_loop(), {})
    users = users_by_key.get(key)
    if users is None:
        users = users_by_key[key] = _Users(SharedCell(make(), random.Random(secrets.randbits(64))))
    users.count += 1

    def release() -> bool:
        users.count -= 1
        if users.count == 0:
            del users_by_key[key]
        return users.count == 0

    return RegisterBackend(users.shared, call_timeout_s=call_timeout_s, on_close=release)


async def open_file(settings: Settings) -> Backend:
    """`file://`: the run's file in the directory given as endpoint. The directory must exist, the file need not."""
    path = path_of(settings.endpoints[0], settings.run_id)
    check_path(path)
    return connect(
        ("file", str(path)), lambda: BlockingCell(FileCell(path), endpoint=str(path)), settings.read_timeout_s
    )


async def open_cell(cell: Cell, settings: Settings) -> Backend:
    """Any cell. All connections to the same object call it from one thread."""
    return connect(("cell", id(cell)), lambda: BlockingCell(cell), settings.read_timeout_s)
