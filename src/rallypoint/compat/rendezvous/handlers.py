"""Handlers with torch's interface, for torch's backend names and parameters.

If this process uses torch, the store of a round is a `torch.distributed.Store`, and rank 0 hosts a `TCPStore` for the
workers of each round. Otherwise the store of a round is a `rallypoint.Store`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rallypoint.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from rallypoint.backends.schemes import BackendOpener, backend_opener
from rallypoint.errors import SettingsError
from rallypoint.handler import Handler, World
from rallypoint.parameters import RendezvousParameters
from rallypoint.rendezvous.membership import Bootstrap, Identity
from rallypoint.settings import Settings
from rallypoint.urls import refusal, shown

SHARING_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def torch_is_in_use() -> bool:
    """Whether this process has imported torch's distributed package: then the caller expects objects of torch."""
    return "torch.distributed" in sys.modules


class _WorkerStores:
    """The store that rank 0 hosts for the workers of a round: torch's TCPStore if torch is in use, else only a port."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._stores: Any = None

    @property
    def is_shared(self) -> bool:
        return torch_is_in_use() and os.environ.get(SHARING_VARIABLE, "0") != "1"

    def bootstrap(self, identity: Identity) -> Bootstrap:
        from rallypoint.api import free_port

        async def publish(number: int, size: int) -> tuple[str, int]:
            if not self.is_shared:
                return identity.addr, free_port()
            if self._stores is None:
                from rallypoint.integrations.torchrun.bootstrap import RoundTCPStores  # imports torch

                self._stores = RoundTCPStores(lambda: self.is_shared, self._limit_s)
            place: tuple[str, int] = await self._stores.bootstrap(identity)(number, size)
            return place

        return publish

    def entered(self, number: int) -> None:
        if self._stores is not None:
            self._stores.entered(number)

    def close(self) -> None:
        if self._stores is not None:
            self._stores.close()


class CompatHandler(RendezvousHandler):
    """One node of one run. `wrap` makes the store that the caller gets for a round."""

    def __init__(
        self,
        settings: Settings,
        backend_name: str,
        *,
        opener: BackendOpener | None = None,
        wrap: Callable[[World], Any] | None = None,
    ) -> None:
        stores = self._stores = _WorkerStores(settings.confirm_timeout_s)
        self._wrap = wrap or _round_store
        self._handler = Handler(settings, backend_name=backend_name, bootstrap=stores.bootstrap, opener=opener)

    def get_backend(self) -> str:
        return self._handler.get_backend()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    @property
    def use_agent_store(self) -> bool:
        return self._stores.is_shared

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if any, and block until this node is in the next."""
        world = self._handler.next_rendezvous()
        self._stores.entered(world.round)
        place = world.bootstrap_store_info
        return RendezvousInfo(
            self._wrap(world),
            world.rank,
            world.world_size,
            RendezvousStoreInfo(place.master_addr, place.master_port),
            world.round,
            lambda: world.members,
        )

    def num_nodes_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()

    def leave(self, reason: str = "leave() was called") -> None:
        """Leave the run without closing it. The handler can join again. torch's interface does not have this."""
        self._handler.leave(reason)

    def shutdown(self) -> bool:
        try:
            return self._handler.shutdown()
        finally:
            self._stores.close()


def _round_store(world: World) -> Any:
    if not torch_is_in_use():
        return world.store
    from rallypoint.integrations.torchrun.store import TorchStore

    return TorchStore(world.store)


# --- creators ---------------------------------------------------------------------------------------------------------


def create_rallypoint(params: RendezvousParameters) -> RendezvousHandler:
    """A handler on an endpoint `host[:port]` of an embedded server, or a URL without a run id: `file:///mnt/shared`."""
    start = _URL.match(params.endpoint.strip())
    if start is None:
        return CompatHandler(Settings.from_parameters(params, "tcp"), params.backend)
    location, mark, query = params.endpoint.strip().partition("?")
    url = f"{location.rstrip('/') if location[start.end() :].strip('/') else location}/{quote(params.run_id, safe='')}"
    options = {"min_nodes": params.min_nodes, "max_nodes": params.max_nodes, "local_addr": params.local_addr or None}
    settings = Settings.from_url(f"{url}{mark}{query}", **{**params.config, **options})
    return CompatHandler(settings, params.backend)


def create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    """With `store_type=tcp` (default), a handler on a server that a node hosts; with `file`, on files."""
    config = dict(params.config)
    store_type = config.pop("store_type", "tcp")
    match str(store_type).strip().lower():
        case "tcp":
            scheme, endpoint = "tcp", params.endpoint
        case "file":
            scheme, endpoint = "file", _directory_for(params.endpoint)
            config.pop("is_host", None)  # ignored, as by torch
        case _:
            raise refusal("store_type", store_type, "is unknown", "write tcp or file")
    return CompatHandler(Settings.from_parameters(_ChangedParameters(params, endpoint, config), scheme), params.backend)


def create_static(params: RendezvousParameters) -> RendezvousHandler:
    """A handler with fixed ranks, on a server that rank 0 hosts. `rank` or `node_rank` is this node's rank."""
    return CompatHandler(Settings.from_parameters(params, "static"), params.backend)


def create_etcd(params: RendezvousParameters) -> RendezvousHandler:
    """A handler on an etcd v3 cluster. The endpoint lists its members, separated by commas."""
    settings = Settings.from_parameters(params, "etcd")
    try:
        backend_opener("etcd")
    except SettingsError as error:
        raise SettingsError(
            f"the rendezvous backend {params.backend!r} needs the etcd client: pip install 'rallypoint[etcd]' "
            f"({error})",
            option="backend",
            value=params.backend,
        ) from error
    return CompatHandler(settings, params.backend)


class _ChangedParameters:
    """Parameters with a different endpoint and different options."""

    def __init__(self, params: RendezvousParameters, endpoint: str, config: dict[str, Any]) -> None:
        self.endpoint = endpoint
        self.config = config
        self.run_id = params.run_id
        self.min_nodes = params.min_nodes
        self.max_nodes = params.max_nodes
        self.local_addr = params.local_addr


def _directory_for(endpoint: str) -> str:
    """The directory for the files of runs, for an endpoint of torch's `FileStore`: that path, or one beside it."""
    if not endpoint.strip():
        return tempfile.mkdtemp(prefix="rallypoint-")
    path = Path(endpoint.strip()).absolute()
    if path.is_dir():
        return str(path)
    if not path.parent.is_dir():
        raise SettingsError(
            f"the endpoint {shown(endpoint)} is not a valid path: {path.parent} does not exist",
            option="endpoint",
            value=endpoint,
        )
    directory = path.with_name(f"{path.name}.runs")
    directory.mkdir(exist_ok=True)
    return str(directory)
