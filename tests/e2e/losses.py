"""Losses of launchers whose workers communicate: `python -m tests.e2e.losses --kills 50` (`make losses`).

A job is three launchers of `rallypoint run --nnodes 1:3` in network namespaces, on a server or an etcd of its own. A
loss happens to one of them, drawn at random: it is killed, stopped for longer than its session lives, or cut off from
the network. The others must go on without it, and three must work again when it, or another in its place, is back. A
job that ended, or a restart that was counted, is a broken promise. Measured: seconds from the loss to the first step of
the new world.

With --failures, workers really fail: each failure must be counted once, and the sentence that names it must be the same
in the output of all launchers, in `rallypoint history` and in `rallypoint events`.
"""

import argparse
import asyncio
import json
import math
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.backends.etcd.kit import EtcdCluster, needs
from tests.e2e.kit import HERE, PATIENCE_S, PORT, Machine, Process, Stage, _tether, why_no_machines
from tests.e2e.launching import marked

SIZE = 3
WORKERS = {"ring": HERE / "ring_worker.py", "ddp": HERE / "ddp_worker.py"}
HOW = ("exit 1", "signal SIGSEGV", "raise CUDA out of memory. Tried to allocate 20.00 GiB")
KINDS = ("kill", "stop", "cut")
WORKS_S = 0.5
"""The three work for so long before the next loss."""
WORLD_S = 90.0
"""The limit for a new world: sessions live for 15 s, and a busy machine starts torch slowly."""
WRITTEN_S = 10.0
"""The limit for the coordinator to keep an event: it writes them in batches."""
TICK_S = 0.01
NAMED = re.compile(r"rank \d+ on \S+ .+")
"""The sentence that names a failed worker, in a launcher's line."""


class Launcher(Process):
    """A launcher in a namespace. `began` has, by round, the first step that its worker reported."""

    def __init__(self, name: str, argv: list[str], machine: Machine) -> None:
        self.machine = machine
        self.began: dict[int, dict] = {}
        self.last: dict = {}
        super().__init__(name, argv, machine=machine)

    def _take_fact(self, line: str) -> None:
        _, _, said = line.partition("] ")
        if said.startswith('{"kind": "step"'):
            self.last = json.loads(said)
            self.began.setdefault(self.last["round"], self.last)
        else:
            self.facts.append({"kind": line})

    @property
    def lines(self) -> list[str]:
        """What the launcher itself said."""
        return [line for line in self.errors if line.startswith("rallypoint run: ")]

    def tree(self) -> list[int]:
        """The launcher and the processes below it."""
        children: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(stat.parent.name))
        found = [self.popen.pid]
        for pid in found:
            found += children.get(pid, [])
        return found


@dataclass
class Figures:
    """What was seen of one kind of loss."""

    took_s: list[float] = field(default_factory=list)
    ended: int = 0
    counted: int = 0
    stuck: int = 0

    @property
    def broken(self) -> int:
        return self.ended + self.counted + self.stuck

    def row(self) -> str:
        took_s = sorted(self.took_s)
        if not took_s:
            return f"{0:6} {self.ended:6} {self.counted:8} {self.stuck:6}"
        p90 = took_s[math.ceil(0.9 * len(took_s)) - 1]
        return (
            f"{len(took_s):6} {self.ended:6} {self.counted:8} {self.stuck:6} "
            f"{took_s[len(took_s) // 2]:8.2f} {p90:8.2f} {took_s[-1]:8.2f}"
        )


class Ended(Exception):
    """A launcher that nobody harmed has ended."""


class Stuck(Exception):
    """Something that was due did not come."""


Play = Iterator[None]
"""A course of events. It yields while it waits, so that several jobs run side by side in one thread."""


