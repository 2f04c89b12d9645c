"""The errors for the names of torch's `etcd_rendezvous_backend`, a cell in one key of etcd v2, which do not exist here.

Rallypoint's etcd backend uses many keys of etcd v3.
"""

from __future__ import annotations

from typing import NoReturn

_HERE = ("EtcdRendezvousBackend", "create_backend")


def __getattr__(name: str) -> NoReturn:
    if name in _HERE:
        raise ImportError(
            f"{name} is not in {__name__}: Rallypoint does not use etcd as a single cell. Get a handler with "
            f"rallypoint.compat.rendezvous.registry.get_rendezvous_handler(params) for 'etcd' or 'etcd-v2', or with "
            f'rallypoint.create_handler("etcd://host:2379/run-id?min_nodes=2")',
            name=name,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
