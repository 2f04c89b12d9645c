"""`rallypoint serve --engine etcd`: starts an etcd member, reports its health, and restarts it when it ends.

The same command on several machines forms a cluster: each gets the same list of peers and finds itself in it. Nothing
here must interfere with etcd's own consensus, data and recovery.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import ipaddress
import shutil
import signal
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.events import Emitter, EtcdEnded, EtcdHealthy, EtcdStarts, EtcdUnhealthy, ServerStopped
from rallypoint.server.etcd_binary import EtcdError, check_version, find_etcd
from rallypoint.server.process import stop_signal
from rallypoint.settings import DEFAULT_PORTS
from rallypoint.urls import format_endpoint, parse_endpoint

PEER_PORT = 2380
HEALTH_INTERVAL_S = 1.0
FAILED_START_S = 10.0
"""A member that ends within this time and was never healthy is not restarted: it would fail again."""
LONG_RUN_S = 60.0
"""After a run of this length the pause before a restart is the first one again."""
STOP_S = 10.0
RESTART_PAUSE_S = (0.5, 10.0)
"""The first and the longest pause before a restart."""
KEPT_LINES = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run one member."""

    name: str
    client: str
    """host:port that it listens on for clients."""
    peers: dict[str, str]
    """Name -> host:port for other members; this member is included."""
    clients: tuple[str, ...]
    """The client endpoints of all members, assuming that they use the same port."""

    def arguments(self, data: Path, health_port: int, more: Sequence[str]) -> list[str]:
        """The command line of etcd."""
        cluster = ",".join(f"{name}=http://{peer}" for name, peer in self.peers.items())
        token = hashlib.sha256(cluster.encode()).hexdigest()[:16]
        own_peer = self.peers[self.name]
        scheme = "https" if any(option.startswith("--cert-file") for option in more) else "http"
        return [
            f"--name={self.name}",
            f"--data-dir={data}",
            f"--listen-client-urls={scheme}://{self.client}",
            f"--advertise-client-urls={scheme}://{self.client}",
            f"--listen-peer-urls=http://{own_peer}",
            f"--initial-advertise-peer-urls=http://{own_peer}",
            f"--initial-cluster={cluster}",
            f"--initial-cluster-token=rallypoint-{token}",
            f"--listen-metrics-urls=http://127.0.0.1:{health_port}",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=1h",
            "--logger=zap",
            "--log-level=warn",
            *more,
        ]


def plan_member(bind: str | None, peers: str | None, member: str | None) -> Plan:
    """Find the member to run among the peers, and its addresses. EtcdError if the options are unclear."""
    if peers is None:
        if member is not None:
            raise EtcdError("--member says which of --peers this one is: give --peers too, or leave it out")
        host, port = parse_endpoint(bind or "127.0.0.1", DEFAULT_PORTS["etcd"])
        client = format_endpoint(_address_of(host), port)
        peer = format_endpoint("127.0.0.1", _free_port())  # etcd requires one, and no other member uses it
        return Plan("default", client, {"default": peer}, (format_endpoint(host, port),))
    members = [
        _Peer(name_of(host, port), _address_of(host), host, port)
        for host, port in (parse_endpoint(peer, PEER_PORT) for peer in peers.split(","))
    ]
    if len({peer.name for peer in members}) != len(members):
        raise EtcdError(f"--peers {peers} names one member twice")
    own = _own(members, member)
    default = own.address, DEFAULT_PORTS["etcd"]
    host, port = parse_endpoint(bind, DEFAULT_PORTS["etcd"]) if bind is not None else default
    addresses = {peer.name: format_endpoint(peer.address, peer.port) for peer in members}
    clients = tuple(format_endpoint(peer.host, port) for peer in members)
    return Plan(own.name, format_endpoint(_address_of(host), port), addresses, clients)


def name_of(host: str, port: int) -> str:
    """The name of a member, the same on every machine."""
    return f"{host}-{port}".replace(":", ".")


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    address: str
    host: str
    port: int


def _own(members: list[_Peer], member: str | None) -> _Peer:
    """The member to run on this machine."""
    if member is not None:
        host, port = parse_endpoint(member, PEER_PORT)
        chosen = [peer for peer in members if peer.name == name_of(host, port)]
        if not chosen:
            raise EtcdError(f"--member {member} is not among --peers {', '.join(peer.host for peer in members)}")
        return chosen[0]
    local = [peer for peer in members if _is_local(peer.address)]
    if len(local) == 1:
        return local[0]
    listed = ", ".join(f"{peer.host}:{peer.port}" for peer in members)
    if not local:
        raise EtcdError(f"none of --peers {listed} is an address of this machine: say which one it is with --member")
    raise EtcdError(f"several of --peers {listed} are addresses of this machine: say which one it is with --member")


