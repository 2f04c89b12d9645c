"""Rendezvous on etcd: Rallypoint's and torch's two. Every sample starts a real etcd of one member."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

from rallypoint.bench.plan import LAST_CALL_S, POLL_S
from rallypoint.bench.processes import ChildProcess, kill_all, spawn
from rallypoint.bench.rallypoint_side import HOST, RallypointClient
from rallypoint.bench.sides import Place, RunConfig

START_TIMEOUT_S = 30.0
RETRY_S = 0.02
ETCD_PATH = "/usr/bin:/usr/local/bin:/opt/bin"
"""Searched before PATH, where a virtual environment may have another version."""


class EtcdProcess(ChildProcess):
    """An etcd; its data directory is removed with it."""

    def __init__(self, process: ChildProcess, folder: str) -> None:
        super().__init__(process.pid, process.sock)
        self._folder = folder

    def reap(self) -> None:
        super().reap()
        shutil.rmtree(self._folder, ignore_errors=True)


def etcd_binary() -> str | None:
    """The path of the etcd that is installed."""
    return shutil.which("etcd", path=ETCD_PATH) or shutil.which("etcd")


def start_etcd(*options: str) -> tuple[EtcdProcess, int]:
    """Start an etcd of one member and wait until it answers; its port for clients. RuntimeError if it does not."""
    binary = etcd_binary()
    if binary is None:
        raise RuntimeError("there is no etcd: install it (Debian: apt-get install etcd-server)")
    from rallypoint.api import free_port

    port, peer = free_port(), free_port()
    folder = tempfile.mkdtemp(prefix="rallypoint-bench-")
    urls = [f"--{kind}=http://{HOST}:{port}" for kind in ("listen-client-urls", "advertise-client-urls")]
    urls += [f"--{kind}=http://{HOST}:{peer}" for kind in ("listen-peer-urls", "initial-advertise-peer-urls")]
    command = [binary, f"--data-dir={folder}/data", *urls, f"--initial-cluster=default=http://{HOST}:{peer}", *options]
    process = EtcdProcess(spawn([*command, "--logger=zap", "--log-level=error"], f"{folder}/log"), folder)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and not process.has_ended():
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=1.0) as answer:
                if b'"true"' in answer.read():
                    return process, port
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(RETRY_S)
    kill_all([process])
    raise RuntimeError(f"etcd did not answer on {HOST}:{port} within {START_TIMEOUT_S:g} s")


class RallypointEtcdSide:
    """Rallypoint on etcd. `load` makes no connection: a process that has used gRPC must not fork."""

    def load(self) -> None:
        for name in (
            "rallypoint.aio",
            "rallypoint.backends.etcd.backend",
            "rallypoint.rendezvous.election",
            "rallypoint.handler",
        ):
            importlib.import_module(name)

    def start_server(self, nodes: int) -> tuple[ChildProcess, int]:
        return start_etcd()

    def client(self, port: int, config: RunConfig) -> RallypointClient:
        return RallypointClient(port, config, "etcd")

    def store(self, port: int, config: RunConfig) -> Any:
        raise NotImplementedError("the store is measured on the embedded server")


class TorchEtcdSide:
    """torch's `etcd` (the older one, with a state machine of its own) or `etcd-v2` (its c10d rendezvous on etcd)."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def load(self) -> None:
        for name in ("registry", "etcd_rendezvous", "etcd_rendezvous_backend"):
            importlib.import_module(f"torch.distributed.elastic.rendezvous.{name}")

    def start_server(self, nodes: int) -> tuple[ChildProcess, int]:
        return start_etcd("--enable-v2")

    def client(self, port: int, config: RunConfig) -> TorchEtcdClient:
        return TorchEtcdClient(self._backend, port, config)

    def store(self, port: int, config: RunConfig) -> Any:
        raise NotImplementedError("the store is measured on the embedded server")


class TorchEtcdClient:
    """One node, through the registry of rendezvous handlers, like torch's agent."""

    def __init__(self, backend: str, port: int, config: RunConfig) -> None:
        self._backend = backend
        self._port = port
        self._config = config
        self._handler: Any = None

    def warm_up(self) -> None:
        config = RunConfig(f"warm-up-{os.getpid()}", 1, 1, join_timeout_s=int(START_TIMEOUT_S))
        alone = TorchEtcdClient(self._backend, self._port, config)
        alone.create()
        alone.join()
        alone._handler.shutdown()

    def connect(self) -> None:
        self.create()

    def create(self) -> None:
        if self._handler is not None:
            return
        rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous")
        registry = importlib.import_module("torch.distributed.elastic.rendezvous.registry")
        limit: dict[str, object] = {"join_timeout": self._config.join_timeout_s}
        if self._backend == "etcd":
            limit = {"timeout": self._config.join_timeout_s}
        parameters = rendezvous.RendezvousParameters(
            backend=self._backend,
            endpoint=f"{HOST}:{self._port}",
            run_id=self._config.run_id,
            min_nodes=self._config.min_nodes,
            max_nodes=self._config.max_nodes,
            local_addr=HOST,
            last_call_timeout=LAST_CALL_S,
            **limit,
        )
        self._handler = registry.get_rendezvous_handler(parameters)

    def join(self) -> Place:
        info = self._handler.next_rendezvous()
        return Place(info.rank, info.world_size)

    def wait_changed(self) -> None:
        """Ask repeatedly, as its agent does."""
        while self._handler.num_nodes_waiting() <= 0:
            time.sleep(POLL_S)
