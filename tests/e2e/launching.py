"""`rallypoint run` as processes: launchers, the facts that their workers report, and processes that are left behind."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rallypoint.launcher.worker_guardian import descendants
from tests.e2e.kit import HERE, PATIENCE_S, Fact, Machine, Process, Stage
from tests.patience import until

WORKER = str(HERE / "worker.py")
QUICK = "last_call_timeout=0.5,join_timeout=60"


class Launcher(Process):
    """A process of `rallypoint run`. `facts` are those that its workers report."""

    _frozen: tuple[int, ...] | list[int] = ()

    def _take_fact(self, line: str) -> None:
        _, _, said = line.partition("] ")
        self.facts.append(json.loads(said) if said.startswith("{") else {"kind": "line", "text": line})

    def workers(self, size: int, above: int = 0, count: int = 1, patience_s: float = PATIENCE_S) -> list[Fact]:
        """The first facts of its workers in the first round after that one with a world of `size` workers."""

        def look() -> list[Fact] | None:
            found = [
                fact for fact in self.all("worker") if fact["RALLYPOINT_ROUND"] > above and fact["WORLD_SIZE"] == size
            ]
            rounds = [[one for one in found if one["RALLYPOINT_ROUND"] == fact["RALLYPOINT_ROUND"]] for fact in found]
            return next((same for same in rounds if len(same) == count), None)

        found: list[Fact] = self.until(look, f"{count} workers in a world of {size} after round {above}", patience_s)
        return sorted(found, key=lambda fact: fact["rank"])

    def freeze_all(self) -> None:
        """Stop the launcher and all its processes, as a machine that loses its power does."""
        self._frozen = [self.popen.pid, *descendants(self.popen.pid)]
        for pid in self._frozen:
            os.kill(pid, signal.SIGSTOP)

    def thaw_all(self) -> None:
        frozen, self._frozen = self._frozen, []
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        self.thaw_all()
        super().end()


class Run:
    """A run of several launchers, with a directory through which the test directs the workers."""

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

    def start(
        self,
        name: str,
        *flags: str,
        words: tuple[str, ...] = (),
        machine: Machine | None = None,
        program: str = WORKER,
    ) -> Launcher:
        addr = machine.address if machine is not None else "127.0.0.1"
        argv = [sys.executable, "-m", "rallypoint", "run", *self.flags, "--name", name, "--local-addr", addr, *flags]
        launcher = Launcher(name, [*argv, program, str(self.directory), *words], machine=machine)
        self.stage.processes.append(launcher)
        self.launchers.append(launcher)
        return launcher

    def say(self, word: str, content: str = "") -> None:
        """Write a file for the workers."""
        path = self.directory / f".{word}"
        path.write_text(content)
        path.rename(self.directory / word)  # atomic

    def finish(self, *launchers: Launcher) -> None:
        """Let the workers finish. All launchers must exit with 0 and leave no process."""
        self.say("finish")
        for launcher in launchers:
            assert launcher.wait_exit() == 0, launcher.story
        self.nothing_is_left()

    def left(self) -> list[int]:
        """The processes of this run's workers and guardians, and their descendants."""
        return marked(f"{self.id}/")

    def wait_left(self, count: int, who: str) -> None:
        """Wait until exactly so many processes are there."""
        until(lambda: len(self.left()) == count, f"{count} processes: {who}")

    def nothing_is_left(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while left := self.left():
            if time.monotonic() > deadline:
                pytest.fail(f"these are left: {[Path(f'/proc/{pid}/cmdline').read_bytes() for pid in left]}")
            time.sleep(0.02)


def marked(start: str) -> list[int]:
    """The processes whose environment marks them as part of a run (and node)."""
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
    """Check that these workers are one round: every rank once, the same size and address. Returns them by rank."""
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
