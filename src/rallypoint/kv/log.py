"""The file format of a server's data: files of frames with checksums, which contain log entries or parts of a snapshot.

A file is a header and frames. The header contains the kind of the file, the format, the generation of the store and the
position of the file in the sequence. A frame is the unit of writing: entries that were committed together, or one part
of a snapshot. Its header has a checksum of its own, so that a damaged length is detected.

Reading a log distinguishes three ends. *Clean*: the last frame ends with the file. *Torn*: the last frame was being
written when the writer died, so it is short, or a sector of it was not written and reads as zeros. *Damaged*: anything
else, above all an unreadable frame before a readable one. A torn frame was never acknowledged and may be cut off. A
damaged one may have been acknowledged, so the server must not start without it.

An entry is an executed operation; entries are in order of execution. They contain no time: a lease that expired is a
`Revoke` at its position, renewals are not logged, and a replay gives every lease its full time again.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Grant, Op, Origin, Outcome, Revoke, Shorten, WatchEvent

FORMAT = 1
SECTOR = 512
LEAST_HOLE = 16
"""At least this many zeros up to the end of a sector are no coincidence: they were never written."""
LEAST_LAST_HOLE = 3
"""The same at the end of the file: no frame ends with this many zeros."""
_FILE = struct.Struct("<8scHQQ16sI")
_FRAME = struct.Struct("<4sIQII")
_FILE_MAGIC = b"RALLYPT\n"
_FRAME_MAGIC = b"\xf9Rf\n"
HEADER_SIZE = _FILE.size
FRAME_HEADER_SIZE = _FRAME.size


class FormatError(ValueError):
    """The bytes do not have the expected format; the text says what was found, and at which byte."""


class NewerFormat(FormatError):
    """The bytes were written by a newer version."""


class Kind(enum.Enum):
    """The content of a file."""

    LOG = b"L"
    SNAPSHOT = b"S"


class Header(msgspec.Struct, frozen=True):
    """The header of a file. `first` is the number of its first entry (of a snapshot: the next entry after it)."""

    kind: Kind
    number: int
    first: int
    generation: str

    def encode(self) -> bytes:
        """The header as bytes; the generation must have sixteen characters."""
        fields = (_FILE_MAGIC, self.kind.value, FORMAT, self.number, self.first, self.generation.encode("ascii"))
        body = _FILE.pack(*fields, 0)[:-4]
        return body + zlib.crc32(body).to_bytes(4, "little")


def read_header(data: bytes, kind: Kind) -> Header:
    """The header of a file of this kind. FormatError: it has none; NewerFormat: a later version wrote it."""
    if len(data) < HEADER_SIZE:
        raise FormatError(f"the header is truncated after {len(data)} bytes")
    magic, found, version, number, first, generation, checksum = _FILE.unpack_from(data)
    if magic != _FILE_MAGIC:
        raise FormatError("it does not start like a file of Rallypoint")
    if checksum != zlib.crc32(data[: HEADER_SIZE - 4]):
        raise FormatError("the checksum of the header does not match")
    if version > FORMAT:
        raise NewerFormat(f"it has format {version}, and this version reads up to {FORMAT}")
    if found != kind.value:
        raise FormatError(f"it is not a {kind.name.lower()}")
    return Header(kind, number, first, generation.decode("ascii", "replace"))


# --- frames -----------------------------------------------------------------------------------------------------------


def frame(number: int, payload: bytes) -> bytes:
    """One frame. `number` is the number of its first entry, or of the part of a snapshot."""
    head = _FRAME.pack(_FRAME_MAGIC, len(payload), number, zlib.crc32(payload), 0)[:-4]
    return b"".join((head, zlib.crc32(head).to_bytes(4, "little"), payload))


class End(enum.Enum):
    """How a file ends."""

    CLEAN = "clean"
    TORN = "torn"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Scanned:
    """The valid frames of a file; `good` is the offset after the last of them, `end` and `why` judge what follows."""

    frames: tuple[tuple[int, memoryview], ...]
    good: int
    end: End
    why: str = ""


def scan(data: bytes, start: int = HEADER_SIZE) -> Scanned:
    """Read frames up to the first that is not valid, and judge what follows. O(bytes)."""
    view = memoryview(data)
    found: list[tuple[int, memoryview]] = []
    place = start
    while (whole := _frame_at(view, place)) is not None:
        number, payload = whole
        found.append((number, payload))
        place += FRAME_HEADER_SIZE + len(payload)
    end, why = _judge(data, view, place)
    return Scanned(tuple(found), place, end, why)


def _frame_at(view: memoryview, place: int) -> tuple[int, memoryview] | None:
    """The frame at this offset, if it is valid."""
    head = _head_at(view, place)
    if head is None:
        return None
    length, number, checksum = head
    payload = view[place + FRAME_HEADER_SIZE : place + FRAME_HEADER_SIZE + length]
    return (number, payload) if len(payload) == length and zlib.crc32(payload) == checksum else None


def _head_at(view: memoryview, place: int) -> tuple[int, int, int] | None:
    """Length, number and checksum of the frame at this offset, if its header is valid."""
    if place + FRAME_HEADER_SIZE > len(view):
        return None
    magic, length, number, checksum, own = _FRAME.unpack_from(view, place)
    if magic != _FRAME_MAGIC or own != zlib.crc32(view[place : place + FRAME_HEADER_SIZE - 4]):
        return None
    return length, number, checksum


def _judge(data: bytes, view: memoryview, place: int) -> tuple[End, str]:
    """Classify the rest of a file that has no valid frame at this offset."""
    rest = len(data) - place
    if rest == 0:
        return End.CLEAN, ""
    later = data.find(_FRAME_MAGIC, place + 1)
    while later >= 0:
        if _frame_at(view, later) is not None:
            return (
                End.DAMAGED,
                f"byte {place} starts no valid frame, but a valid one follows at byte {later}",
            )
        later = data.find(_FRAME_MAGIC, later + 1)
    head = _head_at(view, place)
    if head is not None and rest < FRAME_HEADER_SIZE + head[0]:
        return End.TORN, f"the last {rest} bytes were being written"
    if rest < FRAME_HEADER_SIZE and _FRAME_MAGIC.startswith(data[place : place + 4]):
        return End.TORN, f"the last {rest} bytes were being written"
    if _has_hole(data, place, len(data)):
        return End.TORN, f"the last {rest} bytes were being written, and some of them are missing"
    return End.DAMAGED, f"the last {rest} bytes, from byte {place}, do not match their checksum"


def _has_hole(data: bytes, start: int, end: int) -> bool:
    """Whether a sector, or a part of one at either end, contains only zeros."""
    for sector in range(start - start % SECTOR, end, SECTOR):
        there = data[max(start, sector) : min(end, sector + SECTOR)]
        least = LEAST_LAST_HOLE if sector + SECTOR >= end else LEAST_HOLE
        if not any(there) and (len(there) >= least or len(there) == end - start):
            return True
    return False


# --- entries ----------------------------------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An executed operation, and its origin if the client may send it again."""

    op: Op
    origin: Origin | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Entry])


