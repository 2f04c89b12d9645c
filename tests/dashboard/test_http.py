"""The page over HTTP, without a browser: login, actions, headers, streams and limits."""

import contextlib
import re
import socket
import time

import pytest

from rallypoint.dashboard import app as dashboard_app
from rallypoint.dashboard.app import PAGE
from rallypoint.dashboard.http_security import CONTENT_SECURITY_POLICY
from rallypoint.server.admission.limits import ServerLimits
from tests.dashboard.kit import RUN, Site, phase
from tests.patience import PATIENCE_S, until

TOKEN = "open sesame"


@pytest.fixture
def site():
    with Site() as one:
        yield one


@pytest.fixture
def guarded():
    with Site(token=TOKEN) as one:
        yield one


# --- static files -----------------------------------------------------------------------------------------------------


def test_every_response_has_the_security_headers(guarded):
    browser = guarded.browser()
    for path in ("/", "/page/main.js", "/page/style.css", "/api/me", "/api/runs", "/nothing", "/page/nothing.js"):
        headers = browser.get(path).headers
        assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY, path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
        assert headers.get("server") is None
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY


def test_page_has_no_inline_script_or_style_and_loads_nothing_from_elsewhere():
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|//[\w-]+\.\w", text.replace("// ", "")), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)


def test_page_is_small_and_cached(site):
    browser = site.browser()
    first = browser.get("/page/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = browser.get("/page/main.js", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < 100_000


@pytest.mark.parametrize("path", ["/page/../app.py", "/page/..%2Fapp.py", "/page/%2e%2e/app.py", "/page//etc/passwd"])
def test_no_other_file_is_served(site, path):
    assert site.browser().get(path).status == 404


# --- login ------------------------------------------------------------------------------------------------------------


def test_without_a_login_only_static_files_are_served(guarded):
    browser = guarded.browser()
    assert browser.get("/").status == 200
    assert browser.get("/api/me").json == {"logged_in": False}
    for path in ("/api/runs", f"/api/run?id={RUN}", f"/api/run?id={'x' * 10_000}", "/metrics"):
        assert browser.get(path).status == 401, path
    assert browser.post("/api/close", {"run": RUN}).status == 401
    assert browser.post("/api/logout", {}).status == 401


def test_wrong_token_is_refused_counted_and_logged(guarded):
    browser = guarded.browser()
    answer = browser.login("open barley")
    assert answer.status == 403
    assert "not the server's token" in answer.json["error"]
    assert "set-cookie" not in answer.headers
    assert guarded.admission.refusals.describe() == {"refused_token": "1"}
    assert any("dashboard" in str(event) and "127.0.0.1" in str(event) for event in guarded.events)
    assert TOKEN not in str(guarded.events)
    assert "barley" not in str(guarded.events)


def test_right_token_opens_a_session_with_a_strict_cookie(guarded):
    browser = guarded.browser()
    answer = browser.login(f" {TOKEN}\n")
    assert answer.status == 200
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"rallypoint-{guarded.port}=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert TOKEN not in cookie
    assert browser.get("/api/me").json["may_act"] is True
    with browser.stream("/api/runs") as stream:
        assert stream.next()[1]["full"] is True
    assert guarded.browser().get("/api/runs").status == 401


def test_program_sends_the_token_with_each_request(guarded):
    browser = guarded.browser()
    assert browser.get("/api/me", authorization=f"Bearer {TOKEN}").json["how"] == "token"
    assert browser.get("/api/runs", authorization="Bearer other").status == 401
    assert browser.get("/api/runs", authorization=f"Basic {TOKEN}").status == 401
    guarded.join("a")
    done = browser.post(
        "/api/close", {"run": RUN}, authorization=f"Bearer {TOKEN}", origin=None, x_rallypoint_csrf=None
    )
    assert (done.status, done.json["said"]) == (200, f"Run '{RUN}' is closed.")


def test_blocked_source_is_refused_even_with_the_right_token():
    limits = ServerLimits(max_failed_logins=5, login_block_s=60)
    with Site(token=TOKEN, limits=limits) as site:
        browser = site.browser()
        for number in range(5):
            assert browser.login(f"guess {number}").status == 403
        with pytest.raises(ConnectionError):  # not even read
            browser.login(TOKEN)
        assert int(site.admission.refusals.describe()["refused_blocked"]) >= 1


def test_blocked_source_is_refused_on_an_open_connection_too():
    limits = ServerLimits(max_failed_logins=5, login_block_s=60)
    with Site(token=TOKEN, limits=limits) as site:
        browser = site.browser()
        connection = browser.connect()
        headers = browser.headers({"origin": browser.origin, "content-type": "application/json"})
        found = []
        for token in (*(f"guess {number}" for number in range(5)), TOKEN):
            connection.request("POST", "/api/login", f'{{"token": "{token}"}}'.encode(), headers)
            answer = connection.getresponse()
            found.append(answer.status)
            answer.read()
        connection.close()
        assert found == [403, 403, 403, 403, 403, 429]


def test_logging_out_ends_the_session_and_its_streams(guarded):
    browser = guarded.browser()
    browser.login(TOKEN)
    with browser.stream("/api/runs") as stream:
        stream.next()
        cookie = browser.cookie
        assert browser.post("/api/logout", {}).status == 200
        browser.cookie = cookie  # a browser that keeps it all the same
        assert browser.get("/api/me").json == {"logged_in": False}
        told = stream.rest()
    assert told[-1] == ("end", "signed out")


def test_session_ends_when_its_token_is_removed(guarded):
    browser = guarded.browser()
    browser.login(TOKEN)
    guarded.tokens = (TOKEN, "new")
    assert browser.get("/api/me").json["logged_in"] is True
    guarded.tokens = ("new",)
    assert browser.get("/api/me").json == {"logged_in": False}
    assert browser.login("new").status == 200


# --- requests from other sites ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"x_rallypoint_csrf": None},
        {"x_rallypoint_csrf": ""},
        {"x_rallypoint_csrf": "guessed"},
        {"origin": None},
        {"origin": "null"},
        {"origin": "http://elsewhere.example"},
        {"origin": "http://127.0.0.1:1"},
        {"content_type": "text/plain"},
        {"content_type": "application/x-www-form-urlencoded"},
    ],
)
@pytest.mark.parametrize("token", ["", TOKEN])
def test_other_sites_cannot_act_with_the_cookie(token, wrong):
    with Site(token=token) as site:
        site.join("a")
        browser = site.browser()
        if token:
            browser.login(token)
        browser.load_csrf()
        refused = browser.post("/api/close", {"run": RUN}, **wrong)
        assert refused.status in (403, 415)
        with browser.stream(f"/api/run?id={RUN}") as stream:
            assert stream.until(lambda message: phase(message) == "active")["state"]["is_closed"] is False
        assert browser.post("/api/close", {"run": RUN}).status == 200


