"""Where the runs are: inside this process (the embedded server), or behind a URL. Whoever looks opens it anew."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import quote

import msgspec

from rallypoint.backends.contract import Backend
from rallypoint.errors import SettingsError
from rallypoint.observe.target import Target, open_backend, read_backend_target, read_target
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.server.server import Server

OPEN_S = 10.0


class NotHere(SettingsError):
    """This page is about another run, or the run id cannot be one."""


@dataclass(frozen=True, slots=True)
class Place:
    """`only` is the run that the page is about; None: all that are there."""

    where: str
    only: str | None
    poll_s: float
    """How often the list of runs is looked at while somebody looks at it."""
    _target: Callable[[str], Target]
    _open: Callable[[Target], AbstractAsyncContextManager[Backend]]

    def target(self, run_id: str) -> Target:
        """One run. NotHere, SettingsError."""
        if self.only is not None and run_id != self.only:
            raise NotHere(f"this page is about run {self.only!r} only: start one with a URL without a run id for all")
        return self._target(run_id)

    def anything(self) -> Target:
        """The place itself; the run id of it means nothing."""
        return self._target(self.only or "runs")

    def open(self, target: Target) -> AbstractAsyncContextManager[Backend]:
        """A backend of one's own, closed afterwards."""
        return self._open(target)


def inside(server: Server) -> Place:
    """The runs of a server in this process."""

    @asynccontextmanager
    async def open_local(target: Target) -> AsyncIterator[Backend]:
        backend = server.make_local()
        try:
            yield backend
        finally:
            await backend.close()

    return of_server(f"tcp://{server.addresses[0]}", open_local)


def of_server(where: str, open_it: Callable[[Target], AbstractAsyncContextManager[Backend]]) -> Place:
    """The runs of a server that is reached in a way of one's own; `where` is for people."""
    return Place(where, None, 1.0, lambda run_id: read_target(f"{where}/{quote(run_id, safe='')}"), open_it)


def behind(url: str, **options: object) -> Place:
    """The runs that a URL leads to; with a run id in it, that one only. SettingsError."""
    names_run = _names_run(url)
    if not names_run and url.strip().lower().startswith("file:"):
        raise SettingsError("with file:// each run is a file of its own: give the URL of one run")
    place = read_target(url, **options) if names_run else read_backend_target(url, **options)
    only = place.settings.run_id if names_run else None

    def target(wanted: str) -> Target:
        if wanted == place.settings.run_id:
            return place
        # What is wrong with a run id is said as for a URL.
        checked = read_target(f"tcp://localhost/{quote(wanted, safe='')}").settings.run_id
        settings = msgspec.structs.replace(place.settings, run_id=checked)
        return Target(settings, RunKeys(settings.etcd_prefix, checked), place.given)

    return Place(place.where, only, 2.0, target, lambda target: open_backend(target, OPEN_S))


def _names_run(url: str) -> bool:
    """Whether a URL leads to one run."""
    scheme, _, rest = url.strip().partition("?")[0].partition("://")
    return bool(rest.rpartition("/")[2] if scheme.lower() == "file" else rest.partition("/")[2])
