"""A real browser looks at real nodes of a real server: what happens to them happens on the screen."""

import os
import signal

import pytest

from tests.dashboard.kit import page_processes
from tests.e2e.browser import Looking, chromium, why_no_browser
from tests.e2e.kit import PORT, Stage, loopback
from tests.e2e.operating import ask

WHY = why_no_browser()
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))

LOST_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def browser():
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def place():
    """A server with its page, for all tests: where nodes join, and where the page is. Each test has its own run."""
    with Stage() as stage:
        bind = loopback()
        page = bind.replace(str(PORT), "29480")
        stage.serve(bind, "--http", page).wait_line("shows")
        yield bind, f"http://{page}"


@pytest.fixture
def look(browser):
    """Opens pages, and sees that nothing went wrong on them and that nothing came from elsewhere."""
    opened = []

    def at(address, path="/", **options):
        opened.append(Looking(browser, address, **options))
        return opened[-1].open(path)

    yield at
    for one in opened:
        one.close()
        assert one.wrong == []
        assert all(url.startswith(one.address) for url in one.asked), one.asked


def test_page_goes_on_by_itself_when_its_process_is_killed(stage: Stage, look):
    bind = loopback()
    page_at = bind.replace(str(PORT), "29480")
    server = stage.serve(bind, "--http", page_at)
    server.wait_line("shows")
    page = look(f"http://{page_at}", "/?run=train")
    page.until(lambda: "no such run" in page.text(".pill"), "nothing is there yet")
    (killed,) = page_processes(server.popen.pid)
    os.kill(killed, signal.SIGKILL)
    a = stage.node(f"tcp://{bind}/train?min_nodes=1&last_call_timeout=0.2", "a", "hand")
    a.wait("ready")
    a.ask("next")
    page.until(lambda: page.standings() == {"a": "member"}, "a round on the screen")
    server.wait_line("was ended by SIGKILL")
    assert killed not in page_processes(server.popen.pid)


def test_round_forms_a_node_waits_and_a_killed_node_turns_lost_on_screen(stage: Stage, place, look):
    bind, address = place
    url = f"tcp://{bind}/train?min_nodes=2&max_nodes=3&last_call_timeout=0.2&admission_window=0&labels=zone%3Da"
    page = look(address, "/?run=train")
    page.until(lambda: "no such run" in page.text(".pill"), "nothing is there yet")
    a = stage.node(url, "a", "hand")
    a.wait("ready")
    a.ask("next")
    page.until(lambda: page.standings() == {"a": "joining"}, "a joins")
    page.until(lambda: "1 of at least 2 nodes joined: a" in page.text(".why"), "what is waited for")
    b = stage.node(url, "b", "hand")
    b.wait("ready")
    b.ask("next")
    page.until(lambda: page.standings() == {"a": "member", "b": "member"}, "a round forms")
    page.until(lambda: page.text(".pill") == "active", "the round is active")
    said = ask("why", f"tcp://{bind}/train").strip()
    page.until(lambda: f"{page.text('.advice')} {page.text('.why')}" == said, "the words of `rallypoint why`")
    assert "zone=a" in page.text("table.nodes")
    c = stage.node(url, "c", "hand")
    c.wait("ready")
    c.ask("next")
    page.until(lambda: page.standings() == {"a": "member", "b": "member", "c": "waiting"}, "c waits")
    assert page.text('.tile[data-state="waiting"] .number') == "1"
    killed_at = b.kill()
    lost_at = page.until(lambda: page.standings().get("b") == "lost", "b is lost")
    assert lost_at - killed_at < LOST_WITHIN_S
    page.until(lambda: "b (member of round 1) is lost" in page.text(".lines"), "it is told as it happened")
    assert page.page.locator(".hero").get_attribute("data-mood") == "bad"
    a.ask("next")
    page.until(lambda: page.standings() == {"a": "member", "c": "member"}, "the next round")
    page.until(lambda: page.page.locator("table.rounds tbody tr").count() == 2, "both rounds are in the history")
    assert "b was lost" in page.text("table.rounds")
    page.page.get_by_text("The time line as text").click()
    page.until(lambda: "lost" in page.text(".spans"), "the time line in words")
    assert "member of round 2" in page.text(".spans")


