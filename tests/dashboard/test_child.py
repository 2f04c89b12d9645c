"""The page of `rallypoint serve --http`: a child process that needs no credentials, is replaced, and ends in time."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.dashboard import child as module
from rallypoint.dashboard.child import PageError, advertised
from rallypoint.events import ClientRefused, ServerTrouble
from rallypoint.kv.types import Put
from rallypoint.server.admission.limits import ServerLimits
from rallypoint.server.durability.server import DurableConnection
from rallypoint.testing.disk import MemoryDisk
from tests.dashboard.kit import RUN, Browser, ChildSite, is_running, page_processes, phase
from tests.patience import PATIENCE_S, until
from tests.server.durability.kit import serving_from
from tests.server.kit import eventually, run, serving
from tests.server.tls_kit import Certificates, files

TOKEN = "open-sesame-17"


def troubles(site):
    return [event.reason for event in site.events if isinstance(event, ServerTrouble)]


def the_page():
    (pid,) = page_processes(os.getpid())
    return pid


def trusting(certificates, pair=None):
    context = ssl.create_default_context(cafile=str(certificates.authority.path))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


@pytest.mark.parametrize("address", ["0.0.0.0:29400", "[::]:29400"])
def test_address_of_all_interfaces_is_shown_as_the_name_of_the_machine(address):
    where = asyncio.run(advertised(address))
    assert where.endswith(":29400")
    assert not any(text in where for text in ("0.0.0.0", "::]", "localhost"))
    assert asyncio.run(advertised("10.0.0.7:1234")) == "tcp://10.0.0.7:1234"


# --- what the page can do ---------------------------------------------------------------------------------------------


def test_page_shows_runs_and_changes_them(tmp_path):
    with ChildSite(tmp_path) as site:
        site.join("a", "b")
        browser = site.browser()
        browser.load_csrf()
        with browser.stream(f"/api/run?id={RUN}") as stream:
            stream.until(lambda message: phase(message) == "active")
            assert browser.post("/api/close", {"run": RUN, "why": "wrong data"}).status == 200
            closed = stream.until(lambda message: (message.get("state") or {}).get("is_closed"))
            assert closed["state"]["closing"]["why"] == "wrong data"
            assert browser.post("/api/drain", {"run": RUN, "node": "b", "force": True}).status == 200
        with browser.stream("/api/runs") as stream:
            assert [one["run_id"] for one in stream.until(lambda message: message.get("runs"))["runs"]] == [RUN]
        pid = the_page()
    assert not is_running(pid)
    assert troubles(site) == []


def test_page_asks_for_the_token_of_the_server_and_does_not_show_it(tmp_path):
    with ChildSite(tmp_path, token=TOKEN) as site:
        site.join("a")
        browser = site.browser()
        assert browser.get("/api/runs").status == 401
        assert browser.login(TOKEN).status == 200
        with browser.stream(f"/api/run?id={RUN}") as stream:
            stream.until(lambda message: phase(message) == "active")
        assert browser.post("/api/close", {"run": RUN}).status == 200
        for name in ("cmdline", "environ"):
            assert TOKEN.encode() not in Path(f"/proc/{the_page()}/{name}").read_bytes()


def test_page_of_a_server_with_tls_needs_no_certificate_for_a_client(tmp_path):
    certificates = Certificates(tmp_path)
    with ChildSite(tmp_path, token=TOKEN, tls=files(pair=certificates.server)) as site:
        browser = site.browser(context=trusting(certificates))
        assert browser.login(TOKEN).status == 200
        with browser.stream("/api/runs") as stream:
            assert stream.next()[1]["full"] is True
        assert site.urls == [f"https://127.0.0.1:{site.port}/"]


def test_page_of_a_server_with_mutual_tls_lets_in_its_clients_only(tmp_path):
    certificates = Certificates(tmp_path)
    with ChildSite(tmp_path, tls=files(certificates.authority.path, certificates.server)) as site:
        known = site.browser(context=trusting(certificates, certificates.client))
        assert known.get("/api/me").json["may_act"] is True
        with known.stream("/api/runs") as stream:
            assert stream.next()[1]["full"] is True
        with pytest.raises((ssl.SSLError, ConnectionError)):
            site.browser(context=trusting(certificates)).get("/api/me")
        until(lambda: site.server.describe().get("refused_certificate"), "the server has counted it")


def test_page_takes_up_a_new_token(tmp_path):
    with ChildSite(tmp_path, token=TOKEN) as site:
        browser = site.browser()
        browser.login(TOKEN)
        Path(site.token_file).write_text("another", encoding="utf-8")
        until(lambda: not browser.get("/api/me").json["logged_in"], "sessions of the old token end")
        assert browser.login("another").status == 200


def test_metrics_of_the_server_are_served_by_the_page(tmp_path):
    with ChildSite(tmp_path, token=TOKEN) as site:
        browser = site.browser()
        assert browser.get("/metrics").status == 401
        answer = browser.get("/metrics", authorization=f"Bearer {TOKEN}")
        assert (answer.status, answer.body) == (200, b"rallypoint_rounds_total 1\n")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4"


def test_failed_login_on_the_page_is_counted_and_logged_by_the_server_and_blocks_the_source_there(tmp_path):
    limits = ServerLimits(max_failed_logins=3, login_block_s=60)
    with ChildSite(tmp_path, token=TOKEN, limits=limits) as site:
        for number in range(3):
            assert site.browser().login(f"guess {number}").status == 403
        with pytest.raises(ConnectionError):
            site.browser().login(TOKEN)
        until(lambda: site.server.describe().get("refused_token") == "3", "the server has counted them")
        until(lambda: site.server.describe().get("refused_blocked"), "and the connection after them")
        refused = [event for event in site.events if isinstance(event, ClientRefused)]
        assert "a wrong token was given to the dashboard" in refused[0].reason
        assert refused[0].peer.startswith("127.0.0.1:")
        with socket.create_connection(site.server.addresses[0].rsplit(":", 1), PATIENCE_S) as node:
            assert b"failed" in node.recv(1000)


def test_page_whose_connection_is_dropped_connects_again(tmp_path):
    with ChildSite(tmp_path, token=TOKEN) as site:
        site.join("a")
        browser = site.browser()
        browser.login(TOKEN)
        with browser.stream(f"/api/run?id={RUN}") as stream:
            stream.until(lambda message: phase(message) == "active")
            pid = the_page()
            site.ask(lambda: [one.shut_down("a test") for one in list(site.server.connections) if one.is_trusted])
            browser.post("/api/close", {"run": RUN})
            stream.until(lambda message: (message.get("state") or {}).get("is_closed"))
        assert the_page() == pid
    assert troubles(site) == []


@pytest.mark.parametrize("has_data", [False, True])
def test_admitted_connection_needs_no_token_and_takes_no_place(has_data):
    async def main():
        options = {"token": TOKEN, "limits": ServerLimits(max_connections=0)}
        async with serving_from(MemoryDisk(), **options) if has_data else serving(**options) as server:
            mine, its = socket.socketpair()
            for one in (mine, its):
                one.setblocking(False)
            await server.admit(mine)

            async def connect(make):
                await asyncio.get_running_loop().create_unix_connection(make, sock=its)

            backend = TcpBackend("here", connect)
            assert (await backend.txn((), (Put("/rallypoint/x", b"y"),))).committed
            assert [item.value for item in (await backend.scan("/rallypoint/")).items] == [b"y"]
            assert [isinstance(one, DurableConnection) for one in server.connections] == [has_data]
            await backend.close()
            await eventually(lambda: not server.connections, "it is gone")

    run(main())


# --- how the process ends ---------------------------------------------------------------------------------------------


def test_killed_page_is_replaced_and_browsers_wait_for_it(tmp_path):
    with ChildSite(tmp_path) as site:
        site.join("a")
        browser = site.browser()
        with browser.stream(f"/api/run?id={RUN}") as stream:
            stream.until(lambda message: phase(message) == "active")
            first = the_page()
            os.kill(first, signal.SIGKILL)
            stream.rest()
            last_id = stream.last_id
        with browser.stream(f"/api/run?id={RUN}", last_event_id=last_id) as stream:
            assert stream.next()[1]["full"] is True  # it begins anew
        assert the_page() != first
        (trouble,) = troubles(site)
        assert "was ended by SIGKILL: it is started again in" in trouble
        assert len(site.urls) == 1


def test_page_that_dies_again_and_again_is_started_with_growing_pauses(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.2)
    with ChildSite(tmp_path) as site:
        for number in range(3):
            site.browser().get("/api/me")
            os.kill(the_page(), signal.SIGKILL)
            until(lambda number=number: len(troubles(site)) == number + 1, "it is noticed")
        pauses = [float(why.rpartition(" in ")[2].split()[0]) for why in troubles(site)]
        assert pauses[2] > pauses[0]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"executable": "/nowhere/python"}, "cannot be started with /nowhere/python"),
        ({"executable": "/bin/false"}, "has ended with exit status 1"),
    ],
)
def test_page_that_never_served_anything_ends_the_server_with_an_error(tmp_path, monkeypatch, broken, said):
    monkeypatch.setattr(module.sys, "executable", broken["executable"])
    site = ChildSite(tmp_path)
    with pytest.raises(PageError) as caught, site:
        pass
    assert "the page cannot be served on 127.0.0.1:" in str(caught.value)
    assert said in str(caught.value)


def test_page_that_stands_still_does_not_keep_the_server_from_stopping(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.2)
    with ChildSite(tmp_path) as site:
        pid = the_page()
        os.kill(pid, signal.SIGSTOP)
        site.ask(site.stop_page())
        assert not is_running(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("data", [False, True])
def test_page_ends_with_the_server_and_not_before(tmp_path, number, data):
    command = [sys.executable, "-m", "rallypoint", "serve", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--data", str(tmp_path / "data")] if data else []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if "shows" in line)
            browser = Browser(int(line.strip().rstrip("/").rpartition(":")[2]))
            with browser.stream(f"/api/run?id={RUN}") as stream:
                stream.until(lambda message: phase(message) == "absent")
                (pid,) = page_processes(server.pid)
                os.kill(
                    pid, signal.SIGTERM
                )  # a service manager may send it to all processes: the server stops the page
                os.kill(pid, signal.SIGINT)
                assert browser.get("/api/me").status == 200
                began_at = time.monotonic()
                server.send_signal(number)
                assert stream.rest()[-1][0] == "end"
                until(lambda: not is_running(pid), "it ends")
                server.wait(PATIENCE_S)
                assert time.monotonic() - began_at < 10
                said = server.stderr.read()
                assert "Traceback" not in said
                assert "process of the page" not in said
        finally:
            server.kill()
