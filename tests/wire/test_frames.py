"""Framing: payloads for any split of the bytes, limits, and detection of other protocols."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.wire.frames import (
    DEFAULT_LIMIT,
    GREETING,
    HEADER_BYTES,
    HELLO_LIMIT,
    Framer,
    FrameTooLarge,
    NotRallypoint,
    frame,
)
from rallypoint.wire.messages import Hello, encoder
from tests.wire.strategies import client_frames, hellos

HELLO = encoder.encode(Hello(oldest=1, newest=1, client="c", run="run"))
PAYLOADS = [HELLO, b"", b"x", bytes(300), b"\x00\x00\x00\x05", GREETING, bytes(range(256))]
SENT = GREETING + b"".join(map(frame, PAYLOADS))


def payloads_of(*pieces: bytes, limit: int = DEFAULT_LIMIT) -> list[bytes]:
    framer = Framer(limit)
    return [payload for piece in pieces for payload in framer.feed(piece)]


# --- splits -----------------------------------------------------------------------------------------------------------


def test_payloads_do_not_depend_on_where_the_data_is_split_in_two():
    for cut in range(len(SENT) + 1):
        assert payloads_of(SENT[:cut], SENT[cut:]) == PAYLOADS, cut


def test_payloads_are_the_same_if_fed_byte_by_byte():
    assert payloads_of(*(bytes([byte]) for byte in SENT)) == PAYLOADS


@pytest.mark.parametrize("size", [2, 3, 5, 7, 11, 64, 255])
def test_payloads_are_the_same_in_pieces_of_any_size(size):
    pieces = [SENT[at : at + size] for at in range(0, len(SENT), size)]
    assert payloads_of(*pieces) == PAYLOADS


@given(hellos, st.lists(client_frames, max_size=4), st.lists(st.integers(0, 2_000), max_size=10))
def test_payloads_of_random_messages_are_the_same_with_random_splits(hello, frames, cuts):
    payloads = [encoder.encode(hello), *map(encoder.encode, frames)]
    sent = GREETING + b"".join(map(frame, payloads))
    edges = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    assert payloads_of(*(sent[a:b] for a, b in pairwise(edges))) == payloads


def test_payload_is_returned_with_its_last_byte_and_not_before():
    framer = Framer()
    sent = GREETING + frame(HELLO)
    for byte in sent[:-1]:
        assert list(framer.feed(bytes([byte]))) == []
    assert list(framer.feed(sent[-1:])) == [HELLO]
    assert list(framer.feed(b"")) == []


def test_caller_that_stops_iterating_gets_the_remaining_payloads_with_the_next_bytes():
    framer = Framer(DEFAULT_LIMIT)
    reading = framer.feed(GREETING + frame(b"1") + frame(b"2"))
    assert next(reading) == b"1"
    reading.close()
    assert list(framer.feed(frame(b"3"))) == [b"2", b"3"]


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, HELLO_LIMIT, HELLO_LIMIT + 1])
def test_frame_of_exactly_the_limit_is_accepted_and_a_longer_one_is_not(limit):
    assert payloads_of(GREETING + frame(bytes(limit)), limit=limit) == [bytes(limit)]
    with pytest.raises(FrameTooLarge) as caught:
        payloads_of(GREETING + frame(bytes(limit + 1)), limit=limit)
    assert (caught.value.length, caught.value.limit) == (limit + 1, limit)
    assert str(caught.value) == f"a frame of {limit + 1} bytes is longer than the limit of {limit}"


def test_frame_that_is_too_long_is_refused_after_its_header():
    with pytest.raises(FrameTooLarge):
        payloads_of(GREETING, b"\xff\xff\xff\xff")


def test_default_limit_is_that_of_a_hello():
    assert Framer().limit == HELLO_LIMIT
    with pytest.raises(FrameTooLarge):
        list(Framer().feed(GREETING + (HELLO_LIMIT + 1).to_bytes(HEADER_BYTES, "big")))


def test_limit_that_is_raised_after_the_hello_applies_to_frames_in_the_same_bytes():
    framer = Framer(len(HELLO))
    taken = []
    for payload in framer.feed(GREETING + frame(HELLO) + frame(bytes(5_000))):
        framer.limit = 5_000
        taken.append(len(payload))
    assert taken == [len(HELLO), 5_000]


def test_limit_is_checked_for_each_frame():
    framer = Framer(10)
    taken = []
    with pytest.raises(FrameTooLarge):
        taken.extend(framer.feed(GREETING + frame(b"short") + frame(bytes(11))))
    assert taken == [b"short"]


# --- other protocols --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", range(len(GREETING)))
def test_other_protocol_is_detected_at_the_first_byte_that_differs(keep):
    sent = GREETING[:keep] + bytes([GREETING[keep] ^ 1])
    framer = Framer()
    for byte in sent[:-1]:
        assert list(framer.feed(bytes([byte]))) == []
    with pytest.raises(NotRallypoint) as caught:
        list(framer.feed(sent[-1:]))
    assert caught.value.first == sent


@given(st.binary(min_size=1, max_size=500).filter(lambda data: not GREETING.startswith(data[: len(GREETING)])))
def test_random_bytes_are_another_protocol_and_only_their_beginning_is_kept(data):
    with pytest.raises(NotRallypoint) as caught:
        list(Framer().feed(data))
    assert caught.value.first == data[:200]


def test_greeting_starts_with_a_byte_that_is_no_text():
    assert not GREETING[:1].isascii()
    with pytest.raises(UnicodeDecodeError):
        GREETING.decode()