def test_page_shows_what_happened_before_anybody_looked(stage: Stage, place, look):
    bind, address = place
    url = f"tcp://{bind}/before?min_nodes=2&max_nodes=3&last_call_timeout=0.2"
    a, b = stage.node(url, "a", "hand"), stage.node(url, "b", "hand")
    for node in (a, b):
        node.wait("ready")
        node.ask("next")
    b.wait("round")
    b.kill()
    a.wait("changed")
    c = stage.node(url, "c", "hand")
    c.wait("ready")
    c.ask("next")
    a.ask("next")
    page = look(address, "/?run=before")
    page.until(lambda: page.standings() == {"a": "member", "c": "member"}, "the second round")
    page.until(lambda: "b (member of round 1) is lost" in page.text(".lines"), "the loss is told")
    assert "round 1 is active with 2 members" in page.text(".lines")
    page.until(lambda: page.page.locator(".mark").count() == 1, "the loss has a mark")
    assert "b: lost" in page.page.locator(".mark").get_attribute("title")
    page.page.get_by_text("The time line as text").click()
    page.until(lambda: "member of round 1" in page.text(".spans"), "the first round is on the time line")
    told = ask("events", f"tcp://{bind}/before", "--since", "10m")
    assert told.count("b (member of round 1) is lost") == 1
    page.page.get_by_text("All runs").click()
    page.until(lambda: "before" in page.text("table.runs"), "the list of runs")


def test_absent_run_is_a_sentence_and_no_counts(place, look):
    _, address = place
    page = look(address, "/?run=never")
    page.until(lambda: "There is no run 'never'" in page.text(".why"), "it says so")
    assert not page.page.locator(".tile").first.is_visible()
    assert not page.page.locator(".commands").first.is_visible()


def test_closing_asks_and_works_and_so_do_reopening_and_draining(stage: Stage, place, look):
    bind, address = place
    url = f"tcp://{bind}/shut?min_nodes=2&last_call_timeout=0.2"
    nodes = stage.nodes(url, "a", "b")
    page = look(address, "/?run=shut")
    page.until(lambda: page.text(".pill") == "active", "a round")
    page.page.get_by_role("button", name="Close run").click()
    dialog = page.page.get_by_role("dialog")
    assert "Close run shut?" in dialog.inner_text()
    page.page.keyboard.press("Escape")
    page.until(lambda: not dialog.is_visible(), "it was called off")
    assert "closed" not in ask("why", f"tcp://{bind}/shut")
    page.page.get_by_role("button", name="Close run").click()
    page.page.keyboard.type("wrong <b>dataset</b>")
    page.page.keyboard.press("Enter")
    page.until(lambda: "wrong <b>dataset</b>" in page.text(".why"), "it is closed, and the page says why")
    assert "dashboard on" in page.text(".why")
    assert "was closed by dashboard on" in ask("why", f"tcp://{bind}/shut")
    page.page.get_by_role("button", name="Reopen run").click()
    page.page.get_by_role("dialog").get_by_role("button", name="Reopen run").click()
    page.until(lambda: page.page.get_by_role("button", name="Close run").is_visible(), "it is open again")
    page.page.get_by_role("button", name="Drain b").click()
    page.page.get_by_label("Reason").fill("disk")
    page.page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    page.until(lambda: "run 'shut' has 1 of at least 2 nodes" in dialog.inner_text(), "it warns")
    assert page.standings()["b"] == "member"
    page.page.get_by_role("dialog").get_by_role("button", name="Drain anyway").click()
    nodes[1].wait("end")
    page.until(lambda: page.standings().get("b") != "member", "b has gone")


