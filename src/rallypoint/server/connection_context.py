"""What a connection needs of its server, as an interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rallypoint.server.admission.admission import Admission
from rallypoint.server.admission.quota import Quota
from rallypoint.server.admission.refusals import Refusal
from rallypoint.server.clients import Clients
from rallypoint.server.engine_host import EngineHost
from rallypoint.server.observer_watches import ObserverWatches
from rallypoint.server.traffic import Traffic
from rallypoint.wire.handshake import Versions
from rallypoint.wire.messages import Welcome

if TYPE_CHECKING:
    from rallypoint.server.connection import Connection


class ConnectionContext(Protocol):
    """The server, as far as a connection uses it."""

    engine_host: EngineHost
    observer_watches: ObserverWatches
    clients: Clients
    traffic: Traffic
    versions: Versions
    tokens: tuple[str, ...]
    admission: Admission
    quota: Quota
    generation: str
    software: str
    max_frame: int
    is_dedicated: bool
    connections: dict[Connection, None]

    def limit_reached(self, client: str, run: str) -> tuple[Refusal, str] | None:
        """Why an authenticated client is refused because of a limit; None: it is not."""

    def ensure_run(self, run: str, is_returning: bool, client: str) -> None:
        """A client of a run connected: start the run's coordinator, if it has none."""

    def is_to_make(self, run: str, client: str) -> bool:
        """Whether the run does not exist and this client is the one to create it."""

    def claimed(self, run: str, client: str, claim: bytes) -> None:
        """A client of an earlier generation reports the state of its run there."""

    def describe(self) -> dict[str, str]:
        """The content of `Status`."""


def welcome_by(context: ConnectionContext, version: int, ended: tuple[int, ...], makes_run: bool) -> Welcome:
    """The answer to an accepted hello."""
    return Welcome(
        version=version,
        generation=context.generation,
        software=context.software,
        ended=ended,
        max_frame=context.max_frame,
        is_dedicated=context.is_dedicated,
        makes_run=makes_run,
    )