def test_login_from_another_site_is_refused(guarded):
    browser = guarded.browser()
    assert browser.post("/api/login", {"token": TOKEN}, origin="http://elsewhere.example").status == 403
    assert browser.cookie == ""


@pytest.mark.parametrize("host", ["elsewhere.example", "elsewhere.example:80", "127.0.0.1.elsewhere.example", ""])
def test_page_is_not_served_under_a_foreign_name(site, host):
    answer = site.browser(host=host or " ").get("/api/me")
    assert answer.status in (400, 421)
    assert b"csrf" not in answer.body


def test_page_is_served_under_its_own_names():
    with Site(names=("page.example",)) as site:
        for host in (
            "127.0.0.1",
            "[::1]:80",
            "localhost:1",
            "a.localhost",
            "10.1.2.3",
            "page.example",
            "PAGE.example:9",
        ):
            assert site.browser(host=host).get("/api/me").status == 200, host


# --- actions ----------------------------------------------------------------------------------------------------------


def test_closing_reopening_and_draining_work_and_are_recorded(site):
    site.join("a", "b")
    browser = site.browser()
    browser.load_csrf()
    with browser.stream(f"/api/run?id={RUN}") as stream:
        stream.until(lambda message: phase(message) == "active")
        assert browser.post("/api/close", {"run": RUN, "why": "wrong data"}).json["said"] == "Run 'my-run' is closed."
        closed = stream.until(lambda message: (message.get("state") or {}).get("is_closed"))["state"]["closing"]
        assert closed["why"] == "wrong data"
        assert re.fullmatch(r"dashboard on .+, for 127\.0\.0\.1", closed["by"])
        assert "already" in browser.post("/api/close", {"run": RUN}).json["said"]
        assert "open again" in browser.post("/api/reopen", {"run": RUN}).json["said"]
        asked = {"run": RUN, "node": "b", "why": "disk"}
        warned = browser.post("/api/drain", asked)
        assert (warned.status, "the job stands still" in warned.json["error"]) == (409, True)
        assert browser.post("/api/drain", asked | {"force": True}).json["said"] == "Asked b to go."
        drained = stream.until(lambda message: any(card[5] for card in message.get("nodes", ())))
        ((_, name, _, _, _, drain),) = [card for card in drained["nodes"] if card[5]]
        assert (name, drain["why"]) == ("b", "disk")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/close", {"run": "other"}, 404),
        ("/api/drain", {"run": RUN, "node": "nobody"}, 404),
        ("/api/destroy", {"run": RUN}, 404),
        ("/api/close", {"run": RUN, "unknown": True}, 400),
        ("/api/close", {}, 400),
        ("/api/close", b"{", 400),
        ("/api/close", b"\xff\xfe", 400),
        ("/api/close", {"run": "x" * 10_000}, 404),
        ("/api/close", {"run": RUN, "why": "x" * 501}, 400),
        ("/api/close", {"run": "x" * 20_000}, 413),
    ],
)
def test_wrong_action_is_an_error_with_a_sentence(site, path, body, status):
    site.join("a")
    browser = site.browser()
    browser.load_csrf()
    answer = browser.post(path, body)
    assert answer.status == status
    assert len(answer.json["error"]) > 10


