"""Real processes on a real network: servers, nodes, proxies, and namespaces as machines.

A `Stage` starts everything and ends it, whatever happens. Nothing here sleeps to let something happen: `wait` waits
for a fact that a process says, with a deadline, and a wait in vain shows all that was said. Processes are started from
the main thread only: they are tied to the life of the thread that starts them.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60.0
PORT = 29400
Fact = dict[str, Any]
_numbers = itertools.count(1)
_tether = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
"""A process must not outlive tests that were killed."""


def loopback() -> str:
    """An endpoint on an address of loopback that nobody else uses: any port of it is free."""
    more, last = divmod(next(_numbers), 250)
    return f"127.{os.getpid() % 200 + 20}.{(os.getpid() // 200 + more) % 256}.{last + 1}:{PORT}"


def anything(fact: Fact) -> bool:
    return True


class Process:
    """A process whose words are collected. `facts` are the lines of stdout, `errors` those of stderr."""

    def __init__(self, name: str, argv: list[str], *, machine: "Machine | None" = None) -> None:
        self.name = name
        self.facts: list[Fact] = []
        self.errors: list[str] = []
        self._said = threading.Condition()
        self._ids = itertools.count(1)
        within = ["ip", "netns", "exec", machine.name] if machine is not None else []
        self.popen = subprocess.Popen(
            [*within, *_tether, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")},
        )
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self.popen.stdout, self._take_fact), daemon=True),
            threading.Thread(target=self._read, args=(self.popen.stderr, self.errors.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, take: Callable[[str], None]) -> None:
        for line in stream:
            with self._said:
                take(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def _take_fact(self, line: str) -> None:
        self.facts.append(json.loads(line) if line.startswith("{") else {"kind": line})

    # --- waiting ------------------------------------------------------------------------------------------------------

    def until(self, look: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
        """What `look` finds, once it finds something. The process may end meanwhile: its last words count."""
        deadline = time.monotonic() + patience_s
        with self._said:
            while not (found := look()):
                is_over = not any(reader.is_alive() for reader in self._readers)
                left_s = deadline - time.monotonic()
                if is_over or left_s <= 0:
                    pytest.fail(
                        f"{self.name}: {'it ended' if is_over else f'{patience_s:g} s'} without {what}\n{self.story}"
                    )
                self._said.wait(min(left_s, 1.0))
            return found

    def wait(self, kind: str, which: Callable[[Fact], Any] = anything, patience_s: float = PATIENCE_S) -> Fact:
        """The first fact of the kind that is the one meant."""
        found: Fact = self.until(
            lambda: next((fact for fact in self.facts if fact["kind"] == kind and which(fact)), None),
            f"a fact {kind!r}",
            patience_s,
        )
        return found

    def wait_line(self, *parts: str, after: int = 0, patience_s: float = PATIENCE_S) -> str:
        """The first line of stderr that has all the parts, after so many."""
        found: str = self.until(
            lambda: next((line for line in self.errors[after:] if all(part in line for part in parts)), None),
            f"a line with {parts}",
            patience_s,
        )
        return found

    def wait_exit(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit status, once it has ended by itself and everything it said is here."""
        try:
            status = self.popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name}: still runs after {patience_s:g} s\n{self.story}")
        for reader in self._readers:
            reader.join(patience_s)
        return status

    def all(self, kind: str) -> list[Fact]:
        """Every fact of a kind so far."""
        return [fact for fact in list(self.facts) if fact["kind"] == kind]

    @property
    def story(self) -> str:
        """All that it said, for people."""
        facts = [json.dumps(fact) for fact in self.facts[-40:]]
        return "\n".join([f"--- {self.name} said:", *facts, "--- and on stderr:", *self.errors[-20:]])

    # --- telling ------------------------------------------------------------------------------------------------------

    def write(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def word(self, word: str) -> None:
        """Tell a proxy, and wait until it has done it."""
        before = len(self.all(word))
        self.write(word)
        self.until(lambda: len(self.all(word)) > before, f"{word!r} is done")

    def kill(self) -> float:
        """-9; when that was."""
        at = time.monotonic()
        self.popen.kill()
        self.popen.wait(PATIENCE_S)
        return at

    def stop(self) -> float:
        """SIGSTOP, and wait until it stands still; when that was."""
        at = time.monotonic()
        self.popen.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self.popen.pid}/stat")
        deadline = at + PATIENCE_S
        while status.read_text().rpartition(")")[2].split()[0] not in "Tt":
            assert time.monotonic() < deadline, f"{self.name} does not stop"
            time.sleep(0.002)
        return at

    def go_on(self) -> float:
        """SIGCONT; when that was."""
        self.popen.send_signal(signal.SIGCONT)
        return time.monotonic()

    def terminate(self) -> float:
        """SIGTERM; when that was."""
        self.popen.terminate()
        return time.monotonic()

    def interrupt(self) -> float:
        """SIGINT, as Ctrl-C is; when that was."""
        self.popen.send_signal(signal.SIGINT)
        return time.monotonic()

    def end(self) -> None:
        """However it stands."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


class Node(Process):
    """A process of `node.py`."""

    def ask(self, verb: str, *args: Any) -> int:
        """Begin a command."""
        number = next(self._ids)
        self.write(json.dumps({"id": number, "do": verb, "args": args}))
        return number

    def outcome(self, number: int, patience_s: float = PATIENCE_S) -> Fact:
        """How a command ended: a fact `done` or `failed`."""
        found: Fact = self.until(
            lambda: next((fact for fact in self.facts if fact.get("id") == number), None),
            f"the end of command {number}",
            patience_s,
        )
        return found

    def call(self, verb: str, *args: Any) -> Any:
        """The result of a command that works."""
        fact = self.outcome(self.ask(verb, *args))
        assert fact["kind"] == "done", f"{fact}\n{self.story}"
        return fact["result"]

    def event(self, name: str, which: Callable[[Fact], Any] = anything, patience_s: float = PATIENCE_S) -> Fact:
        """The first event of that name that is the one meant."""
        return self.wait("event", lambda fact: fact["event"] == name and which(fact), patience_s)

    def events(self, name: str) -> list[Fact]:
        return [fact for fact in self.all("event") if fact["event"] == name]

    def round(self, above: int = 0, size: int | None = None, patience_s: float = PATIENCE_S) -> Fact:
        """The first round it entered with a number above that one, and of that size if one is given."""
        return self.wait("round", lambda fact: fact["round"] > above and size in (None, fact["size"]), patience_s)


class Server(Process):
    """A process of `rallypoint serve`."""

    def wait_listening(self) -> str:
        """Where it listens."""
        return self.wait_line("listening on").rpartition("listening on ")[2]


class Machine:
    """A network namespace. Machines of one stage reach each other through `Stage.machines`."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def ip(self, *words: str) -> None:
        """`ip` inside."""
        ip("-n", self.name, *words)

    def write_etc(self, file: str, text: str) -> None:
        """A file of /etc that only processes of this machine see."""
        folder = Path("/etc/netns") / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")


