"""An elastic job on four "nodes" of this machine: one is killed, one is added, and the job continues each time.

It starts `rallypoint serve`, four times `rallypoint run` with `examples/job.py`, and `rallypoint watch`. On a terminal
the live view of `watch` is drawn above the output of the nodes; without one, it prints a line for each change. The demo
takes less than a minute, ends by itself, and leaves no process behind.
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
"""On a terminal, how long each stage stays on the screen."""

started_at = time.monotonic()
printing = threading.RLock()
output_changed = threading.Condition()


class Screen:
    """The output of the demo: on a terminal the live view with the last lines below it, otherwise only lines."""

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

    def say(self, source: str, text: str) -> None:
        """Show one line, with the seconds since the start."""
        colour = COLOURS.get(source, 0) if self.is_live else 0
        name = f"\033[{colour}m{source:8}\033[0m" if colour else f"{source:8}"
        line = f"{time.monotonic() - started_at:6.2f} s  {name} {text}"
        with printing:
            if self.is_live:
                self._lines = [*self._lines, line][-SHOWN_LINES:]
                self._draw()
            else:
                print(line, flush=True)

    def show(self, report: bytes) -> None:
        """Show a report of `rallypoint watch --json`."""
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
    """A `rallypoint` command whose output is shown."""

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
            with output_changed:
                self.lines.append(text)
                output_changed.notify_all()
        with output_changed:
            output_changed.notify_all()

    def kill(self, how: signal.Signals) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(how)

    def wait(self) -> int:
        """Wait for its end and for all its output. Returns the exit code."""
        code = self._popen.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def end(self) -> None:
        self.kill(signal.SIGKILL)
        self._popen.wait()
        self._reader.join(5)
        if self._popen.stdout is not None:
            self._popen.stdout.close()


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    """Wait until the output fulfils a condition. Ends the demo if it does not in time."""
    with output_changed:
        if not output_changed.wait_for(condition, PATIENCE_S):
            raise SystemExit(f"the demo failed: {what}: not within {PATIENCE_S} s")


def wait_line(process: Process, pattern: str) -> re.Match[str]:
    """Wait for a line that matches, and return its match."""
    wait_for(f"{process.name} prints {pattern!r}", lambda: any(re.search(pattern, line) for line in process.lines))
    return next(found for line in process.lines if (found := re.search(pattern, line)))


def last_world(node: Process) -> tuple[str, str]:
    """The number and the size of the last round that a node was in."""
    found = [re.search(r"round (\d+): node \d+ of (\d+)", line) for line in list(node.lines)]
    return next(((one[1], one[2]) for one in reversed(found) if one is not None), ("0", "0"))


def wait_working(screen: Screen, what: str, nodes: list[Process]) -> None:
    """Wait until exactly these nodes work in one round."""
    size = str(len(nodes))

    def are_working() -> bool:
        worlds = {last_world(node) for node in nodes}
        resumed = f"of {size} resumes"
        return len(worlds) == 1 and next(iter(worlds))[1] == size and all(resumed in node.lines[-1] for node in nodes)

    wait_for(what, are_working)
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
            endpoint = wait_line(server, r"listening on ([0-9.:]+)")[1]
            watch_flags = ["--json"] if screen.is_live else []
            watch = start("watch", "watch", f"tcp://{endpoint}/demo", *watch_flags)
            screen.say("demo", "=== start four nodes of an elastic job that needs two to four nodes")
            nodes = [node(name) for name in ("alpha", "bravo", "charlie", "delta")]
            wait_working(screen, "the job runs", nodes)

            screen.say("demo", "=== kill -9 of bravo: its workers die with it, the other nodes form a new round")
            nodes.pop(1).kill(signal.SIGKILL)
            wait_working(screen, "the job continues without the lost node", nodes)

            screen.say("demo", "=== start a new node: it waits, the other nodes are told and form a new round with it")
            nodes.append(node("echo"))
            wait_working(screen, "the job continues with the new node", nodes)

            (Path(directory) / "enough").touch()
            codes = [one.wait() for one in nodes]
            screen.say("demo", f"=== the job has finished on all nodes, with exit codes {codes}")
            for one in (watch, server):
                one.kill(signal.SIGTERM)
            wait_line(server, "stopped")
            if any(codes):
                raise SystemExit("the demo failed: not every node exited with 0")
            screen.say("demo", "=== done")
        finally:
            for process in processes:
                process.end()


if __name__ == "__main__":
    main()
