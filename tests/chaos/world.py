"""One world of real processes: machines as network namespaces, a backend, nodes with a workload, and their faults.

Everything is started from the main thread, and ends with the block of the stage, including namespaces. Faults are
recorded for the timeline.
"""

import contextlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rallypoint.kv.types import Batch
from rallypoint.testing.checkers import BrokeOutageTolerance
from tests.backends.etcd.kit import EtcdCluster, Member, needs
from tests.chaos.plan import RUN_ID, Backend, Plan
from tests.chaos.server import AuditLine, Committed, ServerStart, read_audit
from tests.e2e.etcd_world import history
from tests.e2e.kit import PORT, Machine, Node, Process, Server, Stage

PATIENCE_S = 60.0
PROXY_PORT = 29401
NOBODY = "02:00:00:00:00:01"
"""A hardware address that no device has: packets to it are lost."""
TETHER = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


@dataclass
class Clock:
    """The wall clock of a machine, changed with libfaketime. The monotonic clock is not changed."""

    file: Path

    def __post_init__(self) -> None:
        self.file.write_text("+0")

    def jump(self, seconds: float) -> None:
        """Set the offset from the true time."""
        self.file.write_text(f"{seconds:+.0f}")

    @property
    def environment(self) -> list[str]:
        """The prefix of a command line."""
        if FAKETIME is None:
            return []
        return [
            "env",
            f"LD_PRELOAD={FAKETIME}",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            "FAKETIME_CACHE_DURATION=1",
            f"FAKETIME_TIMESTAMP_FILE={self.file}",
        ]


@dataclass
class Place:
    """The machine, URL and current process of a node."""

    name: str
    machine: Machine
    url: str
    is_proxied: bool
    clock: Clock
    node: Node | None = None
    lives: int = 0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """The periods in which the current process was paused."""