class Job:
    """Three launchers of one run, which is begun anew when it has ended."""

    def __init__(self, backend: str, worker: str, restarts: int, directory: Path, seed: int, say: Callable) -> None:
        self.name = f"{backend}-{worker}-{restarts}"
        self.figures: dict[str, Figures] = {}
        self.unnamed: list[str] = []
        """Failures that were not named in the same words everywhere."""
        self._scheme, self._worker, self._restarts = backend, worker, restarts
        self._directory = directory / self.name
        self._directory.mkdir()
        self._rng = random.Random(f"{seed} {self.name}")
        self._say = lambda text: say(f"{self.name:12} {text}")
        self._runs = 0
        self._started = 0
        self._stage = Stage()
        self._etcd: EtcdCluster | None = None

    # --- the course of events -----------------------------------------------------------------------------------------

    def losses(self, kinds: list[str], kills: int) -> Play:
        """So many losses of each kind, in any order."""
        yield from self._begin()
        waiting = self._rng.sample([kind for kind in kinds for _ in range(kills)], len(kinds) * kills)
        for number, kind in enumerate(waiting, 1):
            figures = self.figures.setdefault(kind, Figures())
            before, story = self._round, ""
            try:
                yield from self._loss(kind, figures)
                story = f"round {before} -> {self._round}, {figures.took_s[-1]:6.2f} s"
            except (Ended, Stuck) as error:
                is_ended = isinstance(error, Ended)
                figures.ended += is_ended
                figures.stuck += not is_ended
                story = f"{'ENDED' if is_ended else 'STUCK'}: {error}"
                yield from self._begin()
            used = self._used()
            if used > self._counted:
                figures.counted += used - self._counted
                self._counted = used
                story += "; A RESTART WAS COUNTED"
            self._say(f"{number:3}/{len(waiting)} {kind:5} {story}")
        self.end()

    def failures(self, count: int) -> Play:
        """So many workers fail. The run has one restart less, so that the last failure ends it."""
        self._restarts = count - 1
        yield from self._begin()
        figures = self.figures.setdefault("failure", Figures())
        for number in range(1, count + 1):
            how = HOW[number % len(HOW)]
            rank = self._rng.randrange(SIZE)
            victim = next(one for one in self._launchers if one.last["rank"] == rank)
            said = {launcher: len(launcher.lines) for launcher in self._launchers}
            before, at = self._round, time.monotonic()
            (self._directory / "order.new").write_text(how)
            (self._directory / "order.new").rename(self._directory / f"do-{rank}")
            if number < count:
                yield from self._world(self._launchers, above=before, since=at, figures=figures)
                used = self._used()
                figures.counted += used != number
            else:
                yield from self._until(lambda: not self._alive, "all launchers end")
                figures.took_s.append(time.monotonic() - at)
                codes = {one.popen.returncode for one in self._launchers}
                figures.counted += len(codes) > 1 or codes <= {0, None}
                used = number
            deadline = time.monotonic() + WRITTEN_S
            while (missing := self._missing(victim, said)) and time.monotonic() < deadline:
                yield
            self.unnamed += [f"failure {number} ({how}): {text}" for text in missing]
            self._say(
                f"{number:3}/{count} {how:14.14} rank {rank}, counted {used}; {'; '.join(missing) or 'named by all'}"
            )
            yield from self._works()
        self.end()

    def _missing(self, victim: Launcher, said: dict[Launcher, int]) -> list[str]:
        places = {one.name: "\n".join(one.lines[number:]) for one, number in said.items()}
        for command in ("history", "events"):
            places[f"`{command}`"] = self._command(command, "--json")
        return missing(victim.name, places)

    def _loss(self, kind: str, figures: Figures) -> Play:
        victim = self._rng.choice(self._launchers)
        others = [one for one in self._launchers if one is not victim]
        before, at = self._round, time.monotonic()
        back = self._hit(kind, victim)
        yield from self._world(others, above=before, since=at, figures=figures)
        back()
        yield from self._world(self._launchers, above=self._round)
        yield from self._works()

    def _hit(self, kind: str, victim: Launcher) -> Callable[[], None]:
        """Harm it. The function brings it back, or another in its place."""
        match kind:
            case "kill":
                victim.kill()
                return lambda: self._replace(victim)
            case "stop":
                # A launcher alone, whose workers go on, or the whole machine.
                pids = victim.tree() if self._rng.random() < 0.5 else [victim.popen.pid]
                _signal("STOP", pids)
                if self._rng.random() < 0.5:
                    return lambda: _signal("CONT", pids)
                return lambda: (_signal("KILL", pids), self._replace(victim))[1]
            case _:
                plug = f"to{self._machines.index(victim.machine) + 1}"
                self._machines[0].ip("link", "set", plug, "down")
                return lambda: self._machines[0].ip("link", "set", plug, "up")

    def _world(
        self, launchers: list[Launcher], *, above: int, since: float = 0.0, figures: Figures | None = None
    ) -> Play:
        """Until all of these, and nobody else, step together in a round above that number."""

        def formed() -> int | None:
            common = set.intersection(*(set(one.began) for one in launchers))
            for number in sorted(common, reverse=True):
                if number > above and launchers[0].began[number]["size"] == len(launchers):
                    return number
            return None

        yield from self._until(lambda: formed() is not None, f"a world of {len(launchers)}", launchers)
        self._round = formed() or 0
        if figures is not None:
            first = min(began["at"] for one in launchers for number, began in one.began.items() if number > above)
            figures.took_s.append(first - since)

    def _works(self) -> Play:
        until = time.monotonic() + WORKS_S
        while time.monotonic() < until and self._alive:
            yield

    def _until(self, look: Callable[[], bool], what: str, unharmed: list[Launcher] | None = None) -> Play:
        deadline = time.monotonic() + WORLD_S
        while not look():
            for one in unharmed or []:
                if (code := one.popen.poll()) is not None:
                    story = " ".join(one.lines[-1:]) if self._round else one.story
                    raise Ended(f"{one.name} ended with {code}: {story}")
            if time.monotonic() > deadline:
                last = "; ".join(f"{one.name}: {' '.join(one.lines[-1:])}" for one in self._launchers)
                raise Stuck(f"not within {WORLD_S:g} s: {what}. {last}")
            yield

    # --- processes ----------------------------------------------------------------------------------------------------

    def _begin(self) -> Play:
        """A new run with three launchers, once they work."""
        self.end()
        self._runs += 1
        self._counted = self._round = 0
        for left in self._directory.iterdir():
            left.unlink()
        self._stage = Stage()
        self._machines = self._stage.machines(SIZE + 1)
        home = self._machines[0]
        endpoint = f"{home.address}:{PORT}"
        if self._scheme == "etcd":
            prefix = ["ip", "netns", "exec", home.name, *_tether]
            data = Path(tempfile.mkdtemp(dir=self._directory.parent))
            self._etcd = EtcdCluster(needs("system"), data, 1, hosts=[home.address], prefixes=[prefix])
            self._etcd.start()
            endpoint = self._etcd.endpoints
        else:
            self._stage.serve(endpoint, "--insecure", machine=home)
        self._run = f"{self.name}-{self._runs}-{time.monotonic_ns() % 10**9}"
        self._url = f"{self._scheme}://{endpoint}/{self._run}"
        reader = [sys.executable, "-m", "tests.e2e.losses", "--read", self._url]
        self._reader = Process("reader", reader, machine=home)
        self._stage.processes.append(self._reader)
        self._launchers = [self._start(machine) for machine in self._machines[1:]]
        yield from self._world(self._launchers, above=0)
        yield from self._works()

    def _start(self, machine: Machine) -> Launcher:
        self._started += 1
        name = f"n{self._machines.index(machine)}-{self._started}"
        # The machine's host name is no address of its namespace, and gloo would take it.
        argv = ["env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, "-m", "rallypoint", "run", "--name", name]
        argv += ["--local-addr", machine.address]
        argv += ["--url", f"{self._url}?min_nodes=1&max_nodes={SIZE}", "--max-restarts", str(self._restarts)]
        launcher = Launcher(name, [*argv, str(WORKERS[self._worker]), str(self._directory)], machine)
        self._stage.processes.append(launcher)
        return launcher

    def _replace(self, victim: Launcher) -> None:
        """It is gone, and another starts on its machine."""
        victim.end()
        self._stage.processes.remove(victim)
        self._launchers[self._launchers.index(victim)] = self._start(victim.machine)

    @property
    def _alive(self) -> list[Launcher]:
        return [one for one in self._launchers if one.popen.poll() is None]

    def _used(self) -> int:
        """The restarts that the run has used."""
        before = len(self._reader.facts)
        self._reader.write("read")
        self._reader.until(lambda: len(self._reader.facts) > before, "the budget")
        return int(self._reader.facts[-1]["used"])

    def _command(self, *words: str) -> str:
        """What a command of the operator says."""
        verb, *options = words
        within = ["ip", "netns", "exec", self._machines[0].name]
        argv = [*within, sys.executable, "-m", "rallypoint", verb, self._url, *options]
        return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False).stdout

    def end(self) -> None:
        """End all processes. Nothing of the run is left."""
        self._stage.__exit__()
        if self._etcd is not None:
            self._etcd.stop()
            self._etcd = None
        if self._runs:
            deadline = time.monotonic() + PATIENCE_S
            while left := marked(f"{self._run}/"):
                assert time.monotonic() < deadline, f"{self.name}: these processes are left: {left}"
                time.sleep(TICK_S)


