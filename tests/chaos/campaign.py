"""Random faults against real processes, with a seed: `python -m tests.chaos.campaign` (`make chaos`).

    --seed N          determines the worlds, their faults, times and durations
    --minutes M       how long (10); the last world runs to its end
    --backend WHICH   tcp (with and without data), etcd, or both
    --world N         only this world of the seed
    --bursts N        the number of bursts per world, instead of a random one
    --json FILE       also write the report as JSON
    --go-on           continue with the next world after a broken guarantee
    --logs DIRECTORY  where to keep the logs of a failed world; with --keep: of all worlds

Worlds run one after the other: machines as network namespaces, a server or three members of etcd, and nodes with a
workload. Each has bursts of faults; after each burst all is healed and liveness is required. At its end the logs are
checked with the simulator's checkers. Exit code: 1 if a guarantee was broken, 2 if it cannot run, 130 after Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rallypoint.rendezvous.keys import RunKeys
from rallypoint.testing.checkers import Broke
from tests.chaos.faults import FaultInjector
from tests.chaos.history_checker import Findings, History, ProcessLog, check_history
from tests.chaos.liveness import Liveness, Times
from tests.chaos.plan import CHOICES, RUN_ID, Backend, Plan, draw
from tests.chaos.stalls import DiskStalls, Stalls
from tests.chaos.timeline import timeline, write_logs
from tests.chaos.world import FAKETIME, World
from tests.e2e.kit import Stage, ip, why_no_machines

LAST_EVENTS = 60
COMPARED_BY_ETCD = 125


@dataclass
class Report:
    """The results of a campaign."""

    seed: int
    worlds: Counter[str] = field(default_factory=Counter)
    bursts: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    probes: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    store_errors: Counter[str] = field(default_factory=Counter)
    times: Times = field(default_factory=Times)
    longest_join_s: float = 0.0
    longest_call_s: float = 0.0
    clocks_apart_s: float = 0.0
    stalled_s: float = 0.0
    took_s: float = 0.0
    broken: str = ""

    def take(self, findings: Findings) -> None:
        for what in ("commits", "lives", "rounds", "returns", "adds", "barriers", "store_calls"):
            self.totals[what] += getattr(findings, what)
        self.store_errors.update(findings.errors)
        self.longest_join_s = max(self.longest_join_s, findings.longest_join_s)
        self.longest_call_s = max(self.longest_call_s, findings.longest_call_s)
        self.clocks_apart_s = max(self.clocks_apart_s, findings.clocks_apart_s)

    def to_json(self) -> dict[str, object]:
        times = {
            what: {"count": len(seen), "median_s": _median(seen), "worst_s": max(seen)[0], "bound_s": max(seen)[1]}
            for what, seen in self.times.seen.items()
        }
        return {
            "schema": 1,
            "seed": self.seed,
            "took_s": round(self.took_s, 1),
            "worlds": dict(self.worlds),
            "bursts": self.bursts,
            "faults": dict(sorted(self.faults.items())),
            "probes": dict(sorted(self.probes.items())),
            "seen": dict(self.totals),
            "store_errors": dict(sorted(self.store_errors.items())),
            "times": times,
            "longest_join_s": round(self.longest_join_s, 2),
            "longest_call_s": round(self.longest_call_s, 2),
            "clocks_apart_s": round(self.clocks_apart_s, 1),
            "stalled_s": round(self.stalled_s, 1),
            "broken": self.broken,
        }

    def in_words(self) -> str:
        totals = self.totals
        lines = [
            f"seed {self.seed}, {self.took_s:.0f} s: {sum(self.worlds.values())} worlds "
            f"({', '.join(f'{count} {kind}' for kind, count in sorted(self.worlds.items()))}), {self.bursts} bursts, "
            f"{sum(self.faults.values())} faults. {self.broken or 'No guarantee was broken.'}",
            f"  checked: {totals['commits']} commits of {totals['lives']} server lives, {totals['rounds']} rounds, "
            f"{totals['returns']} returns, {totals['store_calls']} store calls "
            f"({totals['adds']} adds, {totals['barriers']} barriers)",
            f"  faults: {', '.join(f'{kind} {count}' for kind, count in sorted(self.faults.items()))}",
            f"  probes: {', '.join(f'{kind} {count}' for kind, count in sorted(self.probes.items()))}",
            f"  stalls of the machine: {self.stalled_s:.1f} s in total; longest join {self.longest_join_s:.1f} s, "
            f"longest failed store call {self.longest_call_s:.1f} s; "
            f"clocks up to {self.clocks_apart_s:.0f} s apart",
            f"  {'seconds':34} {'times':>6} {'median':>7} {'worst':>7} {'bound':>7}",
        ]
        for what, seen in sorted(self.times.seen.items()):
            worst_s, bound_s = max(seen)
            lines.append(f"  {what:34} {len(seen):6} {_median(seen):7.2f} {worst_s:7.2f} {bound_s:7.1f}")
        return "\n".join(lines)


def _median(seen: list[tuple[float, float]]) -> float:
    return round(sorted(seen)[(len(seen) - 1) // 2][0], 3)


class Campaign:
    """Runs worlds one after the other."""

    def __init__(
        self, seed: int, logs: Path, say: Callable[[str], None], keeps: bool = False, character: str = "honest"
    ) -> None:
        self.report = Report(seed)
        self.logs = logs
        self.say = say
        self.keeps = keeps
        self.character = character
        self._stalls = Stalls()
        self._began_at = time.monotonic()

    def play(self, plan: Plan) -> None:
        """Run one world. Raises Failure after its logs are written and its processes and namespaces are gone."""
        directory = self.logs / f"world-{plan.seed}"
        directory.mkdir(parents=True)
        self.report.worlds[plan.backend.value] += 1
        with stage() as one:
            try:
                self._play(one, plan, directory)
            finally:
                self.report.took_s = time.monotonic() - self._began_at
                self.report.stalled_s = self._stalls.since(0.0)
        if not self.keeps:
            shutil.rmtree(directory, ignore_errors=True)

    def _play(self, one: Stage, plan: Plan, directory: Path) -> None:
        world = World(one, plan, directory, self.character)
        try:
            try:
                world.begin()
                self._tell(plan, f"{plan.nodes} nodes, {plan.min_nodes} to {plan.max_nodes}, ttl {plan.ttl_s:g} s")
                self._run_faults(world, plan)
            except (AssertionError, pytest.fail.Exception, subprocess.TimeoutExpired) as error:
                self._fail(world, directory, error)
            self._check(world, directory)
        finally:
            world.end()

    def _run_faults(self, world: World, plan: Plan) -> None:
        of_disk = [DiskStalls(world.directory)] if plan.backend is Backend.ETCD else []
        try:
            self._run_bursts(world, plan, Liveness(world, [self._stalls, *of_disk], self.report.times))
        finally:
            for stalls in of_disk:
                stalls.end()

    def _run_bursts(self, world: World, plan: Plan, liveness: Liveness) -> None:
        injector = FaultInjector(world)
        for place in world.places:
            world.start_node(place)
        liveness.settle("first round")
        for number, burst in enumerate(plan.bursts, start=1):
            world.say_all("busy")
            began_at = time.monotonic()
            try:
                injector.run(burst)
            finally:
                self.report.faults.update(injector.done)
                kinds, injector.done = list(injector.done.elements()), Counter()
            self.report.bursts += 1
            healing_at = time.monotonic()
            lasted_s = healing_at - began_at
            world.heal()
            if injector.was_closed:
                world.operate("reopen", "--reason", "chaos is over")
                injector.was_closed = False
            settled_s = liveness.settle("settled after healing", since=healing_at)
            came = liveness.probe(burst)
            self.report.probes[burst.probe.name.lower()] += 1
            self._tell(
                plan,
                f"burst {number}/{len(plan.bursts)} {lasted_s:5.1f} s, settled in {settled_s:5.2f} s, "
                f"{came}; {' '.join(sorted(kinds))}",
            )

    def _check(self, world: World, directory: Path) -> None:
        lines = world.audited()
        try:
            findings = check_history(history_of(world, lines))
        except Broke as error:
            self._fail(world, directory, error)
        self.report.take(findings)
        if self.keeps:
            write_logs(world, lines, directory)

    def _fail(self, world: World, directory: Path, error: BaseException) -> None:
        """Write the logs and raise Failure; a broken safety guarantee takes precedence over `error`."""
        lines = []
        with contextlib.suppress(AssertionError, AttributeError, OSError, subprocess.TimeoutExpired):
            lines = world.audited()  # as far as available
        write_logs(world, lines, directory)
        with contextlib.suppress(KeyError):  # incomplete logs
            try:
                if lines:
                    check_history(history_of(world, lines))
            except Broke as graver:
                error = graver
        raise Failure(error, timeline(world, lines)[-LAST_EVENTS:], directory) from error

    def _tell(self, plan: Plan, what: str) -> None:
        self.say(f"{time.monotonic() - self._began_at:6.0f} s  {plan.seed:8} {plan.backend.value:13} {what}")

    def end(self) -> None:
        self._stalls.end()


class Failure(Exception):
    """A guarantee was broken in a world."""

    def __init__(self, error: BaseException, last: list[str], directory: Path) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.last = last
        self.directory = directory


def history_of(world: World, lines: list) -> History:
    """The logs of a world."""
    plan = world.plan
    living = {id(node) for node in world.nodes}
    nodes = []
    for node in world.all_nodes:
        ended_by_itself = id(node) not in living and node.popen.returncode not in (-9, None)
        stalled = [(f["at"] - f["length_s"], f["at"]) for f in list(node.facts) if f["kind"] == "stall"]
        stalled += world.pauses.get(node.popen.pid, [])
        nodes.append(ProcessLog(node.name, list(node.facts), list(node.errors), stalled, ended_by_itself))
    servers = [ProcessLog(server.name, [], list(server.errors)) for server in world.all_servers]
    is_etcd = plan.backend is Backend.ETCD
    return History(
        keys=RunKeys("rallypoint", RUN_ID),
        min_nodes=plan.min_nodes,
        max_nodes=plan.max_nodes,
        lines=lines,
        nodes=nodes,
        servers=servers,
        compared=COMPARED_BY_ETCD if is_etcd else 1_000_000,
        waits_s=plan.join_timeout_s + plan.confirm_timeout_s if plan.nodes <= plan.max_nodes else None,
    )


# --- clean-up ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """A stage whose namespaces are named after this process, and whose end a second Ctrl-C cannot interrupt."""
    one = Stage()
    one._tag = f"chaos{os.getpid()}{one._tag.partition('x')[1]}{one._tag.partition('x')[2]}"
    try:
        yield one
    finally:
        before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            one.__exit__(None, None, None)
        finally:
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                signal.signal(number, handler)


def remove_stale_namespaces() -> None:
    """Remove namespaces of campaigns that were killed with SIGKILL. Their processes died with them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60, check=False).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line):
        found = re.match(r"chaos(\d+)x\d+m\d+$", name)
        if found and not Path(f"/proc/{found[1]}").exists():
            with contextlib.suppress(AssertionError):
                ip("netns", "del", name)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def why_not(backend: str) -> str | None:
    """Why a campaign cannot run here; None: it can."""
    if FAKETIME is None:
        return "libfaketime is not installed (package libfaketime), which changes the clocks"
    if "etcd" in {kind.value for kind in CHOICES[backend]} and shutil.which("etcd") is None:
        return "etcd is not installed (package etcd-server): say --backend tcp"
    return why_no_machines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--backend", choices=sorted(CHOICES), default="both")
    parser.add_argument("--world", type=int, default=None)
    parser.add_argument("--bursts", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--logs", type=Path, default=None)
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    if (why := why_not(asked.backend)) is not None:
        print(f"error: chaos cannot run here: {why}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):  # shells make background processes ignore SIGINT
        signal.signal(number, interrupt)
    remove_stale_namespaces()
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="rallypoint-chaos-"))
    campaign = Campaign(asked.seed, logs, lambda text: print(text, flush=True), asked.keep)
    try:
        status = run(campaign, asked.minutes, asked.backend, asked.world, asked.bursts, asked.go_on)
    except KeyboardInterrupt:
        campaign.report.broken += " It was interrupted."
        status = 130
    campaign.end()
    print(campaign.report.in_words(), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(campaign.report.to_json(), indent=2) + "\n", encoding="utf-8")
    if not asked.keep and status != 1:
        shutil.rmtree(logs, ignore_errors=True)
    return status


def run(
    campaign: Campaign, minutes: float, backend: str, world: int | None, bursts: int | None, goes_on: bool = False
) -> int:
    """Run worlds until the time is over or a guarantee is broken; the exit code."""
    until = time.monotonic() + 60 * minutes
    seed, number, status = campaign.report.seed, world if world is not None else 0, 0
    while True:
        try:
            campaign.play(draw(seed, number, backend, bursts))
        except Failure as failure:
            status = 1
            campaign.report.broken += f"{str(failure).splitlines()[0]} (world {number}). "
            again = f"python -m tests.chaos.campaign --seed {seed} --backend {backend} --world {number}"
            print("\n".join(["", f"BROKEN: {failure}", "", "the last events:", *failure.last, ""]))
            print(f"seed {seed}, world {number}; repeat the same faults with: {again}")
            print(f"all logs: {failure.directory}", flush=True)
        if world is not None or time.monotonic() >= until or (status and not goes_on):
            return status
        number += 1


if __name__ == "__main__":
    sys.exit(main())
