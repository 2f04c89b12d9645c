"""The interface of a side: how it starts a server, and what a node does. Both are made in the process of a case."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from rallypoint.bench.plan import Side
from rallypoint.bench.processes import ChildProcess


class Place(msgspec.Struct, frozen=True):
    """What the call of a node returned."""

    rank: int
    size: int


class RunConfig(msgspec.Struct, frozen=True):
    """What a node asks for."""

    run_id: str
    min_nodes: int
    max_nodes: int
    join_timeout_s: int
    node: int = 0
    """Its number; some systems need it from outside."""


class Client(Protocol):
    """One node, in its own process. Every call blocks."""

    def warm_up(self) -> None:
        """Go through a round alone. A forked process pays for each page of memory at its first write to it, which no
        node on a machine of its own does."""

    def create(self) -> None:
        """Make the client, if there is none yet, as a user would. Some connect here, others in their first call."""

    def connect(self) -> None:
        """Make the client and connect it."""

    def join(self) -> Place:
        """Leave the round, if any, and wait for a place in the next."""

    def wait_changed(self) -> None:
        """Return when the rendezvous says that it is time to join again."""


class Implementation(Protocol):
    """A side, in the process of a case."""

    def load(self) -> None:
        """Import all that a node or the server needs. Starts no thread."""

    def start_server(self, nodes: int) -> tuple[ChildProcess, int]:
        """A server for one sample, in a process of its own, and its port."""

    def client(self, port: int, config: RunConfig) -> Client:
        """The node of this process, not yet connected."""

    def store(self, port: int, config: RunConfig) -> Any:
        """A connected store that all nodes share, with the calls of `torch.distributed.Store`."""


def implementation(side: Side) -> Implementation:
    """The implementation of a side. Imports no competitor: see `load`."""
    if side is Side.RALLYPOINT:
        from rallypoint.bench.rallypoint_side import RallypointSide

        return RallypointSide()
    if side is Side.RALLYPOINT_ETCD:
        from rallypoint.bench.etcd_side import RallypointEtcdSide

        return RallypointEtcdSide()
    if side in (Side.TORCH_ETCD, Side.TORCH_ETCD_V2):
        from rallypoint.bench.etcd_side import TorchEtcdSide

        return TorchEtcdSide("etcd" if side is Side.TORCH_ETCD else "etcd-v2")
    if side in (Side.TORCHFT, Side.TORCHFT_TWICE):
        from rallypoint.bench.torchft_side import TorchftSide

        return TorchftSide(quorums=2 if side is Side.TORCHFT_TWICE else 1)
    if side is Side.JAX:
        from rallypoint.bench.jax_side import JaxSide

        return JaxSide()
    from rallypoint.bench.torch_side import TorchSide

    return TorchSide(lean=side in (Side.TORCH_LEAN, Side.TORCH_UNSHARED), unshared=side is Side.TORCH_UNSHARED)
