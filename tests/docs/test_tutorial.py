"""The tutorial, followed literally: every command on the machine it is for, and what it says should be seen is seen."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.e2e.kit import Machine, Stage, why_no_machines
from tests.patience import PATIENCE_S

PAGE = ROOT / "docs" / "tutorial.md"
_STEP = re.compile(r"^<!-- run: (?P<how>[^>]*?) -->\n(?:\n```\w+\n(?P<text>.*?)^```$)?", re.DOTALL | re.MULTILINE)


class Host:
    """One of the two machines."""

    def __init__(self, machine: Machine, name: str, place: Path) -> None:
        self.machine = machine
        self.name = name
        self.home = place / name
        self.home.mkdir()
        self.said = ""
        self.read = 0
        """How much of what is said in the background was waited for already."""
        self.running: list[tuple[subprocess.Popen[bytes], Path]] = []
        boot = f"hostname {name}; echo up; exec sleep infinity"
        within = ["ip", "netns", "exec", machine.name, "unshare", "-u", "-p", "-f", "--mount-proc"]
        self._booted = subprocess.Popen([*within, "sh", "-c", boot], stdout=subprocess.PIPE, text=True)
        assert self._booted.stdout is not None
        assert self._booted.stdout.readline() == "up\n"
        children = Path(f"/proc/{self._booted.pid}/task/{self._booted.pid}/children").read_text().split()
        self._init = int(children[0])

    def run(self, script: str) -> None:
        done = subprocess.run(
            self._command(script),
            env=self._env(),
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        self.said = done.stdout + done.stderr
        assert done.returncode == 0, f"on {self.name}: {script}\n{self.said}"

    def start(self, script: str) -> None:
        log = self.home / f"log-{len(self.running)}"
        with log.open("wb") as out:
            command = self._command(f"exec {script}")
            one = subprocess.Popen(command, env=self._env(), stdout=out, stderr=out, start_new_session=True)
        self.running.append((one, log))
        self.read = 0

    def wait_said(self, text: str) -> None:
        """Until what it started last has said that, line by line, in this order."""
        for wanted in text.strip().splitlines():
            deadline = time.monotonic() + 2 * PATIENCE_S
            while (after := found_after(wanted, self.running[-1][1].read_text()[self.read :])) is None:
                assert time.monotonic() < deadline, f"{wanted!r} is not in:\n{self.running[-1][1].read_text()}"
                time.sleep(0.05)
            self.read += after

    def wait_end(self) -> int:
        return self.running[-1][0].wait(2 * PATIENCE_S)

    def end(self) -> None:
        """Everything that runs there is killed with its first process."""
        os.kill(self._init, signal.SIGKILL)
        self._booted.wait()
        assert self._booted.stdout is not None
        self._booted.stdout.close()
        for one, _ in self.running:
            one.wait()

    def _command(self, script: str) -> list[str]:
        """In its home: who enters a machine begins at the top of its files."""
        there = ["nsenter", "-t", str(self._init), "-n", "-u", "-p", "-m", "--"]
        return [*there, "bash", "-c", 'cd "$1" && exec bash -e -c "$2"', "bash", str(self.home), script]

    def _env(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }


def found_after(wanted: str, text: str) -> int | None:
    """Where a line with these words ends; an ellipsis stands for anything."""
    pattern = ".*".join(re.escape(part) for part in wanted.split("…"))
    found = re.search(pattern, text)
    return found.end() if found else None


@pytest.fixture
def hosts(tmp_path):
    why = why_no_machines()
    if why is not None:
        pytest.skip(f"the tutorial needs two machines: {why}")
    with Stage() as stage:
        machines = stage.machines(2)
        names = "\n".join(f"{machine.address} node{at}" for at, machine in enumerate(machines, 1))
        for machine in machines:
            machine.write_etc("hosts", f"127.0.0.1 localhost\n{names}\n")
        made = {f"node{at}": Host(machine, f"node{at}", tmp_path) for at, machine in enumerate(machines, 1)}
        yield made
        for host in made.values():
            host.end()


def test_tutorial_works_as_it_is_written(hosts):
    steps = [(found["how"], found["text"] or "") for found in _STEP.finditer(PAGE.read_text(encoding="utf-8"))]
    assert len(steps) > 10
    for how, text in steps:
        follow(hosts, how, text)


def follow(hosts: dict[str, Host], how: str, text: str) -> None:
    match how.replace(",", "").split():
        case ["not", *_]:
            pass
        case ["on", name]:
            hosts[name].run(text)
        case ["on", first, "and", second]:
            hosts[first].run(text)
            hosts[second].run(text)
        case ["on", name, "in", "the", "background"]:
            hosts[name].start(text)
        case [name, "says"]:
            hosts[name].wait_said(text)
        case [name, "said"]:
            for wanted in text.strip().splitlines():
                assert found_after(wanted, hosts[name].said) is not None, f"{wanted!r} is not in:\n{hosts[name].said}"
        case ["both", "end", "with", "0"]:
            assert [host.wait_end() for host in hosts.values()] == [0, 0]
        case _:
            raise AssertionError(f"what is {how!r}?")
