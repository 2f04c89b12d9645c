"""Where the runs are that the page shows: all runs behind a URL, or one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import quote

import msgspec

from rallypoint.backends.contract import Backend
from rallypoint.errors import SettingsError
from rallypoint.observe.target import ANY_RUN, Target, open_backend, read_backend_target, read_target
from rallypoint.rendezvous.keys import RunKeys

OPEN_S = 10.0

Opener: TypeAlias = Callable[[Target], AbstractAsyncContextManager[Backend]]


class NotShown(SettingsError):
    """The page shows another run only."""


@dataclass(frozen=True, slots=True)
class RunSource:
    """`only` is the run that the page shows; None: all runs."""

    where: str
    only: str | None
    _target: Callable[[str], Target]
    _open: Opener

    def target(self, run_id: str) -> Target:
        """One run. NotShown, SettingsError."""
        if self.only is not None and run_id != self.only:
            raise NotShown(f"this page is about run {self.only!r} only: start one with a URL without a run id for all")
        return self._target(run_id)

    def any_target(self) -> Target:
        """For what does not depend on a run; its run id means nothing."""
        return self._target(self.only or ANY_RUN)

    def open(self, target: Target) -> AbstractAsyncContextManager[Backend]:
        """A backend for the caller, closed afterwards."""
        return self._open(target)

    def opened_by(self, opener: Opener) -> RunSource:
        """The same runs, reached in another way."""
        return replace(self, _open=opener)


def behind(url: str, **options: object) -> RunSource:
    """The runs that a URL leads to; with a run id in it, that one only. SettingsError."""
    names_run = _names_run(url)
    if not names_run and url.strip().lower().startswith("file:"):
        raise SettingsError("with file:// each run is a file of its own: give the URL of one run")
    place = read_target(url, **options) if names_run else read_backend_target(url, **options)
    only = place.settings.run_id if names_run else None

    def target(wanted: str) -> Target:
        if wanted == place.settings.run_id:
            return place
        # A wrong run id gets the same error as in a URL.
        checked = read_target(f"tcp://localhost/{quote(wanted, safe='')}").settings.run_id
        settings = msgspec.structs.replace(place.settings, run_id=checked)
        return Target(settings, RunKeys(settings.etcd_prefix, checked), place.given)

    return RunSource(place.where, only, target, lambda target: open_backend(target, OPEN_S))


def _names_run(url: str) -> bool:
    scheme, _, rest = url.strip().partition("?")[0].partition("://")
    return bool(rest.rpartition("/")[2] if scheme.lower() == "file" else rest.partition("/")[2])
