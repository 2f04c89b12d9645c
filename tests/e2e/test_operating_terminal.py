"""The commands in a real terminal (tmux): resizing, narrow windows, many members, Ctrl-C, confirmation."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.e2e.kit import HERE, PATIENCE_S, Stage, loopback
from tests.e2e.operating import ask, ask_json

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="`tmux` is not on PATH")
MANY = 500
_numbers = itertools.count(1)


class Terminal:
    """A window of a separate tmux server."""

    def __init__(self, width: int, height: int) -> None:
        self._socket = f"rallypoint-{os.getpid()}-{next(_numbers)}"
        env = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "TERM": "xterm-256color"}
        for size_of_another in ("COLUMNS", "LINES"):
            env.pop(size_of_another, None)
        size = ["-x", str(width), "-y", str(height)]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "sh", env=env)
        self._tmux("set-option", "-g", "window-size", "manual")
        self.resize(width, height)
        self.type("PS1='ready> '; clear")
        self.until("ready>", absent=("clear",))

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._socket, *words], capture_output=True, text=True, timeout=60, env=env, check=False
        )
        assert done.returncode == 0, f"tmux {words}: {done.stderr}"
        return done.stdout

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)
        self._tmux("send-keys", "Enter")

    def key(self, key: str) -> None:
        self._tmux("send-keys", key)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    @property
    def text(self) -> str:
        """The text in the window."""
        return self._tmux("capture-pane", "-p")

    @property
    def is_alternate(self) -> bool:
        """Whether a program uses the alternate screen."""
        return self._tmux("display-message", "-p", "#{alternate_on}").strip() == "1"

    def until(self, *parts: str, absent: tuple[str, ...] = ()) -> str:
        """Wait until the window shows all parts and none of `absent`. Returns its text."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            text = self.text
            if all(part in text for part in parts) and not any(part in text for part in absent):
                return text
            time.sleep(0.05)
        pytest.fail(f"never {parts} without {absent}, but:\n{self.text}")

    def command(self, *words: str) -> None:
        self.type(" ".join([sys.executable, "-m", "rallypoint", *words]))

    def end(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    one = Terminal(120, 30)
    yield one
    one.end()


@pytest.fixture(scope="module")
def crowd() -> Iterator[str]:
    """A run with 500 members on a real server."""
    with Stage() as stage:
        endpoint = loopback()
        stage.serve(endpoint)
        url = f"tcp://{endpoint}/crowd"
        many = stage.node(f"{url}?min_nodes={MANY}", "node", "many", str(MANY))
        many.wait("ready")
        many.write("go")
        many.wait("all")
        yield url


def test_watch_fits_500_members_into_any_window_and_restores_the_screen(crowd, terminal):
    terminal.type("echo before")
    terminal.until("before")
    terminal.command("watch", crowd)
    text = terminal.until("run crowd on", f"active with {MANY} of {MANY} members", "more", "address")
    lines = text.rstrip("\n").splitlines()
    assert len(lines) <= 30
    assert lines[0].startswith("run crowd on"), "the heading is not scrolled away"
    shown = [line for line in lines if " member  " in line]
    assert f"... and {MANY - len(shown)} more" in text
    terminal.resize(45, 12)
    narrow = terminal.until("... and", "standing", absent=("address", "joined"))
    assert len(narrow.rstrip("\n").splitlines()) <= 12
    assert all(len(line) <= 45 for line in narrow.splitlines())
    assert "run crowd on" in narrow
    terminal.resize(150, 50)
    terminal.until("address", "node-10 ")
    assert terminal.is_alternate
    terminal.key("C-c")
    terminal.until("before", "ready>", absent=("run crowd on",))
    assert not terminal.is_alternate
    terminal.type("echo code $?")
    terminal.until("code 130")
    assert "Traceback" not in terminal.text


def test_status_of_500_members_is_complete_in_a_pipe(crowd):
    text = ask("status", crowd)
    assert sum("  member  " in line for line in text.splitlines()) == MANY
    assert "…" not in text
    assert not any(mark in text for mark in "─│┌┐└┘╭╮━┃")
    report = ask_json("status", crowd)
    assert [node["rank"] for node in sorted(report["nodes"], key=lambda node: node["rank"])] == list(range(MANY))
    assert report["counts"]["member"] == MANY


def test_narrow_window_has_fewer_columns(crowd, terminal):
    terminal.resize(40, 20)
    terminal.command("status", crowd, "| head -3")
    terminal.until("state: active")
    terminal.type("clear")
    terminal.command("status", crowd)
    text = terminal.until("node-", "member")
    assert all(len(line) <= 40 for line in text.splitlines())


def test_close_asks_for_confirmation_on_a_terminal_unless_told_not_to(terminal):
    with Stage() as stage:
        endpoint = loopback()
        stage.serve(endpoint)
        url = f"tcp://{endpoint}/asked"
        stage.node(f"{url}?min_nodes=1", "a").round()
        terminal.command("close", url)
        terminal.until("Close run 'asked' on", "[y/N]")
        terminal.type("n")
        terminal.until("Aborted!")
        assert ask_json("status", url)["closing"] is None
        terminal.type("clear")
        terminal.command("close", url, "--yes", "--reason", "enough")
        terminal.until("run 'asked' closed, by", "enough", absent=("[y/N]",))
        assert ask_json("status", url)["closing"]["why"] == "enough"


def test_drain_below_the_minimum_warns_and_asks_on_a_terminal(terminal):
    with Stage() as stage:
        endpoint = loopback()
        stage.serve(endpoint)
        url = f"tcp://{endpoint}/small"
        node = stage.node(f"{url}?min_nodes=1", "a", "hand")
        node.ask("next")
        node.round()
        terminal.resize(200, 30)
        terminal.command("drain", url, "a", "--yes")
        terminal.until("Warning: without a, run 'small' has 0 of at least 1 node", "Ask a to leave", "[y/N]")
        terminal.type("n")
        terminal.until("Aborted!")
        assert ask_json("status", url)["nodes"][0]["drain"] is None
        terminal.type("clear")
        terminal.command("drain", url, "a", "--force")
        terminal.until("asked a to go", absent=("[y/N]",))


def test_watch_shows_changes_and_an_outage(terminal):
    with Stage() as stage:
        endpoint = loopback()
        server = stage.serve(endpoint)
        url = f"tcp://{endpoint}/live"
        node = stage.node(f"{url}?min_nodes=1&max_nodes=2&last_call_timeout=0.1&admission_window=0", "a")
        node.round()
        terminal.command("watch", url)
        terminal.until("active with 1 of 1 members")
        second = stage.node(f"{url}?min_nodes=1&max_nodes=2&last_call_timeout=0.1&admission_window=0", "b")
        second.round()
        terminal.until("active with 2 of 2 members")
        server.kill()
        terminal.until("cannot be reached at present", "connection refused")
        terminal.key("C-c")
        terminal.until("ready>", absent=("cannot be reached at present",))