def test_looking_at_a_run_does_not_make_it(site):
    with site.browser().stream("/api/run?id=not-there") as stream:
        message = stream.until(lambda message: phase(message) == "absent")
        assert "There is no run" in message["state"]["why"]
    with site.browser().stream("/api/runs") as stream:
        assert stream.next()[1].get("runs", []) == []
    assert site.ask(lambda: len(site.server.engine_host.engine.items)) == 0


# --- streams ----------------------------------------------------------------------------------------------------------


def test_resumed_stream_gets_only_the_difference(site):
    site.join("a", "b")
    browser = site.browser()
    with browser.stream(f"/api/run?id={RUN}") as stream:
        whole = stream.until(lambda message: phase(message) == "active")
        assert stream.headers["content-type"] == "text/event-stream"
        last = stream.last_id
    browser.load_csrf()
    browser.post("/api/close", {"run": RUN})
    for more, query in (({"last_event_id": last}, ""), ({}, f"&after={last}")):
        with browser.stream(f"/api/run?id={RUN}{query}", **more) as stream:
            missed = stream.until(lambda message: (message.get("state") or {}).get("is_closed"))
            assert "full" not in missed
            assert "nodes" not in missed
            assert missed["version"] > whole["version"]


@pytest.mark.parametrize("last", ["", "0badc0de.3", "junk", "..", "0badc0de.99999999999999999999999", "é.1"])
def test_stream_that_cannot_be_resumed_gets_everything(site, last):
    site.join("a", "b")
    with site.browser().stream(f"/api/run?id={RUN}", last_event_id=last.encode("latin-1").decode("latin-1")) as stream:
        assert stream.next()[1]["full"] is True


def test_all_readers_of_a_run_share_one_follower(site):
    site.join("a")
    before = site.ask(lambda: site.server.engine_host.watch_count)
    browser = site.browser()
    with browser.stream(f"/api/run?id={RUN}") as first:
        first.until(lambda message: phase(message) == "active")
        one = site.ask(lambda: site.server.engine_host.watch_count)
        with browser.stream(f"/api/run?id={RUN}") as second:
            second.until(lambda message: phase(message) == "active")
            assert site.ask(lambda: site.server.engine_host.watch_count) == one
    assert one > before


def test_too_many_streams_are_refused_with_a_sentence(site, monkeypatch):
    monkeypatch.setattr(dashboard_app, "MOST_STREAMS_EACH", 2)
    browser = site.browser()
    with browser.stream("/api/runs") as first, browser.stream("/api/runs") as second:
        first.next()
        second.next()
        refused = browser.get("/api/runs")
        assert refused.status == 503
        assert "too many" in refused.json["error"]
        assert refused.headers["retry-after"]
    until(lambda: _accepted(browser), "a place is free again")


def _accepted(browser):
    with browser.stream("/api/runs") as stream:
        return stream.status == 200


def test_stopping_ends_every_stream_in_order():
    with Site() as site:
        stream = site.browser().stream("/api/runs")
        stream.next()
    with stream:
        assert stream.rest()[-1][0] == "end"


# --- hostile connections ----------------------------------------------------------------------------------------------


def test_silent_connection_is_closed():
    with Site(limits=ServerLimits(hello_timeout_s=0.3)) as site:
        for words in (b"", b"GET / HT", b"POST /api/login HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", site.port), PATIENCE_S) as one:
                one.sendall(words)
                began = time.monotonic()
                with contextlib.suppress(ConnectionResetError):
                    assert one.recv(100) == b""
                assert time.monotonic() - began < PATIENCE_S
        assert site.admission.refusals.describe() == {"refused_silent": "3"}


@pytest.mark.parametrize(
    "words", [b"\x16\x03\x01junk\r\n\r\n", b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000]
)
def test_malformed_request_costs_only_its_own_connection(site, words):
    with socket.create_connection(("127.0.0.1", site.port), PATIENCE_S) as one:
        try:
            one.sendall(words)
            assert one.recv(100)[:12] in (b"HTTP/1.1 400", b"")
        except ConnectionError:
            pass
    assert site.browser().get("/api/me").status == 200


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_need_a_login():
    async def metrics():
        return b"rallypoint_rounds_total 1\n", "text/plain; version=0.0.4"

    with Site(token=TOKEN, metrics=metrics) as site:
        browser = site.browser()
        assert browser.get("/metrics").status == 401
        answer = browser.get("/metrics", authorization=f"Bearer {TOKEN}")
        assert (answer.status, answer.body) == (200, b"rallypoint_rounds_total 1\n")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4"


def test_metrics_are_an_error_if_the_server_does_not_answer():
    async def metrics():
        raise TimeoutError

    with Site(metrics=metrics) as site:
        answer = site.browser().get("/metrics")
        assert (answer.status, answer.json["error"]) == (503, "the server gave no metrics: no answer")


def test_page_without_metrics_says_where_they_are(site):
    answer = site.browser().get("/metrics")
    assert answer.status == 404
    assert "rallypoint serve --http" in answer.json["error"]
