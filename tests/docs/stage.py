"""A machine of its own for the commands of a page: its own network, /etc and /var, and the names pages speak of.

What a page writes to /etc/rallypoint or /var/lib/rallypoint goes away with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.docs.blocks import ROOT, Block
from tests.patience import PATIENCE_S

QUIET = "ignore:Failed to initialize NumPy"
"""What torch says where there is no numpy."""
NAMES = "head node1 node2 e1 e2 e3"
_SETUP = """
set -e
ip link set lo up
mount -t tmpfs tmpfs "$1"
mkdir "$1"/etc "$1"/etc-work "$1"/var "$1"/var-work
mount -t overlay overlay -o lowerdir=/etc,upperdir="$1"/etc,workdir="$1"/etc-work /etc
mount -t overlay overlay -o lowerdir=/var,upperdir="$1"/var,workdir="$1"/var-work /var
echo "127.0.0.1 $2" >> /etc/hosts
mkdir -p /etc/rallypoint /var/lib/rallypoint
echo ready
exec sleep infinity
"""
_NODE = """
import sys, rallypoint
with rallypoint.join("tcp://head:29400/my-run?min_nodes=2&max_nodes=3&last_call_timeout=0.1", name=sys.argv[1]) as run:
    for world in run.rounds():
        if world.rank == 0:
            world.store.set("MASTER_ADDR", "head")
            world.store.set("progress", "1")
        world.changed.wait()
"""


def is_possible() -> bool:
    """Whether this user may make such machines here."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip"))


class Stage:
    """One such machine. Everything that was started on it ends with it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Stage:
        upper, self.home = self.place / "upper", self.place / "home"
        upper.mkdir()
        self.home.mkdir()
        shutil.copytree(ROOT / "examples", self.home / "examples")
        command = ["unshare", "-m", "-n", "--propagation", "private", "sh", "-c", _SETUP, "sh", str(upper), NAMES]
        self._root = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._root.stdout is not None
        assert self._root.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in [*self._started, self._root]:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
            if one.stdout is not None:
                one.stdout.close()

    def run(self, script: str, kind: str = "sh") -> subprocess.CompletedProcess[str]:
        """To its end."""
        command = self._command(script, kind)
        return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, env=self._env())

    def start(self, script: str, until: str = "") -> None:
        """In the background, until it says something (that, if given)."""
        command = self._command(script, "sh")
        log = self.place / f"log-{len(self._started)}"
        with log.open("w") as out:
            one = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=self._env(), start_new_session=True)
        self._started.append(one)
        deadline = time.monotonic() + PATIENCE_S
        while not (log.read_text() and until in log.read_text()):
            said = log.read_text()
            assert one.poll() is None, f"it ended with {one.returncode}: {said}"
            assert time.monotonic() < deadline, f"it said only: {said}"
            time.sleep(0.05)

    def start_job(self) -> None:
        """A server, and two nodes of `my-run` that are members of a round."""
        self.start("exec rallypoint serve --bind head:29400", until="listening")
        (self.place / "node.py").write_text(_NODE)
        for name in ("node1", "node2"):
            out = self.place / f"{name}.log"
            command = self._command(f"exec python {self.place / 'node.py'} {name} >{out} 2>&1", "sh")
            self._started.append(subprocess.Popen(command, text=True, env=self._env(), start_new_session=True))
        waiting = "until rallypoint status tcp://head:29400/my-run --json | grep -q '\"active\"'; do sleep 0.1; done"
        done = self.run(f"timeout {PATIENCE_S} sh -c {_quoted(waiting)}")
        assert done.returncode == 0, done.stderr

    def perform(self, block: Block) -> None:
        """A block of a page, as the page wants it. AssertionError says what went wrong."""
        if block.how == "in the background":
            self.start(f"exec {block.script}" if block.script.count("\n") == 1 else block.script)
            return
        done = self.run(block.script, block.kind)
        failed = done.returncode != 0
        told = f"{block.name} ended with {done.returncode}\n{block.script}\n{done.stdout}\n{done.stderr}"
        assert failed == (block.how == "fails"), told
        assert "Traceback" not in done.stderr, told

    def _command(self, script: str, kind: str) -> list[str]:
        """In its home: who enters a machine begins at the top of its files."""
        there = ["nsenter", "-t", str(self._root.pid), "-m", "-n", "--"]
        there += ["bash", "-c", 'cd "$1" && shift && exec "$@"', "bash", str(self.home)]
        if kind == "python":
            return [*there, sys.executable, "-W", "error", "-W", QUIET, "-c", script]
        return [*there, "bash", "-e", "-o", "pipefail", "-c", script]

    def _env(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}


def _quoted(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"
