"""TLS on real sockets: which clients and servers accept each other, and what is reported if they do not."""

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
from tests.server.tls_kit import Certificates, files, serving_tls, tls_client_of


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


async def rejected(endpoint: str, tls: TlsFiles, **options) -> str:
    """The error of a client that is rejected."""
    async with tls_client_of(endpoint, tls, **options) as backend, asyncio.timeout(PATIENCE_S):
        with pytest.raises(Rejected) as caught:
            await backend.get("/a")
    return str(caught.value)


async def still_serves(server, tls: TlsFiles) -> None:
    """The server still serves others, and no refused connection is left."""
    async with tls_client_of(server.addresses[0], tls) as backend:
        await put(backend, "/lives", b"on")
    await eventually(lambda: not server.connections and not server.admission.pending, "all connections are gone")


# --- accepted connections ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 16_383, 16_385, 300_000, 5_000_000])
def test_values_of_any_size_are_sent_in_both_directions(certificates, size):
    value = bytes(range(256)) * (size // 256 + 1)

    async def main():
        async with serving_tls(files(pair=certificates.server)) as (server, refusals):
            async with tls_client_of(server.addresses[0], files(certificates.authority.path)) as backend:
                await put(backend, "/big", value)
                assert (await backend.get("/big")).item.value == value
            await eventually(lambda: not server.connections, "it is closed")
            assert len(refusals) == 0

    run(main())


def test_mutual_tls_accepts_clients_with_a_certificate_of_the_authority(certificates):
    mutual = files(certificates.authority.path, certificates.server)

    async def main():
        async with serving_tls(mutual) as (server, _):
            await still_serves(server, files(certificates.authority.path, certificates.client))

    run(main())


def test_certificate_may_be_for_a_name(certificates):
    async def main():
        trusts = files(certificates.authority.path)
        async with (
            serving_tls(files(pair=certificates.server)) as (server, _),
            tls_client_of(f"localhost:{port_of(server)}", trusts) as backend,
        ):
            await backend.get("/a")

    run(main())


def test_old_versions_of_tls_are_refused(certificates):
    async def main():
        async with serving_tls(files(pair=certificates.server)) as (server, refusals):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(certificates.authority.path)
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


def test_tls_1_2_is_supported(certificates):
    async def main():
        server_context = files(certificates.authority.path, certificates.server).server_context()
        server_context.maximum_version = ssl.TLSVersion.TLSv1_2
        async with serving(tls=server_context) as server:
            await still_serves(server, files(certificates.authority.path, certificates.client))
            error = await rejected(server.addresses[0], files(certificates.authority.path))
            assert "asks for a certificate" in error

    run(main())


def test_session_of_a_closed_tls_client_ends_after_the_grace(certificates):
    async def main():
        async with serving_tls(files(pair=certificates.server)) as (server, _):
            async with tls_client_of(server.addresses[0], files(certificates.authority.path), grace_s=0.1) as backend:
                session = await backend.open_session(60.0)
                await backend.txn((), (Put("/mine", b"", session.lease),))
            await eventually(lambda: "/mine" not in server.engine_host.engine.items, "the session has ended")

    run(main())


# --- servers that are not trusted -------------------------------------------------------------------------------------


def expired(certificates: Certificates):
    return certificates.authority.expired("expired", "127.0.0.1")


def not_yet(certificates: Certificates):
    return certificates.authority.issue("early", "127.0.0.1", begins=now() + DAY, ends=now() + 2 * DAY)


def self_signed(certificates: Certificates):
    return certificates.authority.issue("self-signed", "127.0.0.1", self_signed=True)


def of_another_authority(certificates: Certificates):
    return certificates.foreign.issue("elsewhere", "127.0.0.1")


def for_another_host(certificates: Certificates):
    return certificates.authority.issue("other-host", "head.example", "10.0.0.1")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (expired, "its certificate has expired"),
        (not_yet, "its certificate is not valid yet"),
        (self_signed, "its certificate is self-signed and not in tls_ca"),
        (of_another_authority, "its certificate was signed by an authority that is not in tls_ca"),
        (for_another_host, "its certificate is not for '127.0.0.1'"),
    ],
)
def test_untrusted_server_is_rejected_with_the_reason_and_gets_no_data(certificates, make, message):
    async def main():
        async with serving_tls(files(pair=make(certificates)), token="secret") as (server, refusals):
            endpoint = server.addresses[0]
            error = await rejected(endpoint, files(certificates.authority.path), token="secret")
            assert error.startswith(f"{endpoint} is not trusted: {message}")
            await eventually(lambda: server.admission.refusals.counts[Refusal.TLS] == 1, "the server gets the reason")
            (line,) = refusals
            assert "does not accept this server's certificate" in str(line)
            assert server.traffic.frames_in == 0
            await eventually(lambda: not server.admission.pending, "no connection is pending")

    run(main())


