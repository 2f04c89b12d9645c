"""Which backend a URL's scheme means, including those that plug-ins register.

A plug-in names itself in the entry-point group `rallypoint.backends`: the entry's name is the scheme, its object an
`async (Settings) -> Backend`. Opening does not wait until the backend can be reached: it may start later.
"""

from __future__ import annotations

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
os.register_at_fork(after_in_child=_memory_servers.clear)  # the copy is not the store that the parent goes on with


async def open_memory(settings: Settings) -> Backend:
    """All URLs with the same endpoint reach the same engine of this process."""
    from rallypoint.backends.memory import (  # with the engine, which other schemes do not need
        MemoryBackend,
        MemoryServer,
    )

    endpoint = settings.endpoints[0] if settings.endpoints else ""
    server = _memory_servers.setdefault(endpoint, MemoryServer())
    return MemoryBackend(server, endpoint)


async def open_etcd(settings: Settings) -> Backend:
    """A cluster of etcd. Rejected, with what to install, if what it needs is not there."""
    try:
        from rallypoint.backends.etcd.backend import open_backend  # with gRPC, which nothing else needs
    except ImportError as error:
        raise Rejected(
            f"etcd:// needs the packages grpcio and protobuf ({error}): pip install 'rallypoint[etcd]'"
        ) from error
    return await open_backend(settings)


async def open_file(settings: Settings) -> Backend:
    """All nodes reach the same file of the run."""
    from rallypoint.backends.register.opening import open_file

    return await open_file(settings)


_openers: dict[str, BackendOpener] = {"memory": open_memory, "etcd": open_etcd, "file": open_file}


def register_backend(scheme: str, opener: BackendOpener) -> None:
    """Make URLs of this scheme open with `opener`. The same one twice is fine, another one is a SettingsError."""
    if _openers.setdefault(scheme, opener) != opener:
        raise SettingsError(f"scheme {scheme!r} is registered already, with {_openers[scheme]!r}")


def backend_opener(scheme: str) -> BackendOpener:
    """What opens this scheme. SettingsError, with the schemes there are, for an unknown one."""
    if scheme not in _openers:
        for entry in _plug_ins():
            if entry.name == scheme:
                register_backend(scheme, entry.load())
    if scheme not in _openers:
        known = sorted({*_openers, *(entry.name for entry in _plug_ins())})
        raise SettingsError(
            f"no backend for scheme {scheme!r}: there are {', '.join(known)}; "
            f"a plug-in adds one in the entry-point group {GROUP!r}",
            option="scheme",
            value=scheme,
        )
    return _openers[scheme]


_observers: dict[str, BackendOpener] = {}


def register_observer(scheme: str, opener: BackendOpener) -> None:
    """How tools open URLs of this scheme, if that differs: they must be taken for no node, and serve nothing."""
    _observers[scheme] = opener


def observer_opener(scheme: str) -> BackendOpener:
    """What opens this scheme for somebody who only looks on. SettingsError as for `backend_opener`."""
    opener = backend_opener(scheme)
    return _observers.get(scheme, opener)


def _plug_ins() -> list[EntryPoint]:
    """What other packages offer. Imported when it is needed: it takes longer than all that is ours."""
    from importlib.metadata import entry_points

    return list(entry_points(group=GROUP))
