"""TLS on real sockets: who comes in, and what everybody else is told, on either side."""

import asyncio
import random
import ssl
from contextlib import suppress

import pytest

from rallypoint.backends.tls import TlsFiles
from rallypoint.backends.tls_pipe import TlsPipe
from rallypoint.errors import Rejected, Unavailable
from rallypoint.kv.types import Put
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.admission.refusals import Refusal
from rallypoint.wire.frames import GREETING, frame
from rallypoint.wire.messages import RefusalCode, Refused, welcome_decoder
from tests.certificates import DAY, now
from tests.server.kit import PATIENCE_S, Raw, client_of, eventually, port_of, put, run, serving
from tests.server.tls_kit import Town, files, serving_tls, tls_client_of


@pytest.fixture(scope="module")
def town(tmp_path_factory) -> Town:
    return Town(tmp_path_factory.mktemp("town"))


async def rejected(endpoint: str, tls: TlsFiles, **options) -> str:
    """What a client is rejected with, at once."""
    async with tls_client_of(endpoint, tls, **options) as backend, asyncio.timeout(PATIENCE_S):
        with pytest.raises(Rejected) as caught:
            await backend.get("/a")
    return str(caught.value)


async def lives_on(server, tls: TlsFiles) -> None:
    """Others come in as before, and nobody who was sent away is held on to."""
    async with tls_client_of(server.addresses[0], tls) as backend:
        await put(backend, "/lives", b"on")
    await eventually(lambda: not server.connections and not server.admission.pending, "all connections are gone")


# --- those who come in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 16_383, 16_385, 300_000, 5_000_000])
def test_values_of_any_size_go_both_ways(town, size):
    value = bytes(range(256)) * (size // 256 + 1)

    async def main():
        async with serving_tls(files(pair=town.server)) as (server, refusals):
            async with tls_client_of(server.addresses[0], files(town.authority.path)) as backend:
                await put(backend, "/big", value)
                assert (await backend.get("/big")).item.value == value
            await eventually(lambda: not server.connections, "it is closed in good order")
            assert len(refusals) == 0

    run(main())


def test_mutual_tls_lets_in_whoever_shows_a_certificate_of_the_authority(town):
    mutual = files(town.authority.path, town.server)

    async def main():
        async with serving_tls(mutual) as (server, _):
            await lives_on(server, files(town.authority.path, town.client))

    run(main())


def test_certificate_is_for_names_and_addresses_of_both_kinds(town):
    async def main():
        trusts = files(town.authority.path)
        async with (
            serving_tls(files(pair=town.server)) as (server, _),
            tls_client_of(f"localhost:{port_of(server)}", trusts) as backend,
        ):
            await backend.get("/a")

    run(main())


def test_old_versions_of_tls_are_refused(town):
    async def main():
        async with serving_tls(files(pair=town.server)) as (server, refusals):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(town.authority.path)
            with pytest.warns(DeprecationWarning, match="TLSv1"):
                context.minimum_version = ssl.TLSVersion.TLSv1
            with pytest.warns(DeprecationWarning, match="TLSv1_1"):
                context.maximum_version = ssl.TLSVersion.TLSv1_1
            context.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", port_of(server), ssl=context)
            await eventually(lambda: server.admission.refusals.counts[Refusal.TLS] == 1, "it is counted")
            (line,) = refusals
            assert "TLS failed" in str(line)

    run(main())


def test_tls_1_2_is_spoken_too(town):
    async def main():
        server_context = files(town.authority.path, town.server).server_context()
        server_context.maximum_version = ssl.TLSVersion.TLSv1_2
        async with serving(tls=server_context) as server:
            await lives_on(server, files(town.authority.path, town.client))
            said = await rejected(server.addresses[0], files(town.authority.path))
            assert "asks for a certificate" in said

    run(main())


def test_client_that_goes_away_ends_its_session_by_the_grace(town):
    async def main():
        async with serving_tls(files(pair=town.server)) as (server, _):
            async with tls_client_of(server.addresses[0], files(town.authority.path), grace_s=0.1) as backend:
                session = await backend.open_session(60.0)
                await backend.txn((), (Put("/mine", b"", session.lease),))
            await eventually(lambda: "/mine" not in server.engine_host.engine.items, "the session has ended")

    run(main())


# --- what is wrong with the server ------------------------------------------------------------------------------------


def expired(town: Town):
    return town.authority.expired("expired", "127.0.0.1")


def not_yet(town: Town):
    return town.authority.issue("early", "127.0.0.1", begins=now() + DAY, ends=now() + 2 * DAY)


def self_signed(town: Town):
    return town.authority.issue("selfish", "127.0.0.1", self_signed=True)


def of_another_authority(town: Town):
    return town.foreign.issue("elsewhere", "127.0.0.1")


def for_another_host(town: Town):
    return town.authority.issue("other-host", "head.example", "10.0.0.1")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (expired, "its certificate has expired"),
        (not_yet, "its certificate is not valid yet"),
        (self_signed, "its certificate is self-signed and not in tls_ca"),
        (of_another_authority, "its certificate is of an authority that is not in tls_ca"),
        (for_another_host, "its certificate is not for '127.0.0.1'"),
    ],
)
def test_server_that_is_not_to_be_trusted_is_rejected_with_the_reason_and_nothing_is_sent(town, make, words):
    async def main():
        async with serving_tls(files(pair=make(town)), token="secret") as (server, refusals):
            endpoint = server.addresses[0]
            said = await rejected(endpoint, files(town.authority.path), token="secret")
            assert said.startswith(f"{endpoint} is not trusted: {words}")
            await eventually(lambda: server.admission.refusals.counts[Refusal.TLS] == 1, "the server is told why")
            (line,) = refusals
            assert "does not accept this server's certificate" in str(line)
            assert server.traffic.frames_in == 0
            await eventually(lambda: not server.admission.pending, "nobody is held on to")

    run(main())


