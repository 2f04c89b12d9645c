"""The names and modules of `torch.distributed.elastic.rendezvous`.

    from rallypoint.compat.rendezvous import RendezvousParameters
    from rallypoint.compat.rendezvous.registry import get_rendezvous_handler

It also has the names of torchelastic, such as `RendezvousException`. docs/migrating.md lists the differences.
"""

from rallypoint.compat.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from rallypoint.compat.rendezvous.legacy_names import (
    RendezvousClosedException,
    RendezvousException,
    RendezvousHandlerFactory,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)
from rallypoint.compat.rendezvous.registry import _register_default_handlers

_register_default_handlers()

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

LEGACY_NAMES = (
    RendezvousClosedException,
    RendezvousException,
    RendezvousHandlerFactory,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)
"""Importable from here but not in `__all__`: torch no longer has these names."""
