"""An elastic job on four "nodes" of this machine: one is killed, one is added, and the job goes on each time.

Starts `rallypoint serve`, four times `rallypoint run` with `examples/job.py`, and `rallypoint watch`, the live view: on
a terminal it is drawn above what the nodes say, in a pipe it is a line for every change. Takes well under a minute,
ends by itself, and leaves no process behind.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("job.py")
OPTIONS = "last_call_timeout=2,admission_window=0.2"
COLOURS = {"alpha": 36, "bravo": 33, "charlie": 35, "delta": 32, "echo": 34}
PATIENCE_S = 30
SHOWN_LINES = 16
READ_S = 3
"""On a terminal: what people have to look at it."""

started_at = time.monotonic()
printing = threading.RLock()
news = threading.Condition()


class Screen:
    """Where everything is shown: on a terminal the live view with the last lines below it, else only lines."""

    def __init__(self) -> None:
        self._live: Any = None
        self._lines: list[str] = []
        self._report: Any = None
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(auto_refresh=False)

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def say(self, who: str, what: str) -> None:
        """One line, with the seconds since the start."""
        colour = COLOURS.get(who, 0) if self.is_live else 0
        name = f"\033[{colour}m{who:8}\033[0m" if colour else f"{who:8}"
        line = f"{time.monotonic() - started_at:6.2f} s  {name} {what}"
        with printing:
            if self.is_live:
                self._lines = [*self._lines, line][-SHOWN_LINES:]
                self._draw()
            else:
                print(line, flush=True)

    def show(self, report: bytes) -> None:
        """A report of `rallypoint watch --json`."""
        import msgspec

        from rallypoint.observe.report import Report

        with printing:
            self._report = msgspec.json.decode(report, type=Report)
            self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.text import Text

        from rallypoint.cli.render import screen

        top = [screen(self._report, "", self._live.console)] if self._report is not None else []
        below = [Text.from_ansi(line, no_wrap=True, overflow="ellipsis") for line in self._lines]
        self._live.update(Group(*top, Text(""), *below), refresh=True)


class Process:
    """A command of `rallypoint` whose lines are shown."""

    def __init__(self, screen: Screen, name: str, *words: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self._screen = screen
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "rallypoint", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            text = line.rstrip()
            if self.name == "watch" and text.startswith("{"):
                self._screen.show(text.encode())
            else:
                self._screen.say(self.name, text)
            with news:
                self.lines.append(text)
                news.notify_all()
        with news:
            news.notify_all()

    def kill(self, how: signal.Signals) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(how)

    def wait(self) -> int:
        """Its exit code, once all that it said is shown."""
        code = self._popen.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def end(self) -> None:
        self.kill(signal.SIGKILL)
        self._popen.wait()
        self._reader.join(5)
        if self._popen.stdout is not None:
            self._popen.stdout.close()


def wait_for(what: str, is_so: Callable[[], bool]) -> None:
    """Until something has been said; ends the demo if it is not in time."""
    with news:
        if not news.wait_for(is_so, PATIENCE_S):
            raise SystemExit(f"the demo failed: {what}: not within {PATIENCE_S} s")


def line_of(process: Process, pattern: str) -> re.Match[str]:
    """The first line that matches."""
    wait_for(f"{process.name} says {pattern!r}", lambda: any(re.search(pattern, line) for line in process.lines))
    return next(found for line in process.lines if (found := re.search(pattern, line)))


def last_world(node: Process) -> tuple[str, str]:
    """The round and the size that a node was last in."""
    found = [re.search(r"round (\d+): node \d+ of (\d+)", line) for line in list(node.lines)]
    return next(((one[1], one[2]) for one in reversed(found) if one is not None), ("0", "0"))


def together(screen: Screen, what: str, nodes: list[Process]) -> None:
    """Until all these nodes, and nobody else, work in one round."""
    size = str(len(nodes))

    def is_so() -> bool:
        worlds = {last_world(node) for node in nodes}
        words = f"of {size} goes on"
        return len(worlds) == 1 and next(iter(worlds))[1] == size and all(words in node.lines[-1] for node in nodes)

    wait_for(what, is_so)
    if screen.is_live:
        time.sleep(READ_S)
    screen.say("demo", f"=== {what}: round {last_world(nodes[0])[0]} with {size} nodes")


def main() -> None:
    processes: list[Process] = []
    with tempfile.TemporaryDirectory() as directory, Screen() as screen:

        def start(name: str, *words: str) -> Process:
            processes.append(Process(screen, name, *words))
            return processes[-1]

        def node(name: str) -> Process:
            flags = ["--nnodes", "2:4", "--rdzv-endpoint", endpoint, "--rdzv-id", "demo", "--rdzv-conf", OPTIONS]
            return start(name, "run", *flags, "--name", name, "--local-addr", "127.0.0.1", str(JOB), directory)

        try:
            server = start("server", "serve", "--bind", "127.0.0.1:0")
            endpoint = line_of(server, r"listening on ([0-9.:]+)")[1]
            watching = ["--json"] if screen.is_live else []
            watch = start("watch", "watch", f"tcp://{endpoint}/demo", *watching)
            screen.say("demo", "=== four nodes of an elastic job start; at least two are needed, at most four may come")
            nodes = [node(name) for name in ("alpha", "bravo", "charlie", "delta")]
            together(screen, "the job runs", nodes)

            screen.say("demo", "=== kill -9 of bravo: its workers go with it, the others re-form and go on")
            nodes.pop(1).kill(signal.SIGKILL)
            together(screen, "the job goes on without the lost node", nodes)

            screen.say("demo", "=== a new node comes: it waits, the others are told and re-form")
            nodes.append(node("echo"))
            together(screen, "the job goes on with the new node", nodes)

            (Path(directory) / "enough").touch()
            codes = [one.wait() for one in nodes]
            screen.say("demo", f"=== the job has finished on all nodes, with exit codes {codes}")
            for one in (watch, server):
                one.kill(signal.SIGTERM)
            line_of(server, "stopped")
            if any(codes):
                raise SystemExit("the demo failed: not every node ended with 0")
            screen.say("demo", "=== done")
        finally:
            for process in processes:
                process.end()


if __name__ == "__main__":
    main()
