"""Peers that violate the protocol get one clear answer and are disconnected; other clients are not affected."""

import asyncio
import http.client
import pickle
import random
import urllib.error
import urllib.request

import msgspec
import pytest

from rallypoint.events import ClientRefused, Emitter
from rallypoint.kv.types import Get, Grant, Put, Txn, TxnResult
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.wire.frames import GREETING, HELLO_LIMIT, frame
from rallypoint.wire.handshake import Versions
from rallypoint.wire.messages import (
    Do,
    Going,
    Hello,
    Hold,
    RefusalCode,
    Refused,
    encoder,
    server_decoder,
    welcome_decoder,
)
from tests.server.kit import PATIENCE_S, Raw, client_of, eventually, port_of, put, run, serving

LINE = b"this is a Rallypoint server, and it was sent "


async def still_serves(server) -> None:
    """The server still serves others, and no refused connection is left."""
    async with client_of(server.addresses[0]) as backend:
        revision = await put(backend, "/alive")
        assert (await backend.get("/alive")).item.mod_revision == revision
    await eventually(lambda: not server.connections, "all connections are gone")


def refused_with(answer: bytes) -> Refused:
    """The refusal in an answer that contains nothing else."""
    assert answer.startswith(GREETING)
    header, payload = answer[len(GREETING) :][:4], answer[len(GREETING) + 4 :]
    assert int.from_bytes(header, "big") == len(payload)
    refusal = welcome_decoder.decode(payload)
    assert isinstance(refusal, Refused)
    return refusal


def going_with(answer: bytes) -> str:
    """The reason of the `Going` message in an answer that contains nothing else."""
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4
    (going,) = server_decoder.decode(answer[4:])
    assert isinstance(going, Going)
    return going.why


# --- other protocols --------------------------------------------------------------------------------------------------


def test_http_client_gets_status_400_with_one_line():
    async def main():
        async with serving() as server:

            def ask(method, body):
                asked = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=PATIENCE_S)
                try:
                    asked.request(method, "/v2/keys", body=body)
                    answer = asked.getresponse()
                    return answer.status, answer.getheader("Content-Type"), answer.read()
                finally:
                    asked.close()

            for method, body in (("GET", None), ("POST", b"a=1"), ("PUT", b"x" * 1000), ("DELETE", None)):
                status, content_type, text = await asyncio.to_thread(ask, method, body)
                assert (status, content_type) == (400, "text/plain")
                assert text == LINE + b"HTTP; connect with tcp:// URLs of Rallypoint\n"
            await still_serves(server)

    run(main())


def test_urllib_reports_the_line_too():
    async def main():
        async with serving() as server:
            with pytest.raises(urllib.error.HTTPError) as caught:
                await asyncio.to_thread(urllib.request.urlopen, f"http://{server.addresses[0]}/", timeout=PATIENCE_S)
            assert caught.value.code == 400
            assert caught.value.read().startswith(LINE)
            caught.value.close()

    run(main())


OTHER_PROTOCOLS = {
    "pickle": (pickle.dumps({"rank": 0}), b"a pickle"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), b"TLS"),
    "ssh": (b"SSH-2.0-OpenSSH_9.6\r\n", b"SSH"),
    "text": (b"hello?", b"'hello?'"),
    "zeros": (bytes(100), b"bytes that begin"),
}


@pytest.mark.parametrize("protocol", OTHER_PROTOCOLS)
def test_other_protocol_gets_one_line_and_is_closed(protocol):
    sent, named = OTHER_PROTOCOLS[protocol]

    async def main():
        seen = []
        async with serving(emit=Emitter(seen.append)) as server:
            raw = await Raw.open(server)
            raw.send_bytes(sent)
            answer = await raw.rest()
            assert answer.startswith(LINE + named)
            assert answer.count(b"\n") == 1
            raw.close()
            await still_serves(server)
            assert server.describe()["refused"] == "1"
        (refused,) = [event for event in seen if isinstance(event, ClientRefused)]
        assert refused.peer.startswith("127.0.0.1:")
        assert "does not speak Rallypoint's protocol" in str(refused)

    run(main())


