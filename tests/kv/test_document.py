"""The document: it is read as it was written, damage is refused, leases end only by `expire` and `Revoke`."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.kv import document as documents
from rallypoint.kv.document import Document, DocumentError, NewerDocument
from rallypoint.kv.types import Delete, Grant, KeepAlive, LeaseResult, Put, Revoke, Txn

KEYS = st.sampled_from(["a", "b", "c/1", "c/2"])


def fresh() -> Document:
    return Document.fresh(7, 100)


def put(document: Document, key: str, value: bytes = b"x", lease: int = 0):
    return document.apply(Txn((), (Put(key, value, lease),)))


def state(document: Document):
    """The whole state of a document."""
    engine = document.engine
    return (
        (document.generation, document.version, engine.revision, engine.items),
        {lease.id: (lease.ttl_s, sorted(lease.keys)) for lease in engine.leases},
        (document.counters, document.clients, document.forgotten),
        (engine.history.oldest, list(engine.history.batches)),
    )


@st.composite
def operations(draw):
    lease = draw(st.integers(0, 3))
    return draw(
        st.one_of(
            st.builds(lambda key, value: Txn((), (Put(key, value, lease),)), KEYS, st.binary(max_size=8)),
            st.builds(lambda key: Txn((), (Delete(key),)), KEYS),
            st.builds(lambda ttl: Grant(float(ttl), lease or 4), st.integers(1, 9)),
            st.just(KeepAlive(lease)),
            st.just(Revoke(lease)),
        )
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(operations(), max_size=30), st.integers(1, 20))
def test_document_is_read_as_it_was_written(ops, history):
    document = Document.fresh(7, 100, history)
    for number, op in enumerate(ops):
        document.apply(op)
        document.sign(f"client {number % 3}", number)
    copy = Document.decode(document.encode(), history)
    assert state(copy) == state(document)
    assert not copy.is_changed
    assert copy.encode() == document.encode()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_damage_is_noticed(data):
    document = fresh()
    put(document, "key", bytes(range(100)))
    document.sign("me", 1)
    whole = document.encode()
    at = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    for damaged in (
        whole[:at],
        whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :],
        whole + whole[:at] + b"x",
    ):
        with pytest.raises(DocumentError):
            Document.decode(damaged)


def test_newer_format_is_distinguished_from_damage():
    whole = bytearray(fresh().encode())
    whole[9] = 2
    with pytest.raises(NewerDocument, match="upgrade"):
        Document.decode(bytes(whole))


def test_document_that_would_decompress_to_too_many_bytes_is_refused(monkeypatch):
    document = fresh()
    put(document, "key", b"x" * 10_000)
    whole = document.encode()
    monkeypatch.setattr(documents, "LARGEST", 5_000)
    with pytest.raises(DocumentError, match="the limit is 5,000"):
        document.encode()
    with pytest.raises(DocumentError, match="the limit is 5,000"):
        Document.decode(whole)


def test_renewal_increments_the_counter_and_an_ended_lease_is_not_renewed():
    document = fresh()
    granted = document.apply(Grant(1.0, 5))
    assert isinstance(granted, LeaseResult)
    put(document, "a", b"x", 5)
    before = document.counters[5]
    document.apply(KeepAlive(5))
    assert document.counters[5] == before + 1
    assert not document.expire(5, before)
    assert "a" in document.engine.items
    assert document.expire(5, before + 1)
    assert "a" not in document.engine.items
    assert not document.counters
    assert not document.expire(5, before + 1)


def test_reads_and_refused_writes_do_not_change_the_document():
    document = Document.decode(fresh().encode())
    document.apply(KeepAlive(9))
    document.apply(Revoke(9))
    document.apply(Txn((), (Delete("nothing"),)))
    assert not document.is_changed


def test_two_writers_never_make_the_same_document():
    document = fresh()
    one, other = Document.decode(document.encode()), Document.decode(document.encode())
    one.sign("one", 1)
    other.sign("other", 1)
    assert one.encode() != other.encode()
    again = Document.decode(one.encode())
    again.sign("one", 2)
    assert again.encode() != one.encode()


def test_document_knows_the_writes_of_each_client_within_its_bound():
    document = fresh()
    document.sign("me", 3)
    assert document.has_write("me", 3, 0) is True
    assert document.has_write("me", 4, 1) is False
    assert document.has_write("you", 1, 1) is False
    for number in range(documents.MOST_CLIENTS):
        document.sign(f"client {number}", 1)
    assert document.has_write("me", 3, 0) is None, "the client was dropped"
    assert document.has_write("you", 1, document.version) is False


def test_log_keeps_old_values_only_up_to_a_size(monkeypatch):
    monkeypatch.setattr(documents, "MOST_LOG_BYTES", 1_000)
    document = fresh()
    rng = random.Random(1)
    for _ in range(50):
        put(document, "key", rng.randbytes(100))
    copy = Document.decode(document.encode())
    assert 5 <= len(copy.engine.history.batches) <= 11
    assert copy.engine.history.oldest == copy.engine.history.batches[0].revision - 1
    put(document, "large", b"x" * 5_000)
    put(document, "large", b"y" * 5_000)
    assert Document.decode(document.encode()).engine.history.batches[-1].changes[0].item.value == b"y" * 5_000
