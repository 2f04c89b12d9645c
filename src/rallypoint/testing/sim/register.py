"""Worlds on a register: the processes share only one compare-and-set cell, which they reach by simulated messages.

`RegisterCell` is the cell: it compares and sets, and reports every new revision. `CellBackend` is the real register
backend of one process; the messages of its calls may be late, lost or repeated, so that a write may be executed long
after its caller has given up, or without an answer. Both have the interfaces of those in `network`, so that a world
can use either.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TypeVar

from rallypoint.backends.contract import Limits
from rallypoint.backends.register.backend import RegisterBackend
from rallypoint.backends.register.cell import Answer, AsyncCell, Found, Token
from rallypoint.backends.register.shared_cell import SharedCell
from rallypoint.errors import Unavailable
from rallypoint.kv.document import Document
from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Batch, Item, Op, Origin, Result
from rallypoint.testing.sim.network import _WIRE, LinkConditions

_T = TypeVar("_T")

PATIENCE = 6
"""A call of the cell times out after the time to live divided by this."""
Note = Callable[[str, str, object], None]


class RegisterCell:
    """The cell. `on_commit(batch, writer)` is called for every revision."""

    def __init__(self, on_commit: Callable[[Batch, str], None], history: int) -> None:
        self.is_up = True
        self._on_commit = on_commit
        self._history = max(history, 1)
        self._state: bytes | None = None
        self._version = 0
        self._document: Document | None = None
        self._seq = 0

    def read(self) -> Found:
        return None if self._state is None else (self._state, self._version)

    def write(self, state: bytes, token: Token | None, writer: str) -> Answer:
        """Compare and set."""
        if token != (self._version if self._state is not None else None):
            return None if self._state is None else (self._state, self._version, False)
        before, self._document = self._document, Document.decode(state, self._history)
        self._state = state
        self._version += 1
        self._tell(before, self._document, writer)
        return state, self._version, True

    def _tell(self, before: Document | None, after: Document, writer: str) -> None:
        """Report every new revision. The removal of keys of an ended lease has no writer."""
        known = before if before is not None and before.generation == after.generation else None
        items: dict[str, Item] = dict(known.engine.items) if known is not None else {}
        since = known.engine.revision if known is not None else 0
        for batch in after.engine.history.batches:
            if batch.revision <= since:
                continue
            leases = {items[change.key].lease for change in batch.changes if change.key in items}
            is_end = all(change.item is None for change in batch.changes) and leases.isdisjoint({0, *after.counters})
            for change in batch.changes:
                if change.item is None:
                    items.pop(change.key, None)
                else:
                    items[change.key] = change.item
            self._on_commit(batch, "" if is_end else writer)

    # --- for the world ------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        return self._document.engine if self._document is not None else Engine()

    def execute(self, op: Op, writer: str, origin: Origin | None) -> Result:
        """Execute an operation that does not come from a process."""
        assert self._state is not None
        document = Document.decode(self._state, self._history)
        result = document.apply(op)
        self._seq += 1
        document.sign("the world", self._seq)
        self.write(document.encode(), self._version, writer)
        return result

    def crash(self) -> None:
        """Make it unreachable."""
        self.is_up = False

    def restart(self, with_data: bool) -> None:
        """Make it reachable again, with its content or empty."""
        if not with_data:
            self._state = self._document = None
            self._version += 1
        self.is_up = True


class _CellClient(AsyncCell):
    """One process's access to the cell."""

    name = "sim"

    def __init__(
        self,
        cell: RegisterCell,
        process: str,
        writer: str,
        rng: random.Random,
        conditions: LinkConditions,
        note: Note,
        ttl_s: float,
    ) -> None:
        self.cell = cell
        self.conditions = conditions
        self.is_dead = False
        self.left_to_send: int | None = None
        self.has_sent = asyncio.Event()
        """Set when `left_to_send` more writes have been sent."""
        self._process = process
        self._writer = writer
        self._rng = rng
        self._note = note
        self._patience_s = ttl_s / PATIENCE
        self._loop = asyncio.get_running_loop()

    async def get(self) -> Found:
        answer: asyncio.Future[Found] = self._loop.create_future()
        self._up(lambda: self._down(answer, self.cell.read()))
        return await self._answer(answer)

    async def set(self, state: bytes, token: Token | None) -> Answer:
        answer: asyncio.Future[Answer] = self._loop.create_future()

        def arrive() -> None:
            result = self.cell.write(state, token, self._writer)
            self._note("writes", self._process, "written" if result is not None and result[2] else "refused")
            self._down(answer, result)

        self._up(arrive)
        if self.left_to_send is not None:
            self.left_to_send -= 1
            if self.left_to_send <= 0:
                self.has_sent.set()
        try:
            return await self._answer(answer)
        except Unavailable:
            if self._rng.random() < 0.5:
                return None  # the interface allows it: unknown
            raise

    async def _answer(self, answer: asyncio.Future[_T]) -> _T:
        if self.is_dead:
            raise Unavailable("this process is dead")
        patience = self._loop.call_later(self._patience_s, _give_up, answer)
        try:
            return await answer
        finally:
            patience.cancel()

    def _up(self, action: Callable[[], None]) -> None:
        conditions, rng = self.conditions, self._rng
        if not conditions.to_server or self.is_dead or (conditions.lose and rng.random() < conditions.lose):
            return

        def arrive() -> None:
            if self.cell.is_up:
                action()

        is_late = conditions.late and rng.random() < conditions.late
        delay_s = rng.uniform(0.0, conditions.late_s) if is_late else rng.uniform(*conditions.delay_s)
        self._loop.call_later(delay_s, arrive, context=_WIRE)
        if conditions.repeat and rng.random() < conditions.repeat:
            self._loop.call_later(rng.uniform(*conditions.delay_s) * 10, arrive, context=_WIRE)

    def _down(self, answer: asyncio.Future[_T], result: _T) -> None:
        conditions, rng = self.conditions, self._rng
        if not conditions.from_server or (conditions.lose and rng.random() < conditions.lose):
            return
        self._loop.call_later(rng.uniform(*conditions.delay_s), _give, answer, result, context=_WIRE)


