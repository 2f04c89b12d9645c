"""The names of `torch.distributed.elastic.rendezvous.registry`, and the handlers in `rendezvous_handler_registry`.

All of them are Rallypoint's, whatever the backend name: `c10d` is a server that one of the nodes hosts (or files),
`etcd` and `etcd-v2` are etcd v3, `static` has fixed ranks. `get_backend()` returns the name that was asked for.
"""

from __future__ import annotations

from rallypoint.compat.rendezvous.api import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from rallypoint.compat.rendezvous.handlers import create_c10d, create_etcd, create_rallypoint, create_static

__all__ = ["get_rendezvous_handler"]


def _register_default_handlers() -> None:
    for name, creator in (
        ("rallypoint", create_rallypoint),
        ("c10d", create_c10d),
        ("etcd", create_etcd),
        ("etcd-v2", create_etcd),
        ("static", create_static),
    ):
        rendezvous_handler_registry.register(name, creator)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for these parameters. ValueError if their backend is not registered. Does not block."""
    return rendezvous_handler_registry.create_handler(params)