def test_tls_client_is_told_that_the_server_speaks_plain_text(certificates):
    async def main():
        async with serving() as server:
            error = await rejected(server.addresses[0], files(certificates.authority.path))
            assert "speaks plain text, not TLS: leave out tls_ca, tls_cert and tls_key" in error
            assert server.admission.refusals.counts[Refusal.STRANGER] == 1

    run(main())


def test_tls_client_is_told_which_other_protocol_answered(certificates):
    async def main():
        async def answer(reader, writer):
            await reader.read(100)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with listening:
            endpoint = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            error = await rejected(endpoint, files(certificates.authority.path))
            assert error == f"{endpoint} does not speak TLS: it answered with HTTP. Is the port right?"

    run(main())


# --- clients that are not trusted -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reported", "logged"),
    [
        (lambda certificates: None, "asks for a certificate (mutual TLS) and none was given", "none was given"),
        (lambda certificates: certificates.authority.expired("late"), "(tls_cert) has expired", "has expired"),
        (
            lambda certificates: certificates.foreign.issue("foreign"),
            "(tls_cert) was signed by an authority that the server",
            "unable to get",
        ),
        (
            lambda certificates: certificates.authority.issue("alone", self_signed=True),
            "(tls_cert) was signed by an authority",
            "self-signed",
        ),
    ],
)
def test_client_is_told_what_is_wrong_with_its_certificate(certificates, make, reported, logged):
    async def main():
        async with serving_tls(files(certificates.authority.path, certificates.server)) as (server, refusals):
            error = await rejected(server.addresses[0], files(certificates.authority.path, make(certificates)))
            assert error.startswith(f"{server.addresses[0]} refused: ")
            assert reported in error
            assert server.admission.refusals.counts[Refusal.CERTIFICATE] == 1
            (line,) = refusals
            assert line.peer.startswith("127.0.0.1:")
            assert logged in str(line)
            assert server.traffic.frames_in == 0
            await still_serves(server, files(certificates.authority.path, certificates.client))

    run(main())


def test_plain_client_is_told_that_the_server_speaks_tls(certificates):
    async def main():
        async with serving_tls(files(pair=certificates.server)) as (server, refusals):
            async with client_of(server.addresses[0]) as backend:
                with pytest.raises(Rejected, match="refused: this server speaks TLS only: give tls_ca"):
                    await backend.get("/a")
            assert server.admission.refusals.counts[Refusal.TLS] == 1
            (line,) = refusals
            assert "it speaks plain text, and this server TLS only" in str(line)
            await still_serves(server, files(certificates.authority.path))

    run(main())


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"SSH-2.0-x\r\n", b"\x16\x03\x01" + b"z" * 500]
)
def test_other_protocol_at_a_tls_server_affects_only_its_own_connection(certificates, sent):
    async def main():
        async with serving_tls(files(pair=certificates.server)) as (server, refusals):
            raw = await Raw.open(server)
            raw.send_bytes(sent)
            answer = await raw.rest()
            assert answer.startswith(b"HTTP/1.1 400") == sent.startswith(b"GET")
            raw.close()
            assert server.admission.refusals.counts[Refusal.TLS] == 1
            assert len(refusals) == 1
            await still_serves(server, files(certificates.authority.path))

    run(main())


def test_junk_after_the_handshake_affects_only_its_own_connection(certificates):
    async def main():
        async with serving_tls(files(pair=certificates.server)) as (server, _):
            context = files(certificates.authority.path).client_context()
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server), ssl=context)
            writer.write(GREETING + frame(b"\xc1"))
            refusal = welcome_decoder.decode((await reader.read())[len(GREETING) + 4 :])
            assert isinstance(refusal, Refused)
            assert refusal.code is RefusalCode.MALFORMED
            writer.close()
            await still_serves(server, files(certificates.authority.path))

    run(main())


def test_invalid_tls_record_ends_the_connection_and_shortens_no_session(certificates):
    async def main():
        async with serving_tls(files(pair=certificates.server)) as (server, _):
            made = []

            async def tampering(make):
                def pipe():
                    link = make()
                    made.append(TlsPipe(context, link, host="127.0.0.1", on_opening=link.opening))
                    return made[-1]

                await asyncio.get_running_loop().create_connection(pipe, "127.0.0.1", port_of(server))

            context = files(certificates.authority.path).client_context()
            async with client_of(server.addresses[0], grace_s=0.0) as backend:
                backend._connector = tampering
                session = await backend.open_session(60.0)
                await backend.get("/a")
                made[0].below.write(b"\x17\x03\x03\x00\x20" + bytes(32))
                await eventually(lambda: len(made) == 2, "it reconnects")
                await backend.txn((), (Put("/mine", b"", session.lease),))
                assert server.engine_host.engine.leases.get(session.lease) is not None

    run(main())


