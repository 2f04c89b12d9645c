"""A short fuzzing campaign; `make fuzz` is the long one."""

import msgspec
import pytest

from rallypoint.wire.messages import client_decoder
from tests.fuzz import campaign
from tests.fuzz.mutants import Mutants, harms_others


def test_frames_contain_every_kind_of_message_and_are_valid():
    frames = Mutants(1).frames
    kinds = {(message[0], message[2][0] if message[0] == 1 else 0) for message in messages(frames.of_each_kind())}
    assert {kind for kind, _ in kinds} == {1, 2, 3, 4, 5, 6}
    assert {op for kind, op in kinds if kind == 1} == {1, 2, 3, 4, 5, 6, 7}


def messages(payloads):
    for payload in payloads:
        client_decoder.decode(payload)
        yield from msgspec.msgpack.decode(payload)[1]


def test_mutants_are_the_same_for_the_same_seed_and_most_of_them_are_invalid():
    first, again, other = (Mutants(seed) for seed in (7, 7, 8))
    drawn = [first.next() for _ in range(500)]
    assert drawn == [again.next() for _ in range(500)]
    assert drawn != [other.next() for _ in range(500)]
    assert not any(harms_others(data[4:]) for data, lies in drawn if not lies)
    valid = sum(is_valid(data[4:]) for data, lies in drawn if not lies)
    assert 20 < valid < 400


def is_valid(payload: bytes) -> bool:
    try:
        client_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


@pytest.mark.parametrize("seed", [11])
def test_server_survives_mutated_frames_and_junk_and_serves_honest_clients(seed):
    report = campaign.run(frames=2_000, junk_bytes=3_000_000, seed=seed, say=lambda line: None)
    assert report.frames == report.accepted + report.refused == 2_000
    assert report.accepted > 200
    assert report.refused > 200
    assert report.junk_bytes >= 3_000_000
    assert int(report.status["refused_malformed"]) >= report.refused / 2
    assert report.honest["under load"]["times"] > 50
