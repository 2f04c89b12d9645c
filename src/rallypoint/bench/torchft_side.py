"""torchft's lighthouse, through the low-level API of its package: a quorum of all replicas stands for a round."""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta
from typing import Any

from rallypoint.bench.plan import LIMIT_S
from rallypoint.bench.processes import ChildProcess
from rallypoint.bench.sides import Place, RunConfig
from rallypoint.bench.torch_side import serve_forever, start_forked

JOIN_TIMEOUT_MS = 100
"""Its default. Without effect here: a quorum needs all replicas."""


class TorchftSide:
    """The lighthouse alone, without managers and their stores.

    A quorum is one answer to all replicas, which none of them confirms. After a second one each replica knows that all
    others had the first: the guarantee of a confirmed round, for a second round trip.
    """

    def __init__(self, quorums: int = 1) -> None:
        self._quorums = quorums

    def load(self) -> None:
        importlib.import_module("torchft._torchft")

    def start_server(self, nodes: int) -> tuple[ChildProcess, int]:
        def host(sock: socket.socket) -> None:
            lighthouse = _module().LighthouseServer(
                bind="127.0.0.1:0", min_replicas=nodes, join_timeout_ms=JOIN_TIMEOUT_MS
            )
            serve_forever(sock, int(lighthouse.address().rpartition(":")[2]))

        return start_forked(host)

    def client(self, port: int, config: RunConfig) -> TorchftClient:
        return TorchftClient(port, self._quorums)

    def store(self, port: int, config: RunConfig) -> Any:
        raise NotImplementedError("torchft uses torch's store")


class TorchftClient:
    """One replica."""

    def __init__(self, port: int, quorums: int = 1) -> None:
        self._port = port
        self._quorums = quorums
        self._client: Any = None
        self._id = f"replica-{os.getpid()}"

    def warm_up(self) -> None:
        """With a lighthouse of its own: the measured one waits for all replicas."""
        own = _module().LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=JOIN_TIMEOUT_MS)
        alone = TorchftClient(int(own.address().rpartition(":")[2]))
        alone.create()
        alone.join()
        own.shutdown()

    def connect(self) -> None:
        self.create()

    def create(self) -> None:
        """Connects to the lighthouse."""
        if self._client is None:
            self._client = _module().LighthouseClient(f"http://127.0.0.1:{self._port}", timedelta(seconds=LIMIT_S))

    def join(self) -> Place:
        for _ in range(self._quorums - 1):
            self._ask()
        ids = [member.replica_id for member in self._ask().participants]
        return Place(ids.index(self._id), len(ids))

    def _ask(self) -> Any:
        return self._client.quorum(self._id, timedelta(seconds=LIMIT_S), world_size=1)

    def wait_changed(self) -> None:
        raise NotImplementedError("torchft is measured in a rendezvous only")


def _module() -> Any:
    return importlib.import_module("torchft._torchft")