# --- time and limits --------------------------------------------------------------------------------------------------


def test_connection_without_a_handshake_in_time_is_closed(certificates):
    async def main():
        limits = ServerLimits(hello_timeout_s=0.2)
        async with serving_tls(files(pair=certificates.server), limits=limits) as (server, refusals):
            for sent in (b"", b"\x16\x03\x01\x02\x00\x01"):
                raw = await Raw.open(server)
                raw.send_bytes(sent)
                assert await raw.rest() == b""
                raw.close()
            assert server.admission.refusals.counts[Refusal.SILENT] == 2
            assert len(refusals) == 1

    run(main())


def test_blocked_source_is_refused_before_the_handshake(certificates):
    async def main():
        limits = ServerLimits(max_failed_logins=3, login_block_s=1.0)
        async with serving_tls(files(certificates.authority.path, certificates.server), limits=limits) as (server, _):
            for _ in range(3):
                await rejected(server.addresses[0], files(certificates.authority.path))
            async with tls_client_of(
                server.addresses[0], files(certificates.authority.path, certificates.client)
            ) as backend:
                with pytest.raises(Unavailable, match="refuses this address for now"):
                    await backend.get("/a")
                assert server.admission.refusals.counts[Refusal.BLOCKED] >= 1
                loop = asyncio.get_running_loop()

                def over():
                    return server.admission.logins.blocked_s("127.0.0.1", loop.time()) == 0

                await eventually(over, "the block is over")
                await backend.get("/a")

    run(main())


def test_client_times_out_in_the_handshake_and_closes_its_socket(certificates, monkeypatch):
    monkeypatch.setattr("rallypoint.backends.tcp.client.CONNECT_S", 0.2)

    async def main():
        accepted = []

        async def listen(reader, writer):
            accepted.append((reader, writer))

        listening = await asyncio.start_server(listen, "127.0.0.1", 0)
        async with listening:
            endpoint = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            async with tls_client_of(endpoint, files(certificates.authority.path)) as backend:
                with pytest.raises(Unavailable, match=r"no answer within 0.2 s"):
                    await backend.get("/a")
                reader, writer = accepted[0]
                with suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), PATIENCE_S)  # returns only when the client's socket is closed
            for _, writer in accepted:
                writer.close()

    run(main())


# --- files ------------------------------------------------------------------------------------------------------------


def test_error_about_a_file_contains_its_name(certificates, tmp_path):
    pair, other = certificates.server, certificates.client
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    locked = certificates.authority.issue("locked", "127.0.0.1", password=b"secret")
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
    for tls, message in cases:
        with pytest.raises(Rejected) as caught:
            tls.client_context()
        assert message in str(caught.value)
        if tls.cert is not None:
            with pytest.raises(Rejected) as caught:
                tls.server_context()
            assert message in str(caught.value)
    with pytest.raises(Rejected, match="needs tls_cert"):
        TlsFiles(str(certificates.authority.path)).server_context()


def test_key_may_be_in_the_file_of_its_certificate(certificates, tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes(certificates.server.cert.read_bytes() + certificates.server.key.read_bytes())

    async def main():
        async with serving_tls(TlsFiles(None, str(both))) as (server, _):
            await still_serves(server, files(certificates.authority.path))

    run(main())


def test_self_signed_certificate_can_be_given_as_its_authority(certificates):
    pair = self_signed(certificates)

    async def main():
        async with serving_tls(files(pair=pair)) as (server, _):
            await still_serves(server, files(pair.cert))

    run(main())


def test_key_that_every_user_can_read_is_warned_of(certificates):
    assert files(pair=certificates.server).warnings() == []
    certificates.server.key.chmod(0o644)
    try:
        (warning,) = files(pair=certificates.server).warnings()
    finally:
        certificates.server.key.chmod(0o600)
    assert warning == f"tls_key {str(certificates.server.key)!r} can be read by everybody on this machine: chmod 600 it"


def test_megabytes_of_junk_before_a_handshake_do_not_affect_others(certificates):
    async def main():
        rng = random.Random(15)
        async with (
            serving_tls(files(pair=certificates.server)) as (server, refusals),
            tls_client_of(server.addresses[0], files(certificates.authority.path)) as client,
        ):
            for number in range(60):
                raw = await Raw.open(server)
                raw.send_bytes((b"\x16\x03\x01" if number % 2 else b"") + rng.randbytes(100_000))
                await raw.rest()
                raw.abort()
                await put(client, "/a", b"%d" % number)
            assert (await client.get("/a")).item.version == 60
            assert server.admission.refusals.counts[Refusal.TLS] == 60
            assert len(refusals) == 1
            assert server.traffic.bytes_in < 100_000

    run(main())
