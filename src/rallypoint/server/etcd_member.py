"""`rallypoint serve --engine etcd`: starts a real etcd member, sees that it is healthy, and starts it again if it ends.

The same command on several machines forms a cluster: every one is given the same list of peers and finds itself in it.
Consensus, data and recovery are etcd's own; nothing here touches them.
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
from rallypoint.settings import DEFAULT_PORTS
from rallypoint.urls import format_endpoint, parse_endpoint

PEER_PORT = 2380
LOOK_S = 1.0
"""How often its health is asked for."""
SOON_S = 10.0
"""One that ends so soon after its start, without ever having been healthy, will not do better the next time."""
STOP_S = 10.0
AGAIN_S = (0.5, 10.0)
"""The first and the longest pause before it is started again."""
KEPT_LINES = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run one member."""

    name: str
    client: str
    """host:port that it listens on for clients."""
    peers: dict[str, str]
    """Name -> host:port for the other members, this one included."""
    clients: tuple[str, ...]
    """Where clients find all members, as far as that is known here."""

    def arguments(self, data: Path, health_port: int, more: Sequence[str]) -> list[str]:
        """What etcd is given."""
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
    """Who this one is, and where it listens. EtcdError if that cannot be told."""
    if peers is None:
        if member is not None:
            raise EtcdError("--member says which of --peers this one is: give --peers too, or leave it out")
        host, port = parse_endpoint(bind or "127.0.0.1", DEFAULT_PORTS["etcd"])
        client = format_endpoint(_address_of(host), port)
        peer = format_endpoint("127.0.0.1", _free_port())  # nobody else needs it
        return Plan("default", client, {"default": peer}, (format_endpoint(host, port),))
    given = [parse_endpoint(one, PEER_PORT) for one in peers.split(",")]
    found = [(name_of(host, port), _address_of(host), host, port) for host, port in given]
    if len({name for name, *_ in found}) != len(found):
        raise EtcdError(f"--peers {peers} names one member twice")
    name, address, _, _ = _own(found, member)
    host, port = parse_endpoint(bind, DEFAULT_PORTS["etcd"]) if bind is not None else (address, DEFAULT_PORTS["etcd"])
    everybody = {one: format_endpoint(other, other_port) for one, other, _, other_port in found}
    clients = tuple(format_endpoint(other, port) for _, _, other, _ in found)
    return Plan(name, format_endpoint(_address_of(host), port), everybody, clients)


def name_of(host: str, port: int) -> str:
    """What a member is called: the same on every machine."""
    return f"{host}-{port}".replace(":", ".")


def _own(found: list[tuple[str, str, str, int]], member: str | None) -> tuple[str, str, str, int]:
    """The one of the peers that this machine is."""
    if member is not None:
        host, port = parse_endpoint(member, PEER_PORT)
        chosen = [one for one in found if one[0] == name_of(host, port)]
        if not chosen:
            raise EtcdError(f"--member {member} is not among --peers {', '.join(one[2] for one in found)}")
        return chosen[0]
    ours = [one for one in found if _is_ours(one[1])]
    if len(ours) == 1:
        return ours[0]
    listed = ", ".join(f"{host}:{port}" for _, _, host, port in found)
    if not ours:
        raise EtcdError(f"none of --peers {listed} is an address of this machine: say which one it is with --member")
    raise EtcdError(f"several of --peers {listed} are addresses of this machine: say which one it is with --member")


