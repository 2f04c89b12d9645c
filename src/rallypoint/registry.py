"""The registry of handlers by backend name of `RendezvousParameters`, and `create_handler`.

URL schemes are known without registration. A plug-in registers in the entry-point group `rallypoint.handlers`: the
entry's name is the backend's, its object a `(RendezvousParameters) -> RendezvousHandler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias, overload

from rallypoint.aio import settings_of
from rallypoint.api import RendezvousHandler
from rallypoint.backends.schemes import backend_opener
from rallypoint.errors import SettingsError
from rallypoint.events import Sink
from rallypoint.handler import Handler
from rallypoint.parameters import RendezvousParameters
from rallypoint.settings import Settings

GROUP = "rallypoint.handlers"

RendezvousHandlerCreator: TypeAlias = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Creators by backend name."""

    def __init__(self) -> None:
        self._creators: dict[str, RendezvousHandlerCreator] = {}

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """SettingsError (a ValueError) if another creator is registered under this name."""
        if not backend:
            raise SettingsError("the name of a rendezvous backend must not be empty", option="backend", value=backend)
        taken = self._creators.setdefault(backend, creator)
        if taken != creator:
            raise SettingsError(
                f"backend {backend!r} is already registered with {taken!r}: not replaced by {creator!r}",
                option="backend",
                value=backend,
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """SettingsError for an unknown backend; RuntimeError if the creator's handler has another backend's name."""
        handler = self._creator(params.backend)(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"the handler made for backend {params.backend!r} calls itself {handler.get_backend()!r}: "
                f"its creator is registered under the wrong name"
            )
        return handler

    def _creator(self, name: str) -> RendezvousHandlerCreator:
        if name not in self._creators:
            from importlib.metadata import entry_points  # slow to import and rarely needed

            for entry in entry_points(group=GROUP, name=name):
                self.register(name, entry.load())
        if name not in self._creators:
            backend_opener(name)  # SettingsError, with the known names, if it is not a scheme either
            self.register(name, _create)
        return self._creators[name]


def _create(params: RendezvousParameters) -> RendezvousHandler:
    return Handler(Settings.from_parameters(params, params.backend), backend_name=params.backend)


rendezvous_handler_registry = RendezvousHandlerRegistry()


@overload
def create_handler(target: str | Settings, *, sinks: Iterable[Sink] = (), **options: object) -> Handler: ...


@overload
def create_handler(target: RendezvousParameters) -> RendezvousHandler: ...


def create_handler(
    target: str | Settings | RendezvousParameters, *, sinks: Iterable[Sink] = (), **options: object
) -> RendezvousHandler:
    """A blocking handler from a URL, settings or parameters; `options` override those of a URL.

    Parameters go through the registry, so their handler may be a plug-in's. Raises SettingsError (a ValueError)
    that names the wrong setting. Does not block: nothing is opened yet.
    """
    if isinstance(target, RendezvousParameters) and not options:
        if sinks:
            raise TypeError("sinks can be given with a URL or settings only: parameters may create a plug-in's handler")
        return rendezvous_handler_registry.create_handler(target)
    return Handler(settings_of(target, options), sinks=sinks)
