"""torch's `etcd_rendezvous_backend` is a cell in one key of etcd v2. Here etcd is a backend of its own, on v3."""

from __future__ import annotations

from typing import NoReturn

_HERE = ("EtcdRendezvousBackend", "create_backend")


def __getattr__(name: str) -> NoReturn:
    if name in _HERE:
        raise ImportError(
            f"{name} is not in {__name__}: here etcd is no single cell. Get a handler with "
            f"rallypoint.compat.rendezvous.registry.get_rendezvous_handler(params) for 'etcd' or 'etcd-v2', or with "
            f'rallypoint.create_handler("etcd://host:2379/run-id?min_nodes=2")',
            name=name,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
