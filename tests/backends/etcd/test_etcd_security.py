"""Certificates, users and strangers: what works, and what each mistake is told."""

import asyncio
import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import rallypoint
from rallypoint.errors import Rejected, SettingsError, Unavailable
from rallypoint.kv.types import Put
from rallypoint.settings import Settings
from tests.backends.etcd.kit import Member, needs, running
from tests.patience import PATIENCE_S, until
from tests.ports import free_ports

pytest.importorskip("grpc", reason="needs grpcio: pip install 'rallypoint[etcd]'")

from rallypoint.backends.etcd.backend import open_backend
from rallypoint.backends.etcd.cluster import too_old


def settings(endpoint: str, **options) -> Settings:
    options = {"min_nodes": 1, "read_timeout": 10, "join_timeout": 20, "last_call_timeout": 0.1} | options
    return Settings.build(scheme="etcd", endpoints=endpoint, run_id="run", **options)


def use(endpoint: str, **options):
    """Write and read a key."""

    async def work():
        backend = await open_backend(settings(endpoint, **options))
        try:
            await backend.txn((), [Put("/rallypoint/x", b"1")])
            return (await backend.get("/rallypoint/x")).item.value
        finally:
            await backend.close()

    async def limited():
        async with asyncio.timeout(PATIENCE_S):
            return await work()

    return asyncio.run(limited())


def refusal(endpoint: str, **options) -> str:
    """Why it is refused, for good."""
    with pytest.raises(Rejected) as caught:
        use(endpoint, **options)
    return str(caught.value)


# --- certificates -----------------------------------------------------------------------------------------------------


def openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """A directory with two authorities, and a certificate for localhost and one for a client from the first."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    here = tmp_path_factory.mktemp("pem")
    for name in ("ca", "other"):
        key, cert = str(here / f"{name}.key"), str(here / f"{name}.pem")
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-subj", f"/CN={name}")
    names = here / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        key, request, cert = (str(here / f"{name}.{end}") for end in ("key", "csr", "pem"))
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        authority = ("-CA", str(here / f"{ca}.pem"), "-CAkey", str(here / f"{ca}.key"), "-CAcreateserial")
        openssl("x509", "-req", "-in", request, *authority, "-out", cert, "-extfile", str(names), "-days", "2")
    (here / "both.pem").write_bytes((here / "client.pem").read_bytes() + (here / "client.key").read_bytes())
    return here


@pytest.fixture(scope="module")
def secure(pem, tmp_path_factory):
    """The endpoint of an etcd that speaks TLS and wants to see a certificate."""
    binary = needs("system")
    client, peer = (f"127.0.0.1:{port}" for port in free_ports(2))
    options = [
        f"--cert-file={pem / 'server.pem'}",
        f"--key-file={pem / 'server.key'}",
        f"--trusted-ca-file={pem / 'ca.pem'}",
        "--client-cert-auth",
    ]
    member = Member(
        binary, tmp_path_factory.mktemp("etcd"), "m0", client, peer, f"m0=http://{peer}", options, scheme="https"
    )
    member.start()
    try:
        until(lambda: _listens(client), "etcd listens")
        yield client
    finally:
        member.kill()


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as one:
        one.settimeout(1)
        return one.connect_ex((host, int(port))) == 0


def test_certificates_work_in_two_files_and_in_one(secure, pem):
    ca = str(pem / "ca.pem")
    two = {"ssl_cert": str(pem / "client.pem"), "ssl_cert_key": str(pem / "client.key"), "ca_cert": ca}
    assert use(secure, protocol="https", **two) == b"1"
    assert use(secure, protocol="https", cert=str(pem / "both.pem"), cacert=ca) == b"1"


def test_handler_works_over_tls(secure, pem):
    files = f"cacert={pem / 'ca.pem'}&cert={pem / 'both.pem'}"
    handler = rallypoint.create_handler(f"etcd://{secure}/tls?protocol=https&{files}&min_nodes=1&last_call_timeout=0.1")
    world = handler.next_rendezvous()
    world.store.set("a", "b")
    assert world.store.get("a") == b"b"
    assert handler.shutdown()


def test_wrong_certificates_are_told_apart(secure, pem):
    ca, other = str(pem / "ca.pem"), str(pem / "other.pem")
    client = {"cert": str(pem / "both.pem")}
    assert "its certificate is not accepted" in refusal(secure, protocol="https", cacert=other, **client)
    assert "wants a client certificate" in refusal(secure, protocol="https", cacert=ca)
    stranger = {"cert": str(pem / "stranger.pem"), "key": str(pem / "stranger.key")}
    assert "does not accept the client certificate" in refusal(secure, protocol="https", cacert=ca, **stranger)
    mixed = {"cert": str(pem / "client.pem"), "key": str(pem / "stranger.key")}
    assert "cannot be used" in refusal(secure, protocol="https", cacert=ca, **mixed)
    missing = refusal(secure, protocol="https", cacert=str(pem / "nowhere.pem"))
    assert "cacert" in missing
    assert "no such file" in missing


def test_plain_and_tls_do_not_understand_each_other_and_say_so(secure, etcd):
    assert "protocol=https" in refusal(secure)
    assert "protocol=http" in refusal(etcd.endpoint, protocol="https")


def test_certificates_without_tls_are_refused_before_anything_is_opened(pem):
    with pytest.raises(SettingsError) as caught:
        settings("127.0.0.1:1", cert=str(pem / "both.pem"))
    assert "protocol=https" in str(caught.value)


# --- users ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """An etcd that knows two users; only one of them may write where runs are."""
    with running(needs("system"), tmp_path_factory.mktemp("etcd")) as cluster:
        member = cluster.members[0]
        for name in ("root", "runner", "visitor"):
            member.ask("auth/user/add", name=name, password=f"{name}'s")
        for role in ("root", "runs"):
            member.ask("auth/role/add", name=role)
        allowed = {"permType": "READWRITE", "key": "L3JhbGx5cG9pbnQv", "range_end": "L3JhbGx5cG9pbnQw"}  # /rallypoint/
        member.ask("auth/role/grant", name="runs", perm=allowed)
        member.ask("auth/user/grant", user="root", role="root")
        member.ask("auth/user/grant", user="runner", role="runs")
        member.ask("auth/enable")
        yield member


@pytest.fixture
def password(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "password").write_text(text)
        return str(tmp_path / "password")

    return write


def test_user_with_its_password_gets_in_and_a_token_that_is_gone_is_renewed(guarded, password):
    async def work():
        backend = await open_backend(settings(guarded.endpoint, user="runner", password_file=password("runner's\n")))
        try:
            start = (await backend.txn((), [Put("/rallypoint/x", b"1")])).revision
            watch = backend.watch("/rallypoint/x", start)
            session = await backend.open_session(10)
            await backend.txn((), [Put("/rallypoint/x", b"2")])
            assert (await anext(watch)).changes[0].item.value == b"2"
            guarded.kill()  # it forgets its tokens
            guarded.start()
            await asyncio.to_thread(until, guarded.has_leader, "etcd is back")
            for _ in range(100):
                try:
                    await backend.txn((), [Put("/rallypoint/x", b"3")])
                    break
                except Unavailable:
                    await asyncio.sleep(0.1)
            changes = [(await anext(watch)).changes[0].item.value]
            later = backend.watch("/rallypoint/y", start)  # on a stream of the new token
            await backend.txn((), [Put("/rallypoint/y", b"4")])
            changes.append((await anext(later)).changes[0].item.value)
            alive = await backend.keep_alive(session.lease)
            await session.close()
            return changes, alive
        finally:
            await backend.close()

    async def limited():
        async with asyncio.timeout(PATIENCE_S):
            return await work()

    assert asyncio.run(limited()) == ([b"3", b"4"], True)


def test_wrong_users_are_told_apart(guarded, password):
    assert "user" in refusal(guarded.endpoint)
    wrong = refusal(guarded.endpoint, user="runner", password_file=password("wrong"))
    assert "does not know this user with this password" in wrong
    assert "may not do that" in refusal(guarded.endpoint, user="visitor", password_file=password("visitor's"))
    assert "password_file" in refusal(guarded.endpoint, user="runner")


def test_run_without_an_id_of_its_own_is_refused():
    """`none` is what torchrun calls every run that nobody gave an id."""
    handler = rallypoint.create_handler("etcd://127.0.0.1:1/none?min_nodes=1")
    with pytest.raises(rallypoint.RendezvousConnectionError) as caught:
        handler.next_rendezvous()
    handler.close()
    assert "an id of its own" in str(caught.value)


def test_handler_with_a_wrong_password_fails_at_once_and_says_why(guarded, password):
    handler = rallypoint.create_handler(
        f"etcd://{guarded.endpoint}/run?min_nodes=1&user=runner&password_file={password('wrong')}"
    )
    with pytest.raises(rallypoint.RendezvousConnectionError) as caught:
        handler.next_rendezvous()
    handler.close()
    assert "password" in str(caught.value)


def test_password_for_an_etcd_that_asks_for_none_does_no_harm(etcd, password):
    assert use(etcd.endpoint, user="runner", password_file=password("x")) == b"1"


# --- strangers --------------------------------------------------------------------------------------------------------


class Stranger(BaseHTTPRequestHandler):
    """A web server."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *args):
        pass


