"""Rendezvous over an etcd: Rallypoint's, and torch's two. A real etcd of one member is started for every sample."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

from rallypoint.bench.helper import Helper, end_all, execute
from rallypoint.bench.plan import LAST_CALL_S, POLL_S
from rallypoint.bench.rallypoint_side import HOST, RallypointClient
from rallypoint.bench.sides import Place, Sizes

START_S = 30.0
LOOK_S = 0.02


class EtcdHelper(Helper):
    """An etcd, with its data, which goes with it."""

    def __init__(self, helper: Helper, place: str) -> None:
        super().__init__(helper.pid, helper.sock)
        self._place = place

    def reap(self) -> None:
        super().reap()
        shutil.rmtree(self._place, ignore_errors=True)


def start_etcd(*options: str) -> tuple[EtcdHelper, int]:
    """An etcd of one member that answers, and its port for clients. RuntimeError if there is none."""
    binary = shutil.which("etcd", path="/usr/bin:/usr/local/bin:/opt/bin") or shutil.which("etcd")
    if binary is None:
        raise RuntimeError("there is no etcd: install it (Debian: apt-get install etcd-server)")
    from rallypoint.api import free_port

    port, peer = free_port(), free_port()
    place = tempfile.mkdtemp(prefix="rallypoint-bench-")
    urls = [f"--{kind}=http://{HOST}:{port}" for kind in ("listen-client-urls", "advertise-client-urls")]
    urls += [f"--{kind}=http://{HOST}:{peer}" for kind in ("listen-peer-urls", "initial-advertise-peer-urls")]
    command = [binary, f"--data-dir={place}/data", *urls, f"--initial-cluster=default=http://{HOST}:{peer}", *options]
    helper = EtcdHelper(execute([*command, "--logger=zap", "--log-level=error"], f"{place}/log"), place)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and not helper.has_ended():
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=1.0) as answer:
                if b'"true"' in answer.read():
                    return helper, port
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(LOOK_S)
    end_all([helper])
    raise RuntimeError(f"etcd did not answer on {HOST}:{port} within {START_S:g} s")


class RallypointEtcdSide:
    """Rallypoint on etcd. The nodes rehearse, each by itself: gRPC must not have been used by a process that forks."""

    def load(self) -> None:
        for name in (
            "rallypoint.aio",
            "rallypoint.backends.etcd.backend",
            "rallypoint.rendezvous.election",
            "rallypoint.handler",
        ):
            importlib.import_module(name)

    def start_server(self, nodes: int) -> tuple[Helper, int]:
        return start_etcd()

    def client(self, port: int, sizes: Sizes) -> RallypointClient:
        return RallypointClient(port, sizes, "etcd")

    def store(self, port: int, sizes: Sizes) -> Any:
        raise NotImplementedError("the store is measured on the embedded server")


class TorchEtcdSide:
    """torch's `etcd` (the older one, with a state machine of its own) or `etcd-v2` (its c10d rendezvous on etcd)."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def load(self) -> None:
        for name in ("registry", "etcd_rendezvous", "etcd_rendezvous_backend"):
            importlib.import_module(f"torch.distributed.elastic.rendezvous.{name}")

    def start_server(self, nodes: int) -> tuple[Helper, int]:
        return start_etcd("--enable-v2")

    def client(self, port: int, sizes: Sizes) -> TorchEtcdClient:
        return TorchEtcdClient(self._backend, port, sizes)

    def store(self, port: int, sizes: Sizes) -> Any:
        raise NotImplementedError("the store is measured on the embedded server")


class TorchEtcdClient:
    """One node, through the registry of rendezvous handlers as torch's agent does it."""

    def __init__(self, backend: str, port: int, sizes: Sizes) -> None:
        self._backend = backend
        self._port = port
        self._sizes = sizes
        self._handler: Any = None

    def rehearse(self) -> None:
        sizes = Sizes(f"rehearsal-{os.getpid()}", 1, 1, join_timeout_s=int(START_S))
        alone = TorchEtcdClient(self._backend, self._port, sizes)
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
        limit: dict[str, object] = {"join_timeout": self._sizes.join_timeout_s}
        if self._backend == "etcd":
            limit = {"timeout": self._sizes.join_timeout_s}
        parameters = rendezvous.RendezvousParameters(
            backend=self._backend,
            endpoint=f"{HOST}:{self._port}",
            run_id=self._sizes.run_id,
            min_nodes=self._sizes.least,
            max_nodes=self._sizes.most,
            local_addr=HOST,
            last_call_timeout=LAST_CALL_S,
            **limit,
        )
        self._handler = registry.get_rendezvous_handler(parameters)

    def join(self) -> Place:
        info = self._handler.next_rendezvous()
        return Place(info.rank, info.world_size)

    def wait_told(self) -> None:
        """As its agent does: ask again and again."""
        while self._handler.num_nodes_waiting() <= 0:
            time.sleep(POLL_S)
