"""The bytes of a server's data on disk: files of frames, each with checksums, that hold entries or parts of a snapshot.

A file is a header and frames. The header names the kind of the file, the format, the generation of the store and where
the file stands in the order of things. A frame is what is written at once: entries that were committed together, or one
part of a snapshot. Its header has a checksum of its own, so that a damaged length leads nobody astray.

Reading a log tells three ends apart. *Clean*: the last frame is the last byte. *Torn*: the last frame was being written
when the writer died, so it is short, or a sector of it never arrived and reads as zeros. *Damaged*: anything else;
above all a frame that is unreadable although a readable one follows. A torn frame was never acknowledged and may be cut
off. A damaged one may have been, so nobody may go on as if it had not.

An entry is an operation as it was executed, in order. Time is not in it: what ends by time is written as a `Revoke` at
its place, renewals are not written, and whoever replays gives every lease its full time again.
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
"""So many zeros up to the edge of a sector are no chance: they were never written."""
LEAST_LAST_HOLE = 3
"""So many up to the end: what ends a frame never ends like that by itself."""
_FILE = struct.Struct("<8scHQQ16sI")
_FRAME = struct.Struct("<4sIQII")
_FILE_MAGIC = b"RALLYPT\n"
_FRAME_MAGIC = b"\xf9Rf\n"
HEADER_SIZE = _FILE.size
FRAME_HEADER_SIZE = _FRAME.size


class FormatError(ValueError):
    """The bytes are not what they should be; the text says what they are, and at which byte."""


class NewerFormat(FormatError):
    """A newer version wrote them."""


class Kind(enum.Enum):
    """What a file holds."""

    LOG = b"L"
    SNAPSHOT = b"S"


class Header(msgspec.Struct, frozen=True):
    """The beginning of a file. `first` is the number of the first entry that is not before it."""

    kind: Kind
    number: int
    first: int
    generation: str

    def encode(self) -> bytes:
        """The generation has sixteen characters."""
        fields = (_FILE_MAGIC, self.kind.value, FORMAT, self.number, self.first, self.generation.encode("ascii"))
        body = _FILE.pack(*fields, 0)[:-4]
        return body + zlib.crc32(body).to_bytes(4, "little")


def read_header(data: bytes, kind: Kind) -> Header:
    """The header of a file of this kind. FormatError: it has none; NewerFormat: it is of a later version."""
    if len(data) < HEADER_SIZE:
        raise FormatError(f"the header is cut short after {len(data)} bytes")
    magic, found, version, number, first, generation, checksum = _FILE.unpack_from(data)
    if magic != _FILE_MAGIC:
        raise FormatError("it does not begin as a file of ours")
    if checksum != zlib.crc32(data[: HEADER_SIZE - 4]):
        raise FormatError("the checksum of the header does not match")
    if version > FORMAT:
        raise NewerFormat(f"it has format {version}, and this version reads up to {FORMAT}")
    if found != kind.value:
        raise FormatError(f"it is not a {kind.name.lower()}")
    return Header(kind, number, first, generation.decode("ascii", "replace"))


# --- frames -----------------------------------------------------------------------------------------------------------


def frame(number: int, payload: bytes) -> bytes:
    """What is written at once. `number` is that of its first entry, or of the part."""
    head = _FRAME.pack(_FRAME_MAGIC, len(payload), number, zlib.crc32(payload), 0)[:-4]
    return b"".join((head, zlib.crc32(head).to_bytes(4, "little"), payload))


class End(enum.Enum):
    """How a file ends."""

    CLEAN = "clean"
    TORN = "torn"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Scanned:
    """The frames of a file up to `good`, where the first byte is that is no part of one; and what is there."""

    frames: tuple[tuple[int, memoryview], ...]
    good: int
    end: End
    why: str = ""


def scan(data: bytes, start: int = HEADER_SIZE) -> Scanned:
    """Read frames for as long as they are whole, and judge what follows. Costs one look at every byte."""
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
    """The frame that begins here, if it is whole."""
    head = _head_at(view, place)
    if head is None:
        return None
    length, number, checksum = head
    payload = view[place + FRAME_HEADER_SIZE : place + FRAME_HEADER_SIZE + length]
    return (number, payload) if len(payload) == length and zlib.crc32(payload) == checksum else None


def _head_at(view: memoryview, place: int) -> tuple[int, int, int] | None:
    """Length, number and checksum of the frame that begins here, if its header is whole."""
    if place + FRAME_HEADER_SIZE > len(view):
        return None
    magic, length, number, checksum, own = _FRAME.unpack_from(view, place)
    if magic != _FRAME_MAGIC or own != zlib.crc32(view[place : place + FRAME_HEADER_SIZE - 4]):
        return None
    return length, number, checksum


def _judge(data: bytes, view: memoryview, place: int) -> tuple[End, str]:
    """What it means that no whole frame begins here."""
    rest = len(data) - place
    if rest == 0:
        return End.CLEAN, ""
    later = data.find(_FRAME_MAGIC, place + 1)
    while later >= 0:
        if _frame_at(view, later) is not None:
            return (
                End.DAMAGED,
                f"what is at byte {place} cannot be read, and at byte {later} something readable follows",
            )
        later = data.find(_FRAME_MAGIC, later + 1)
    head = _head_at(view, place)
    if head is not None and rest < FRAME_HEADER_SIZE + head[0]:
        return End.TORN, f"the last {rest} bytes were being written"
    if rest < FRAME_HEADER_SIZE and _FRAME_MAGIC.startswith(data[place : place + 4]):
        return End.TORN, f"the last {rest} bytes were being written"
    if _has_hole(data, place, len(data)):
        return End.TORN, f"the last {rest} bytes were being written, and not all of them arrived"
    return End.DAMAGED, f"the last {rest} bytes, from byte {place}, do not match their checksum"


def _has_hole(data: bytes, start: int, end: int) -> bool:
    """Whether some sector of it, or what there is of one, holds nothing but zeros."""
    for sector in range(start - start % SECTOR, end, SECTOR):
        there = data[max(start, sector) : min(end, sector + SECTOR)]
        least = LEAST_LAST_HOLE if sector + SECTOR >= end else LEAST_HOLE
        if not any(there) and (len(there) >= least or len(there) == end - start):
            return True
    return False


# --- entries ----------------------------------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An operation that was executed, and who had asked for it, if it might ask again."""

    op: Op
    origin: Origin | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Entry])