def ip(*words: str) -> None:
    """iproute2, which says what is wrong."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def why_no_machines() -> str | None:
    """Why namespaces cannot be made here; None: they can."""
    if shutil.which("ip") is None:
        return "`ip` (iproute2) is not installed"
    return None if os.geteuid() == 0 else "namespaces need root"


class Stage:
    """Whatever is started here has ended when the block has."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self._machines: list[Machine] = []
        self._tag = f"q{os.getpid() % 100000}x{next(_numbers)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.end()
        for machine in self._machines:
            with contextlib.suppress(AssertionError):
                ip("netns", "del", machine.name)
            shutil.rmtree(Path("/etc/netns") / machine.name, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # if it was ours

    # --- processes ----------------------------------------------------------------------------------------------------

    def serve(self, bind: str, *options: str, machine: Machine | None = None, listens: bool = True) -> Server:
        """`rallypoint serve`; returns when it listens, unless it is not expected to."""
        server = Server(
            f"server {bind}", [sys.executable, "-m", "rallypoint", "serve", "--bind", bind, *options], machine=machine
        )
        self.processes.append(server)
        if listens:
            server.wait_listening()
        return server

    def dashboard(self, url: str, http: str, *options: str) -> Process:
        """`rallypoint dashboard`; returns when it is served."""
        words = ["dashboard", url, "--http", http, *options]
        process = Process(f"dashboard {http}", [sys.executable, "-m", "rallypoint", *words])
        self.processes.append(process)
        process.wait_line("shows")
        return process

    def node(self, url: str, name: str, mode: str = "loop", *more: str, machine: Machine | None = None) -> Node:
        """A node, by the modes of `node.py`. The URL has a query already."""
        argv = [sys.executable, str(HERE / "node.py"), mode, f"{url}&name={name}", *more]
        node = Node(name, argv, machine=machine)
        self.processes.append(node)
        return node

    def nodes(self, url: str, *names: str, mode: str = "loop", machine: Machine | None = None) -> list[Node]:
        return [self.node(url, name, mode, machine=machine) for name in names]

    def proxy(self, listen: str, target: str, machine: Machine | None = None) -> Process:
        """A proxy between two endpoints; returns when it listens."""
        where = [*listen.rsplit(":", 1), *target.rsplit(":", 1)]
        proxy = Process(f"proxy {listen}", [sys.executable, str(HERE / "proxy.py"), *where], machine=machine)
        self.processes.append(proxy)
        proxy.wait("ready")
        return proxy

    # --- machines -----------------------------------------------------------------------------------------------------

    def machines(self, count: int) -> list[Machine]:
        """Machines on one Ethernet, 10.213.0.1 and so on. The first is everybody's way to everywhere else."""
        made: list[Machine] = []
        for number in range(1, count + 1):
            machine = Machine(f"{self._tag}m{number}", f"10.213.0.{number}")
            ip("netns", "add", machine.name)
            self._machines.append(machine)
            made.append(machine)
            machine.ip("link", "set", "lo", "up")
        first = made[0]
        first.ip("link", "add", "br0", "type", "bridge")
        first.ip("addr", "add", f"{first.address}/24", "dev", "br0")
        first.ip("link", "set", "br0", "up")
        subprocess.run(
            ["ip", "netns", "exec", first.name, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"],
            timeout=PATIENCE_S,
            check=True,
        )
        for number, machine in enumerate(made[1:], start=2):
            first.ip("link", "add", f"to{number}", "type", "veth", "peer", "name", "eth0", "netns", machine.name)
            first.ip("link", "set", f"to{number}", "master", "br0", "up")
            machine.ip("addr", "add", f"{machine.address}/24", "dev", "eth0")
            machine.ip("link", "set", "eth0", "up")
            machine.ip("route", "add", "default", "via", first.address)
        return made


def members_agree(*rounds: Fact) -> None:
    """The facts are those of one round: the same number and members, every rank once."""
    assert len({fact["round"] for fact in rounds}) == 1, rounds
    assert len({tuple(fact["members"]) for fact in rounds}) == 1, rounds
    assert sorted(fact["rank"] for fact in rounds) == list(range(len(rounds))), rounds
    assert {fact["size"] for fact in rounds} == {len(rounds)}, rounds
