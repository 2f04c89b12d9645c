"""Parses and opens a URL in order to observe a run, or all runs of a backend.

Creates no run, hosts no server, opens no session. The sizes of a run may be missing from the URL: an observer does not
need them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import quote

import msgspec

import rallypoint.aio  # noqa: F401 - registers the schemes that are always there
from rallypoint.backends.contract import Backend
from rallypoint.backends.schemes import observer_opener, register_observer
from rallypoint.errors import Unavailable
from rallypoint.options import find_option
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.settings import Settings
from rallypoint.urls import parse_url

ANY_RUN = "runs"
"""The run id of a target that is a backend, not a run."""


async def _observe_tcp(settings: Settings) -> Backend:
    """Never hosts a server, and does not make the server start a coordinator for the run."""
    from rallypoint.server.hosting import HostingBackend, open_tcp

    backend = await open_tcp(msgspec.structs.replace(settings, is_host=False))
    assert isinstance(backend, HostingBackend)
    backend.observe_only()
    return backend


for _scheme in ("tcp", "static"):
    register_observer(_scheme, _observe_tcp)


@dataclass(frozen=True, slots=True)
class Target:
    """A run or backend to be observed. `given` are those shared settings (the same on all nodes) that the URL names."""

    settings: Settings
    keys: RunKeys
    given: dict[str, int | str]

    @property
    def where(self) -> str:
        return self.settings.where

    @property
    def url(self) -> str:
        """The URL of the run, without options."""
        return f"{self.where}/{quote(self.settings.run_id, safe='')}"


def read_target(url: str, **overrides: object) -> Target:
    """The run of a node's URL. Options that only nodes need are checked and then ignored. SettingsError."""
    parts = parse_url(url)
    named = {find_option(name, parts.scheme).name: value for name, value in parts.query.items()}
    sizes: dict[str, object] = {}
    if "min_nodes" not in named:  # any value that the other sizes allow
        sizes["min_nodes"] = named.get("max_nodes", named.get("step", 1))
    settings = Settings.from_url(url, **sizes, **overrides)
    shared = settings.shared()
    given = {name: shared[name] for name in shared if name in named}
    settings = msgspec.structs.replace(settings, is_host=False)
    return Target(settings, RunKeys(settings.etcd_prefix, settings.run_id), given)


def read_backend_target(url: str, **overrides: object) -> Target:
    """The server or cluster of a URL; a run id in the URL is ignored. SettingsError."""
    location, mark, query = url.strip().partition("?")
    scheme, separator, rest = location.partition("://")
    if separator and scheme.lower() == "file":
        rest = f"{rest.rstrip('/')}/{ANY_RUN}"
    elif separator:
        rest = f"{rest.partition('/')[0]}/{ANY_RUN}"
    return read_target(f"{scheme}{separator}{rest}{mark}{query}", **overrides)


@asynccontextmanager
async def open_backend(target: Target, timeout_s: float) -> AsyncIterator[Backend]:
    """The backend of a target, closed on leaving the context. Unavailable if opening it takes longer than the limit."""
    opener = observer_opener(target.settings.scheme)
    try:
        async with asyncio.timeout(timeout_s):
            backend = await opener(target.settings)
    except TimeoutError:
        raise Unavailable(f"{target.where} could not be opened within {timeout_s:g} s") from None
    try:
        yield backend
    finally:
        await backend.close()
