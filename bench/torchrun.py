"""torchrun with this package's backend beside its own `c10d`, in one run: two nodes on this machine, a plain worker.

    /path/to/python bench/torchrun.py --repetitions 10     # a Python that has torch and rallypoint

Measured: from exec of both agents until the slower of the two has its first worker's first line; of that, the
rendezvous (between torch's own log lines "Rendezvous'ing" and "Rendezvous complete", the slower agent's); and how long
after its exec the first worker of a third agent starts that joins a running job. Without torch it says so and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 90.0
LESS_S = 0.7
RENDEZVOUS_S = 0.3
LATE_S = 5.0
WORKER = """
import os, sys, time
from pathlib import Path
with open(sys.argv[1] + "/starts", "a") as starts:
    starts.write(f"{os.environ['GROUP_WORLD_SIZE']} {os.getppid()} {time.monotonic()}\\n")
while not Path(sys.argv[1], "finish").exists() and os.getppid() != 1:
    time.sleep(0.005)
"""
CLOCK = re.compile(r"^I\d{4} (\d\d):(\d\d):(\d\d\.\d+) .*(Rendezvous'ing worker group|Rendezvous complete for workers)")


class Agents:
    """The agents of one run; whatever is started here has ended when the block has."""

    def __init__(self, backend: str, folder: Path, nnodes: str, env: dict[str, str]) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._env = {**os.environ, "LOGLEVEL": "INFO", "OMP_NUM_THREADS": "1", **env}
        (folder / "worker.py").write_text(WORKER, encoding="utf-8")
        conf = "last_call_timeout=1"
        self._argv = [
            *(sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={backend}", f"--nnodes={nnodes}"),
            *(f"--rdzv-endpoint=127.0.0.1:{_free_port()}", "--rdzv-id=bench", f"--rdzv-conf={conf}"),
            *("--local-addr=127.0.0.1", str(folder / "worker.py"), str(folder)),
        ]

    def start(self) -> float:
        """Start one more; when that was."""
        at = time.monotonic()
        log = (self.folder / f"log{len(self.processes)}").open("wb")
        self.processes.append(
            subprocess.Popen(self._argv, stdout=log, stderr=log, env=self._env, start_new_session=True)
        )
        log.close()
        return at

    def wait_starts(self, nodes: int, count: int) -> dict[int, float]:
        """By agent: when its first worker of a group of so many nodes started."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found: dict[int, float] = {}
            with contextlib.suppress(FileNotFoundError):
                for line in (self.folder / "starts").read_text(encoding="utf-8").splitlines():
                    size, agent, at = line.split()
                    if int(size) == nodes:
                        found.setdefault(int(agent), float(at))
            if len(found) >= count:
                return found
            if time.monotonic() > deadline or any(one.poll() is not None for one in self.processes):
                raise RuntimeError(f"no group of {nodes}:\n{self.logs()[-3000:]}")
            time.sleep(0.005)

    def finish(self) -> None:
        """Let them end; RuntimeError if one of them ends badly."""
        (self.folder / "finish").touch()
        for process in self.processes:
            if process.wait(PATIENCE_S) != 0:
                raise RuntimeError(f"an agent failed:\n{self.logs()[-3000:]}")

    def rendezvous_s(self) -> float:
        """How long the first rendezvous took, at the agent where it took longest."""
        took = []
        for number in range(len(self.processes)):
            lines = (self.folder / f"log{number}").read_text(encoding="utf-8", errors="replace").splitlines()
            found = [one for one in map(CLOCK.match, lines) if one is not None]
            times = [int(one[1]) * 3600 + int(one[2]) * 60 + float(one[3]) for one in found]
            took.append(times[1] - times[0])
        return max(took)

    def logs(self) -> str:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in self.folder.glob("log*"))


@contextlib.contextmanager
def agents(backend: str, nnodes: str, env: dict[str, str] | None = None) -> Iterator[Agents]:
    with tempfile.TemporaryDirectory() as folder:
        these = Agents(backend, Path(folder), nnodes, env or {})
        try:
            yield these
        finally:
            (these.folder / "finish").touch()
            for process in these.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                process.wait()


def two_nodes(backend: str) -> tuple[float, float]:
    """Seconds until the slower of two nodes has its first line, and of those the rendezvous."""
    with agents(backend, "2") as these:
        began_at = these.start()
        these.start()
        took_s = max(these.wait_starts(2, 2).values()) - began_at
        these.finish()
        return took_s, these.rendezvous_s()


def third_node(backend: str, env: dict[str, str] | None = None) -> float:
    """Seconds from the exec of a third agent until its first line. No agent may fail."""
    with agents(backend, "2:3", env) as these:
        these.start()
        these.start()
        these.wait_starts(2, 2)
        began_at = these.start()
        late = these.processes[-1].pid
        took_s = these.wait_starts(3, 3)[late] - began_at
        these.finish()
        return took_s


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def figure(samples: list[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(samples), 3),
        "from": round(min(samples), 3),
        "to": round(max(samples), 3),
    }


def measure(repetitions: int) -> dict[str, Any]:
    """All figures. The backends take turns, so that a busy moment of the machine hits both."""
    two_nodes("rallypoint")  # whatever has to be read from disk has been, for all of them
    samples: dict[str, list[tuple[float, float]]] = {"rallypoint": [], "c10d": []}
    for _ in range(repetitions):
        for backend, found in samples.items():
            found.append(two_nodes(backend))
    late = {
        "rallypoint": [third_node("rallypoint") for _ in range(max(1, repetitions // 2))],
        "c10d, store sharing off": [third_node("c10d", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})],
    }
    return {
        "benchmark": "torchrun",
        "first line": {backend: figure([one[0] for one in found]) for backend, found in samples.items()},
        "rendezvous": {backend: figure([one[1] for one in found]) for backend, found in samples.items()},
        "third agent": {backend: figure(found) for backend, found in late.items()},
    }


def missed(found: dict[str, Any]) -> list[str]:
    """The targets that were not met, in words."""
    first, rendezvous, late = (found[what] for what in ("first line", "rendezvous", "third agent"))
    less_s = first["c10d"]["median"] - first["rallypoint"]["median"]
    wrong = []
    if less_s < LESS_S:
        wrong.append(f"the first line comes {less_s:.2f} s before that of c10d, not {LESS_S} s")
    if rendezvous["rallypoint"]["median"] > RENDEZVOUS_S:
        wrong.append(f"the rendezvous takes {rendezvous['rallypoint']['median']} s, more than {RENDEZVOUS_S} s")
    if late["rallypoint"]["median"] > LATE_S:
        wrong.append(f"a third agent takes {late['rallypoint']['median']} s, more than {LATE_S} s")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--assert-target", action="store_true", help="exit with 1 if a target is missed")
    options, _ = parser.parse_known_args()
    if importlib.util.find_spec("torch") is None:
        found: dict[str, Any] = {"benchmark": "torchrun", "skipped": "torch is not installed"}
        print(json.dumps(found) if options.json else "torchrun: torch is not installed, nothing measured")
        return 0
    found = measure(options.repetitions)
    wrong = missed(found)
    if options.json:
        print(json.dumps({**found, "missed": wrong}))
    else:
        for what in ("first line", "rendezvous", "third agent"):
            for backend, one in found[what].items():
                print(f"{what:12} {backend:24} {one['median']:7.3f} s  ({one['from']:.3f} to {one['to']:.3f})")
        for words in wrong:
            print(f"missed: {words}")
    return 1 if wrong and options.assert_target else 0


if __name__ == "__main__":
    sys.exit(main())
