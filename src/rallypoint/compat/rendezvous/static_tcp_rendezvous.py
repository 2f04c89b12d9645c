"""The names of `torch.distributed.elastic.rendezvous.static_tcp_rendezvous`: a handler with fixed ranks."""

from __future__ import annotations

from typing import NoReturn

from rallypoint.compat.rendezvous.api import RendezvousHandler, RendezvousParameters
from rallypoint.compat.rendezvous.handlers import create_static

__all__ = ["create_rdzv_handler"]


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler with fixed ranks, on a server that rank 0 hosts. `rank` is this node's rank. Does not block."""
    return create_static(params)


def __getattr__(name: str) -> NoReturn:
    if name == "StaticTCPRendezvous":
        raise ImportError(
            f"{name} is not in {__name__}: get a handler with create_rdzv_handler(params), or with "
            f'rallypoint.create_handler("static://host:29500/run-id?min_nodes=2&node_rank=0")',
            name=name,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
