"""The server, as far as a connection is concerned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rallypoint.server.clients import Clients
from rallypoint.server.door import Door
from rallypoint.server.gallery import Gallery
from rallypoint.server.hub import Hub
from rallypoint.server.quota import Quota
from rallypoint.server.refusals import Refusal
from rallypoint.server.traffic import Traffic
from rallypoint.wire.handshake import Versions
from rallypoint.wire.messages import Welcome

if TYPE_CHECKING:
    from rallypoint.server.connection import Connection


class House(Protocol):
    """The server, as far as a connection is concerned."""

    hub: Hub
    gallery: Gallery
    clients: Clients
    traffic: Traffic
    versions: Versions
    tokens: tuple[str, ...]
    door: Door
    quota: Quota
    generation: str
    software: str
    max_frame: int
    max_txn_ops: int
    max_txn_bytes: int
    is_dedicated: bool
    connections: dict[Connection, None]

    def lacks_room(self, client: str, run: str) -> tuple[Refusal, str] | None:
        """Why somebody who may come in cannot."""

    def attend(self, run: str, is_returning: bool, client: str) -> None:
        """Somebody has come for a run."""

    def is_to_make(self, run: str, client: str) -> bool:
        """Whether the run does not exist and this client is to make it."""

    def claimed(self, run: str, client: str, claim: bytes) -> None:
        """A client of an earlier generation says where the run stood."""

    def describe(self) -> dict[str, str]:
        """For `Status`."""


def welcome_by(house: House, version: int, ended: tuple[int, ...], makes_run: bool) -> Welcome:
    """What is said to somebody who is let in."""
    return Welcome(
        version=version,
        generation=house.generation,
        software=house.software,
        ended=ended,
        max_frame=house.max_frame,
        max_txn_ops=house.max_txn_ops,
        max_txn_bytes=house.max_txn_bytes,
        is_dedicated=house.is_dedicated,
        makes_run=makes_run,
    )
