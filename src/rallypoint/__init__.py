"""Rallypoint: rendezvous for elastic distributed jobs.

    handler = rallypoint.create_handler("tcp://head:29400/my-run?min_nodes=2&max_nodes=4")
    info = handler.next_rendezvous()      # .rank .world_size .round .store .members

    with rallypoint.join("tcp://head:29400/my-run?min_nodes=2") as run:
        for world in run.rounds():        # a new one each time the world changes
            train(world.rank, world.world_size, world.store, until=world.changed)

`rallypoint.aio` is the same for asyncio; `rallypoint.testing` is a test kit. Importing this package must stay cheap: a
public name is imported from its module at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rallypoint._version import __version__

if TYPE_CHECKING:
    from rallypoint._alive import alive
    from rallypoint.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
    from rallypoint.backends.schemes import register_backend
    from rallypoint.errors import (
        BackendError,
        ForkedProcessError,
        HistoryGone,
        LeaseGone,
        NewerSchemaError,
        OutcomeUnknown,
        RallypointError,
        Rejected,
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousGracefulExitError,
        RendezvousStateError,
        RendezvousTimeoutError,
        SessionLostError,
        SettingsError,
        SettingsMismatchError,
        StoreError,
        StoreFencedError,
        StoreTimeoutError,
        Unavailable,
    )
    from rallypoint.handler import Changed, Handler, Run, World, join
    from rallypoint.parameters import RendezvousParameters
    from rallypoint.registry import (
        RendezvousHandlerCreator,
        RendezvousHandlerRegistry,
        create_handler,
        rendezvous_handler_registry,
    )
    from rallypoint.rendezvous.membership import Cause
    from rallypoint.rendezvous.records import LeaveCause, LeaveKind
    from rallypoint.settings import Settings
    from rallypoint.store.blocking import Store

__all__ = [
    "BackendError",
    "Cause",
    "Changed",
    "ForkedProcessError",
    "Handler",
    "HistoryGone",
    "LeaseGone",
    "LeaveCause",
    "LeaveKind",
    "NewerSchemaError",
    "OutcomeUnknown",
    "RallypointError",
    "Rejected",
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
    "Run",
    "SessionLostError",
    "Settings",
    "SettingsError",
    "SettingsMismatchError",
    "Store",
    "StoreError",
    "StoreFencedError",
    "StoreTimeoutError",
    "Unavailable",
    "World",
    "__version__",
    "alive",
    "create_handler",
    "join",
    "register_backend",
    "rendezvous_handler_registry",
]

_NAMES = {
    "rallypoint._alive": ("alive",),
    "rallypoint.api": ("RendezvousHandler", "RendezvousInfo", "RendezvousStoreInfo"),
    "rallypoint.backends.schemes": ("register_backend",),
    "rallypoint.errors": (
        "BackendError",
        "ForkedProcessError",
        "HistoryGone",
        "LeaseGone",
        "NewerSchemaError",
        "OutcomeUnknown",
        "RallypointError",
        "Rejected",
        "RendezvousClosedError",
        "RendezvousConnectionError",
        "RendezvousError",
        "RendezvousGracefulExitError",
        "RendezvousStateError",
        "RendezvousTimeoutError",
        "SessionLostError",
        "SettingsError",
        "SettingsMismatchError",
        "StoreError",
        "StoreFencedError",
        "StoreTimeoutError",
        "Unavailable",
    ),
    "rallypoint.handler": ("Changed", "Handler", "Run", "World", "join"),
    "rallypoint.parameters": ("RendezvousParameters",),
    "rallypoint.registry": (
        "RendezvousHandlerCreator",
        "RendezvousHandlerRegistry",
        "create_handler",
        "rendezvous_handler_registry",
    ),
    "rallypoint.rendezvous.membership": ("Cause",),
    "rallypoint.rendezvous.records": ("LeaveCause", "LeaveKind"),
    "rallypoint.settings": ("Settings",),
    "rallypoint.store": ("Store",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name, or a module of the package."""
    if name in _MODULE_OF:
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value
    if not name.startswith("__"):
        try:
            return import_module(f"rallypoint.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"rallypoint.{name}":
                raise
    raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
