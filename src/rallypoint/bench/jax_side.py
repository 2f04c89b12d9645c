"""JAX's coordination service, through the part of jaxlib that `jax.distributed.initialize` calls.

Its nodes have their numbers, and the number of all of them, from outside. `connect` returns when all have come, which
is its rendezvous; afterwards a barrier is what stands for a round. There is no other round: whoever is lost takes the
job with it, and nobody can come late.
"""

from __future__ import annotations

import importlib
import itertools
import socket
from typing import Any

from rallypoint.api import free_port
from rallypoint.bench.helper import Helper
from rallypoint.bench.plan import LIMIT_S
from rallypoint.bench.rallypoint_side import HOST
from rallypoint.bench.sides import Place, Sizes
from rallypoint.bench.torch_side import report_port, start_forked

_MS = 1_000


class JaxSide:
    """The service alone: no devices, no backends."""

    def load(self) -> None:
        importlib.import_module("jax._src.lib")

    def start_server(self, nodes: int) -> tuple[Helper, int]:
        def host(sock: socket.socket) -> None:
            port = free_port()
            service = _serve(port, nodes)
            report_port(sock, port)
            del service

        return start_forked(host)

    def client(self, port: int, sizes: Sizes) -> JaxClient:
        return JaxClient(port, sizes)

    def store(self, port: int, sizes: Sizes) -> Any:
        client = JaxClient(port, sizes)
        client.connect()
        return JaxStore(client)


class JaxClient:
    """One process of a JAX job."""

    def __init__(self, port: int, sizes: Sizes) -> None:
        self._port = port
        self._sizes = sizes
        self._is_connected = False
        self._barriers = itertools.count()
        self.client: Any = None

    def rehearse(self) -> None:
        """With a service of its own: one that waits for all has nothing for one."""
        port = free_port()
        service = _serve(port, 1)
        alone = JaxClient(port, Sizes("rehearsal", 1, 1, join_timeout_s=int(LIMIT_S)))
        alone.create()
        alone.join()
        alone.join()
        alone.client.shutdown()
        del alone, service

    def create(self) -> None:
        """Connects nothing: the first call does."""
        if self.client is None:
            limit_s = self._sizes.join_timeout_s
            self.client = _module().get_distributed_runtime_client(
                f"{HOST}:{self._port}", self._sizes.number, init_timeout=limit_s, shutdown_on_destruction=False
            )

    def connect(self) -> None:
        """Returns when all have done so."""
        self.create()
        if not self._is_connected:
            self.client.connect()
            self._is_connected = True

    def join(self) -> Place:
        if self._is_connected:
            self.client.wait_at_barrier(f"round-{next(self._barriers)}", self._sizes.join_timeout_s * _MS)
        else:
            self.connect()
        return Place(self._sizes.number, self._sizes.most)

    def wait_told(self) -> None:
        raise NotImplementedError("JAX tells nobody anything: its jobs have one round")


class JaxStore:
    """Its keys with the calls that the measurement makes; it has no others (see `plan.LACKING`)."""

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
