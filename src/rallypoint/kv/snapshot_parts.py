"""An incremental snapshot: captured at once, encoded in parts.

Encoding a large store would block the server for too long. `capture` copies references to the whole state (values are
immutable) without encoding anything, and `parts` encodes one part at a time. The keys of a lease are not written: the
items contain their lease.
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

PART_SIZE = 500
"""Keys, changes, leases or clients in a part, which is encoded in well below a millisecond."""


class Head(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The first part: single values."""

    revision: int
    next_lease: int
    history_oldest: int
    has_log: bool
    """Whether the log with the same number existed before this snapshot: if it is missing later, data was lost."""


class Items(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    items: list[Item]


class Leases(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    leases: list[tuple[int, float]]


class Clients(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    clients: list[tuple[str, int, list[tuple[int, Result]]]]


class History(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """Changes. If the key has not changed since, only the key is written."""

    batches: list[tuple[int, list[str | tuple[str, Item | None]]]]


class Tail(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """The last part: the number of parts before it."""

    parts: int


Part: TypeAlias = Head | Items | Leases | Clients | History | Tail
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Part)


@dataclass(frozen=True, slots=True)
class Captured:
    """The state of an engine at one moment. Later changes of the engine do not affect it."""

    revision: int
    next_lease: int
    history_oldest: int
    items: dict[str, Item]
    leases: list[tuple[int, float]]
    clients: list[tuple[str, int, list[tuple[int, Result]]]]
    history: list[Batch]

    def parts(self, has_log: bool) -> Iterator[bytes]:
        """All parts, encoded one by one on demand."""
        count = 0
        for part in self._parts(has_log):
            yield _encoder.encode(part)
            count += 1
        yield _encoder.encode(Tail(count))

    def _parts(self, has_log: bool) -> Iterator[Part]:
        yield Head(self.revision, self.next_lease, self.history_oldest, has_log)
        items = iter(self.items.values())
        while some := list(islice(items, PART_SIZE)):
            yield Items(some)
        for start in range(0, len(self.leases), PART_SIZE):
            yield Leases(self.leases[start : start + PART_SIZE])
        for start in range(0, len(self.clients), PART_SIZE):
            yield Clients(self.clients[start : start + PART_SIZE])
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
            if size >= PART_SIZE:
                yield History(some)
                some, size = [], 0
        if some:
            yield History(some)


def capture(engine: Engine) -> Captured:
    """The whole state of an engine, without watches. Takes milliseconds for a hundred thousand keys."""
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
    """An engine in the captured state, with its leases renewed at `now`, and whether the snapshot has a log.

    SnapshotError: a part is missing or invalid.
    """
    builder = _Builder(now, history)
    try:
        for data in parts:
            builder.add(_decoder.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SnapshotError(f"a part cannot be decoded: {error}") from error
    return builder.finished()


class _Builder:
    """Builds an engine from parts."""

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
            raise SnapshotError(f"part {self._count} is out of order")
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
            raise SnapshotError(f"the history names {change!r}, which does not exist")
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
            raise SnapshotError(f"parts are missing: {self._count} were found, and the last is not among them")
        self._adopt_items()
        return self._engine, self._head.has_log
