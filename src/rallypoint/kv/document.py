"""A whole store as one document: for backends that have nothing but one place for bytes, and compare-and-set.

A document is an engine and what it takes to do without a server: leases that are judged by whether their counter moves
(nobody's clock is in it), and who has written what last, so that a writer that was not told finds out. The engine is
given no time, so nothing in it ends by itself: somebody who saw a counter stand still for a time to live says so with
`expire`.

As bytes it is a fixed head with a format and a checksum, then compressed msgpack. A change in the log is only named
where the key still is as that change left it. No two documents are ever the same: each names the write that made it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

import msgspec

from rallypoint.kv.engine import Engine
from rallypoint.kv.leases import Lease
from rallypoint.kv.types import Batch, Change, Grant, Item, KeepAlive, LeaseResult, Op, Result, Revoke
from rallypoint.kv.watches import History

FORMAT = 1
MAGIC = b"rallypt\x00"
DEFAULT_HISTORY = 1_000
"""So many changes a watch may lag behind, unless they are large."""
MOST_LOG_BYTES = 256 * 1024
"""What the log may add to what the keys hold."""
MOST_CLIENTS = 256
"""So many writers are remembered; the one that has been silent for longest goes first."""
LARGEST = 8 * 1024 * 1024
"""Bytes of a document before compression."""
NO_TIME = 0.0
_HEAD = struct.Struct(">8sHI16s")


class DocumentError(ValueError):
    """The bytes are no document: damaged, cut off, or something else."""


class NewerDocument(DocumentError):
    """A document, of a format that this version does not know."""


class _Lease(msgspec.Struct, array_like=True):
    id: int
    ttl_s: float
    counter: int


class _Client(msgspec.Struct, array_like=True):
    client: str
    seq: int
    version: int


class _Logged(msgspec.Struct, array_like=True):
    revision: int
    changes: list[str | Change]
    """A key alone: it is still as this revision left it."""


class _Saved(msgspec.Struct, array_like=True):
    generation: int
    version: int
    revision: int
    items: list[Item]
    leases: list[_Lease]
    clients: list[_Client]
    forgotten: int
    log_oldest: int
    log: list[_Logged]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Saved)


class Document:
    """One store. Made by `fresh` or `decode`; changed by `apply`, `expire` and `sign`; written with `encode`."""

    def __init__(self, generation: int, version: int, engine: Engine) -> None:
        self.generation = generation
        """Tells documents apart that have nothing to do with each other: somebody removed the one, and made another."""
        self.version = version
        """How many writes have made it."""
        self.engine = engine
        self.counters: dict[int, int] = {}
        """Of each lease: moved by every renewal."""
        self.clients: dict[str, tuple[int, int]] = {}
        """Who wrote: the number of its last write, and the version that was."""
        self.forgotten = 0
        """Writes up to this version may be of somebody who is no longer in `clients`."""
        self.is_changed = False
        """Whether it is no longer what was read."""

    @classmethod
    def fresh(cls, generation: int, first: int, history: int = DEFAULT_HISTORY) -> Document:
        """An empty store, which is still to be written."""
        document = cls(generation, 0, Engine(history, first=first))
        document.is_changed = True
        return document

    def apply(self, op: Op) -> Result:
        """Execute one operation."""
        before = self.engine.revision
        result = self.engine.apply(op, NO_TIME).result
        match op, result:
            case KeepAlive(lease), LeaseResult(alive=True):
                self.counters[lease] += 1
                self.is_changed = True
            case Grant(), LeaseResult(lease=lease):
                self.counters[lease] = 0
                self.is_changed = True
            case Revoke(lease), _ if self.counters.pop(lease, None) is not None:
                self.is_changed = True
        self.is_changed = self.is_changed or self.engine.revision != before
        return result

    def expire(self, lease: int, counter: int) -> bool:
        """End a lease that was not renewed since its counter was this; whether it is so."""
        if self.counters.get(lease) != counter:
            return False
        self.apply(Revoke(lease))
        return True

    def sign(self, client: str, seq: int) -> None:
        """This is write number `seq` of `client`: the next version."""
        self.version += 1
        self.clients.pop(client, None)
        self.clients[client] = (seq, self.version)
        while len(self.clients) > MOST_CLIENTS:
            silent = next(iter(self.clients))
            self.forgotten = max(self.forgotten, self.clients.pop(silent)[1])

    def has_write(self, client: str, seq: int, after_version: int) -> bool | None:
        """Whether that write, made on a document of version `after_version`, is in here; None: it cannot be said."""
        known = self.clients.get(client)
        if known is not None:
            return known[0] >= seq
        return False if self.forgotten <= after_version else None

    # --- bytes --------------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The document as bytes. DocumentError if it is larger than it may be."""
        engine = self.engine
        saved = _Saved(
            self.generation,
            self.version,
            engine.revision,
            list(engine.items.values()),
            [_Lease(lease.id, lease.ttl_s, self.counters[lease.id]) for lease in engine.leases],
            [_Client(client, seq, version) for client, (seq, version) in self.clients.items()],
            self.forgotten,
            0,
            self._log(),
        )
        saved.log_oldest = engine.history.oldest  # which the log may have moved
        payload = _encoder.encode(saved)
        if len(payload) > LARGEST:
            raise DocumentError(f"it would have {len(payload):,} bytes, and may have {LARGEST:,}")
        packed = zlib.compress(payload, 1)
        return _HEAD.pack(MAGIC, FORMAT, len(payload), _digest(packed)) + packed

    def _log(self) -> list[_Logged]:
        """The history, newest changes first in size: the oldest are forgotten where all of them would be too much."""
        items, history = self.engine.items, self.engine.history
        log: list[_Logged] = []
        size = 0
        for batch in reversed(history.batches):
            changes: list[str | Change] = []
            for change in batch.changes:
                item = items.get(change.key)
                is_current = item is not None and item.mod_revision == batch.revision
                changes.append(change.key if is_current else change)
                size += len(change.key) + (0 if is_current or change.item is None else len(change.item.value))
            if log and size > MOST_LOG_BYTES:
                break
            log.append(_Logged(batch.revision, changes))
        while len(history.batches) > len(log):
            history.forget_one()
        log.reverse()
        return log

    @classmethod
    def decode(cls, data: bytes, history: int = DEFAULT_HISTORY) -> Document:
        """The document of these bytes. DocumentError if they are not exactly what was once written."""
        saved = _unpacked(data)
        engine = Engine(history)
        engine.revision, engine.now = saved.revision, NO_TIME
        items = {item.key: item for item in saved.items}
        document = cls(saved.generation, saved.version, engine)
        for lease in saved.leases:
            engine.leases.insert(Lease(lease.id, lease.ttl_s, lease.ttl_s))
            document.counters[lease.id] = lease.counter
        try:
            for item in saved.items:
                engine.adopt(item)
                if item.lease:
                    held = engine.leases.get(item.lease)
                    if held is None:
                        raise DocumentError(f"{item.key!r} is under lease {item.lease}, which is not there")
                    held.keys.add(item.key)
            engine.history = History(history, saved.log_oldest)
            for logged in saved.log:
                engine.history.append(Batch(logged.revision, tuple(_change(one, items) for one in logged.changes)))
        except KeyError as error:
            raise DocumentError(f"its log names {error}, which is not there") from error
        document.clients = {one.client: (one.seq, one.version) for one in saved.clients}
        document.forgotten = saved.forgotten
        return document


def _change(logged: str | Change, items: dict[str, Item]) -> Change:
    return Change(logged, items[logged]) if isinstance(logged, str) else logged


def _unpacked(data: bytes) -> _Saved:
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise DocumentError(f"it does not begin as a document of Rallypoint does, but with {bytes(data[:16])!r}")
    _, found, length, digest = _HEAD.unpack_from(data)
    if found != FORMAT:
        raise NewerDocument(f"it has format {found}, and this version of Rallypoint knows {FORMAT}: upgrade this one")
    packed = data[_HEAD.size :]
    if _digest(packed) != digest:
        raise DocumentError("its checksum is not that of its content: it was damaged or cut off")
    if length > LARGEST:
        raise DocumentError(f"it says that it has {length:,} bytes, and may have {LARGEST:,}")
    try:
        payload = zlib.decompressobj().decompress(packed, length + 1)
        if len(payload) != length:
            raise DocumentError(f"it says that it has {length:,} bytes, and has {len(payload):,} or more")
        return _decoder.decode(payload)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DocumentError(f"it cannot be read: {error}") from error


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()
