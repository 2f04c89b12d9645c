"""The actions of an operator on a run: close, reopen, drain or free a node, read and write the round's store.

Each write is one transaction that compares what was read, and records who did it and why. No action creates a run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from rallypoint.backends.backoff import Backoff
from rallypoint.backends.contract import Backend
from rallypoint.errors import (
    HistoryGone,
    OutcomeUnknown,
    RallypointError,
    RendezvousError,
    RendezvousStateError,
    Unavailable,
)
from rallypoint.kv.types import Delete, Exists, Item, ModRevisionIs, Put
from rallypoint.observe.explain import absent_sentence
from rallypoint.observe.report import Report, Standing
from rallypoint.observe.target import Target
from rallypoint.rendezvous.records import (
    ConfigRecord,
    HealthRecord,
    NodePhase,
    NodeRecord,
    RoundPhase,
    RoundRecord,
    decode,
)
from rallypoint.rendezvous.run_config import RunConfig, RunSnapshot
from rallypoint.sentences import of_at_least

T = TypeVar("T")


class NoSuchRun(RallypointError):
    """There is no such run. Nothing was changed."""


class NoSuchKey(RallypointError):
    """There is no such node, round or key. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Done:
    """Whether the action changed anything, and the run's state afterwards."""

    changed: bool
    run: RunSnapshot


class Operator:
    """Acts on one run in the name of `by`. `wall` gives the wall-clock times that are recorded for people."""

    def __init__(self, backend: Backend, target: Target, by: str, wall: Callable[[], float]) -> None:
        self._backend = backend
        self._target = target
        self._run_config = RunConfig(backend, target.keys, target.settings, by, lambda: "", wall)
        self._backoff = Backoff(random.Random())

    async def snapshot(self) -> RunSnapshot:
        """The current state of the run. Raises NoSuchRun."""
        run = await self._run_config.read()
        if run is None:
            raise no_such_run(self._target)
        return run

    async def close(self, why: str) -> Done:
        """Close the run. Raises NoSuchRun. Retries while the backend is unavailable: the caller sets a time limit."""
        await self.snapshot()
        changed = await self._retry(lambda: self._run_config.close(why, make=False))
        return Done(changed, await self.snapshot())

    async def reopen(self, why: str) -> Done:
        """Reopen the run. Raises and retries as `close`."""
        await self.snapshot()
        changed = await self._retry(lambda: self._run_config.reopen(why))
        return Done(changed, await self.snapshot())

    async def drain(self, node: str, why: str) -> list[str]:
        """Ask all nodes with this id or name to go. Returns their ids. Raises NoSuchRun, or NoSuchKey without a node.

        Retries as `close`.
        """
        await self.snapshot()
        try:
            return await self._retry(lambda: self._run_config.drain(node, why))
        except RendezvousError as error:
            raise NoSuchKey(str(error)) from error

    async def free(self, node: str) -> None:
        """End the holding back of a node, by name: its losses are forgotten. Raises NoSuchRun; NoSuchKey if it is not
        held back. Retries as `close`.
        """
        await self.snapshot()
        keys = self._target.keys
        key = keys.health(node)
        result = await self._retry(lambda: self._backend.txn([Exists(key)], [Delete(key)]))
        if not result.committed:
            records = (await self._backend.scan(keys.healths)).items
            names = ", ".join(sorted(decode(HealthRecord, item).name for item in records)[:20]) or "none"
            raise NoSuchKey(f"run {keys.run_id!r} holds no node {node!r} back; held back: {names}")

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry until the outcome is known. The caller sets the time limit."""
        while True:
            try:
                return await attempt()
            except (Unavailable, OutcomeUnknown):
                await self._backoff.sleep()


class RoundStore:
    """The key-value store of a round, for an operator. Writes are fenced by the round, not by a membership in it."""

    def __init__(self, backend: Backend, target: Target, number: int, round_revision: int, lease: int) -> None:
        self.number = number
        self._backend = backend
        self._keys = target.keys
        self._root = target.keys.user_data(number)
        self._round_revision = round_revision
        self._lease = lease

    @classmethod
    async def of(cls, backend: Backend, target: Target, number: int | None) -> RoundStore:
        """The store of the current round, or of the round with that number. Raises NoSuchRun, or NoSuchKey."""
        keys = target.keys
        config, state = await backend.get(keys.config), await backend.get(keys.round)
        if config.item is None:
            raise no_such_run(target)
        record = decode(RoundRecord, state.item) if state.item is not None else None
        current = 0 if record is None else record.number if record.phase is RoundPhase.ACTIVE else record.last_active
        if not current:
            raise NoSuchKey(f"run {keys.run_id!r} has had no round yet, and so has no store")
        revision = state.item.mod_revision if state.item is not None and number in (None, current) else 0
        return cls(backend, target, number or current, revision, decode(ConfigRecord, config.item).data_lease)

    async def items(self) -> list[tuple[str, Item]]:
        """All user keys with their items, in order."""
        return [(item.key[len(self._root) :], item) for item in (await self._backend.scan(self._root)).items]

    async def get(self, key: str) -> bytes | None:
        item = (await self._backend.get(self._root + key)).item
        return item.value if item is not None else None

    async def set(self, key: str, value: bytes) -> None:
        """Write a key of the current round. Raises NoSuchKey if the round is over."""
        await self._check_members()
        compares = (ModRevisionIs(self._keys.round, self._round_revision), Exists(self._keys.config))
        put = Put(self._root + key, value, self._lease)
        if not self._round_revision or not (await self._backend.txn(compares, [put])).committed:
            raise NoSuchKey(f"round {self.number} is over: nothing was written")

    async def _check_members(self) -> None:
        """NoSuchKey if no member of the round is in it any more: nobody would read the key."""
        for item in (await self._backend.scan(self._keys.nodes)).items:
            with suppress(RendezvousStateError):
                node = decode(NodeRecord, item)
                if node.phase is NodePhase.MEMBER and node.round == self.number:
                    return
        raise NoSuchKey(f"round {self.number} is over: nothing was written")

    async def watch(self, key: str) -> AsyncIterator[bytes | None]:
        """The current value, if there is one, and the value after every change; None: the key was removed."""
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


def drain_warning(report: Report, node: str) -> str:
    """What happens if draining this node, by name or id, leaves fewer than `min_nodes`; empty if enough are left."""
    there = report.standing(
        Standing.MEMBER, Standing.CONFIRMED, Standing.CONFIRMING, Standing.JOINING, Standing.WAITING, Standing.SPARE
    )
    before = [one for one in there if one.drain is None]
    going = [one for one in before if node in (one.id, one.name)]
    least, left = report.shared("min_nodes"), len(before) - len(going)
    if not left < least <= len(before):
        return ""
    lacking, name = least - left, going[0].name
    return (
        f"without {name}, run {report.run_id!r} has {of_at_least(left, least)}: when {name} leaves, the "
        f"round ends, and the job stands still until {lacking} more {'node is' if lacking == 1 else 'nodes are'} "
        f"started"
    )


def no_such_run(target: Target) -> NoSuchRun:
    """The error for a run that does not exist."""
    return NoSuchRun(absent_sentence(target.settings.run_id, target.where))
