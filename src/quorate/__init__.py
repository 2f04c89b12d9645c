"""Quorate: rendezvous for elastic distributed jobs.

    handler = quorate.create_handler("memory:///my-run?min_nodes=2&max_nodes=4")
    info = handler.next_rendezvous()      # .rank .world_size .round .store .members

    with quorate.join("memory:///my-run?min_nodes=2") as run:
        for world in run.rounds():        # a new one each time the world changes
            train(world.rank, world.world_size, world.store, until=world.changed)

`quorate.aio` is the same for asyncio; `quorate.testing` has what testing needs.
"""

from quorate._version import __version__
from quorate.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from quorate.backends.schemes import register_backend
from quorate.errors import (
    BackendError,
    ForkedProcessError,
    HistoryGone,
    LeaseGone,
    NewerSchemaError,
    OutcomeUnknown,
    QuorateError,
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
from quorate.handler import Changed, Handler, Run, World, join
from quorate.parameters import RendezvousParameters
from quorate.registry import (
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    create_handler,
    rendezvous_handler_registry,
)
from quorate.rendezvous.membership import Cause
from quorate.settings import Settings
from quorate.store import Store

__all__ = [
    "BackendError",
    "Cause",
    "Changed",
    "ForkedProcessError",
    "Handler",
    "HistoryGone",
    "LeaseGone",
    "NewerSchemaError",
    "OutcomeUnknown",
    "QuorateError",
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
    "create_handler",
    "join",
    "register_backend",
    "rendezvous_handler_registry",
]
