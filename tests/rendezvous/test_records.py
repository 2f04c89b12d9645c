"""The records in the keys: round trips, other versions, damage, rosters."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import NewerSchemaError, RendezvousStateError
from rallypoint.kv.types import Item
from rallypoint.rendezvous.records import (
    ROSTER_CHUNK,
    SCHEMA,
    AssignRecord,
    BudgetRecord,
    ClaimRecord,
    ClosedRecord,
    ConfigRecord,
    CoordinatorRecord,
    DrainRecord,
    HealthRecord,
    HistoryRecord,
    LeaveCause,
    LeaveKind,
    ListedRunRecord,
    NodePhase,
    NodeRecord,
    Record,
    RefusedRecord,
    RosterMember,
    RosterRecord,
    RoundEnd,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
    encode,
    join_roster,
    roster_digest,
    split_roster,
)
from rallypoint.settings import Timing

KEY = "/rallypoint/run/some/key"

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(0, 2**53)
TIMES = st.floats(0, 1e9).filter(lambda number: math.isfinite(number))
MEMBERS = st.builds(RosterMember, TEXT, NUMBERS, TEXT, TEXT)
LEFT = st.builds(LeaveCause, kind=st.sampled_from(LeaveKind), why=TEXT, round=NUMBERS, rank=st.none() | NUMBERS)
END = st.builds(
    RoundEnd,
    round=NUMBERS,
    kind=st.sampled_from(LeaveKind),
    why=TEXT,
    lasted_s=st.none() | TIMES,
    nodes=st.lists(TEXT, max_size=3).map(tuple),
)
RECORDS: dict[type[Record], st.SearchStrategy[Any]] = {
    ConfigRecord: st.builds(
        ConfigRecord,
        incarnation=TEXT,
        shared=st.dictionaries(TEXT, NUMBERS | TEXT, max_size=4),
        timing=st.builds(Timing, confirm_timeout_s=TIMES, hold_back_losses=NUMBERS),
        run_lease=NUMBERS,
        data_lease=NUMBERS,
        by=TEXT,
    ),
    NodeRecord: st.builds(
        NodeRecord,
        id=TEXT,
        name=TEXT,
        addr=TEXT,
        session=NUMBERS,
        join=NUMBERS,
        phase=st.sampled_from(NodePhase),
        labels=st.dictionaries(TEXT, TEXT, max_size=3),
        node_rank=st.none() | NUMBERS,
        round=NUMBERS,
        floor=NUMBERS,
        port0=NUMBERS,
        why=TEXT,
        left=st.none() | LEFT,
    ),
    ClaimRecord: st.builds(
        ClaimRecord, id=TEXT, round=NUMBERS, size=NUMBERS, is_member=st.booleans(), floor=NUMBERS, ttl_s=st.just(15.0)
    ),
    CoordinatorRecord: st.builds(CoordinatorRecord, id=TEXT, name=TEXT),
    RoundRecord: st.builds(
        RoundRecord,
        number=NUMBERS,
        phase=st.sampled_from(RoundPhase),
        incarnation=TEXT,
        size=NUMBERS,
        term=NUMBERS,
        addr=TEXT,
        digest=TEXT,
        why=TEXT,
    ),
    WaitingRecord: st.builds(
        WaitingRecord, number=NUMBERS, waiting=NUMBERS, lost=NUMBERS, reason=TEXT, end=st.none() | END
    ),
    ClosedRecord: st.builds(ClosedRecord, closed=st.booleans(), by=TEXT, why=TEXT, at=TIMES),
    AssignRecord: st.builds(AssignRecord, number=NUMBERS, rank=NUMBERS, join=NUMBERS),
    RosterRecord: st.builds(RosterRecord, number=NUMBERS, members=st.lists(MEMBERS, max_size=3).map(tuple)),
    DrainRecord: st.builds(DrainRecord, by=TEXT, why=TEXT, at=TIMES),
    HealthRecord: st.builds(HealthRecord, name=TEXT, losses=NUMBERS, hold_s=TIMES, why=TEXT),
    ListedRunRecord: st.builds(ListedRunRecord),
    RefusedRecord: st.builds(
        RefusedRecord,
        name=TEXT,
        differences=st.dictionaries(TEXT, st.tuples(st.none() | NUMBERS | TEXT, st.none() | NUMBERS | TEXT)),
        why=TEXT,
    ),
    HistoryRecord: st.builds(
        HistoryRecord,
        number=NUMBERS,
        size=NUMBERS,
        formed_at=TIMES,
        why=TEXT,
        gather_s=TIMES,
        last_call_s=TIMES,
        confirm_s=TIMES,
        last_arrivals=st.lists(st.tuples(TEXT, TIMES), max_size=3).map(tuple),
        last_confirmed=st.lists(TEXT, max_size=3).map(tuple),
        ended=TEXT,
        ended_kind=st.none() | st.sampled_from(LeaveKind),
    ),
    BudgetRecord: st.builds(
        BudgetRecord, incarnation=TEXT, used=NUMBERS, limit=NUMBERS, why=TEXT, outcome=st.none() | NUMBERS
    ),
}
ANY_RECORD = st.one_of(*RECORDS.values())


def item(value: bytes, key: str = KEY) -> Item:
    return Item(key, value, 1, 1, 1)


def decoding_error(kind: type[Record], value: bytes) -> RendezvousStateError | None:
    """The error of decoding a value; None if it is a record of this kind."""
    try:
        assert isinstance(decode(kind, item(value)), kind)
    except RendezvousStateError as error:
        return error
    return None


def with_fields(record: Record, **fields: object) -> bytes:
    """The record with other or additional fields, as another version would write it."""
    return msgspec.json.encode({**msgspec.json.decode(encode(record)), **fields})


def test_every_kind_of_record_is_tested() -> None:
    assert set(RECORDS) == {kind for kind in Record.__subclasses__() if kind.__module__ == Record.__module__}


# Round trips and versions


@given(ANY_RECORD)
def test_decoding_restores_the_record(record: Record) -> None:
    assert decode(type(record), item(encode(record))) == record


@given(ANY_RECORD)
def test_equal_records_give_equal_bytes(record: Record) -> None:
    copy = decode(type(record), item(encode(record)))
    assert encode(copy) == encode(record)


def test_order_of_labels_does_not_change_the_bytes() -> None:
    one, other = (
        NodeRecord(id="i", name="a", addr="a", session=1, join=1, phase=NodePhase.JOINING, labels=labels)
        for labels in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    )
    assert encode(one) == encode(other)


def test_records_are_readable_json() -> None:
    text = encode(ClosedRecord(closed=True, by="ops", why="done", at=1.5)).decode()
    assert text == '{"v":1,"closed":true,"by":"ops","why":"done","at":1.5,"outcome":null}'


@given(ANY_RECORD)
def test_record_one_schema_ahead_is_decoded(record: Record) -> None:
    ahead = with_fields(record, v=SCHEMA + 1, something_new={"a": [1, 2]})
    assert decode(type(record), item(ahead)) == msgspec.structs.replace(record, v=SCHEMA + 1)


@given(ANY_RECORD, st.integers(SCHEMA + 2, 10**6))
def test_record_two_schemas_ahead_is_refused_with_its_key(record: Record, version: int) -> None:
    with pytest.raises(NewerSchemaError, match="upgrade rallypoint") as caught:
        decode(type(record), item(with_fields(record, v=version)))
    assert caught.value.key == KEY
    assert KEY in str(caught.value)
    assert str(version) in str(caught.value)


def test_record_far_ahead_is_a_newer_schema_error_even_with_unknown_fields() -> None:
    with pytest.raises(NewerSchemaError):
        decode(AssignRecord, item(b'{"v": 7, "place": "other"}'))


def test_fields_with_defaults_may_be_missing() -> None:
    assert decode(WaitingRecord, item(b'{"number": 3}')) == WaitingRecord(number=3)


# Damage


@given(st.sampled_from(sorted(RECORDS, key=lambda kind: kind.__name__)), st.binary(max_size=40))
def test_arbitrary_bytes_are_a_state_error_that_names_the_key(kind: type[Record], value: bytes) -> None:
    error = decoding_error(kind, value)
    if error is not None:
        assert error.key == KEY
        assert KEY in str(error)


@given(ANY_RECORD, st.data())
def test_damaged_record_is_a_state_error_or_another_record(record: Record, data: st.DataObject) -> None:
    value = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    error = decoding_error(type(record), bytes(value))
    assert error is None or error.key == KEY


@given(ANY_RECORD, st.data())
def test_truncated_record_is_a_state_error(record: Record, data: st.DataObject) -> None:
    value = encode(record)
    with pytest.raises(RendezvousStateError) as caught:
        decode(type(record), item(value[: data.draw(st.integers(0, len(value) - 1))]))
    assert caught.value.key == KEY


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'"\xff"',
        b'{"number": "one"}',
        b'{"number": 1, "v": "new"}',
        b'{"number": 99999999999999999999999999}',
        b'{"number": 1, "unknown": ' + b"[" * 100_000,
        b"[" * 100_000,
    ],
    ids=["empty", "null", "list", "no utf-8", "no text", "wrong type", "wrong version", "too large", "deep", "deeper"],
)
def test_value_that_is_no_record_is_a_state_error_with_advice(value: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="remove the key, or use another run id") as caught:
        decode(WaitingRecord, item(value))
    assert caught.value.key == KEY
    assert "WaitingRecord" in str(caught.value)


# Rosters


def members(count: int) -> list[RosterMember]:
    return [RosterMember(f"id{index}", index % 3 + 1, f"host{index}", f"10.0.0.{index}") for index in range(count)]


def roster(count: int, number: int = 7) -> tuple[RoundRecord, list[Item]]:
    chunks = split_roster(number, members(count))
    record = RoundRecord(
        number=number,
        phase=RoundPhase.ACTIVE,
        incarnation="i",
        size=count,
        term=1,
        chunks=len(chunks),
        digest=roster_digest(chunks),
    )
    return record, [item(chunk, f"/roster/{index:06d}") for index, chunk in enumerate(chunks)]


@pytest.mark.parametrize("count", [1, ROSTER_CHUNK - 1, ROSTER_CHUNK, ROSTER_CHUNK + 1, 3 * ROSTER_CHUNK, 1000])
def test_roster_is_restored_in_rank_order(count: int) -> None:
    record, items = roster(count)
    assert len(items) == math.ceil(count / ROSTER_CHUNK)
    assert join_roster(record, items) == tuple(members(count))
    assert join_roster(record, items[::-1]) == tuple(members(count))


def test_missing_chunk_is_an_error() -> None:
    record, items = roster(600)
    for missing in range(len(items)):
        with pytest.raises(RendezvousStateError, match="roster of round 7 is not complete: 2 of 3 chunks"):
            join_roster(record, items[:missing] + items[missing + 1 :])
    with pytest.raises(RendezvousStateError, match="0 of 3 chunks"):
        join_roster(record, [])


def test_surplus_chunk_is_ignored() -> None:
    record, items = roster(600)
    assert join_roster(record, [*items, item(items[0].value, "/roster/000003")]) == tuple(members(600))


def test_altered_chunk_is_an_error() -> None:
    record, items = roster(600)
    altered = encode(RosterRecord(number=7, members=tuple(members(257)[:256][::-1])))
    with pytest.raises(RendezvousStateError, match="does not match the digest"):
        join_roster(record, [item(altered, items[0].key), *items[1:]])


def test_swapped_chunks_are_an_error() -> None:
    record, items = roster(600)
    swapped = [item(items[1].value, items[0].key), item(items[0].value, items[1].key), items[2]]
    with pytest.raises(RendezvousStateError, match="does not match the digest"):
        join_roster(record, swapped)


def test_roster_of_another_size_is_an_error() -> None:
    record, items = roster(600)
    with pytest.raises(RendezvousStateError, match="600 members instead of 599"):
        join_roster(msgspec.structs.replace(record, size=599), items)


@given(st.lists(MEMBERS, max_size=20), NUMBERS)
def test_any_roster_is_restored(listed: list[RosterMember], number: int) -> None:
    chunks = split_roster(number, listed)
    record = RoundRecord(
        number=number,
        phase=RoundPhase.FORMING,
        incarnation="",
        size=len(listed),
        term=1,
        chunks=len(chunks),
        digest=roster_digest(chunks),
    )
    assert join_roster(record, [item(chunk, f"/{i:06d}") for i, chunk in enumerate(chunks)]) == tuple(listed)