def _address_of(host: str) -> str:
    """etcd listens on addresses only."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EtcdError(f"{host!r} is not the name of a machine: {error}") from error
    return min((str(address[0]) for *_, address in found), key=lambda one: (":" in one, one))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as one:
        try:
            one.bind((address, 0))
        except OSError:
            return False
    return True


class EtcdMember:
    """One member, supervised until `stop`."""

    def __init__(self, binary: str, version: str, plan: Plan, data: Path, more: Sequence[str], emit: Emitter) -> None:
        self._binary = binary
        self._version = version
        self._plan = plan
        self._data = data
        self._more = more
        self._emit = emit
        self._health_port = _free_port()
        self._process: asyncio.subprocess.Process | None = None
        self._words: deque[str] = deque(maxlen=KEPT_LINES)
        self._was_healthy = False
        self._is_healthy: bool | None = None

    async def supervise(self) -> None:
        """Run it, and again when it has ended. EtcdError if it never gets healthy; cancelling it ends the member."""
        pause_s = AGAIN_S[0]
        loop = asyncio.get_running_loop()
        try:
            while True:
                started_at = loop.time()
                await self._run_once()
                code = self._process.returncode if self._process is not None else None
                if not self._was_healthy and loop.time() - started_at < SOON_S:
                    raise EtcdError(f"etcd ended with status {code} before it was of any use:\n{self._last_words()}")
                if loop.time() - started_at > 60.0:
                    pause_s = AGAIN_S[0]
                self._emit(
                    EtcdEnded(
                        run_id="", by=self._plan.name, status=code or 0, reason=self._last_words(1), again_s=pause_s
                    )
                )
                self._is_healthy = None
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, AGAIN_S[1])
        finally:
            await self._end()

    async def _run_once(self) -> None:
        arguments = self._plan.arguments(self._data, self._health_port, self._more)
        self._process = await asyncio.create_subprocess_exec(
            self._binary,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            start_new_session=True,  # Ctrl-C is for this process, which ends it in good order
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
        looking = asyncio.create_task(self._look_after(), name="health of etcd")
        try:
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                self._words.append(line.decode(errors="replace").rstrip())
            await self._process.wait()
        finally:
            looking.cancel()

    async def _look_after(self) -> None:
        """Say when it becomes healthy, and when it is not any more."""
        while True:
            healthy, why = await asyncio.to_thread(self._health)
            if healthy and not self._is_healthy:
                self._was_healthy = True
                endpoints = ",".join(self._plan.clients)
                self._emit(EtcdHealthy(run_id="", by=self._plan.name, address=self._plan.client, endpoints=endpoints))
            elif not healthy and self._is_healthy:
                self._emit(EtcdUnhealthy(run_id="", by=self._plan.name, reason=why))
            self._is_healthy = healthy
            await asyncio.sleep(LOOK_S)

    def _health(self) -> tuple[bool, str]:
        """Whether it can do work: it has a leader and answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health_port}/health", timeout=5.0) as answer:
                said = answer.read().decode(errors="replace")
        except (OSError, urllib.error.URLError, ValueError) as error:
            return False, f"it does not answer: {error}"
        return '"true"' in said, f"it says {said.strip()[:100]}"

    async def _end(self) -> None:
        """In good order, or by force if that takes too long."""
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

    def _last_words(self, count: int = 5) -> str:
        return "\n".join(list(self._words)[-count:])


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
    """Run a member until SIGTERM or SIGINT. EtcdError if it cannot be."""
    path = find_etcd(binary)
    version = check_version(path, any_version=any_version)
    if peers is not None and data is None:
        raise EtcdError(
            "a member of a cluster must find its data again when it is started again: say where it is kept with --data"
        )
    plan = plan_member(bind, peers, member)
    temporary = None if data is not None else Path(tempfile.mkdtemp(prefix="rallypoint-etcd-"))
    place = temporary or Path(data or "")
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        place.chmod(0o700)  # etcd asks for it
    except OSError as error:
        raise EtcdError(f"--data {place} cannot be used: {error}") from error
    supervising = asyncio.create_task(
        EtcdMember(path, version, plan, place, more, emit).supervise(), name="supervise etcd"
    )
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def tell(number: signal.Signals) -> None:
        if not told.done():
            told.set_result(f"it got {number.name}")

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, tell, number)
    try:
        waited: list[asyncio.Future[Any]] = [supervising, told]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if supervising.done():
            supervising.result()
        emit(ServerStopped(run_id="", by=plan.name, reason=told.result()))
    finally:
        supervising.cancel()
        await asyncio.wait([supervising])
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _die_with_parent() -> None:
    """In the child: should this process be killed, etcd is not to be left behind with its port."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