def test_plain_server_is_named_to_a_client_that_speaks_tls(town):
    async def main():
        async with serving() as server:
            said = await rejected(server.addresses[0], files(town.authority.path))
            assert "speaks plain text, not TLS: leave out tls_ca, tls_cert and tls_key" in said
            assert server.admission.refusals.counts[Refusal.STRANGER] == 1

    run(main())


def test_something_else_than_a_server_is_named_to_a_client_that_speaks_tls(town):
    async def main():
        async def answer(reader, writer):
            await reader.read(100)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with listening:
            endpoint = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            said = await rejected(endpoint, files(town.authority.path))
            assert said == f"{endpoint} does not speak TLS: it answered with HTTP. Is the port right?"

    run(main())


# --- what is wrong with the client ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told", "logged"),
    [
        (lambda town: None, "asks for a certificate (mutual TLS) and none was given", "none was given"),
        (lambda town: town.authority.expired("late"), "(tls_cert) has expired", "has expired"),
        (lambda town: town.foreign.issue("stranger"), "(tls_cert) is of an authority that the server", "unable to get"),
        (lambda town: town.authority.issue("alone", self_signed=True), "(tls_cert) is of an authority", "self-signed"),
    ],
)
def test_client_without_the_right_certificate_is_told_what_is_wrong_with_it(town, make, told, logged):
    async def main():
        async with serving_tls(files(town.authority.path, town.server)) as (server, refusals):
            said = await rejected(server.addresses[0], files(town.authority.path, make(town)))
            assert said.startswith(f"{server.addresses[0]} refused: ")
            assert told in said
            assert server.admission.refusals.counts[Refusal.CERTIFICATE] == 1
            (line,) = refusals
            assert line.peer.startswith("127.0.0.1:")
            assert logged in str(line)
            assert server.traffic.frames_in == 0
            await lives_on(server, files(town.authority.path, town.client))

    run(main())


