"""What `torch.distributed.elastic.rendezvous.static_tcp_rendezvous` has: a handler with fixed ranks."""

from __future__ import annotations

from typing import NoReturn

from rallypoint.compat.rendezvous.api import RendezvousHandler, RendezvousParameters
from rallypoint.compat.rendezvous.handlers import create_static

__all__ = ["create_rdzv_handler"]


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Fixed ranks over a server that rank 0 hosts; `rank` says which one this node has. Does not block."""
    return create_static(params)


def __getattr__(name: str) -> NoReturn:
    if name == "StaticTCPRendezvous":
        raise ImportError(
            f"{name} is not in {__name__}: get a handler with create_rdzv_handler(params), or with "
            f'rallypoint.create_handler("static://host:29500/run-id?min_nodes=2&node_rank=0")',
            name=name,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