def perform(
    engine: Engine, op: Op, now: float, origin: Origin | None = None
) -> tuple[Outcome, tuple[WatchEvent, ...], list[Entry]]:
    """As `engine.apply`; also returns the events of leases that expired before it, and the entries to be logged.

    A request with an origin is logged, because its answer is remembered, unless it was a repetition. A request without
    one is logged if it made a revision, or granted or ended a lease. Renewals are not logged.
    """
    entries: list[Entry] = []
    ended: tuple[WatchEvent, ...] = ()
    while (due := engine.end_due(now)) is not None:
        lease, events = due
        entries.append(Entry(Revoke(lease)))
        ended += events
    if origin is None:
        revision = engine.revision
        outcome = engine.apply(op, now)
        is_kept = engine.revision != revision or isinstance(op, Grant | Revoke)
    else:
        is_kept = engine.dedupe.lookup(origin) is None
        outcome = engine.apply(op, now, origin)
    if is_kept:
        entries.append(Entry(op, origin))
    return outcome, ended, entries


def encode_entries(first: int, entries: Sequence[Entry]) -> bytes:
    """One frame with the entries; `first` is the number of the first."""
    return frame(first, _encoder.encode(entries))


def decode_entries(frames: Iterable[tuple[int, memoryview]], first: int) -> Iterator[list[Entry]]:
    """The entries, frame by frame, numbered from `first`. FormatError if one is missing or unreadable."""
    for number, payload in frames:
        if number != first:
            raise FormatError(f"entry {first} is missing: the next one is {number}")
        try:
            entries = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"the frame of entry {number} cannot be decoded: {error}") from error
        first += len(entries)
        yield entries


def replay(engine: Engine, entries: Iterable[Entry], now: float) -> None:
    """Execute logged entries. `now` must be the same for the whole log, so that no lease expires in between."""
    for entry in entries:
        op = entry.op
        engine.apply(op, now, entry.origin)
        if isinstance(op, Shorten):
            lease = engine.leases.get(op.lease)
            if lease is not None:
                lease.deadline = now + lease.ttl_s


def renew_all(engine: Engine, now: float) -> None:
    """Give every lease its full time: clients could not renew while the server was down."""
    engine.now = max(engine.now, now)
    for lease in engine.leases:
        lease.deadline = engine.now + lease.ttl_s
