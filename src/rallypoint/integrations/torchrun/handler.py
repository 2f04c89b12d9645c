"""The rendezvous handler of torchrun's backend `rallypoint`: torch's interface and errors over Rallypoint's handler.

It adds only what torch's agent needs: a TCPStore for the workers of every round, and a `shutdown()` that does not close
the run for all nodes if only this one has to go.
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
from rallypoint.handler import Handler, World
from rallypoint.integrations.torchrun.bootstrap import RoundTCPStores
from rallypoint.integrations.torchrun.errors import rendezvous_error
from rallypoint.integrations.torchrun.failures import failure_cause, restart_cause
from rallypoint.integrations.torchrun.settings import settings_of
from rallypoint.integrations.torchrun.store import TorchStore
from rallypoint.integrations.torchrun.torch_events import TorchEventSink
from rallypoint.rendezvous.membership import Bootstrap, Identity
from rallypoint.rendezvous.records import LeaveCause, one_line
from rallypoint.settings import Parameters, Settings

SHARING_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ONLY_THIS_NODE = (RendezvousGracefulExitError, SettingsMismatchError)
"""Errors that exclude only this node from the run. `shutdown()` does not close the run after them."""
FAILED = 1
"""The exit code of an agent whose worker failed for good."""


class NamedParameters(Parameters, Protocol):
    """torch's `RendezvousParameters`."""

    @property
    def backend(self) -> str: ...


def create_handler(params: NamedParameters, environ: Mapping[str, str] = os.environ) -> TorchrunHandler:
    """The handler for torchrun's registry. Does not block. SettingsError, a ValueError, if an option is not valid."""
    return TorchrunHandler(settings_of(params, environ), params.backend)


def shares_store() -> bool:
    """Whether the agent of rank 0 hosts the workers' store. It does unless torch's variable turns that off."""
    return os.environ.get(SHARING_VARIABLE, "0") != "1"


class TorchrunHandler(RendezvousHandler):  # type: ignore[misc]  # torch is not typed here
    """One agent of one run."""

    def __init__(self, settings: Settings, backend_name: str) -> None:
        stores = self._stores = RoundTCPStores(shares_store, settings.confirm_timeout_s)
        event_sink = self._event_sink = TorchEventSink(settings)

        def bootstrap(identity: Identity) -> Bootstrap:  # must not refer to `self`, which could never be collected then
            event_sink.set_identity(identity)
            return stores.bootstrap(identity)

        self._handler = Handler(settings, backend_name=backend_name, sinks=[event_sink], bootstrap=bootstrap)
        self._store: TorchStore | None = None
        self._world: World | None = None
        self._is_excluded = False

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
        """Leave the current round, if any, and block until this node is in the next. Raises torch's errors."""
        with self._translated("next_rendezvous"):
            try:
                world = self._world = self._handler.next_rendezvous(cause=self._restart_cause())
            except RallypointError as error:
                self._is_excluded = isinstance(error, ONLY_THIS_NODE)
                raise
            self._stores.entered(world.round)
            self._store = TorchStore(world.store)
            self._store.release()  # this handler keeps it alive
            place = world.bootstrap_store_info
            return RendezvousInfo(
                self._store,
                world.rank,
                world.world_size,
                RendezvousStoreInfo(place.master_addr, place.master_port),
            )

    def num_nodes_waiting(self) -> int:
        """From the last push, in microseconds. During an outage, the last known number."""
        with self._translated("num_nodes_waiting"):
            return self._handler.num_nodes_waiting()

    def is_closed(self) -> bool:
        with self._translated("is_closed"):
            return self._handler.is_closed()

    def set_closed(self) -> None:
        with self._translated("set_closed"):
            self._handler.set_closed()

    def shutdown(self) -> bool:
        """Leave and close the run. True, or False with a warning if closing failed. A second call returns the same.

        If the agent ends because a worker failed for good, the run has failed for all agents: each of them is told to
        join again, gets RendezvousClosedError, and ends with a failure.

        The run is not closed if only this node is excluded from it: a spare, a drained node, one with refused settings.
        Nor is it closed if a signal ends the agent. (In that case torch calls `shutdown` only for Ctrl-C before the
        first round.)
        """
        error = sys.exc_info()[1]
        is_interrupted = isinstance(error, KeyboardInterrupt | SystemExit | SignalException)
        with self._translated("shutdown"):
            try:
                if not self._is_excluded and not is_interrupted:
                    if error is None:
                        return self._handler.shutdown()
                    cause = failure_cause(self._handler.name, error)
                    reason = f"its agent failed: {one_line(f'{type(error).__name__}: {error}')}"
                    return self._handler.shutdown(reason, cause=cause, outcome=FAILED if cause is not None else None)
                self._handler.close()
                return True
            finally:
                self._stores.close()
                self._store = self._world = None

    def _restart_cause(self) -> LeaveCause | None:
        world = self._world
        return restart_cause(self._handler.name) if world is not None and not world.changed.is_set() else None

    @contextmanager
    def _translated(self, call: str) -> Iterator[None]:
        """Record every error that leaves the API, and translate Rallypoint's to torch's."""
        try:
            yield
        except RallypointError as error:
            translated = rendezvous_error(error)
            self._event_sink.failed(call, translated)
            if translated is error:
                raise
            raise translated from error
        except BaseException as error:
            self._event_sink.failed(call, error)
            raise
