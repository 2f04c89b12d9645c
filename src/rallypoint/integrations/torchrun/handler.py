"""The rendezvous handler of torchrun's backend `rallypoint`: torch's interface, errors and results over our handler.

It adds no behaviour of its own but what torch's agent needs: a TCPStore for the workers of every round, and a
`shutdown()` that does not close the run for everybody when only this node is to go.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from rallypoint.errors import RallypointError, RendezvousGracefulExitError, SettingsMismatchError
from rallypoint.handler import Handler
from rallypoint.integrations.torchrun.bootstrap import RoundStores
from rallypoint.integrations.torchrun.errors import rendezvous_error
from rallypoint.integrations.torchrun.narration import Narrator
from rallypoint.integrations.torchrun.settings import settings_of
from rallypoint.integrations.torchrun.store import TorchStore
from rallypoint.rendezvous.membership import Bootstrap, Identity
from rallypoint.settings import Parameters, Settings

SHARING_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ONLY_THIS_NODE = (RendezvousGracefulExitError, SettingsMismatchError)
"""Whoever gets one of these is not to be a part of the run; that is no reason to end it for the others."""


class NamedParameters(Parameters, Protocol):
    """torch's `RendezvousParameters`."""

    @property
    def backend(self) -> str: ...


def create_handler(params: NamedParameters, environ: Mapping[str, str] = os.environ) -> TorchrunHandler:
    """What torchrun's registry calls. SettingsError, a ValueError, if an option is not acceptable. Does not block."""
    return TorchrunHandler(settings_of(params, environ), params.backend)


def shares_store() -> bool:
    """Whether the agent of rank 0 serves the workers' store, as it does unless torch's variable says otherwise."""
    return os.environ.get(SHARING_VARIABLE, "0") != "1"


class TorchrunHandler(RendezvousHandler):  # type: ignore[misc]  # torch is not typed here
    """One agent of one run."""

    def __init__(self, settings: Settings, backend_name: str) -> None:
        stores = self._stores = RoundStores(shares_store, settings.confirm_timeout_s)
        narrator = self._narrator = Narrator(settings)

        def bootstrap(identity: Identity) -> Bootstrap:  # refers to no handler: one that is dropped must be able to go
            narrator.introduce(identity)
            return stores.bootstrap(identity)

        self._handler = Handler(settings, backend_name=backend_name, sinks=[narrator], bootstrap=bootstrap)
        self._store: TorchStore | None = None
        self._is_outsider = False

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._handler.settings

    def get_backend(self) -> str:
        return self._handler.get_backend()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    @property
    def use_agent_store(self) -> bool:
        return shares_store()

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if any, and block for a place in the next. Raises torch's errors."""
        with self._as_theirs("next_rendezvous"):
            try:
                world = self._handler.next_rendezvous()
            except RallypointError as error:
                self._is_outsider = isinstance(error, ONLY_THIS_NODE)
                raise
            self._stores.entered(world.round)
            self._store = TorchStore(world.store)
            self._store.release()  # this handler keeps it, and lets it go when it goes
            place = world.bootstrap_store_info
            return RendezvousInfo(
                self._store,
                world.rank,
                world.world_size,
                RendezvousStoreInfo(place.master_addr, place.master_port),
            )

    def num_nodes_waiting(self) -> int:
        """From what was pushed last: microseconds, and the last known number while nobody can be reached."""
        with self._as_theirs("num_nodes_waiting"):
            return self._handler.num_nodes_waiting()

    def is_closed(self) -> bool:
        with self._as_theirs("is_closed"):
            return self._handler.is_closed()

    def set_closed(self) -> None:
        with self._as_theirs("set_closed"):
            self._handler.set_closed()

    def shutdown(self) -> bool:
        """Leave, and close the run; True, or False with a warning if closing did not work. Again: the same answer.

        The run goes on if this node was not to be a part of it: a spare, one that was asked to go, one whose settings
        were refused. And if a signal ends the agent: torch's does not call this then, but for Ctrl-C while it waits for
        its first round.
        """
        is_interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt | SystemExit | SignalException)
        with self._as_theirs("shutdown"):
            try:
                if not self._is_outsider and not is_interrupted:
                    return self._handler.shutdown()
                self._handler.close()
                return True
            finally:
                self._stores.close()
                self._store = None

    @contextmanager
    def _as_theirs(self, verb: str) -> Iterator[None]:
        """Whatever leaves the API is recorded, and is torch's if it was ours."""
        try:
            yield
        except RallypointError as error:
            translated = rendezvous_error(error)
            self._narrator.failed(verb, translated)
            if translated is error:
                raise
            raise translated from error
        except BaseException as error:
            self._narrator.failed(verb, error)
            raise