def test_random_bytes_affect_only_their_own_connections():
    async def main():
        rng = random.Random(4)
        async with serving() as server, client_of(server.addresses[0]) as other:
            await put(other, "/a")
            for size in (1, 7, 8, 9, 100, 5_000, 200_000):
                raw = await Raw.open(server)
                raw.send_bytes(rng.randbytes(size))
                await raw.rest()
                raw.close()
                await put(other, "/a", b"%d" % size)
            for _ in range(20):
                raw = await Raw.open(server)
                raw.send_bytes(GREETING + frame(rng.randbytes(rng.randrange(300))))
                assert refused_with(await raw.rest()).code is RefusalCode.MALFORMED
                raw.close()
            assert (await other.get("/a")).item.version == 8
            assert server.describe()["refused"] == "27"

    run(main())


def test_connection_that_closes_without_a_hello_is_no_refusal():
    async def main():
        async with serving() as server:
            for sent in (b"", GREETING[:3], GREETING, GREETING + b"\x00\x00"):
                raw = await Raw.open(server)
                raw.send_bytes(sent)
                raw.close()
            await still_serves(server)
            assert server.describe()["refused"] == "0"

    run(main())


# --- hellos -----------------------------------------------------------------------------------------------------------


def test_connection_without_a_hello_in_time_is_closed():
    async def main():
        loop = asyncio.get_running_loop()
        limits = ServerLimits(hello_timeout_s=0.2)
        async with serving(limits=limits) as server, client_of(server.addresses[0]) as known:
            await put(known, "/a")
            for sent in (b"", GREETING, GREETING + frame(b"x")[:-1]):
                began_at = loop.time()
                raw = await Raw.open(server)
                raw.send_bytes(sent)
                refused = refused_with(await raw.rest())
                assert refused == Refused(RefusalCode.MALFORMED, "no hello within 0.2 s")
                assert loop.time() - began_at >= 0.19
                raw.close()
            await put(known, "/a")  # after its hello a client may be idle
            assert server.describe()["refused"] == "3"

    run(main())


def test_too_long_hello_is_refused_before_it_has_arrived():
    async def main():
        async with serving() as server:
            raw = await Raw.open(server)
            raw.send_bytes(GREETING + (HELLO_LIMIT + 1).to_bytes(4, "big"))
            refused = refused_with(await raw.rest())
            assert refused.code is RefusalCode.MALFORMED
            sizes = f"a frame of {HELLO_LIMIT + 1} bytes is longer than the limit of {HELLO_LIMIT}"
            assert refused.message == f"the hello is too long: {sizes}"
            raw.close()
            await still_serves(server)

    run(main())


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"token": "wrong"}, RefusalCode.TOKEN),
        ({}, RefusalCode.TOKEN),
        ({"token": "right", "oldest": 7, "newest": 9}, RefusalCode.VERSION),
        ({"token": "right", "client": ""}, RefusalCode.MALFORMED),
    ],
)
def test_invalid_hello_is_refused_with_the_reason(fields, code):
    async def main():
        async with serving(token="right") as server:
            raw = await Raw.open(server)
            raw.send_bytes(
                GREETING + frame(encoder.encode(Hello(**{"oldest": 1, "newest": 1, "client": "c", **fields})))
            )
            assert refused_with(await raw.rest()).code is code
            raw.close()
            assert len(server.clients) == 0
            assert len(server.runs) == 0
            async with client_of(server.addresses[0], token="right") as known:
                await put(known, "/a")

    run(main())


def test_frames_after_a_refused_hello_are_ignored():
    async def main():
        async with serving(token="right") as server:
            raw = await Raw.open(server)
            hello = frame(encoder.encode(Hello(1, 1, "c", token="wrong")))
            raw.send_bytes(GREETING + hello)
            raw.send(Do(1, Txn((), (Put("/a", b""),))))
            refused_with(await raw.rest())
            raw.close()
            assert server.engine_host.engine.items == {}

    run(main())


def test_requests_may_be_sent_with_the_hello():
    async def main():
        async with serving() as server:
            raw = await Raw.open(server)
            hello = frame(encoder.encode(Hello(1, 1, "c")))
            request = frame(msgspec.msgpack.encode([0, [Do(1, Txn((), (Put("/a", bytes(200_000)),)))]]))
            raw.send_bytes(GREETING + hello + request)
            welcome_decoder.decode(await raw.next_frame())
            assert isinstance(await raw.answer(1), TxnResult)
            assert "/a" in server.engine_host.engine.items
            raw.close()

    run(main())