class World:
    """The machines and processes of a world. `note` records events for the timeline."""

    def __init__(self, stage: Stage, plan: Plan, directory: Path, character: str = "honest") -> None:
        """`character`: of its servers (see `tests.chaos.server`)."""
        self.stage = stage
        self.character = character
        self.plan = plan
        self.directory = directory
        self.notes: list[tuple[float, str, str]] = []
        self.all_nodes: list[Node] = []
        self.all_servers: list[Process] = []
        self.pauses: dict[int, list[tuple[float, float]]] = {}
        """By pid: the periods in which it was paused."""
        self.server: Server | None = None
        self.cluster: EtcdCluster | None = None
        self.server_clock = Clock(directory / "server.clock")
        self._cuts: list[tuple[Machine, str, Machine]] = []
        self._paused: dict[int, tuple[Process, float]] = {}
        self.proxies: list[Process] = []
        self.places: list[Place] = []

    def begin(self) -> None:
        """Create the machines and start the backend, without nodes."""
        servers = 3 if self.plan.backend is Backend.ETCD else 1
        self.outside, self.strange, *machines = self.stage.machines(2 + servers + self.plan.nodes)
        self.homes, theirs = machines[:servers], machines[servers:]
        self._begin_backend()
        self.places = [self._place(number, machine) for number, machine in enumerate(theirs)]

    def end(self) -> None:
        """Stop what the stage does not stop."""
        if self.cluster is not None:
            self.cluster.stop()

    def note(self, who: str, what: str) -> None:
        self.notes.append((time.monotonic(), who, what))

    # --- the backend --------------------------------------------------------------------------------------------------

    def _begin_backend(self) -> None:
        if self.plan.backend is Backend.ETCD:
            prefixes = [["ip", "netns", "exec", home.name, *TETHER] for home in self.homes]
            hosts = [home.address for home in self.homes]
            self.cluster = EtcdCluster(needs("system"), self.directory, 3, hosts=hosts, prefixes=prefixes)
            self.cluster.start()
            targets = [member.endpoint for member in self.cluster.members]
        else:
            self.start_server()
            targets = [f"{self.homes[0].address}:{PORT}"]
        for number, target in enumerate(targets):
            listen = f"{self.outside.address}:{PROXY_PORT + number}"
            self.proxies.append(self.stage.proxy(listen, target, machine=self.outside))
        self.endpoints = ",".join(targets)
        self.proxied = ",".join(f"{self.outside.address}:{PROXY_PORT + n}" for n in range(len(targets)))

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def audit(self) -> Path:
        return self.directory / "audit.jsonl"

    def start_server(self) -> None:
        """Start the server, with its existing data if it keeps any."""
        plan, home = self.plan, self.homes[0]
        command = [*self.server_clock.environment, sys.executable, "-m", "tests.chaos.server", self.character]
        options = ["--data", str(self.data), "--sync", plan.sync] if plan.backend is Backend.DATA else []
        bind = f"{home.address}:{PORT}"
        command += [str(self.audit), str(plan.entries), "serve", "--bind", bind, "--insecure", *options]
        server = Server(f"server-{len(self.all_servers) + 1}", command, machine=home)
        self.server = server
        self.all_servers.append(server)
        self.stage.processes.append(server)
        try:
            server.wait_listening()
        except pytest.fail.Exception as error:
            raise BrokeOutageTolerance(f"the server does not start: {error}") from None
        self.note("server", "listens")
        began = server.wait("begins")
        if began["lost"]:
            raise BrokeOutageTolerance(
                f"the server restarted at revision {began['revision']} and has lost {began['lost']} acknowledged ones"
            )

    def kill_server(self) -> None:
        if self.server is not None and self.server.popen.poll() is None:
            self.server.kill()
            self.note("server", "is killed")

    def stop_server(self) -> None:
        """Send SIGTERM and wait for its end; kill it if it takes too long."""
        if self.server is None or self.server.popen.poll() is not None:
            return
        self.resume(self.server)
        self.server.terminate()
        self.note("server", "is asked to stop")
        try:
            self.server.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.note("server", "does not stop")
            self.server.kill()

    def tell_server(self, word: str) -> None:
        """Send a command to the server."""
        if self.server is not None and self.server.popen.poll() is None and self.server.popen.pid not in self._paused:
            with contextlib.suppress(BrokenPipeError):
                self.server.write(word)
                self.note("server", word)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _place(self, number: int, machine: Machine) -> Place:
        name = "abcdefgh"[number]
        is_proxied = number % 2 == 1
        scheme = "etcd" if self.plan.backend is Backend.ETCD else "tcp"
        where = self.proxied if is_proxied else self.endpoints
        url = f"{scheme}://{where}/{RUN_ID}?{self.plan.options}&name={name}&local_addr={machine.address}"
        return Place(name, machine, url, is_proxied, Clock(self.directory / f"{name}.clock"))

    def start_node(self, place: Place) -> None:
        """Start a process in this place, if none runs there."""
        if place.node is not None and place.node.popen.poll() is None:
            return
        place.lives += 1
        seed = f"{self.plan.seed} {place.name} {place.lives}"
        command = [*place.clock.environment, sys.executable, "-m", "tests.chaos.node", place.url, seed]
        place.node = Node(f"{place.name}-{place.lives}", command, machine=place.machine)
        self.all_nodes.append(place.node)
        self.stage.processes.append(place.node)
        self.note(place.node.name, "is started")

    def kill_node(self, place: Place) -> float:
        """Kill the process; the time of its death, which on a busy machine is later than the signal."""
        assert place.node is not None
        self.note(place.node.name, "is killed")
        self._paused.pop(place.node.popen.pid, None)
        place.node.kill()
        return time.monotonic()

    def tell_node(self, place: Place, word: str) -> None:
        """Send a command to the process, if it runs. A paused process reads it later."""
        if place.node is not None and place.node.popen.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                place.node.write(word)

    def say_all(self, word: str) -> None:
        for place in self.places:
            self.tell_node(place, word)

    @property
    def nodes(self) -> list[Node]:
        """The running nodes."""
        return [place.node for place in self.places if place.node is not None and place.node.popen.poll() is None]

    @property
    def pids(self) -> list[int]:
        """The pids of all running processes."""
        members = self.cluster.members if self.cluster is not None else []
        processes = [*self.nodes, *self.proxies, *([self.server] if self.server is not None else [])]
        return [process.popen.pid for process in processes] + [m.pid for m in members if m.is_running]

    # --- pauses -------------------------------------------------------------------------------------------------------

    def pause(self, process: Process | None) -> float | None:
        """Pause a process; the time of the pause, or None if it is already paused or dead."""
        if process is None or process.popen.poll() is not None or process.popen.pid in self._paused:
            return None
        at = process.stop()
        self._paused[process.popen.pid] = (process, at)
        self.note(process.name, "is paused")
        return at

    def resume(self, process: Process | None) -> None:
        if process is None or process.popen.pid not in self._paused:
            return
        _, at = self._paused.pop(process.popen.pid)
        if process.popen.poll() is None:
            process.go_on()
            self.note(process.name, f"is resumed after {time.monotonic() - at:.1f} s")
        self.pauses.setdefault(process.popen.pid, []).append((at, time.monotonic()))

    # --- the network --------------------------------------------------------------------------------------------------

    def hosts_of(self, place: Place) -> list[Machine]:
        """The machines that a node connects to."""
        return [self.outside] if place.is_proxied else self.homes

    def lose(self, sender: Machine, receiver: Machine) -> None:
        """Drop packets from one machine to another from now on."""
        device = "br0" if sender is self.outside else "eth0"
        sender.ip("neigh", "replace", receiver.address, "lladdr", NOBODY, "dev", device, "nud", "permanent")
        self._cuts.append((sender, device, receiver))

    def heal_network(self, *machines: Machine) -> None:
        """Stop dropping packets: all of them, or those from and to these machines."""
        for cut in list(self._cuts):
            sender, device, receiver = cut
            if machines and sender not in machines and receiver not in machines:
                continue
            self._cuts.remove(cut)
            if not any(one[0] is sender and one[2] is receiver for one in self._cuts):
                sender.ip("neigh", "del", receiver.address, "dev", device)

    def tell_proxies(self, word: str) -> None:
        for proxy in self.proxies:
            proxy.word(word)
        self.note("proxies", word)

    # --- operating ----------------------------------------------------------------------------------------------------

    def operate(self, verb: str, *words: str, timeout_s: float = 10.0) -> int:
        """Run a `rallypoint` command on the operator's machine; its exit code."""
        scheme = "etcd" if self.plan.backend is Backend.ETCD else "tcp"
        url = f"{scheme}://{self.endpoints}/{RUN_ID}"
        within = ["ip", "netns", "exec", self.outside.name, *TETHER]
        command = [
            *within,
            sys.executable,
            "-m",
            "rallypoint",
            verb,
            url,
            *words,
            "--timeout",
            f"{timeout_s:g}",
            "--yes",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        said = (done.stdout + done.stderr).strip().splitlines()
        self.note("operator", f"{verb} {' '.join(words)}: exit {done.returncode}: {said[-1] if said else ''}")
        return done.returncode

    # --- healing ------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Resume paused processes, start dead ones, and end all faults of network and disk."""
        self.note("world", "heals")
        self.heal_network()
        for process, _ in list(self._paused.values()):
            self.resume(process)
        self.tell_proxies("delay 0")
        self.tell_proxies("pass")
        if self.cluster is not None:
            for member in self.cluster.members:
                member.resume()
                if not member.is_running:
                    member.start()
            self.cluster.wait_ready()
        else:
            if self.server is None or self.server.popen.poll() is not None:
                self.start_server()
            self.tell_server("disk heal")
            self.tell_server("fds heal")
        for place in self.places:
            self.start_node(place)
        self.say_all("calm")

    def member(self, is_leader: bool, pick: int) -> Member | None:
        """A running member of etcd: the leader, or another one."""
        assert self.cluster is not None
        working = [m for m in self.cluster.members if m.is_running and not m._is_paused]
        leaders = [m for m in working if m.is_leader()]
        if is_leader:
            return leaders[0] if leaders else None
        others = [m for m in working if m not in leaders]
        return others[pick % len(others)] if others else None

    def home_of(self, member: Member) -> Machine:
        assert self.cluster is not None
        return self.homes[self.cluster.members.index(member)]

    # --- the recorded commits -----------------------------------------------------------------------------------------

    def audited(self) -> list[AuditLine]:
        """All committed revisions in order, and the starts of the server."""
        if self.plan.backend is not Backend.ETCD:
            return read_audit(self.audit)
        batches: list[Batch] = history(self.endpoints, f"/rallypoint/{RUN_ID}", self.outside)
        return [ServerStart(0.0, "etcd", 0), *(Committed(0.0, batch) for batch in batches)]