def _address_of(host: str) -> str:
    """The address of a host, IPv4 if it has one: etcd does not listen on names."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EtcdError(f"{host!r} is not the name of a machine: {error}") from error
    return min((str(address[0]) for *_, address in found), key=lambda one: (":" in one, one))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


class EtcdMember:
    """One member of a cluster as a child process."""

    def __init__(self, binary: str, version: str, plan: Plan, data: Path, more: Sequence[str], emit: Emitter) -> None:
        self._binary = binary
        self._version = version
        self._plan = plan
        self._data = data
        self._more = more
        self._emit = emit
        self._health_port = _free_port()
        self._process: asyncio.subprocess.Process | None = None
        self._output: deque[str] = deque(maxlen=KEPT_LINES)
        self._was_healthy = False
        self._is_healthy: bool | None = None

    async def supervise(self) -> None:
        """Run the member and restart it when it ends. EtcdError if it cannot start; cancelling stops the member."""
        pause_s = RESTART_PAUSE_S[0]
        loop = asyncio.get_running_loop()
        try:
            while True:
                started_at = loop.time()
                await self._run_once()
                code = self._process.returncode if self._process is not None else None
                if not self._was_healthy and loop.time() - started_at < FAILED_START_S:
                    raise EtcdError(f"etcd ended with status {code} and was never healthy:\n{self._last_lines()}")
                if loop.time() - started_at > LONG_RUN_S:
                    pause_s = RESTART_PAUSE_S[0]
                self._emit(
                    EtcdEnded(
                        run_id="", by=self._plan.name, status=code or 0, reason=self._last_lines(1), again_s=pause_s
                    )
                )
                self._is_healthy = None
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RESTART_PAUSE_S[1])
        finally:
            await self._stop()

    async def _run_once(self) -> None:
        arguments = self._plan.arguments(self._data, self._health_port, self._more)
        self._process = await asyncio.create_subprocess_exec(
            self._binary,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            start_new_session=True,  # Ctrl-C must reach this process only, which then stops etcd
        )
        self._emit(
            EtcdStarts(
                run_id="",
                by=self._plan.name,
                version=self._version,
                data=str(self._data),
                members=len(self._plan.peers),
            )
        )
        watching = asyncio.create_task(self._watch_health(), name="health of etcd")
        try:
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                self._output.append(line.decode(errors="replace").rstrip())
            await self._process.wait()
        finally:
            watching.cancel()

    async def _watch_health(self) -> None:
        """Emit an event whenever its health changes."""
        while True:
            healthy, why = await asyncio.to_thread(self._health)
            if healthy and not self._is_healthy:
                self._was_healthy = True
                endpoints = ",".join(self._plan.clients)
                self._emit(EtcdHealthy(run_id="", by=self._plan.name, address=self._plan.client, endpoints=endpoints))
            elif not healthy and self._is_healthy:
                self._emit(EtcdUnhealthy(run_id="", by=self._plan.name, reason=why))
            self._is_healthy = healthy
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def _health(self) -> tuple[bool, str]:
        """Whether the member answers and has a leader; why not. Blocks."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health_port}/health", timeout=5.0) as response:
                body = response.read().decode(errors="replace")
        except (OSError, urllib.error.URLError, ValueError) as error:
            return False, f"it does not answer: {error}"
        return '"true"' in body, f"it answers {body.strip()[:100]}"

    async def _stop(self) -> None:
        """Terminate the process; kill it after `STOP_S`."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _last_lines(self, count: int = 5) -> str:
        return "\n".join(list(self._output)[-count:])


async def serve_etcd_until_signal(
    *,
    bind: str | None,
    peers: str | None,
    member: str | None,
    data: str | None,
    binary: str | None,
    any_version: bool,
    more: Sequence[str],
    emit: Emitter,
) -> None:
    """Run a member until SIGTERM or SIGINT. EtcdError if it cannot be run."""
    path = find_etcd(binary)
    version = check_version(path, any_version=any_version)
    if peers is not None and data is None:
        raise EtcdError("a member of a cluster must have the same data after a restart: give its directory with --data")
    plan = plan_member(bind, peers, member)
    temporary = None if data is not None else Path(tempfile.mkdtemp(prefix="rallypoint-etcd-"))
    directory = temporary or Path(data or "")
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)  # etcd requires it
    except OSError as error:
        raise EtcdError(f"--data {directory} cannot be used: {error}") from error
    signalled = stop_signal()
    supervising = asyncio.create_task(
        EtcdMember(path, version, plan, directory, more, emit).supervise(), name="supervise etcd"
    )
    try:
        waited: list[asyncio.Future[Any]] = [supervising, signalled]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if supervising.done():
            supervising.result()
        emit(ServerStopped(run_id="", by=plan.name, reason=signalled.result()))
    finally:
        supervising.cancel()
        await asyncio.wait([supervising])
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _die_with_parent() -> None:
    """Runs in the child process: etcd must not survive a killed parent and keep its port."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