def missing(victim: str, places: dict[str, str]) -> list[str]:
    """Where the last sentence of the victim's launcher about a failed worker is not found."""
    own = NAMED.findall(places[victim])
    if not own:
        return [f"{victim} does not name it: {places[victim].splitlines()[-1:]}"]
    # What follows is how it goes on, which each launcher says in its way.
    sentence = re.split(r" \(restart|, and the run|; ", own[-1])[0].rstrip(".")
    quoted = json.dumps(sentence)[1:-1]  # as it is within JSON
    return [f"{name} lacks {sentence!r}" for name, text in places.items() if not (sentence in text or quoted in text)]


def _signal(name: str, pids: list[int]) -> None:
    subprocess.run(["kill", f"-{name}", *map(str, pids)], check=False, timeout=PATIENCE_S)


# --- the campaign -----------------------------------------------------------------------------------------------------


def run_all(plays: list[Play], side_by_side: int) -> None:
    """Play them, so many at a time."""
    waiting, playing = plays[::-1], []
    while waiting or playing:
        while waiting and len(playing) < side_by_side:
            playing.append(waiting.pop())
        for play in list(playing):
            try:
                next(play)
            except StopIteration:
                playing.remove(play)
        time.sleep(TICK_S)


async def read_budget(url: str) -> None:
    """Print the run's budget for every line on stdin."""
    from rallypoint.errors import Unavailable
    from rallypoint.launcher.restart_budget import BudgetRecord
    from rallypoint.observe.target import open_backend, read_target
    from rallypoint.rendezvous.records import decode

    loop = asyncio.get_running_loop()
    target = read_target(url)
    async with open_backend(target, PATIENCE_S) as backend:
        while await loop.run_in_executor(None, sys.stdin.readline):
            try:
                item = (await backend.get(target.keys.budget)).item
            except Unavailable as error:
                sys.exit(str(error))
            used = decode(BudgetRecord, item).used if item is not None else 0
            print(msgspec.json.encode({"kind": "budget", "used": used}).decode(), flush=True)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="losses of each kind in each job")
    parser.add_argument("--failures", type=int, default=0, help="failed workers in each job, instead of losses")
    parser.add_argument("--backend", choices=("tcp", "etcd", "both"), default="both")
    parser.add_argument("--worker", choices=(*WORKERS, "both"), default="both")
    parser.add_argument("--restarts", type=numbers, default=[0, 1, 3], help="--max-restarts of the jobs: 0,1,3")
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all")
    parser.add_argument("--jobs", type=int, default=2, help="how many jobs run side by side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read:
        asyncio.run(read_budget(asked.read))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended
    if why := why_no_machines():
        print(why, file=sys.stderr)
        return 2
    began_at = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_at:6.0f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="rallypoint-losses-") as place:
        jobs = [
            Job(backend, worker, restarts, Path(place), asked.seed, say)
            for backend in (("tcp", "etcd") if asked.backend == "both" else (asked.backend,))
            for worker in (WORKERS if asked.worker == "both" else (asked.worker,))
            for restarts in (asked.restarts if not asked.failures else [asked.failures - 1])
        ]
        kinds = list(KINDS) if asked.kind == "all" else [asked.kind]
        plays = [job.failures(asked.failures) if asked.failures else job.losses(kinds, asked.kills) for job in jobs]
        try:
            run_all(plays, asked.jobs)
        finally:
            for job in jobs:
                job.end()
    return report(jobs)


def report(jobs: list[Job]) -> int:
    """The table; 1 if a promise was broken."""
    print(f"\n{'job':12} {'kind':8} {'losses':>6} {'ended':>6} {'counted':>8} {'stuck':>6} {'median':>8} p90 s, max s")
    for job in jobs:
        for kind, figures in job.figures.items():
            print(f"{job.name:12} {kind:8} {figures.row()}")
    broken = sum(figures.broken for job in jobs for figures in job.figures.values())
    unnamed = [text for job in jobs for text in job.unnamed]
    print("\n".join(unnamed))
    print(f"{broken} losses ended a job, cost a restart or got stuck; {len(unnamed)} sentences are missing")
    return 1 if broken or unnamed else 0


if __name__ == "__main__":
    sys.exit(main())
