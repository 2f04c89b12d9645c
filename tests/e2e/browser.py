"""A real Chromium, as Debian packages it, for tests of the page."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.kit import PATIENCE_S

CHROMIUM = shutil.which("chromium")


def why_no_browser() -> str | None:
    """Why tests with a browser are skipped; None: they are not, as in CI, where they must be able to run."""
    if os.environ.get("CI"):
        return None
    if CHROMIUM is None:
        return "no `chromium` (package chromium): tests of the page are skipped"
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "no package `playwright`: tests of the page are skipped"
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """One browser; whoever looks makes a page of it."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "this must run in CI: install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


class Looking:
    """A page, and everything that must not happen on it."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.address = address
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("console", self._console)
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.wrong.append(f"console: {message.text}")

    def open(self, path: str = "/") -> "Looking":
        self.page.goto(self.address + path)
        return self

    def close(self) -> None:
        self.context.close()

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())

    def standings(self) -> dict[str, str]:
        """The table of nodes, as it is on the screen: name -> standing."""
        rows = self.page.locator("table.nodes tbody tr").all_inner_texts()
        return {cells[1]: cells[2].strip() for row in rows if len(cells := row.split("\t")) > 2}

    def until(self, look: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> float:
        """Look again and again until it is so; when that was."""
        deadline = time.monotonic() + patience_s
        while not look():
            if time.monotonic() > deadline:
                shown = self.page.locator("main").inner_text()
                pytest.fail(f"not on the page within {patience_s:g} s: {what}\n{self.wrong}\n{shown}")
            self.page.wait_for_timeout(20)
        return time.monotonic()
