"""Shared by the tests of the register: kits for the conformance suites on any cell."""

import asyncio
import random
from collections.abc import Callable

from rallypoint.backends.register.backend import RegisterBackend
from rallypoint.backends.register.cell import AsyncCell, BlockingCell, Cell
from rallypoint.backends.register.shared_cell import SharedCell
from rallypoint.errors import Unavailable
from rallypoint.testing.cells import MemoryCell
from rallypoint.testing.conformance.backend import BackendKit

HISTORY = 1_000
IDLE_S = 1.0


class Distant(AsyncCell):
    """A cell with latency. While it cannot be reached, calls fail after `patience_s`."""

    name = "distant"

    def __init__(self, cell: MemoryCell, *, delay_s: float = 0.0, patience_s: float = 1.0):
        self.cell = cell
        self.delay_s = delay_s
        self.patience_s = patience_s
        self.is_up = True
        self.reads = 0
        self.writes = 0

    async def get(self):
        self.reads += 1
        await self._reach()
        return self.cell.get_state()

    async def set(self, state, token):
        self.writes += 1
        await self._reach()
        return self.cell.set_state(state, token)

    async def _reach(self):
        if not self.is_up:
            await asyncio.sleep(self.patience_s)
            raise Unavailable("no answer from the cell")
        await asyncio.sleep(self.delay_s)


def connector(make: Callable[[], Cell], *, history: int = HISTORY, idle_s: float = IDLE_S, seed: int = 0):
    """Connections that share only the cell, like those of different processes."""
    rng = random.Random(seed)

    async def connect():
        cell = await asyncio.get_running_loop().run_in_executor(None, make)  # connecting may take seconds
        shared = SharedCell(BlockingCell(cell), random.Random(rng.getrandbits(64)), history=history, idle_s=idle_s)
        return RegisterBackend(shared, rng=random.Random(rng.getrandbits(64)))

    return connect


def backend_kit(make: Callable[[], Cell], **changes) -> BackendKit:
    history = changes.pop("history", HISTORY)
    idle_s = changes.pop("idle_s", IDLE_S)
    options = {"prefix": "/test/", "lease_slack_s": 1.3, "ttl_s": 3.0} | changes
    return BackendKit(connector(make, history=history, idle_s=idle_s), asyncio.sleep, **options)
