"""The names of `torch.distributed.elastic.rendezvous.dynamic_rendezvous`: a handler over *any* compare-and-set cell.

    handler = DynamicRendezvousHandler.from_backend("my-run", store, MyBackend(), min_nodes=2, max_nodes=4)

The cell (a `RendezvousBackend`, or any object with its methods) holds the whole state of the run. Its methods may
block: they are called in a thread, one call at a time, at most once a second while nothing changes. docs/register.md
has the cost, and the number of nodes up to which it works well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from rallypoint.backends.register.cell import Cell, Token
from rallypoint.backends.register.connect import open_cell
from rallypoint.compat.rendezvous.handlers import CompatHandler
from rallypoint.compat.rendezvous.prefix_store import prefixed
from rallypoint.errors import SettingsError
from rallypoint.handler import World
from rallypoint.parameters import RendezvousParameters
from rallypoint.settings import Settings
from rallypoint.urls import refusal, shown

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "create_handler",
]

SCHEME = "register"
_TIMEOUTS = ("join", "last_call", "close", "heartbeat")
_CELL_OPTIONS = ("store_type", "is_host", "read_timeout")
"""Options of `create_backend`, which the same parameters may contain."""


class RendezvousBackend(ABC):
    """A compare-and-set cell that holds the state of a run."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The value that `get_backend()` of a handler on this cell returns."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None: the cell is empty."""

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state if `token` is its token (None: if the cell is empty).

        Returns the state afterwards, its token, and whether it was replaced; None: not known, read again.
        """


class RendezvousTimeout:
    """Time limits. ValueError for a value that is not positive."""

    DEFAULTS: ClassVar = {
        "join": timedelta(seconds=600),
        "last_call": timedelta(seconds=30),
        "close": timedelta(seconds=30),
        "heartbeat": timedelta(seconds=5),
    }

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self.join = _positive("join", join)
        self.last_call = _positive("last_call", last_call)
        self.close = _positive("close", close)
        self.heartbeat = _positive("heartbeat", heartbeat)


def _positive(name: str, value: timedelta | None) -> timedelta:
    limit = RendezvousTimeout.DEFAULTS[name] if value is None else value
    if limit <= timedelta(0):
        raise refusal(f"{name} timeout", str(limit), "is not positive", "give more than 0 seconds")
    return limit


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """The settings in force."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int


class DynamicRendezvousHandler(CompatHandler):
    """One node of one run, over any cell. Created by `from_backend`."""

    def __init__(self, settings: Settings, shown_settings: RendezvousSettings, store: Any, backend: Cell) -> None:
        self._settings = shown_settings
        super().__init__(
            settings, backend.name, opener=partial(open_cell, backend), wrap=_wrapper(store, settings.run_id)
        )

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: Cell,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: float = 5,
        keep_alive_max_attempt: int = 3,
        **options: object,
    ) -> DynamicRendezvousHandler:
        """A handler. Does not block. ValueError says which argument is wrong.

        Each round's store is `store` under a prefix of its own; None: Rallypoint's own store. `options` are options of
        Rallypoint.
        """
        timeout = timeout or RendezvousTimeout()
        if not run_id:
            raise SettingsError("the run id must not be empty", option="run_id", value=run_id)
        if not isinstance(getattr(backend, "name", None), str) or not backend.name:
            raise SettingsError(f"the backend {shown(backend)} has no name", option="backend", value=backend)
        settings = Settings.build(
            scheme=SCHEME,
            endpoints=backend.name,
            run_id=run_id,
            **{
                "join_timeout": timeout.join,
                "last_call_timeout": timeout.last_call,
                "close_timeout": timeout.close,
                "heartbeat_timeout": timeout.heartbeat,
                "keep_alive_interval": keep_alive_interval,
                "keep_alive_max_attempt": keep_alive_max_attempt,
                "local_addr": local_addr or None,
                **options,
                "min_nodes": min_nodes,
                "max_nodes": max_nodes,
            },
        )
        interval = timedelta(seconds=settings.keep_alive_interval_s)
        shown_settings = RendezvousSettings(
            run_id, settings.min_nodes, settings.max_nodes, timeout, interval, settings.keep_alive_max_attempt
        )
        return cls(settings, shown_settings, store, backend)

    @property
    def settings(self) -> RendezvousSettings:
        """The settings in force."""
        return self._settings


def _wrapper(store: Any, run_id: str) -> Callable[[World], Any] | None:
    """The function that makes a round's store. It must not refer to the handler, which could never be collected."""
    if store is None:
        return None
    return lambda world: prefixed(f"torch.rendezvous.{run_id}.{world.round}", store, world)


def create_handler(store: Any, backend: Cell, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """A handler over any cell, with the options in the parameters. Does not block. ValueError if one is wrong."""
    given = {name: _seconds(params, f"{name}_timeout") for name in _TIMEOUTS}
    options = {name: value for name, value in params.config.items() if name not in _CELL_OPTIONS}
    if given["join"] is None:
        given["join"] = _seconds(params, "timeout")
    for name in (*(f"{name}_timeout" for name in _TIMEOUTS), "timeout"):
        options.pop(name, None)
    timeout = RendezvousTimeout(*(given[name] for name in _TIMEOUTS))
    return DynamicRendezvousHandler.from_backend(
        params.run_id, store, backend, params.min_nodes, params.max_nodes, params.local_addr, timeout, **options
    )


def _seconds(params: RendezvousParameters, option: str) -> timedelta | None:
    from rallypoint.urls import parse_seconds

    value = params.get(option)
    return None if value is None else timedelta(seconds=parse_seconds(option, value))
