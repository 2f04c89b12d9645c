"""What `torch.distributed.elastic.rendezvous` has, here: the same names, the same modules.

    from rallypoint.compat.rendezvous import RendezvousParameters
    from rallypoint.compat.rendezvous.registry import get_rendezvous_handler

Also here: the names of the older package, `RendezvousException` and the like. docs/migrating.md says what is different.
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
from rallypoint.compat.rendezvous.older import (
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

OLDER_NAMES = (
    RendezvousClosedException,
    RendezvousException,
    RendezvousHandlerFactory,
    RendezvousNonRetryableError,
    RendezvousTimeoutException,
)
"""Importable from here, and not in `__all__`, as torch's are no longer."""
