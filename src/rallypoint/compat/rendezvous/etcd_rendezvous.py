"""The names of `torch.distributed.elastic.rendezvous.etcd_rendezvous` that apply to etcd v3.

`create_rdzv_handler(params)` returns a handler on etcd v3. The classes of the etcd v2 implementation do not exist here;
the error on importing one of them says what to use instead.
"""

from __future__ import annotations

from typing import NoReturn

from rallypoint.compat.rendezvous.api import RendezvousHandler, RendezvousParameters
from rallypoint.compat.rendezvous.handlers import create_etcd

__all__ = ["create_rdzv_handler"]

_INSTEAD = {
    "EtcdRendezvousHandler": "get a handler with create_rdzv_handler(params), or with "
    'rallypoint.create_handler("etcd://host:2379/run-id?min_nodes=2")',
    "EtcdRendezvous": "it was the algorithm behind EtcdRendezvousHandler: get one with create_rdzv_handler(params)",
    "EtcdRendezvousRetryableFailure": "it was internal, and nothing raises it here: attempts are repeated until the "
    "join time-out, which raises RendezvousTimeoutError",
    "EtcdRendezvousRetryImmediately": "it was internal, and nothing raises it here: attempts are repeated until the "
    "join time-out, which raises RendezvousTimeoutError",
}


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler on the etcd v3 cluster of the endpoint. Needs `rallypoint[etcd]`; does not block."""
    return create_etcd(params)


def __getattr__(name: str) -> NoReturn:
    if name in _INSTEAD:
        raise ImportError(f"{name} is not in rallypoint.compat.rendezvous.etcd_rendezvous: {_INSTEAD[name]}", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