def test_peers_with_different_version_ranges_agree_on_the_newest_common_one():
    async def main():
        for theirs, ours, agreed in (
            (Versions(1, 2), Versions(1, 1), 1),
            (Versions(1, 1), Versions(1, 2), 1),
            (Versions(2, 2), Versions(1, 2), 2),
        ):
            async with serving(versions=theirs) as server:
                raw = await Raw.open(server)
                raw.send_bytes(GREETING + frame(encoder.encode(Hello(ours.oldest, ours.newest, "c"))))
                assert welcome_decoder.decode(await raw.next_frame()).version == agreed
                raw.close()
                async with client_of(server.addresses[0], versions=ours) as backend:
                    await put(backend, "/a")

    run(main())


# --- after the hello --------------------------------------------------------------------------------------------------

MALFORMED = {
    "not msgpack": frame(b"\xc1\xc1\xc1"),
    "nothing": frame(b""),
    "a string": frame(msgspec.msgpack.encode("hello")),
    "unknown message": frame(msgspec.msgpack.encode([0, [[99, 1]]])),
    "wrong type": frame(msgspec.msgpack.encode([0, [[1, "one", [6]]]])),
    "unknown operation": frame(msgspec.msgpack.encode([0, [[1, 1, [77]]]])),
    "cut short": frame(msgspec.msgpack.encode([0, [[1, 1, [3, 5.0]]]])[:-3]),
    "bad text": frame(msgspec.msgpack.encode([0, [[2, 1, "ab", 0]]]).replace(b"\xa2ab", b"\xa2\xff\xfe")),
    "nested too deeply": frame(b"\x93\x00\x90" + b"\x91" * 50_000 + b"\xc0"),
    "pickle": frame(pickle.dumps(list(range(10)))),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_frame_is_answered_with_one_sentence_and_closed(kind):
    async def main():
        async with serving() as server, client_of(server.addresses[0]) as other:
            await put(other, "/a")
            raw, _ = await Raw.welcomed(server)
            raw.send_bytes(MALFORMED[kind])
            raw.send(Do(1, Txn((), (Put("/b", b""),))))
            assert going_with(await raw.rest()).startswith("a frame could not be read: ")
            raw.close()
            await eventually(lambda: len(server.connections) == 1, "only the other one is left")
            assert "/b" not in server.engine_host.engine.items
            await put(other, "/a")

    run(main())


def test_too_long_frame_is_answered_with_the_limit_and_closed():
    async def main():
        async with serving() as server, client_of(server.addresses[0]) as other:
            server.max_frame = 10_000
            raw, welcome = await Raw.welcomed(server)
            assert welcome.max_frame == 10_000
            raw.send(Do(1, Txn((), (Put("/a", bytes(9_000)),))))
            assert isinstance(await raw.answer(1), TxnResult)
            raw.send_bytes(frame(bytes(10_001)))
            assert going_with(await raw.rest()) == "a frame of 10001 bytes is longer than the limit of 10000"
            raw.close()
            await put(other, "/b")

    run(main())


def test_request_before_a_malformed_frame_is_executed():
    async def main():
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(Do(1, Txn((), (Put("/a", b"kept"),))))
            raw.send_bytes(frame(b"\xc1"))
            await raw.rest()
            raw.close()
            assert server.engine_host.engine.items["/a"].value == b"kept"

    run(main())


def test_invalid_values_are_refused_and_the_connection_stays_open():
    async def main():
        nan, inf = float("nan"), float("inf")
        async with serving() as server:
            raw, _ = await Raw.welcomed(server)
            invalid = [Grant(nan), Grant(inf), Grant(-1.0), Txn((), (Put("", b""),)), Txn((), (Put("/a", b"", 77),))]
            raw.send(*(Do(seq, op) for seq, op in enumerate(invalid, start=1)))
            for seq in range(1, len(invalid) + 1):
                assert type(await raw.answer(seq)).__name__ == "Failure"
            for grace_s in (nan, inf, -inf, -1.0):
                raw.send(Hold(12345, grace_s), Hold(-1, grace_s))
            raw.send(Do(10, Txn((), (Get("/a"),))))
            assert isinstance(await raw.answer(10), TxnResult)
            raw.close()
            await still_serves(server)

    run(main())