def test_plain_client_is_told_that_the_server_speaks_tls(town):
    async def main():
        async with serving_tls(files(pair=town.server)) as (server, refusals):
            async with client_of(server.addresses[0]) as backend:
                with pytest.raises(Rejected, match="refused: this server speaks TLS only: give tls_ca"):
                    await backend.get("/a")
            assert server.admission.refusals.counts[Refusal.TLS] == 1
            (line,) = refusals
            assert "it speaks plain text, and this server TLS only" in str(line)
            await lives_on(server, files(town.authority.path))

    run(main())


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"SSH-2.0-x\r\n", b"\x16\x03\x01" + b"z" * 500]
)
def test_stranger_at_a_tls_server_costs_only_its_own_connection(town, sent):
    async def main():
        async with serving_tls(files(pair=town.server)) as (server, refusals):
            raw = await Raw.open(server)
            raw.send_bytes(sent)
            answer = await raw.rest()
            assert answer.startswith(b"HTTP/1.1 400") == sent.startswith(b"GET")
            raw.close()
            assert server.admission.refusals.counts[Refusal.TLS] == 1
            assert len(refusals) == 1
            await lives_on(server, files(town.authority.path))

    run(main())


def test_junk_after_the_handshake_costs_only_its_own_connection(town):
    async def main():
        async with serving_tls(files(pair=town.server)) as (server, _):
            context = files(town.authority.path).client_context()
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server), ssl=context)
            writer.write(GREETING + frame(b"\xc1"))
            word = welcome_decoder.decode((await reader.read())[len(GREETING) + 4 :])
            assert isinstance(word, Refused)
            assert word.code is RefusalCode.MALFORMED
            writer.close()
            await lives_on(server, files(town.authority.path))

    run(main())


def test_record_that_was_tampered_with_ends_the_connection_and_shortens_no_session(town):
    async def main():
        async with serving_tls(files(pair=town.server)) as (server, _):
            made = []

            async def tampering(make):
                def pipe():
                    link = make()
                    made.append(TlsPipe(context, link, host="127.0.0.1", on_opening=link.opening))
                    return made[-1]

                await asyncio.get_running_loop().create_connection(pipe, "127.0.0.1", port_of(server))

            context = files(town.authority.path).client_context()
            async with client_of(server.addresses[0], grace_s=0.0) as backend:
                backend._connector = tampering
                session = await backend.open_session(60.0)
                await backend.get("/a")
                made[0].below.write(b"\x17\x03\x03\x00\x20" + bytes(32))
                await eventually(lambda: len(made) == 2, "it comes back on another connection")
                await backend.txn((), (Put("/mine", b"", session.lease),))
                assert server.engine_host.engine.leases.get(session.lease) is not None

    run(main())


# --- time and limits --------------------------------------------------------------------------------------------------


def test_handshake_that_is_not_finished_in_time_is_dropped(town):
    async def main():
        limits = ServerLimits(hello_timeout_s=0.2)
        async with serving_tls(files(pair=town.server), limits=limits) as (server, refusals):
            for sent in (b"", b"\x16\x03\x01\x02\x00\x01"):
                raw = await Raw.open(server)
                raw.send_bytes(sent)
                assert await raw.rest() == b""
                raw.close()
            assert server.admission.refusals.counts[Refusal.SILENT] == 2
            assert len(refusals) == 1

    run(main())


def test_source_that_was_refused_too_often_is_refused_before_any_handshake(town):
    async def main():
        limits = ServerLimits(max_failed_logins=3, login_block_s=1.0)
        async with serving_tls(files(town.authority.path, town.server), limits=limits) as (server, _):
            for _ in range(3):
                await rejected(server.addresses[0], files(town.authority.path))
            async with tls_client_of(server.addresses[0], files(town.authority.path, town.client)) as backend:
                with pytest.raises(Unavailable, match="refuses this address for now"):
                    await backend.get("/a")
                assert server.admission.refusals.counts[Refusal.BLOCKED] >= 1
                loop = asyncio.get_running_loop()

                def over():
                    return server.admission.logins.blocked_s("127.0.0.1", loop.time()) == 0

                await eventually(over, "the block is over")
                await backend.get("/a")

    run(main())


