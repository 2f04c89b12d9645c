"""The log format: frames are read as they were written, and damaged or torn ones are detected."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.kv.engine import Engine
from rallypoint.kv.log import (
    FORMAT,
    FRAME_HEADER_SIZE,
    HEADER_SIZE,
    SECTOR,
    End,
    Entry,
    FormatError,
    Header,
    Kind,
    NewerFormat,
    decode_entries,
    encode_entries,
    frame,
    perform,
    read_header,
    renew_all,
    replay,
    scan,
)
from rallypoint.kv.snapshot import SnapshotError, snapshot
from rallypoint.kv.snapshot_parts import PART_SIZE, assemble, capture
from rallypoint.kv.types import Add, Grant, KeepAlive, Origin, Put, Revoke, Shorten, Tick, Txn
from tests.kv.strategies import endings, ops, origins, waits

GENERATION = "0123456789abcdef"
HEADER = Header(Kind.LOG, 7, 1000, GENERATION)


def three_frames() -> tuple[bytes, list[int]]:
    """A log, and the offset of each frame; the last offset is the end."""
    data, starts = HEADER.encode(), []
    for number, size in enumerate((5, 700, 90)):
        starts.append(len(data))
        data += frame(number, bytes([number + 65]) * size)
    return data, [*starts, len(data)]


# --- headers ----------------------------------------------------------------------------------------------------------


def test_header_is_read_as_it_was_written():
    assert read_header(HEADER.encode(), Kind.LOG) == HEADER
    assert len(HEADER.encode()) == HEADER_SIZE


def test_header_of_another_kind_is_refused():
    with pytest.raises(FormatError, match="it is not a snapshot"):
        read_header(HEADER.encode(), Kind.SNAPSHOT)


def test_header_of_a_newer_format_is_refused_as_such(monkeypatch):
    monkeypatch.setattr("rallypoint.kv.log.FORMAT", FORMAT + 1)
    newer = HEADER.encode()
    monkeypatch.undo()
    with pytest.raises(NewerFormat, match=f"format {FORMAT + 1}, and this version reads up to {FORMAT}"):
        read_header(newer, Kind.LOG)


def test_header_that_is_cut_or_has_any_bit_flipped_is_refused():
    whole = HEADER.encode()
    for length in range(HEADER_SIZE):
        with pytest.raises(FormatError):
            read_header(whole[:length], Kind.LOG)
    for bit in range(HEADER_SIZE * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            read_header(bytes(data), Kind.LOG)


# --- frames -----------------------------------------------------------------------------------------------------------


def test_frames_are_read_as_they_were_written():
    data, starts = three_frames()
    scanned = scan(data)
    assert [(number, bytes(payload)) for number, payload in scanned.frames] == [
        (0, b"A" * 5),
        (1, b"B" * 700),
        (2, b"C" * 90),
    ]
    assert (scanned.end, scanned.good) == (End.CLEAN, starts[-1])


def test_log_that_is_cut_anywhere_has_the_frames_before_and_a_torn_end():
    data, starts = three_frames()
    for length in range(HEADER_SIZE, len(data)):
        scanned = scan(data[:length])
        whole = sum(start <= length for start in starts[1:])
        assert len(scanned.frames) == whole
        assert scanned.good == starts[whole]
        assert scanned.end is (End.CLEAN if length in starts else End.TORN), length


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_log_with_any_byte_flipped_is_damaged(flip):
    data, starts = three_frames()
    for place in range(HEADER_SIZE, len(data)):
        flipped = bytearray(data)
        flipped[place] ^= flip
        scanned = scan(bytes(flipped))
        assert scanned.end is End.DAMAGED, place
        assert scanned.good == max(start for start in starts if start <= place)


def test_last_frame_with_a_sector_that_was_not_written_is_torn():
    data, starts = three_frames()
    body = starts[1] + FRAME_HEADER_SIZE
    hole = -(-body // SECTOR) * SECTOR
    holed = data[:hole] + bytes(starts[2] - hole)
    assert scan(holed).end is End.TORN
    assert scan(holed + data[starts[2] :]).end is End.DAMAGED  # a later frame is valid


def test_frame_whose_last_few_bytes_were_not_written_is_torn():
    for over in range(3, 30):
        size = SECTOR - HEADER_SIZE - FRAME_HEADER_SIZE + over
        data = HEADER.encode() + frame(0, b"x" * size)
        assert len(data) == SECTOR + over
        assert scan(data[:SECTOR] + bytes(over)).end is End.TORN


def test_zeros_at_the_end_are_torn():
    data, starts = three_frames()
    for count in (1, 20, 3 * SECTOR):
        scanned = scan(data + bytes(count))
        assert (scanned.end, scanned.good) == (End.TORN, starts[-1])


def test_garbage_at_the_end_is_damage():
    data, _ = three_frames()
    for junk in (b"x", b"junk" * 20):
        assert scan(data + junk).end is End.DAMAGED


@given(st.binary(max_size=200))
def test_any_bytes_can_be_scanned(data):
    scanned = scan(data, 0)
    assert scanned.good <= len(data)
    assert (scanned.end is End.CLEAN) == (scanned.good == len(data))


# --- entries ----------------------------------------------------------------------------------------------------------


def test_entry_that_is_missing_is_refused():
    data = encode_entries(0, [Entry(Tick())]) + encode_entries(2, [Entry(Tick())])
    with pytest.raises(FormatError, match="entry 1 is missing: the next one is 2"):
        list(decode_entries(scan(data, 0).frames, 0))


def test_entry_that_cannot_be_decoded_is_refused():
    with pytest.raises(FormatError, match="cannot be decoded"):
        list(decode_entries(scan(frame(0, b"\xc1"), 0).frames, 0))


def test_expired_lease_is_logged_as_a_revoke_at_its_position():
    engine = Engine()
    perform(engine, Grant(1.0, 5), 0.0)
    perform(engine, Txn((), (Put("a", b"", 5),)), 0.0)
    _, ended, entries = perform(engine, Txn((), (Put("b", b""),)), 1.0)
    assert [event.batch for event in ended] == []  # there is no watch
    assert entries == [Entry(Revoke(5)), Entry(Txn((), (Put("b", b""),)))]
    assert perform(engine, KeepAlive(5), 2.0)[2] == []


def test_renewals_reads_and_resent_requests_are_not_logged():
    engine = Engine()
    perform(engine, Grant(9.0, 5), 0.0)
    adding = Add("n", 1), 0.0, Origin("x", 1)
    assert len(perform(engine, *adding)[2]) == 1
    assert perform(engine, *adding)[2] == []
    for op in (KeepAlive(5), Shorten(5, 1.0), Tick(), Txn((), ())):
        assert perform(engine, op, 0.5)[2] == []


@settings(max_examples=300)
@given(st.lists(st.tuples(ops | endings, waits, origins), max_size=40))
def test_replay_of_any_operations_gives_the_same_state(requests):
    engine, now, entries = Engine(history=10), 0.0, []
    for op, wait_s, origin in requests:
        now = max(0.0, now + wait_s)
        entries += perform(engine, op, now, None if isinstance(op, KeepAlive) else origin)[2]
    perform_rest(engine, entries)
    data = b"".join(encode_entries(index, [entry]) for index, entry in enumerate(entries))
    again = Engine(history=10)
    for some in decode_entries(scan(data, 0).frames, 0):
        replay(again, some, 1234.5)
    renew_all(again, 2000.0)
    assert snapshot(again) == snapshot(engine)
    assert again.next_deadline() is None or again.next_deadline() >= 2001.0


def perform_rest(engine: Engine, entries: list[Entry]) -> None:
    """Let leases that were shortened to zero end: they end with the next operation, and then states can be compared."""
    entries += perform(engine, Tick(), engine.now)[2]


# --- snapshots in parts -----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(ops, waits, origins), max_size=40))
def test_store_assembled_from_parts_is_the_same_store(requests):
    engine, now = Engine(history=10), 0.0
    for op, wait_s, origin in requests:
        now = max(0.0, now + wait_s)
        engine.apply(op, now, origin)
    before = snapshot(engine)
    again, has_log = assemble(list(capture(engine).parts(has_log=True)), 5.0, history=10)
    assert has_log
    assert snapshot(again) == before
    again.apply(Txn((), (Put("new", b""),)), 6.0)
    assert [item.key for item in again.apply(Txn((), (Put("b", b""),)), 6.0).events] == []


def large() -> Engine:
    engine = Engine()
    for number in range(2 * PART_SIZE + 1):
        engine.apply(Grant(5.0, number + 1), 0.0, Origin(f"c{number}", 1))
        engine.apply(Txn((), (Put(f"k{number}", b"v", number + 1),)), 0.0, Origin(f"c{number}", 2))
    return engine


def test_later_changes_do_not_affect_a_captured_state():
    engine = large()
    before = snapshot(engine)
    parts = capture(engine).parts(has_log=False)
    first = next(parts)
    engine.apply(Revoke(1), 0.0, Origin("c1", 3, 2))
    engine.apply(Txn((), (Put("k2", b"new"), Put("zzz", b""))), 0.0)
    again, has_log = assemble([first, *parts], 0.0)
    assert not has_log
    assert snapshot(again) == before


def test_snapshot_with_a_part_missing_or_out_of_order_is_refused():
    parts = list(capture(large()).parts(has_log=True))
    assert len(parts) > 10
    wrong = [[*parts[:index], *parts[index + 1 :]] for index in range(len(parts))]
    wrong += [[*parts, parts[-1]], [parts[1], parts[0], *parts[2:]], []]
    for some in wrong:
        with pytest.raises(SnapshotError):
            assemble(some, 0.0)


def test_part_that_cannot_be_decoded_is_refused():
    with pytest.raises(SnapshotError, match="cannot be decoded"):
        assemble([b"\xc1"], 0.0)
