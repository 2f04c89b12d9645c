"""What an operator does to a run: close, reopen, ask a node to go, look into the store and write there.

Each is one transaction against what was read, recorded with who did it and why, and makes no run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend
from rallypoint.errors import HistoryGone, OutcomeUnknown, RallypointError, RendezvousError, Unavailable
from rallypoint.kv.types import Exists, Item, ModRevisionIs, Put
from rallypoint.observe.opening import Target
from rallypoint.rendezvous.records import ConfigRecord, RoundPhase, RoundRecord, decode
from rallypoint.rendezvous.run_config import RunConfig, RunSnapshot

T = TypeVar("T")


class NoSuchRun(RallypointError):
    """There is no such run; nothing was done."""


class NoSuchKey(RallypointError):
    """There is no such node, round or key; nothing was done."""


@dataclass(frozen=True, slots=True)
class Done:
    """Whether anything changed, and how the run stands now."""

    changed: bool
    door: RunSnapshot


class Operator:
    """Acts on one run, as `by`; `wall` is for the times that people read."""

    def __init__(self, backend: Backend, target: Target, by: str, wall: Callable[[], float]) -> None:
        self._backend = backend
        self._target = target
        self._run_config = RunConfig(backend, target.keys, target.settings, by, lambda: "", wall)
        self._backoff = Backoff(random.Random())

    async def door(self) -> RunSnapshot:
        """The run as it is. NoSuchRun."""
        door = await self._run_config.read()
        if door is None:
            raise no_such_run(self._target)
        return door

    async def close(self, why: str) -> Done:
        """Close the run. NoSuchRun, and the backend's errors once it did not answer in time."""
        await self.door()
        changed = await self._retry(lambda: self._run_config.close(why, make=False))
        return Done(changed, await self.door())

    async def reopen(self, why: str) -> Done:
        """Reopen the run, as `close`."""
        await self.door()
        changed = await self._retry(lambda: self._run_config.reopen(why))
        return Done(changed, await self.door())

    async def drain(self, node: str, why: str) -> list[str]:
        """Ask every node of this id or name to go; the ids that were asked. NoSuchRun, NoSuchKey."""
        await self.door()
        try:
            return await self._retry(lambda: self._run_config.drain(node, why))
        except RendezvousError as error:
            raise NoSuchKey(str(error)) from error

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Until it is known to have worked; whoever calls sets the limit."""
        while True:
            try:
                return await attempt()
            except (Unavailable, OutcomeUnknown):
                await self._backoff.sleep()


class RoundStore:
    """The key-value store of a run's round, from outside: not fenced by a membership, but by the round."""

    def __init__(self, backend: Backend, target: Target, number: int, round_revision: int, lease: int) -> None:
        self.number = number
        self._backend = backend
        self._keys = target.keys
        self._root = f"{target.keys.store(number)}k/"
        self._round_revision = round_revision
        self._lease = lease

    @classmethod
    async def of(cls, backend: Backend, target: Target, number: int | None) -> RoundStore:
        """Of the current round, or of the one before it by its number. NoSuchRun, NoSuchKey."""
        keys = target.keys
        config, state = await backend.get(keys.config), await backend.get(keys.round)
        if config.item is None:
            raise no_such_run(target)
        record = decode(RoundRecord, state.item) if state.item is not None else None
        current = 0 if record is None else record.number if record.phase is RoundPhase.ACTIVE else record.last_active
        if not current:
            raise NoSuchKey(f"run {keys.run_id!r} has had no round yet: its store begins with the first")
        revision = state.item.mod_revision if state.item is not None and number in (None, current) else 0
        return cls(backend, target, number or current, revision, decode(ConfigRecord, config.item).data_lease)

    async def items(self) -> list[tuple[str, Item]]:
        """All keys of the user, in order."""
        return [(item.key[len(self._root) :], item) for item in (await self._backend.scan(self._root)).items]

    async def get(self, key: str) -> bytes | None:
        item = (await self._backend.get(self._root + key)).item
        return item.value if item is not None else None

    async def set(self, key: str, value: bytes) -> None:
        """Write a key of the current round. NoSuchKey if that is over."""
        compares = (ModRevisionIs(self._keys.round, self._round_revision), Exists(self._keys.config))
        put = Put(self._root + key, value, self._lease)
        if not self._round_revision or not (await self._backend.txn(compares, [put])).committed:
            raise NoSuchKey(f"round {self.number} is over: nothing was written")

    async def watch(self, key: str) -> AsyncIterator[bytes | None]:
        """The value now, if there is one, and after every change; None: it was removed."""
        path, was_there = self._root + key, False
        while True:
            got = await self._backend.get(path)
            if got.item is not None or was_there:
                yield got.item.value if got.item is not None else None
            was_there = got.item is not None
            watch = self._backend.watch(path, got.revision)
            try:
                async for batch in watch:
                    for change in batch.changes:
                        if change.key == path:
                            was_there = change.item is not None
                            yield change.item.value if change.item is not None else None
            except HistoryGone:
                await asyncio.sleep(0)
            finally:
                watch.cancel()


def no_such_run(target: Target) -> NoSuchRun:
    """The error for a run that is not there."""
    return NoSuchRun(
        f"there is no run {target.settings.run_id!r} on {target.where}: no node has joined it, or all have gone for "
        f"longer than reopen_after. `rallypoint ls` shows the runs there"
    )
