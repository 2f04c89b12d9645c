"""`rallypoint run` as processes: launchers, what their workers say, and whether anything is left of them."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kit import HERE, PATIENCE_S, Fact, Machine, Process, Stage
from tests.patience import until

WORKER = str(HERE / "worker.py")
QUICK = "last_call_timeout=0.5,join_timeout=60"


class Launcher(Process):
    """A process of `rallypoint run`. `facts` are what its workers said."""

    def _take_fact(self, line: str) -> None:
        _, _, said = line.partition("] ")
        self.facts.append(json.loads(said) if said.startswith("{") else {"kind": "line", "text": line})

    def workers(self, size: int, above: int = 0, count: int = 1, patience_s: float = PATIENCE_S) -> list[Fact]:
        """The first words of its workers in the first round above that one with so many workers in all."""

        def look() -> list[Fact] | None:
            found = [
                fact for fact in self.all("worker") if fact["RALLYPOINT_ROUND"] > above and fact["WORLD_SIZE"] == size
            ]
            rounds = [[one for one in found if one["RALLYPOINT_ROUND"] == fact["RALLYPOINT_ROUND"]] for fact in found]
            return next((same for same in rounds if len(same) == count), None)

        found: list[Fact] = self.until(look, f"{count} workers in a world of {size} after round {above}", patience_s)
        return sorted(found, key=lambda fact: fact["rank"])


class Run:
    """One run of several launchers, with a directory that its workers look into."""

    def __init__(self, stage: Stage, endpoint: str, directory: Path, nnodes: str, *flags: str, conf: str = "") -> None:
        self.stage = stage
        self.endpoint = endpoint
        self.directory = directory
        self.id = f"{directory.name}-{os.getpid()}-{time.monotonic_ns() % 10**9}"
        self.url = f"tcp://{endpoint}/{self.id}"
        self.launchers: list[Launcher] = []
        conf = ",".join(part for part in (QUICK, conf) if part)
        self.flags = [
            "--nnodes",
            nnodes,
            "--rdzv-endpoint",
            endpoint,
            "--rdzv-id",
            self.id,
            "--rdzv-conf",
            conf,
            *flags,
        ]

    def start(self, name: str, *flags: str, words: tuple[str, ...] = (), machine: Machine | None = None) -> Launcher:
        addr = machine.address if machine is not None else "127.0.0.1"
        argv = [sys.executable, "-m", "rallypoint", "run", *self.flags, "--name", name, "--local-addr", addr, *flags]
        launcher = Launcher(name, [*argv, WORKER, str(self.directory), *words], machine=machine)
        self.stage.processes.append(launcher)
        self.launchers.append(launcher)
        return launcher

    def say(self, word: str, content: str = "") -> None:
        """Tell the workers."""
        path = self.directory / f".{word}"
        path.write_text(content)
        path.rename(self.directory / word)  # whole or not there

    def finish(self, *launchers: Launcher) -> None:
        """Let everybody finish: they all end with 0, and nothing is left."""
        self.say("finish")
        for launcher in launchers:
            assert launcher.wait_exit() == 0, launcher.story
        self.nothing_is_left()

    def left(self) -> list[int]:
        """The processes of workers and guardians of this run, and all that they ever started."""
        return marked(f"{self.id}/")

    def wait_left(self, count: int, who: str) -> None:
        """There are exactly so many, once all that was just started has started what it starts."""
        until(lambda: len(self.left()) == count, f"{count} processes: {who}")

    def nothing_is_left(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while left := self.left():
            if time.monotonic() > deadline:
                pytest.fail(f"these are left: {[Path(f'/proc/{pid}/cmdline').read_bytes() for pid in left]}")
            time.sleep(0.02)


def marked(start: str) -> list[int]:
    """Processes whose environment says that they belong to a run (and node)."""
    wanted, found = f"RALLYPOINT_WORKER_OF={start}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if any(part.startswith(wanted) for part in environment.split(b"\0")):
                found.append(int(entry.name))
    return found


def consistent(*groups: list[Fact]) -> list[Fact]:
    """The workers of one round: every rank once, one size, one address for all. All of them, by rank."""
    workers: list[dict[str, Any]] = sorted((fact for group in groups for fact in group), key=lambda fact: fact["rank"])
    size = len(workers)
    assert [fact["RANK"] for fact in workers] == list(range(size)), workers
    assert {fact["WORLD_SIZE"] for fact in workers} == {size}, workers
    assert [fact["ROLE_RANK"] for fact in workers] == list(range(size)), workers
    assert {fact["ROLE_WORLD_SIZE"] for fact in workers} == {size}, workers
    for name in ("RALLYPOINT_ROUND", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "addr"):
        assert len({fact[name] for fact in workers}) == 1, (name, workers)
    assert sorted({fact["GROUP_RANK"] for fact in workers}) == list(range(workers[0]["GROUP_WORLD_SIZE"])), workers
    return workers
