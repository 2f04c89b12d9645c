"""A real browser: a wrong token is refused, and what nodes are called does nothing."""

from urllib.parse import quote

import pytest

from tests.e2e.browser import Looking, chromium, why_no_browser
from tests.e2e.kit import PORT, Stage, loopback

WHY = why_no_browser()
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&{{7*7}}"


@pytest.fixture(scope="module")
def browser():
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def place():
    with Stage() as stage:
        yield serve(stage)


def serve(stage: Stage, *options: str) -> tuple[str, str]:
    bind = loopback()
    page = bind.replace(str(PORT), "29480")
    stage.serve(bind, "--http", page, *options).wait_line("shows")
    return bind, f"http://{page}"


def test_wrong_token_is_refused_and_the_right_one_opens_the_page_until_logging_out(stage, browser, tmp_path):
    token = tmp_path / "token"
    token.write_text("open sesame", encoding="utf-8")
    token.chmod(0o600)
    bind, address = serve(stage, "--token-file", str(token))
    stage.node(f"tcp://{bind}/train?min_nodes=1&last_call_timeout=0.1&token_file={token}", "a")
    page = Looking(browser, address).open("/?run=train")
    field = page.page.get_by_label("Token")
    field.wait_for()
    field.fill("open barley")
    page.page.keyboard.press("Enter")
    page.until(lambda: "not the server's token" in page.text(".wrong"), "it is refused")
    assert "train" not in page.text("main")
    field.fill("open sesame")
    page.page.get_by_role("button", name="Log in").click()
    page.until(lambda: page.standings() == {"a": "member"}, "the run that was asked for")
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert page.page.evaluate("document.cookie") == ""
    page.page.reload()
    page.until(lambda: page.standings() == {"a": "member"}, "still in")
    page.page.get_by_role("button", name="Log out").click()
    page.page.get_by_label("Token").wait_for()
    assert page.context.cookies() == []
    assert page.wrong == []
    page.close()


def test_names_labels_reasons_and_run_ids_are_only_text(stage, place, browser):
    bind, address = place
    run = quote(EVIL, safe="")
    labels = quote("<b>k</b>=<i>v</i>", safe="")
    url = f"tcp://{bind}/{run}?min_nodes=1&max_nodes=2&last_call_timeout=0.1&labels={labels}"
    stage.node(url, quote(EVIL, safe=""))
    page = Looking(browser, address).open()
    page.until(lambda: EVIL in page.text("table.runs"), "the run in the list, as it is called")
    page.page.locator("table.runs a").click()
    page.until(lambda: page.standings().get(EVIL) == "member", "the node, as it is called")
    assert page.text("h1") == EVIL
    assert "<b>k</b>=<i>v</i>" in page.text("table.nodes")
    page.page.get_by_role("button", name="Close run").click()
    assert EVIL in page.page.get_by_role("dialog").inner_text()
    page.page.get_by_label("Reason").fill(EVIL)
    page.page.keyboard.press("Enter")
    page.until(lambda: EVIL in page.text(".why") and "dashboard on" in page.text(".why"), "closed, with that reason")
    page.page.get_by_text("The time line as text").click()
    page.until(lambda: EVIL in page.text(".spans"), "the time line in words")
    page.until(lambda: EVIL in page.text(".lines"), "what happened")
    page.page.reload()
    page.until(lambda: page.text("h1") == EVIL, "again, from its address")
    foreign = "main img, main script, main b, main i, main iframe, dialog img, dialog script"
    assert page.page.locator(foreign).count() == 0
    assert page.wrong == []
    page.close()


def test_script_that_is_not_ours_does_not_run(place, browser):
    page = Looking(browser, place[1]).open()
    page.until(lambda: "Runs" in page.text("main"), "the page")
    page.page.evaluate(
        """() => {
            const one = document.createElement('script');
            try { one.textContent = 'window.ran = 1'; } catch { window.refused = true; }
            document.head.append(one);
            const two = document.createElement('script');
            try { two.src = 'data:text/javascript,window.ran=2'; } catch { window.refused = true; }
            document.head.append(two);
            try { document.body.innerHTML += '<img src=x onerror="window.ran=3">'; } catch { window.refused = true; }
        }"""
    )
    page.page.wait_for_timeout(200)
    assert page.page.evaluate("window.ran") is None
    assert page.page.evaluate("window.refused") is True
    page.close()
