"""The web server: TLS, addresses, and clients that do not read."""

import socket
import ssl
import time

import pytest

from rallypoint.dashboard import web_server
from rallypoint.dashboard.address import bind_page, check_exposure
from rallypoint.server.process import BindError
from tests.dashboard.kit import Site
from tests.patience import PATIENCE_S, until
from tests.server.tls_kit import Certificates, files


def trusting(certificates, pair=None):
    context = ssl.create_default_context(cafile=str(certificates.authority.path))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


# --- TLS --------------------------------------------------------------------------------------------------------------


def test_page_speaks_tls_with_the_certificate_of_the_server(tmp_path):
    certificates = Certificates(tmp_path)
    with Site(token="sesame", tls=files(pair=certificates.server)) as site:
        browser = site.browser(context=trusting(certificates))
        cookie = browser.login("sesame").headers["set-cookie"]
        assert cookie.startswith(f"__Host-rallypoint-{site.port}=")
        assert {"Secure", "HttpOnly", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
        with browser.stream("/api/runs") as stream:
            assert stream.next()[1]["full"] is True
        plain = site.browser().get("/")
        assert (plain.status, plain.body) == (400, b"This page speaks https only.\n")


def test_page_with_mutual_tls_needs_a_client_certificate(tmp_path):
    certificates = Certificates(tmp_path)
    with Site(tls=files(certificates.authority.path, certificates.server)) as site:
        known = site.browser(context=trusting(certificates, certificates.client))
        assert known.get("/api/me").json["may_act"] is True
        with pytest.raises((ssl.SSLError, ConnectionError)):
            site.browser(context=trusting(certificates)).get("/api/me")


def test_large_responses_pass_through_tls_whole(tmp_path):
    certificates = Certificates(tmp_path)
    with Site(tls=files(pair=certificates.server)) as site:
        browser = site.browser(context=trusting(certificates))
        assert len(browser.get("/page/timeline.js").body) > 10_000


# --- addresses --------------------------------------------------------------------------------------------------------


def test_page_that_other_machines_reach_needs_a_login():
    address = bind_page("0.0.0.0:0")
    with pytest.raises(BindError) as caught:
        check_exposure(address, authenticates=False, has_tls=False, insecure=False)
    assert "--token-file" in str(caught.value)
    address = bind_page("0.0.0.0:0")
    try:
        assert "act on none" in check_exposure(address, authenticates=False, has_tls=False, insecure=True)[0]
        assert "as they are" in check_exposure(address, authenticates=True, has_tls=False, insecure=False)[0]
        assert check_exposure(address, authenticates=True, has_tls=True, insecure=False) == []
    finally:
        address.sock.close()


def test_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BindError) as caught:
        bind_page(f"127.0.0.1:{taken.getsockname()[1]}")
    assert "is taken" in str(caught.value)


# --- clients that do not read -----------------------------------------------------------------------------------------


def ask_and_read_nothing(site):
    """More responses than all buffers on the way hold."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", site.port))
    one.sendall(b"GET /page/timeline.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000)
    return one


def stalled(site, wait_s=PATIENCE_S):
    """Wait until the page has a connection that it cannot write to."""

    def count():
        return [one for one in site.web.connections if one.flow.write_paused]

    until(lambda: site.ask(count), "it does not take what it asked for", wait_s)


def test_client_that_reads_nothing_is_disconnected_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(web_server, "STALLED_S", 0.5)
    with Site(token="sesame") as site, ask_and_read_nothing(site):
        stalled(site)
        until(lambda: not site.ask(lambda: site.web.connections), "its connection is gone")


def test_client_that_reads_nothing_does_not_keep_the_page_from_stopping(tmp_path):
    with Site(token="sesame") as site, ask_and_read_nothing(site):
        stalled(site)
        began = time.monotonic()
        site.ask(site.stop_page())
        assert time.monotonic() - began < 10
