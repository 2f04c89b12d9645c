"""Election of the coordinator among the nodes, for backends that run no coordinator themselves.

The node that creates the `coordinator` key under its session is the coordinator; the key's create revision is its term.
The other nodes watch the key and try when it is deleted. A coordinator that leaves in order ends its session, so the
next one takes over at once; one that dies is replaced when its lease ends. Two nodes are never coordinator in the same
term; an old one that still runs is stopped by the fence of its writes (`fenced_writer.py`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

from rallypoint._marks import mark
from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend, Session
from rallypoint.errors import BackendError, HistoryGone, LeaseGone, RendezvousStateError
from rallypoint.events import CoordinatorDeposed, CoordinatorElected, Emitter
from rallypoint.kv.types import CreateRevisionIs, Delete, Exists, Item, Put
from rallypoint.rendezvous.coordinator import Coordinator
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import CoordinatorRecord, decode, encode

ELECTION_JITTER_S = 0.2
"""Nodes that do not try first wait a random part of this time, so that they do not all write in the same instant."""


class Election:
    """One node's candidacy: `run()` stands for election, and coordinates, until the session is lost."""

    def __init__(
        self,
        backend: Backend,
        keys: RunKeys,
        session: Session,
        record: CoordinatorRecord,
        emit: Emitter,
        rng: random.Random,
        wall: Callable[[], float],
        tries_first: Callable[[], bool],
    ) -> None:
        self.on_elected: Callable[[], None] | None = None
        """Called when a term of this node begins."""
        self._backend = backend
        self._keys = keys
        self._session = session
        self._value = encode(record)
        self._name = record.name
        self._emit = emit
        self._rng = rng
        self._wall = wall
        self._tries_first = tries_first
        self._backoff = Backoff(rng)
        self._predecessor: str | None = None
        """Name of the last coordinator seen, if it was another node."""

    async def run(self) -> None:
        """Loop: try to be elected, coordinate, or wait until the coordinator is gone. Ends with the session."""
        while not self._session.lost.is_set():
            try:
                term = await self._elect()
                if term is None or await self._lead(term):
                    self._backoff.reset()
            except LeaseGone:
                return
            except HistoryGone:
                continue
            except BackendError:
                await self._backoff.sleep()

    async def _elect(self) -> int | None:
        """The term of this node if it is the coordinator; None after another coordinator has gone."""
        key = self._keys.coordinator
        got = await self._backend.get(key)
        if got.item is None:
            result = await self._backend.txn([Exists(key, False)], [Put(key, self._value, self._session.lease)])
            return result.revision if result.committed else None
        if self._is_ours(got.item):
            mark("election.again")
            return got.item.create_revision
        with suppress(RendezvousStateError):
            self._predecessor = decode(CoordinatorRecord, got.item).name
        await self._wait_until_vacant(got.revision)
        return None

    def _is_ours(self, item: Item) -> bool:
        return item.lease == self._session.lease and item.value == self._value

    async def _wait_until_vacant(self, revision: int) -> None:
        watch = self._backend.watch(self._keys.coordinator, revision)
        try:
            async for batch in watch:
                if any(change.key == self._keys.coordinator and change.item is None for change in batch.changes):
                    break
        finally:
            watch.cancel()
        if not self._tries_first():
            await asyncio.sleep(self._rng.uniform(0.0, ELECTION_JITTER_S))

    async def _lead(self, term: int) -> bool:
        """Coordinate for one term. False: the coordinator failed with a defect."""
        run_id = self._keys.run_id
        self._emit(CoordinatorElected(run_id=run_id, by=self._name, term=term))
        if self.on_elected is not None:
            self.on_elected()
        backoff = Backoff(self._rng)
        coordinator = Coordinator(self._backend, self._keys, term, self._name, self._emit, backoff, self._wall)
        if self._predecessor is not None:
            coordinator.view.note_predecessor(self._predecessor)
            self._predecessor = None
        failure: Exception | None = None
        try:
            reason = await coordinator.run()
        except Exception as error:
            failure, reason = error, f"it failed: {error!r}"
        self._emit(CoordinatorDeposed(run_id=run_id, by=self._name, term=term, reason=reason))
        if failure is None:
            return True
        # A new election, on this node or another: better than a run without coordinator.
        await self._backend.txn([CreateRevisionIs(self._keys.coordinator, term)], [Delete(self._keys.coordinator)])
        await self._backoff.sleep()
        return False
