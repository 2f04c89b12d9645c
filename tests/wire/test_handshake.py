"""The handshake: versions, tokens, malformed hellos, and replies to other protocols."""

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.wire.frames import GREETING
from rallypoint.wire.handshake import LONGEST_NAME, Accepted, Versions, describe, is_http, judge, stranger_line
from rallypoint.wire.messages import Hello, RefusalCode, Refused, encoder
from tests.wire.strategies import hellos

ONE = Versions(1, 1)


def hello(oldest=1, newest=1, client="c", **fields) -> bytes:
    return encoder.encode(Hello(oldest=oldest, newest=newest, client=client, **fields))


def refusal(verdict) -> Refused:
    assert isinstance(verdict, Refused), verdict
    assert "\n" not in verdict.message
    return verdict


def code_of(verdict) -> RefusalCode:
    return refusal(verdict).code


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        (Versions(1, 1), (1, 1), 1),
        (Versions(1, 2), (1, 1), 1),
        (Versions(1, 1), (1, 2), 1),
        (Versions(1, 2), (2, 2), 2),
        (Versions(2, 2), (1, 2), 2),
        (Versions(1, 2), (1, 2), 2),
        (Versions(1, 2), (2, 3), 2),
        (Versions(2, 3), (1, 2), 2),
        (Versions(1, 9), (4, 5), 5),
        (Versions(1, 1), (2, 2), None),
        (Versions(2, 2), (1, 1), None),
        (Versions(1, 2), (3, 4), None),
        (Versions(3, 4), (1, 2), None),
        (Versions(1, 1), (3, 1), None),
    ],
)
def test_newest_version_that_both_support_is_chosen(ours, theirs, agreed):
    assert ours.agree(*theirs) == agreed
    verdict = judge(hello(*theirs), None, ours)
    if agreed is None:
        assert code_of(verdict) is RefusalCode.VERSION
    else:
        assert isinstance(verdict, Accepted)
        assert verdict.version == agreed


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_chosen_version_equals_the_result_of_a_search_over_all_versions(a, b, c, d):
    common = [version for version in range(8) if a <= version <= b and c <= version <= d]
    assert Versions(a, b).agree(c, d) == Versions(c, d).agree(a, b) == max(common, default=None)


def test_too_old_client_is_refused_with_the_advice_to_upgrade_it():
    message = refusal(judge(hello(1, 1, software="rallypoint 0.9"), None, Versions(2, 3))).message
    assert message == (
        "the client (rallypoint 0.9) speaks version 1 of the protocol and the server versions 2 to 3: upgrade "
        "the client"
    )


def test_too_new_client_is_refused_with_the_advice_to_upgrade_the_server():
    message = refusal(judge(hello(2, 3), None, ONE)).message
    assert message == (
        "the client (unknown) speaks versions 2 to 3 of the protocol and the server version 1: upgrade the server"
    )


# --- the token --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given_token", ["secret", "geheim: ä", "x" * 10_000])
def test_right_token_is_accepted(given_token):
    assert isinstance(judge(hello(token=given_token), given_token, ONE), Accepted)


@pytest.mark.parametrize("wrong", ["Secret", "secret ", "secre", "secrets", "s", "ß"])
def test_wrong_token_is_refused_and_not_shown(wrong):
    verdict = refusal(judge(hello(token=wrong), "secret", ONE))
    assert verdict.code is RefusalCode.TOKEN
    assert verdict.message == "the token is wrong: set token_file to the file that contains it"


def test_missing_token_is_refused_with_its_own_message():
    verdict = refusal(judge(hello(), "secret", ONE))
    assert verdict.code is RefusalCode.TOKEN
    assert "none was given" in verdict.message


def test_token_is_ignored_if_none_is_required():
    assert isinstance(judge(hello(token="whatever"), None, ONE), Accepted)


def test_token_is_checked_before_the_rest_of_the_hello():
    for fields in ({"oldest": 5, "newest": 9}, {"client": ""}, {"client": "c" * 5_000}, {"run": "r" * 5_000}):
        verdict = refusal(judge(hello(token="wrong", software="mine", **fields), "secret", ONE))
        assert verdict.code is RefusalCode.TOKEN
        assert "mine" not in verdict.message


# --- the rest of the hello --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"hello",
        pickle.dumps({"a": 1}),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([1, 1]),
        msgspec.msgpack.encode({"oldest": 1, "newest": 1, "client": "c"}),
        msgspec.msgpack.encode(["1", "1", "c"]),
        msgspec.msgpack.encode([1, 1, b"c"]),
        msgspec.msgpack.encode([1, 1, "c", "", "", "", "", [[1]]]),
        hello()[:-1],
        hello() + b"\x00",
        hello().replace(b"\xa1c", b"\xa1\xff"),
    ],
)
def test_malformed_hello_is_refused_in_one_sentence(payload):
    assert refusal(judge(payload, None, ONE)) == Refused(
        RefusalCode.MALFORMED, "the first frame is not a hello: is this a Rallypoint client?"
    )
    assert code_of(judge(payload, "secret", ONE)) in (RefusalCode.MALFORMED, RefusalCode.TOKEN)