def perform(
    engine: Engine, op: Op, now: float, origin: Origin | None = None
) -> tuple[Outcome, tuple[WatchEvent, ...], list[Entry]]:
    """As `engine.apply`; with what was to be told of leases that ended by time before it, and what has to be written.

    A request with an origin is written, because its answer is remembered, unless that was remembered already. Without
    one, it is written if it has made a revision, or has granted or ended a lease. Renewing is not.
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
    """One frame; `first` is the number of the first of them."""
    return frame(first, _encoder.encode(entries))


def decode_entries(frames: Iterable[tuple[int, memoryview]], first: int) -> Iterator[list[Entry]]:
    """The entries, frame by frame; the first has to have this number. FormatError if one is missing or unreadable."""
    for number, payload in frames:
        if number != first:
            raise FormatError(f"entry {first} is expected, and {number} is there")
        try:
            entries = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"entry {number} and those with it cannot be read: {error}") from error
        first += len(entries)
        yield entries


def replay(engine: Engine, entries: Iterable[Entry], now: float) -> None:
    """Execute what was executed. No lease ends by time meanwhile: `now` has to be the same for all of a log."""
    for entry in entries:
        op = entry.op
        engine.apply(op, now, entry.origin)
        if isinstance(op, Shorten):
            lease = engine.leases.get(op.lease)
            if lease is not None:
                lease.deadline = now + lease.ttl_s


def renew_all(engine: Engine, now: float) -> None:
    """Give every lease its full time: nobody could renew while nobody was there."""
    engine.now = max(engine.now, now)
    for lease in engine.leases:
        lease.deadline = engine.now + lease.ttl_s
