"""The names of `torch.distributed.elastic.rendezvous.api`. The classes are Rallypoint's own."""

from __future__ import annotations

from rallypoint.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from rallypoint.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
    SettingsError,
)
from rallypoint.parameters import RendezvousParameters
from rallypoint.registry import RendezvousHandlerCreator
from rallypoint.registry import RendezvousHandlerRegistry as _Registry

__all__ = [
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "rendezvous_handler_registry",
]


class RendezvousHandlerRegistry(_Registry):
    """Handler creators by backend name. Unlike Rallypoint's registry, it does not also know the URL schemes."""

    def _creator(self, name: str) -> RendezvousHandlerCreator:
        if name not in self._creators:
            known = ", ".join(sorted(self._creators)) or "none"
            raise SettingsError(
                f"the rendezvous backend {name!r} is not registered (registered: {known}). Register it first",
                option="backend",
                value=name,
            )
        return self._creators[name]


rendezvous_handler_registry = RendezvousHandlerRegistry()
"""Knows `rallypoint`, `c10d`, `etcd`, `etcd-v2` and `static` once `rallypoint.compat.rendezvous` is imported."""
