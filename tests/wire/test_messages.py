"""Messages: round trips, messages of newer versions, and damaged ones."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.wire import messages
from rallypoint.wire.frames import packed
from rallypoint.wire.messages import (
    Answer,
    ClientFrame,
    ClientMessage,
    Going,
    Hello,
    Push,
    PushRaw,
    RefusalCode,
    Refused,
    ServerMessage,
    Status,
    Welcome,
    client_decoder,
    encoder,
    hello_decoder,
    server_decoder,
    welcome_decoder,
)
from tests.wire.strategies import (
    CLIENT_MESSAGES,
    SERVER_MESSAGES,
    batches,
    client_frames,
    hellos,
    numbers,
    refusals,
    server_frames,
    types_of,
    welcomes,
)

MORE = ["of a newer version", {"a": [1, None]}, 3.5, b"bytes"]


def longer(message: object) -> bytes:
    """A message with additional fields at its end, as of a newer version."""
    return msgspec.msgpack.encode([*msgspec.msgpack.decode(encoder.encode(message)), *MORE])


def test_strategies_cover_every_message_type():
    assert types_of(ClientMessage) == CLIENT_MESSAGES.keys()
    assert types_of(ServerMessage) == SERVER_MESSAGES.keys()


# --- round trips ------------------------------------------------------------------------------------------------------


@given(hellos)
def test_hello_round_trips(hello):
    assert hello_decoder.decode(encoder.encode(hello)) == hello


@given(welcomes | refusals)
def test_first_frame_of_the_server_round_trips(answer):
    assert welcome_decoder.decode(encoder.encode(answer)) == answer


@pytest.mark.parametrize("kind", CLIENT_MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_each_client_message_round_trips(kind, data):
    sent = ClientFrame(data.draw(numbers), (data.draw(CLIENT_MESSAGES[kind]),))
    assert client_decoder.decode(encoder.encode(sent)) == sent


@pytest.mark.parametrize("kind", SERVER_MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_each_server_message_round_trips(kind, data):
    sent = (data.draw(SERVER_MESSAGES[kind]),)
    assert server_decoder.decode(encoder.encode(sent)) == sent


@given(server_frames)
def test_messages_that_were_encoded_separately_round_trip(sent):
    assert server_decoder.decode(packed([encoder.encode(message) for message in sent])) == tuple(sent)


@given(client_frames, server_frames)
def test_frames_of_many_messages_round_trip(client_frame, server_frame):
    assert client_decoder.decode(encoder.encode(client_frame)) == client_frame
    assert server_decoder.decode(encoder.encode(server_frame)) == server_frame


@given(numbers, batches)
def test_push_of_an_encoded_batch_equals_a_push_of_the_batch(watch, batch):
    raw = PushRaw(watch, msgspec.Raw(encoder.encode(batch)))
    assert encoder.encode([raw]) == encoder.encode([Push(watch, batch)])
    assert server_decoder.decode(encoder.encode([raw])) == (Push(watch, batch),)


# --- newer versions ---------------------------------------------------------------------------------------------------


@given(hellos)
def test_hello_with_fields_of_a_newer_version_is_read(hello):
    assert hello_decoder.decode(longer(hello)) == hello


@given(welcomes | refusals)
def test_first_frame_of_a_newer_server_is_read(answer):
    assert welcome_decoder.decode(longer(answer)) == answer


@given(st.one_of(*CLIENT_MESSAGES.values()))
def test_client_message_with_fields_of_a_newer_version_is_read(message):
    sent = msgspec.msgpack.encode([0, [msgspec.Raw(longer(message))], *MORE])
    assert client_decoder.decode(sent) == ClientFrame(0, (message,))


@given(st.one_of(*SERVER_MESSAGES.values()))
def test_server_message_with_fields_of_a_newer_version_is_read(message):
    assert server_decoder.decode(msgspec.msgpack.encode([msgspec.Raw(longer(message))])) == (message,)


def test_unknown_refusal_code_is_read_and_not_retried():
    refused = welcome_decoder.decode(msgspec.msgpack.encode([2, "moon phase", "come back at full moon"]))
    assert refused == Refused(RefusalCode.MALFORMED, "come back at full moon")
    assert refused.code is not RefusalCode.BUSY


def test_minimal_first_frames_get_default_values():
    assert hello_decoder.decode(msgspec.msgpack.encode([1, 1, "c"])) == Hello(1, 1, "c")
    assert welcome_decoder.decode(msgspec.msgpack.encode([1, 1, "gen"])) == Welcome(1, "gen")


# --- damaged messages -------------------------------------------------------------------------------------------------

DECODERS = {
    "hello": hello_decoder,
    "welcome": welcome_decoder,
    "client": client_decoder,
    "server": server_decoder,
}


@pytest.mark.parametrize("decoder", DECODERS)
@given(data=st.binary(max_size=200))
def test_random_payload_is_decoded_or_raises_decode_error(decoder, data):
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        DECODERS[decoder].decode(data)


@pytest.mark.parametrize("decoder", DECODERS)
@given(sent=st.one_of(hellos, welcomes, refusals, client_frames, server_frames), data=st.data())
def test_damaged_message_is_decoded_or_raises_decode_error(decoder, sent, data):
    payload = bytearray(encoder.encode(sent))
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        DECODERS[decoder].decode(bytes(payload[:cut]))


@pytest.mark.parametrize("wrong", [[10, 1], [0], ["Do", 1], [1], [1, "x", []]])
def test_message_with_an_unknown_tag_is_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        client_decoder.decode(msgspec.msgpack.encode([0, [wrong]]))
    with pytest.raises(msgspec.ValidationError):
        server_decoder.decode(msgspec.msgpack.encode([wrong]))


def test_tags_of_messages_do_not_change():
    def tags(union):
        return {kind.__name__: kind.__struct_config__.tag for kind in types_of(union)}

    assert tags(ClientMessage) == {
        "Do": 1,
        "WatchStart": 2,
        "WatchStop": 3,
        "Hold": 4,
        "Claim": 5,
        "AskStatus": 6,
        "Await": 7,
    }
    assert tags(ServerMessage) == {
        "Answer": 1,
        "Push": 2,
        "WatchRefused": 3,
        "Status": 4,
        "Going": 5,
        "MakeRun": 6,
    }
    assert tags(messages.Op) == {
        "Txn": 1,
        "Add": 2,
        "Grant": 3,
        "KeepAlive": 4,
        "Revoke": 5,
        "Tick": 6,
        "Shorten": 7,
    }
    assert encoder.encode(Refused(RefusalCode.BUSY, "m")) == msgspec.msgpack.encode([2, "busy", "m"])
    assert encoder.encode([Going("w"), Status(1, 2, {})]) == msgspec.msgpack.encode([[5, "w"], [4, 1, 2, {}]])
    assert encoder.encode(Answer(7, messages.Result.__args__[3](2))) == msgspec.msgpack.encode([1, 7, [4, 2]])