def test_fields_after_the_token_are_not_decoded_if_it_is_wrong():
    payload = msgspec.msgpack.encode([1, 1, "c", "wrong", 5, 5, 5, [[1]]])
    assert code_of(judge(payload, "secret", ONE)) is RefusalCode.TOKEN
    assert code_of(judge(payload, "wrong", ONE)) is RefusalCode.MALFORMED


@pytest.mark.parametrize(("given", "is_accepted"), [("new", True), ("old", True), ("other", False), ("", False)])
def test_each_of_several_tokens_is_accepted(given, is_accepted):
    verdict = judge(hello(token=given), ("old", "new"), ONE)
    assert isinstance(verdict, Accepted) is is_accepted


def test_hello_with_something_nested_too_deeply_is_refused():
    deep = msgspec.msgpack.encode([1, 1, "c", "", "", "", "", []])
    deep = bytes([deep[0] + 1]) + deep[1:] + b"\x91" * 60_000 + b"\xc0"
    assert code_of(judge(deep, None, ONE)) is RefusalCode.MALFORMED


@pytest.mark.parametrize("fields", [{"client": ""}, {"client": "c" * 513}, {"run": "r" * 513}])
def test_names_that_are_missing_or_too_long_are_refused(fields):
    assert code_of(judge(hello(**fields), None, ONE)) is RefusalCode.MALFORMED


@pytest.mark.parametrize("fields", [{"client": "c" * 512}, {"run": "r" * LONGEST_NAME}, {"run": ""}])
def test_names_of_the_greatest_length_are_accepted(fields):
    assert isinstance(judge(hello(**fields), None, ONE), Accepted)


@given(hellos)
def test_hello_is_accepted_as_it_was_sent_or_refused_with_a_reason(sent):
    verdict = judge(encoder.encode(sent), None, Versions(1, 2))
    if isinstance(verdict, Accepted):
        assert verdict.hello == sent
        assert verdict.version == Versions(1, 2).agree(sent.oldest, sent.newest)
    else:
        assert verdict.code in (RefusalCode.VERSION, RefusalCode.MALFORMED)
        assert verdict.message


@given(st.binary(max_size=300), st.none() | st.just("secret"))
def test_random_bytes_cause_no_exception(payload, token):
    verdict = judge(payload, token, ONE)
    assert isinstance(verdict, Accepted | Refused)


def test_hello_of_a_newer_version_with_more_fields_is_accepted():
    fields = msgspec.msgpack.decode(hello(1, 2, run="run"))
    verdict = judge(msgspec.msgpack.encode([*fields, "new", [1, 2]]), None, ONE)
    assert isinstance(verdict, Accepted)
    assert (verdict.version, verdict.hello.run) == (1, "run")


# --- other protocols --------------------------------------------------------------------------------------------------

OTHER_PROTOCOLS = {
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n": "HTTP",
    b"POST /v1/keys HTTP/1.1\r\n": "HTTP",
    b"OPTIONS * HTTP/1.1\r\n": "HTTP",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "HTTP",
    b"HTTP/1.1 400 Bad Request\r\n": "HTTP",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03": "TLS",
    pickle.dumps([1]): "a pickle",
    pickle.dumps([1], 2): "a pickle",
    pickle.dumps([1], 3): "a pickle",
    b"SSH-2.0-OpenSSH_9.6\r\n": "SSH",
    b"hello": "'hello'",
    b"\x00\x00\x00\x01": "bytes that begin with b'\\x00\\x00\\x00\\x01'",
    b"\xff" * 100: "bytes that begin with b'" + "\\xff" * 8 + "'",
}


@pytest.mark.parametrize("first", OTHER_PROTOCOLS)
def test_reply_to_another_protocol_names_it_in_one_line(first):
    assert describe(first) == OTHER_PROTOCOLS[first]
    line = stranger_line(first).rpartition(b"\r\n")[2].decode()
    is_tls = OTHER_PROTOCOLS[first] == "TLS"
    advice = "it speaks plain text, leave out tls_*" if is_tls else "connect with tcp:// URLs of Rallypoint"
    assert line == f"this is a Rallypoint server, and it was sent {OTHER_PROTOCOLS[first]}; {advice}\n"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_http_request_gets_an_http_response(method):
    answer = stranger_line(f"{method} /x HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.decode().split("\r\n")
    named = dict(header.split(": ") for header in headers)
    assert status == "HTTP/1.1 400 Bad Request"
    assert named == {"Content-Type": "text/plain", "Content-Length": str(len(body)), "Connection": "close"}
    assert body.count(b"\n") == 1
    assert body.endswith(b"\n")


@given(st.binary(max_size=200))
def test_reply_to_random_bytes_is_one_short_ascii_line(first):
    line = stranger_line(first)
    if not is_http(first):
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
        assert line.isascii()
    assert len(line) < 500


@given(st.binary(max_size=200))
def test_description_contains_no_control_characters(first):
    assert describe(first).isprintable()


def test_greeting_is_described_as_bytes():
    assert describe(GREETING).startswith("bytes that begin with")
