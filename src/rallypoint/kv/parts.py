"""A snapshot in parts: the same state as `snapshot`, taken at once and encoded piece by piece.

Encoding a large store takes longer than anybody may be kept waiting. `capture` takes hold of everything that is in it,
without encoding anything (values never change, so this is copying references), and `parts` encodes a piece whenever it
is asked to. Where the keys of a lease are is not written: the keys say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import msgspec

from rallypoint.kv.dedupe import ClientAnswers
from rallypoint.kv.engine import Engine
from rallypoint.kv.leases import Lease
from rallypoint.kv.snapshot import SnapshotError
from rallypoint.kv.types import Batch, Change, Item, Result

IN_A_PART = 500
"""Keys, changes, leases or clients: a part takes well below a millisecond."""


class Head(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """First: what there is one of."""

    revision: int
    next_lease: int
    history_oldest: int
    has_log: bool
    """Whether the log of the same number was there before this was: if it is missing now, something was lost."""


class Items(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    items: list[Item]


class Leases(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    leases: list[tuple[int, float]]


class Clients(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    clients: list[tuple[str, int, list[tuple[int, Result]]]]


class History(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Changes. One that left its key as it is now only names the key."""

    batches: list[tuple[int, list[str | tuple[str, Item | None]]]]


class Tail(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Last: how many parts came before."""

    parts: int


Part: TypeAlias = Head | Items | Leases | Clients | History | Tail
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Part)


@dataclass(frozen=True, slots=True)
class Captured:
    """The state of an engine at one moment. What the engine does later does not change it."""

    revision: int
    next_lease: int
    history_oldest: int
    items: dict[str, Item]
    leases: list[tuple[int, float]]
    clients: list[tuple[str, int, list[tuple[int, Result]]]]
    history: list[Batch]

    def parts(self, has_log: bool) -> Iterator[bytes]:
        """Everything, encoded while it is asked for."""
        count = 0
        for part in self._parts(has_log):
            yield _encoder.encode(part)
            count += 1
        yield _encoder.encode(Tail(count))

    def _parts(self, has_log: bool) -> Iterator[Part]:
        yield Head(self.revision, self.next_lease, self.history_oldest, has_log)
        items = iter(self.items.values())
        while some := list(islice(items, IN_A_PART)):
            yield Items(some)
        for start in range(0, len(self.leases), IN_A_PART):
            yield Leases(self.leases[start : start + IN_A_PART])
        for start in range(0, len(self.clients), IN_A_PART):
            yield Clients(self.clients[start : start + IN_A_PART])
        yield from self._history()

    def _history(self) -> Iterator[History]:
        items = self.items
        some: list[tuple[int, list[str | tuple[str, Item | None]]]] = []
        size = 0
        for batch in self.history:
            changes: list[str | tuple[str, Item | None]] = [
                change.key
                if change.item is not None and items.get(change.key) is change.item
                else (change.key, change.item)
                for change in batch.changes
            ]
            some.append((batch.revision, changes))
            size += len(changes)
            if size >= IN_A_PART:
                yield History(some)
                some, size = [], 0
        if some:
            yield History(some)


def capture(engine: Engine) -> Captured:
    """Everything that decides an engine's later answers. Milliseconds for a hundred thousand keys."""
    return Captured(
        engine.revision,
        engine.leases.next_id,
        engine.history.oldest,
        engine.items.copy(),
        [(lease.id, lease.ttl_s) for lease in engine.leases],
        [(client, known.forgotten, list(known.answers.items())) for client, known in engine.dedupe.clients.items()],
        list(engine.history.batches),
    )


def assemble(parts: Iterable[bytes | memoryview], now: float, history: int | None = None) -> tuple[Engine, bool]:
    """An engine in the captured state, its leases renewed at `now`, and whether the snapshot has a log.

    SnapshotError: something is missing, or is no part.
    """
    builder = _Builder(now, history)
    try:
        for data in parts:
            builder.add(_decoder.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"a part cannot be read: {error}") from error
    return builder.finished()


class _Builder:
    """Puts an engine together."""

    def __init__(self, now: float, history: int | None) -> None:
        self._now = now
        self._engine = Engine() if history is None else Engine(history)
        self._engine.now = now
        self._head: Head | None = None
        self._count = 0
        self._is_whole = False
        self._items: list[Item] = []

    def add(self, part: Part) -> None:
        engine, now = self._engine, self._now
        if self._is_whole or isinstance(part, Head) != (self._head is None):
            raise SnapshotError(f"part {self._count} is not where it belongs")
        match part:
            case Head():
                self._head = part
                engine.revision, engine.leases.next_id = part.revision, part.next_lease
                engine.history.oldest = part.history_oldest
            case Items(items):
                self._items += items
            case Leases(leases):
                for lease, ttl_s in leases:
                    engine.leases.insert(Lease(lease, ttl_s, now + ttl_s))
            case Clients(clients):
                for client, forgotten, answers in clients:
                    engine.dedupe.clients[client] = ClientAnswers(forgotten, dict(answers))
            case History(batches):
                self._adopt_items()
                for revision, changes in batches:
                    engine.history.append(Batch(revision, tuple([self._change(change) for change in changes])))
            case Tail(count):
                self._is_whole = count == self._count
        self._count += 1

    def _change(self, change: str | tuple[str, Item | None]) -> Change:
        if isinstance(change, tuple):
            return Change(*change)
        item = self._engine.items.get(change)
        if item is None:
            raise SnapshotError(f"{change!r} is said to be there, and is not")
        return Change(change, item)

    def _adopt_items(self) -> None:
        if not self._items:
            return
        self._engine.adopt_all(self._items)
        leases = self._engine.leases
        for item in self._items:
            if item.lease:
                lease = leases.get(item.lease)
                if lease is None:
                    raise SnapshotError(f"lease {item.lease} of {item.key!r} is missing")
                lease.keys.add(item.key)
        self._items = []

    def finished(self) -> tuple[Engine, bool]:
        if self._head is None or not self._is_whole:
            raise SnapshotError(f"parts are missing: there are {self._count}, and the last is not among them")
        self._adopt_items()
        return self._engine, self._head.has_log
