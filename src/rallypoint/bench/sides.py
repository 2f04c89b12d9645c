"""What every side of a comparison can do. A side is a server and the client that a node is; both are made in a case."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from rallypoint.bench.helper import Helper
from rallypoint.bench.plan import Side


class Place(msgspec.Struct, frozen=True):
    """What a node got from its call."""

    rank: int
    size: int


class Sizes(msgspec.Struct, frozen=True):
    """What the nodes of a run ask for."""

    run_id: str
    least: int
    most: int
    join_timeout_s: int
    number: int = 0
    """Of the node that asks: some are told from outside which one they are."""


class Client(Protocol):
    """One node, in its own process. Every call blocks."""

    def rehearse(self) -> None:
        """Go through a round of its own once. A process that was forked from another pays for each page of memory when
        it first writes to it, which no node on a machine of its own does."""

    def create(self) -> None:
        """Make the client, if that has not happened, as a user would: some connect with it, others with their call."""

    def connect(self) -> None:
        """Make the client, and see to it that it is connected."""

    def join(self) -> Place:
        """Leave the round, if any, and wait for a place in the next."""

    def wait_told(self) -> None:
        """Return when the rendezvous says that it is time to join again."""


class Contender(Protocol):
    """A side, in the process of a case."""

    def load(self) -> None:
        """Import all that a node or the server needs, and start no thread."""

    def start_server(self, nodes: int) -> tuple[Helper, int]:
        """A server for one sample, in a process of its own, and its port."""

    def client(self, port: int, sizes: Sizes) -> Client:
        """The node of this process. Connects nothing yet."""

    def store(self, port: int, sizes: Sizes) -> Any:
        """A store that all nodes share, connected; it has the calls of `torch.distributed.Store`."""


def contender(side: Side) -> Contender:
    """The side of that name."""
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

        return TorchftSide(trips=2 if side is Side.TORCHFT_TWICE else 1)
    if side is Side.JAX:
        from rallypoint.bench.jax_side import JaxSide

        return JaxSide()
    from rallypoint.bench.torch_side import TorchSide

    return TorchSide(lean=side in (Side.TORCH_LEAN, Side.TORCH_UNSHARED), unshared=side is Side.TORCH_UNSHARED)
