"""Maps URL schemes to backends, including those of plug-ins.

A plug-in registers in the entry-point group `rallypoint.backends`: the entry's name is the scheme, its object an
`async (Settings) -> Backend`. Opening does not wait until the backend can be reached: it may start later.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from rallypoint.backends.contract import Backend
from rallypoint.errors import Rejected, SettingsError
from rallypoint.settings import Settings

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from rallypoint.backends.memory import MemoryServer

GROUP = "rallypoint.backends"

BackendOpener: TypeAlias = Callable[[Settings], Awaitable[Backend]]

_memory_servers: dict[str, MemoryServer] = {}
os.register_at_fork(after_in_child=_memory_servers.clear)  # a forked copy is not the parent's store


async def open_memory(settings: Settings) -> Backend:
    """All URLs with the same endpoint use the same engine of this process."""
    from rallypoint.backends.memory import (  # imports the engine, which other schemes do not need
        MemoryBackend,
        MemoryServer,
    )

    endpoint = settings.endpoints[0] if settings.endpoints else ""
    server = _memory_servers.setdefault(endpoint, MemoryServer())
    return MemoryBackend(server, endpoint)


async def open_etcd(settings: Settings) -> Backend:
    """An etcd cluster. Rejected, with the package to install, if gRPC is missing."""
    try:
        from rallypoint.backends.etcd.backend import open_backend  # imports gRPC, which nothing else needs
    except ImportError as error:
        raise Rejected(
            f"etcd:// needs the packages grpcio and protobuf ({error}): pip install 'rallypoint[etcd]'"
        ) from error
    return await open_backend(settings)


async def open_file(settings: Settings) -> Backend:
    """One file per run, which all nodes can reach."""
    from rallypoint.backends.register.connect import open_file

    return await open_file(settings)


_openers: dict[str, BackendOpener] = {"memory": open_memory, "etcd": open_etcd, "file": open_file}


def register_backend(scheme: str, opener: BackendOpener) -> None:
    """Open URLs of this scheme with `opener`. SettingsError if another opener is registered for the scheme."""
    if _openers.setdefault(scheme, opener) != opener:
        raise SettingsError(f"scheme {scheme!r} is already registered with {_openers[scheme]!r}")


def backend_opener(scheme: str) -> BackendOpener:
    """The opener of a scheme. SettingsError, with the known schemes, for an unknown one."""
    if scheme not in _openers:
        for entry in _plug_ins():
            if entry.name == scheme:
                register_backend(scheme, entry.load())
    if scheme not in _openers:
        known = sorted({*_openers, *(entry.name for entry in _plug_ins())})
        near = difflib.get_close_matches(scheme, known, n=1)
        meant = f"did you mean {near[0]}://? " if near else ""
        raise SettingsError(
            f"no backend for scheme {scheme!r}: {meant}There are {', '.join(known)}; "
            f"a plug-in adds one in the entry-point group {GROUP!r}",
            option="scheme",
            value=scheme,
        )
    return _openers[scheme]


_observers: dict[str, BackendOpener] = {}


def register_observer(scheme: str, opener: BackendOpener) -> None:
    """The opener of this scheme for tools, if it differs: a tool is not a node and does not host a server."""
    _observers[scheme] = opener


def observer_opener(scheme: str) -> BackendOpener:
    """The opener of a scheme for read-only clients. SettingsError as for `backend_opener`."""
    opener = backend_opener(scheme)
    return _observers.get(scheme, opener)


def _plug_ins() -> list[EntryPoint]:
    """Entry points of other packages. `importlib.metadata` is imported on demand: its import is slow."""
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))
