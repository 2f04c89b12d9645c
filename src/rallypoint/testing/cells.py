"""Compare-and-set cells for tests: one in memory, and one that injects the faults that a cell may have."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.backends.register.cell import Answer, Cell, Found, Token
from rallypoint.errors import RendezvousConnectionError


class MemoryCell:
    """A cell in memory. The token is the number of the write."""

    name = "memory cell"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: bytes | None = None
        self._version = 0
        self.reads = 0
        self.writes = 0

    def get_state(self) -> Found:
        with self._lock:
            self.reads += 1
            return None if self._state is None else (self._state, self._version)

    def set_state(self, state: bytes, token: Token | None = None) -> Answer:
        with self._lock:
            self.writes += 1
            if self._state is not None and token != self._version:
                return self._state, self._version, False
            if self._state is None and token is not None:
                return None
            self._state = state
            self._version += 1
            return state, self._version, True

    def corrupt(self, state: bytes) -> None:
        """Replace the content without a token."""
        with self._lock:
            self._state = state
            self._version += 1


@dataclass(frozen=True, slots=True)
class CellFaults:
    """Probabilities of the faults of a call."""

    unavailable: float = 0.0
    """It raises and is not executed."""
    unknown: float = 0.0
    """A write returns None. It is executed half of the time."""
    broken: float = 0.0
    """A write raises. It is executed half of the time."""
    late: float = 0.0
    """A write returns None and is executed just before a later call, if its token is still current."""


class FaultyCell:
    """Injects faults into another cell. Tokens and contents are never wrong: no cell may do that."""

    def __init__(self, cell: Cell, rng: random.Random, faults: CellFaults) -> None:
        self.name = cell.name
        self.faults = faults
        self._cell = cell
        self._rng = rng
        self._delayed: list[Callable[[], object]] = []

    def get_state(self) -> Found:
        self._execute_delayed()
        if self._rng.random() < self.faults.unavailable:
            raise RendezvousConnectionError("the cell could not be reached")
        return self._cell.get_state()

    def set_state(self, state: bytes, token: Token | None = None) -> Answer:
        self._execute_delayed()
        drawn, faults = self._rng.random(), self.faults
        if drawn < faults.unavailable:
            raise RendezvousConnectionError("the cell could not be reached")
        drawn -= faults.unavailable
        if drawn < faults.unknown + faults.broken:
            if self._rng.random() < 0.5:
                self._cell.set_state(state, token)
            if drawn < faults.unknown:
                return None
            raise ConnectionResetError("the connection was reset")
        drawn -= faults.unknown + faults.broken
        if drawn < faults.late:
            self._delayed.append(lambda: self._cell.set_state(state, token))
            return None
        return self._cell.set_state(state, token)

    def _execute_delayed(self) -> None:
        while self._delayed and self._rng.random() < 0.5:
            self._delayed.pop(0)()
