"""A real server and real node processes: a round forms, one comes late, one is killed, another takes its place.

Starts `quorate serve` and several `examples/node.py` on this machine and shows what each of them says. Nothing polls.
Takes a few seconds, ends by itself, and leaves no process behind.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

NODE = Path(__file__).with_name("node.py")
OPTIONS = "min_nodes=2&max_nodes=3&last_call_timeout=0.5&admission_window=0.1"
COLOURS = {"alpha": 36, "bravo": 33, "charlie": 35, "delta": 32, "server": 34}
PATIENCE_S = 30

started_at = time.monotonic()
printing = threading.Lock()
news = threading.Condition()


def say(who: str, what: str) -> None:
    """One line, with the seconds since the start."""
    colour = COLOURS.get(who, 0) if sys.stdout.isatty() else 0
    name = f"\033[{colour}m{who:8}\033[0m" if colour else f"{who:8}"
    with printing:
        print(f"{time.monotonic() - started_at:6.2f} s  {name} {what}", flush=True)


class Process:
    """A process whose lines are shown, and whose last world is known."""

    def __init__(self, name: str, *command: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.world = (0, 0, 0)
        """Round, rank and size."""
        self._popen = subprocess.Popen(
            [sys.executable, "-u", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            text = line.rstrip()
            if found := re.fullmatch(r"WORLD (\d+) (\d+) (\d+)", text):
                self.world = (int(found[1]), int(found[2]), int(found[3]))
            else:
                say(self.name, text)
            with news:
                self.lines.append(text)
                news.notify_all()

    def kill(self, how: signal.Signals) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(how)

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


def together(what: str, *nodes: Process, size: int) -> None:
    """Until all these nodes are in one round of this size; then say which ranks they have."""
    wait_for(what, lambda: len({node.world[0] for node in nodes}) == 1 and nodes[0].world[2] == size)
    ranks = ", ".join(f"{node.name}={node.world[1]}" for node in nodes)
    say("demo", f"=== {what}: round {nodes[0].world[0]}, ranks {ranks}")


def main() -> None:
    processes: list[Process] = []

    def start(name: str, *command: str) -> Process:
        processes.append(Process(name, *command))
        return processes[-1]

    try:
        server = start("server", "-m", "quorate", "serve", "--bind", "127.0.0.1:0")
        url = f"tcp://{line_of(server, r'listening on ([0-9.:]+)')[1]}/demo?{OPTIONS}"
        say("demo", "=== two nodes start; at least two are needed, at most three may come")
        alpha, bravo = (start(name, str(NODE), url, "--name", name) for name in ("alpha", "bravo"))
        together("a round formed", alpha, bravo, size=2)

        say("demo", "=== a third node comes late: it waits, the members are told and re-join")
        charlie = start("charlie", str(NODE), url, "--name", "charlie")
        together("the round re-formed with the late node", alpha, bravo, charlie, size=3)

        say("demo", "=== kill -9 of bravo")
        bravo.kill(signal.SIGKILL)
        together("the round re-formed without the lost node", alpha, charlie, size=2)

        say("demo", "=== a new node takes the place")
        delta = start("delta", str(NODE), url, "--name", "delta")
        together("the round re-formed with the new node", alpha, charlie, delta, size=3)

        for node in (alpha, charlie, delta):
            node.kill(signal.SIGTERM)
        say("demo", "=== the server stops in good order")
        server.kill(signal.SIGTERM)
        line_of(server, "stopped")
        say("demo", "=== done")
    finally:
        for process in processes:
            process.end()


if __name__ == "__main__":
    main()
