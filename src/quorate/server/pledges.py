"""Places that were confirmed beforehand (`Pledge`), and are written down as soon as they are given.

Whoever waits for a node's place has nothing to decide when it is told: it compares, and confirms. If it has said so
beforehand, and not long ago, the server need not wake it for that. It is the same transaction with the same compare, of
the same key and under the same session; all that are due at one time are executed as one, and each by itself if one of
them does not hold any more. Who is refused is told its place, as if it had pledged nothing.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NamedTuple, Protocol

from quorate._marks import mark
from quorate.kv.types import ModRevisionIs, Put, Txn, TxnResult
from quorate.server.hub import Hub
from quorate.server.outbox import guarded
from quorate.server.quota import Quota
from quorate.wire.messages import Place


class Told(Protocol):
    """Somebody who waits for a place."""

    def say(self, place: Place) -> None:
        """Tell it."""


class _Due(NamedTuple):
    run: str
    compare: ModRevisionIs
    put: Put
    who: Told
    place: Place


class Pledges:
    """Those that are due. Belongs to the loop it is made on."""

    def __init__(self, hub: Hub, quota: Quota) -> None:
        self._hub = hub
        self._quota = quota
        self._loop = asyncio.get_running_loop()
        self._due: list[_Due] = []
        hub.outbox.follows = self.write

    def keep(self, run: str, compare: ModRevisionIs, put: Put, who: Told, place: Place) -> None:
        """Write a confirmation, when what is executed now is done."""
        if not self._due:
            self._loop.call_soon(self.write)
        self._due.append(_Due(run, compare, put, who, place))

    def write(self) -> bool:
        """Write all that are due, if any are. A defect costs the run that met it, not those behind it."""
        due, self._due = self._due, []
        by_run: dict[str, list[_Due]] = {}
        for one in due:
            by_run.setdefault(one.run, []).append(one)
        for those in by_run.values():
            guarded(self._loop, partial(self._write_or_tell, those))
        return bool(due)

    def _write_or_tell(self, those: list[_Due]) -> None:
        if self._are_written(those):
            mark("pledges.written")
            return
        for one in those:
            if not self._are_written([one]):
                guarded(self._loop, partial(one.who.say, one.place))

    def _are_written(self, those: list[_Due]) -> bool:
        op = Txn(tuple(one.compare for one in those), tuple(one.put for one in those))
        size = sum(len(one.put.key) + len(one.put.value) for one in those)
        self._quota.room -= size
        is_tight = self._quota.room < 0 and self._quota.is_tight(size)
        if not self._hub.is_able or (is_tight and self._quota.refusal(op, None) is not None):
            return False
        result = self._hub.execute(op)
        return isinstance(result, TxnResult) and result.committed