def _give(answer: asyncio.Future[_T], result: _T) -> None:
    if not answer.done():
        answer.set_result(result)


def _give_up(answer: asyncio.Future[_T]) -> None:
    if not answer.done():
        answer.set_exception(Unavailable("no answer from the cell"))


class CellBackend(RegisterBackend):
    """The register backend of one process, with the controls of the director."""

    def __init__(
        self,
        cell: RegisterCell,
        process: str,
        writer: str,
        rng: random.Random,
        conditions: LinkConditions,
        note: Note,
        ttl_s: float,
    ) -> None:
        self.client = _CellClient(cell, process, writer, rng, conditions, note, ttl_s)
        shared = SharedCell(self.client, rng, history=cell._history)
        super().__init__(shared, call_timeout_s=ttl_s / 2, rng=rng)
        self.limits = Limits(max_txn_ops=1_000, max_txn_bytes=1 << 20)
        self.swallow: Callable[[Op], bool] | None = None
        """Requests that match are never sent."""

    @property
    def conditions(self) -> LinkConditions:
        return self.client.conditions

    @conditions.setter
    def conditions(self, conditions: LinkConditions) -> None:
        self.client.conditions = conditions

    @property
    def is_dead(self) -> bool:
        return self.client.is_dead

    @is_dead.setter
    def is_dead(self, is_dead: bool) -> None:
        self.client.is_dead = is_dead

    @property
    def left_to_send(self) -> int | None:
        return self.client.left_to_send

    @left_to_send.setter
    def left_to_send(self, left: int | None) -> None:
        self.client.left_to_send = left

    @property
    def has_sent(self) -> asyncio.Event:
        return self.client.has_sent

    def reset(self) -> None:
        """No effect: there is no connection."""

    async def execute(self, op: Op) -> Result:
        if self.swallow is not None and self.swallow(op):
            await asyncio.sleep(self._call_timeout_s)
            raise Unavailable("it was never sent")
        return await super().execute(op)
