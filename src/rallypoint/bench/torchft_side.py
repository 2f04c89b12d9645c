"""torchft's lighthouse, through the low-level API of its package: a quorum of all replicas stands for a round."""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta
from typing import Any

from rallypoint.bench.helper import Helper
from rallypoint.bench.plan import LIMIT_S
from rallypoint.bench.sides import Place, Sizes
from rallypoint.bench.torch_side import report_port, start_forked

JOIN_TIMEOUT_MS = 100
"""Its default. It does not matter here: a quorum needs all replicas."""


class TorchftSide:
    """The lighthouse alone: managers and their stores are not started.

    Asked twice, each replica knows that all others have had the first quorum: what a confirmed round is, in trips.
    """

    def __init__(self, trips: int = 1) -> None:
        self._trips = trips

    def load(self) -> None:
        importlib.import_module("torchft._torchft")

    def start_server(self, nodes: int) -> tuple[Helper, int]:
        def host(sock: socket.socket) -> None:
            lighthouse = _module().LighthouseServer(
                bind="127.0.0.1:0", min_replicas=nodes, join_timeout_ms=JOIN_TIMEOUT_MS
            )
            report_port(sock, int(lighthouse.address().rpartition(":")[2]))

        return start_forked(host)

    def client(self, port: int, sizes: Sizes) -> TorchftClient:
        return TorchftClient(port, self._trips)

    def store(self, port: int, sizes: Sizes) -> Any:
        raise NotImplementedError("torchft uses torch's store")


class TorchftClient:
    """One replica."""

    def __init__(self, port: int, trips: int = 1) -> None:
        self._port = port
        self._trips = trips
        self._client: Any = None
        self._id = f"replica-{os.getpid()}"

    def rehearse(self) -> None:
        """With a lighthouse of its own: one that waits for all has no round for one."""
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
        for _ in range(self._trips - 1):
            self._ask()
        ids = [member.replica_id for member in self._ask().participants]
        return Place(ids.index(self._id), len(ids))

    def _ask(self) -> Any:
        return self._client.quorum(self._id, timedelta(seconds=LIMIT_S), world_size=1)

    def wait_told(self) -> None:
        raise NotImplementedError("torchft is measured in a rendezvous only")


def _module() -> Any:
    return importlib.import_module("torchft._torchft")
