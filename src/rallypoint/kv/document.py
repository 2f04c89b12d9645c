"""A whole store as one document: for backends that have only one value of bytes with compare-and-set.

A document is an engine plus what it needs without a server: a renewal counter for each lease (no clock is involved),
and the number of the last write of each client, so that a client can find out whether its write was executed. The
engine's time stands still, so no lease in it ends by itself: a client that saw a counter unchanged for the lease's time
to live calls `expire`.

The encoding is a fixed header with format and checksum, then compressed msgpack. A change in the log contains only the
key if the key has not changed since. No two documents are equal: each contains the write that made it.
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
"""The most changes that a watch may lag behind; large changes lower it."""
MOST_LOG_BYTES = 256 * 1024
"""The most bytes that the log adds to the document."""
MOST_CLIENTS = 256
"""The most clients whose last write is kept; the least recent one is dropped first."""
LARGEST = 8 * 1024 * 1024
"""Bytes of a document before compression."""
NO_TIME = 0.0
_HEAD = struct.Struct(">8sHI16s")


class DocumentError(ValueError):
    """The bytes are not a document: damaged, truncated, or foreign."""


class NewerDocument(DocumentError):
    """A document with a format that this version does not know."""


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
    """Only a key: it has not changed since this revision."""


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
    """One store. Created by `fresh` or `decode`; changed by `apply`, `expire` and `sign`; written with `encode`."""

    def __init__(self, generation: int, version: int, engine: Engine) -> None:
        self.generation = generation
        """Distinguishes unrelated documents, such as one that was created after another was removed."""
        self.version = version
        """The number of writes that have made it."""
        self.engine = engine
        self.counters: dict[int, int] = {}
        """By lease: incremented by every renewal."""
        self.clients: dict[str, tuple[int, int]] = {}
        """By client: the number of its last write, and the version of the document that it made."""
        self.forgotten = 0
        """Writes up to this version may be from clients that are no longer in `clients`."""
        self.is_changed = False
        """Whether it differs from what was read."""

    @classmethod
    def fresh(cls, generation: int, first: int, history: int = DEFAULT_HISTORY) -> Document:
        """An empty store that is not written yet."""
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
        """End a lease if its counter still has this value; whether it did."""
        if self.counters.get(lease) != counter:
            return False
        self.apply(Revoke(lease))
        return True

    def sign(self, client: str, seq: int) -> None:
        """Make the next version: write number `seq` of `client`."""
        self.version += 1
        self.clients.pop(client, None)
        self.clients[client] = (seq, self.version)
        while len(self.clients) > MOST_CLIENTS:
            silent = next(iter(self.clients))
            self.forgotten = max(self.forgotten, self.clients.pop(silent)[1])

    def has_write(self, client: str, seq: int, after_version: int) -> bool | None:
        """Whether that write, made on a document of version `after_version`, was executed; None: unknown."""
        known = self.clients.get(client)
        if known is not None:
            return known[0] >= seq
        return False if self.forgotten <= after_version else None

    # --- bytes --------------------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """The document as bytes. DocumentError if it exceeds LARGEST."""
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
        saved.log_oldest = engine.history.oldest  # `_log` may have moved it
        payload = _encoder.encode(saved)
        if len(payload) > LARGEST:
            raise DocumentError(f"it would have {len(payload):,} bytes; the limit is {LARGEST:,}")
        packed = zlib.compress(payload, 1)
        return _HEAD.pack(MAGIC, FORMAT, len(payload), _digest(packed)) + packed

    def _log(self) -> list[_Logged]:
        """The newest part of the history that fits into MOST_LOG_BYTES. Older batches are dropped."""
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
        """The document in these bytes. DocumentError if they are not exactly what was written."""
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
                        raise DocumentError(f"{item.key!r} has lease {item.lease}, which does not exist")
                    held.keys.add(item.key)
            engine.history = History(history, saved.log_oldest)
            for logged in saved.log:
                engine.history.append(Batch(logged.revision, tuple(_change(one, items) for one in logged.changes)))
        except KeyError as error:
            raise DocumentError(f"its log names {error}, which does not exist") from error
        document.clients = {one.client: (one.seq, one.version) for one in saved.clients}
        document.forgotten = saved.forgotten
        return document


def _change(logged: str | Change, items: dict[str, Item]) -> Change:
    return Change(logged, items[logged]) if isinstance(logged, str) else logged


def _unpacked(data: bytes) -> _Saved:
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise DocumentError(f"it does not start like a document of Rallypoint, but with {bytes(data[:16])!r}")
    _, found, length, digest = _HEAD.unpack_from(data)
    if found != FORMAT:
        raise NewerDocument(f"it has format {found}, and this version of Rallypoint knows {FORMAT}: upgrade this one")
    packed = data[_HEAD.size :]
    if _digest(packed) != digest:
        raise DocumentError("its checksum does not match its content: it is damaged or truncated")
    if length > LARGEST:
        raise DocumentError(f"its header says {length:,} bytes; the limit is {LARGEST:,}")
    try:
        payload = zlib.decompressobj().decompress(packed, length + 1)
        if len(payload) != length:
            raise DocumentError(f"its header says {length:,} bytes, and it has {len(payload):,} or more")
        return _decoder.decode(payload)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DocumentError(f"it cannot be read: {error}") from error


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()