def test_client_gives_up_on_a_handshake_that_is_never_answered_and_keeps_no_socket(town, monkeypatch):
    monkeypatch.setattr("rallypoint.backends.tcp.client.CONNECT_S", 0.2)

    async def main():
        silent = []

        async def listen(reader, writer):
            silent.append((reader, writer))

        listening = await asyncio.start_server(listen, "127.0.0.1", 0)
        async with listening:
            endpoint = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            async with tls_client_of(endpoint, files(town.authority.path)) as backend:
                with pytest.raises(Unavailable, match=r"no answer within 0.2 s"):
                    await backend.get("/a")
                reader, writer = silent[0]
                with suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), PATIENCE_S)  # the end, which only a closed socket gives
            for _, writer in silent:
                writer.close()

    run(main())


# --- files ------------------------------------------------------------------------------------------------------------


def test_whatever_is_wrong_with_a_file_is_said_with_its_name(town, tmp_path):
    pair, other = town.server, town.client
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    locked = town.authority.issue("locked", "127.0.0.1", password=b"secret")
    missing = tmp_path / "missing.pem"
    cases = [
        (TlsFiles(str(missing)), f"tls_ca {str(missing)!r} cannot be read: No such file"),
        (TlsFiles(str(junk)), f"tls_ca {str(junk)!r} holds no certificate"),
        (TlsFiles(None, str(missing), str(pair.key)), f"tls_cert {str(missing)!r} cannot be read"),
        (TlsFiles(None, str(junk), str(pair.key)), f"tls_cert {str(junk)!r} holds no certificate"),
        (TlsFiles(None, str(pair.cert), str(missing)), f"tls_key {str(missing)!r} cannot be read"),
        (TlsFiles(None, str(pair.cert), str(junk)), f"tls_key {str(junk)!r} holds no private key"),
        (TlsFiles(None, str(pair.cert)), f"tls_cert {str(pair.cert)!r} holds no private key"),
        (TlsFiles(None, str(pair.cert), str(other.key)), f"is not the key of tls_cert {str(pair.cert)!r}"),
        (TlsFiles(None, str(locked.cert), str(locked.key)), f"tls_key {str(locked.key)!r} is locked with a password"),
        (TlsFiles(None, str(pair.cert), str(tmp_path)), "cannot be read: Is a directory"),
    ]
    for tls, words in cases:
        with pytest.raises(Rejected) as caught:
            tls.client_context()
        assert words in str(caught.value)
        if tls.cert is not None:
            with pytest.raises(Rejected) as caught:
                tls.server_context()
            assert words in str(caught.value)
    with pytest.raises(Rejected, match="needs tls_cert"):
        TlsFiles(str(town.authority.path)).server_context()


def test_key_may_be_in_the_file_of_its_certificate(town, tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes(town.server.cert.read_bytes() + town.server.key.read_bytes())

    async def main():
        async with serving_tls(TlsFiles(None, str(both))) as (server, _):
            await lives_on(server, files(town.authority.path))

    run(main())


def test_certificate_itself_may_stand_in_the_place_of_its_authority(town):
    pair = self_signed(town)

    async def main():
        async with serving_tls(files(pair=pair)) as (server, _):
            await lives_on(server, files(pair.cert))

    run(main())


def test_key_that_everybody_can_read_is_warned_of(town):
    assert files(pair=town.server).warnings() == []
    town.server.key.chmod(0o644)
    try:
        (warning,) = files(pair=town.server).warnings()
    finally:
        town.server.key.chmod(0o600)
    assert warning == f"tls_key {str(town.server.key)!r} can be read by everybody on this machine: chmod 600 it"


def test_megabytes_of_junk_before_a_handshake_cost_nobody_else_anything(town):
    async def main():
        rng = random.Random(15)
        async with (
            serving_tls(files(pair=town.server)) as (server, refusals),
            tls_client_of(server.addresses[0], files(town.authority.path)) as honest,
        ):
            for number in range(60):
                raw = await Raw.open(server)
                raw.send_bytes((b"\x16\x03\x01" if number % 2 else b"") + rng.randbytes(100_000))
                await raw.rest()
                raw.abort()
                await put(honest, "/a", b"%d" % number)
            assert (await honest.get("/a")).item.version == 60
            assert server.admission.refusals.counts[Refusal.TLS] == 60
            assert len(refusals) == 1
            assert server.traffic.bytes_in < 100_000

    run(main())
