"""JAX's coordination service, through the part of jaxlib that `jax.distributed.initialize` calls.

Its processes get their number, and how many there are, from outside. `connect` returns when all have connected: that
is its rendezvous. A barrier stands for a further round. There is no new membership: the loss of a process ends the job,
and none can join later.
"""

from __future__ import annotations

import importlib
import itertools
import socket
from typing import Any

from rallypoint.api import free_port
from rallypoint.bench.plan import LIMIT_S
from rallypoint.bench.processes import ChildProcess
from rallypoint.bench.rallypoint_side import HOST
from rallypoint.bench.sides import Place, RunConfig
from rallypoint.bench.torch_side import serve_forever, start_forked

_MS = 1_000


class JaxSide:
    """The service alone: no devices, no backends."""

    def load(self) -> None:
        importlib.import_module("jax._src.lib")

    def start_server(self, nodes: int) -> tuple[ChildProcess, int]:
        def host(sock: socket.socket) -> None:
            port = free_port()
            service = _serve(port, nodes)
            serve_forever(sock, port)
            del service

        return start_forked(host)

    def client(self, port: int, config: RunConfig) -> JaxClient:
        return JaxClient(port, config)

    def store(self, port: int, config: RunConfig) -> Any:
        client = JaxClient(port, config)
        client.connect()
        return JaxStore(client)


class JaxClient:
    """One process of a JAX job."""

    def __init__(self, port: int, config: RunConfig) -> None:
        self._port = port
        self._config = config
        self._is_connected = False
        self._barriers = itertools.count()
        self.client: Any = None

    def warm_up(self) -> None:
        """With a service of its own: the measured one waits for all processes."""
        port = free_port()
        service = _serve(port, 1)
        alone = JaxClient(port, RunConfig("warm-up", 1, 1, join_timeout_s=int(LIMIT_S)))
        alone.create()
        alone.join()
        alone.join()
        alone.client.shutdown()
        del alone, service

    def create(self) -> None:
        """Does not connect: the first call does."""
        if self.client is None:
            limit_s = self._config.join_timeout_s
            self.client = _module().get_distributed_runtime_client(
                f"{HOST}:{self._port}", self._config.node, init_timeout=limit_s, shutdown_on_destruction=False
            )

    def connect(self) -> None:
        """Returns when all processes have connected."""
        self.create()
        if not self._is_connected:
            self.client.connect()
            self._is_connected = True

    def join(self) -> Place:
        if self._is_connected:
            self.client.wait_at_barrier(f"round-{next(self._barriers)}", self._config.join_timeout_s * _MS)
        else:
            self.connect()
        return Place(self._config.node, self._config.max_nodes)

    def wait_changed(self) -> None:
        raise NotImplementedError("a JAX job has one round")


class JaxStore:
    """Its key-value store with the names of torch's calls, as far as it has them (see `plan.UNSUPPORTED_OPS`)."""

    def __init__(self, client: JaxClient) -> None:
        self._client = client.client

    def set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str) -> Any:
        return self._client.blocking_key_value_get_bytes(key, int(LIMIT_S) * _MS)

    def add(self, key: str, amount: int) -> Any:
        return self._client.key_value_increment(key, amount)


def _serve(port: int, nodes: int) -> Any:
    return _module().get_distributed_runtime_service(f"{HOST}:{port}", nodes)


def _module() -> Any:
    return importlib.import_module("jax._src.lib")._jax