def test_list_of_runs_leads_to_each_by_keyboard_and_back(stage: Stage, place, look):
    bind, address = place
    stage.node(f"tcp://{bind}/first?min_nodes=2", "a")
    page = look(address)
    page.until(lambda: "1 of at least 2 nodes joined: a" in page.text("main"), "a run in the list")
    stage.node(f"tcp://{bind}/second?min_nodes=3", "b")
    page.until(lambda: "1 of at least 3 nodes joined: b" in page.text("main"), "another one")
    link = page.page.get_by_role("link", name="second")
    link.focus()
    page.page.keyboard.press("Enter")
    page.until(lambda: page.standings() == {"b": "joining"}, "the run")
    assert page.page.title().startswith("second")
    page.page.go_back()
    page.until(lambda: page.page.get_by_role("link", name="second").is_visible(), "the list again")


def test_who_goes_on_before_the_page_is_there_leaves_no_stream_behind(place, look):
    page = look(place[1])
    page.until(lambda: page.text("#feed-text") == "Live", "the list")

    def streams():
        return sum("/api/runs" in url for url in page.asked)

    before = streams()
    page.page.evaluate("for (const _ of [1, 2, 3]) document.getElementById('home').click()")
    page.until(lambda: streams() > before, "the list again")
    page.page.wait_for_timeout(500)
    assert streams() == before + 1


def test_stopped_server_is_said_and_not_shown_as_if_it_lived(stage: Stage, look):
    bind, page_at = loopback(), loopback().replace(str(PORT), "29480")
    server = stage.serve(bind)
    stage.node(f"tcp://{bind}/train?min_nodes=1&keep_alive_interval=2&last_call_timeout=0.1", "a")
    dashboard = stage.dashboard(f"tcp://{bind}/train", page_at)
    page = look(f"http://{page_at}")
    page.until(lambda: page.text(".pill") == "active", "the run, without asking for it")
    server.kill()
    page.until(lambda: "cannot be reached" in page.text("#trouble"), "the backend is gone")
    stage.serve(bind)
    page.until(lambda: not page.page.locator("#trouble").is_visible(), "it is back")
    page.until(lambda: page.text(".pill") == "active", "and so is the node")
    dashboard.terminate()
    assert dashboard.wait_exit() == 0
    page.until(lambda: page.text("#feed-text") != "Live", "the page says that it is not live")


def test_page_is_named_for_those_who_do_not_see_and_follows_the_system_s_theme(stage: Stage, place, look):
    bind, address = place
    stage.nodes(f"tcp://{bind}/dark?min_nodes=2&last_call_timeout=0.2", "a", "b")
    page = look(address, "/?run=dark", color_scheme="dark", reduced_motion="reduce")
    page.until(lambda: page.text(".pill") == "active", "a round")
    back = "getComputedStyle(document.body).backgroundColor"
    dark = page.page.evaluate(back)
    page.page.get_by_role("button", name="Switch to the light theme").click()
    assert page.page.evaluate(back) != dark
    page.page.reload()
    page.until(lambda: page.text(".pill") == "active", "again")
    assert page.page.evaluate(back) != dark, "the choice is kept"
    unnamed = page.page.evaluate(
        """[...document.querySelectorAll('button, a, input, [tabindex="0"], section, table')].filter((one) =>
        one.checkVisibility() && !one.textContent.trim() && !one.getAttribute('aria-label')
        && !one.getAttribute('aria-labelledby') && !one.labels?.length).map((one) => one.outerHTML)"""
    )
    assert unnamed == []
    page.until(lambda: "round 1 is active" in page.text("#announce"), "what is waited for is announced")
    page.page.get_by_role("group", name="Time line").focus()
    page.page.keyboard.press("ArrowDown")
    page.until(lambda: "b, rank 1: member (round 1)" in page.text(".readout"), "the time line by keyboard")


def test_page_fits_a_phone(stage: Stage, place, look):
    bind, address = place
    stage.nodes(f"tcp://{bind}/phone?min_nodes=2&last_call_timeout=0.2", "a", "b")
    page = look(address, "/?run=phone")
    page.page.set_viewport_size({"width": 360, "height": 740})
    page.until(lambda: page.text(".pill") == "active", "a round")
    wide = "document.documentElement.scrollWidth"
    page.until(lambda: page.page.evaluate(wide) <= 360, "nothing is wider than the screen")