@contextmanager
def web_server():
    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_endpoint_that_is_a_web_server_is_no_etcd():
    with web_server() as endpoint:
        assert "it is no etcd" in refusal(endpoint)


def test_endpoint_that_speaks_grpc_but_is_no_etcd_is_told():
    import grpc

    async def work():
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        backend = await open_backend(settings(f"127.0.0.1:{port}"))
        try:
            with pytest.raises(Rejected) as caught:
                await backend.get("a")
        finally:
            await backend.close()
            await server.stop(None)
        return str(caught.value)

    assert "no etcd v3" in asyncio.run(work())


def test_one_stranger_among_the_endpoints_does_not_end_the_trying(etcd):
    with web_server() as stranger:
        assert use(f"{stranger},{etcd.endpoint}") == b"1"
        with pytest.raises(Unavailable) as caught:
            use(f"{stranger},127.0.0.1:1")
    assert "it is no etcd" in str(caught.value)
    assert "connection refused" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "is_too_old"),
    [("3.4.0", False), ("3.4.23", False), ("3.5.1", False), ("4.0.0-alpha", False), ("3.3.27", True), ("2.3", True)],
)
def test_versions_that_lack_what_is_needed_are_refused(version, is_too_old):
    assert (too_old(version) is not None) == is_too_old


def test_without_a_leader_the_error_says_so(tmp_path):
    with running(needs("system"), tmp_path, 3) as cluster:
        for member in cluster.members[1:]:
            member.kill()
        last = cluster.members[0]
        until(lambda: not last.has_leader(), "it has lost its leader")
        with pytest.raises(Unavailable) as caught:
            use(last.endpoint)
        assert "no leader" in str(caught.value)
