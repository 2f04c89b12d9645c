"""Lanes in a wire world: what a caller does on its own thread and connection, as callbacks of the same loop.

The terms, the server's part and what the node makes of it are the real ones, and so are the conditions, said once more:
the real caller (`TcpLane.wait`) blocks, which nobody may do in simulated time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quorate.backends.contract import Terms
from quorate.backends.tcp_lane import OPEN_S, OfferedLane
from quorate.backends.tcp_link import Link
from quorate.wire.frames import frame
from quorate.wire.messages import (
    NEWEST_VERSION,
    OLDEST_VERSION,
    ClientFrame,
    ClientMessage,
    Do,
    Hello,
    Place,
    ServerMessage,
    Stand,
    Welcome,
    encoder,
)

if TYPE_CHECKING:
    from quorate.testing.sim.wired_client import WiredBackend


class WiredLane(OfferedLane):
    """Of one process."""

    def __init__(self, backend: WiredBackend, node_id: str) -> None:
        super().__init__()
        self._backend = backend
        self._stand = Stand(backend._client, node_id)
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._opening: asyncio.Task[None] | None = None
        self._lives = 0
        self._seq = 0
        self._confirmed: tuple[int, Terms] | None = None

    def attend(self) -> None:
        """There may be something new to wait for."""
        if self._link is None and (self._opening is None or self._opening.done()):
            self._opening = asyncio.create_task(self._open(), name="lane")

    def leave(self) -> None:
        """Wait no more."""
        link, self._link, self._confirmed = self._link, None, None
        if link is not None:
            link.close()

    def wait(self, bell: int, within_s: float) -> object | None:
        raise AssertionError("nobody blocks in simulated time")

    async def _open(self) -> None:
        self._lives += 1
        client, self._seq = f"{self._stand.client} lane {self._lives}", 0
        self._backend.speaks_as(client)
        link = Link(
            lambda: Hello(oldest=OLDEST_VERSION, newest=NEWEST_VERSION, client=client),
            self._received,
            lambda link, why: self._closed(link),
        )
        try:
            async with asyncio.timeout(OPEN_S):
                await self._backend.dial_aside(lambda: link)
                if isinstance(await link.welcome, Welcome):
                    self._link = link
                    self._send(self._stand)
        except (OSError, TimeoutError):
            link.abort("given up")

    def _closed(self, link: Link) -> None:
        if link is self._link:
            self._link = self._confirmed = None

    def _send(self, message: ClientMessage) -> None:
        if self._link is not None:
            self._link.send(encoder.encode(ClientFrame(self._seq, (message,))))

    def _received(self, messages: Sequence[ServerMessage]) -> None:
        for message in messages:
            if isinstance(message, Place):
                # The thread is woken, and has to wait for a core.
                self._loop.call_later(self._backend.dawdle_s(), self._told, message)

    def _told(self, place: Place) -> None:
        confirmed = self._confirmed
        if not (self._enters(*confirmed, place) if confirmed is not None else self._confirms(place)):
            self.leave()

    def _confirms(self, place: Place) -> bool:
        number, terms = next(iter(self.terms.items()), (0, None))
        if terms is None or place.is_active or not _is_expected(terms, place):
            return False
        op, until = terms.op if place.rank else terms.as_zero, self._loop.time() + terms.held_s
        if op is None or until > min(terms.deadline, terms.session.expires_at) or terms.session.lost.reason is not None:
            return False
        self.place = frame(encoder.encode((place,)))
        if self.terms.pop(number, None) is None:
            return False
        self._confirmed = number, terms
        self._seq += 1
        if not self._backend.vanishes(op):
            self._send(Do(self._seq, op))
        return True

    def _enters(self, number: int, terms: Terms, place: Place) -> bool:
        session = terms.session
        if not place.is_active or not _is_expected(terms, place):
            return False
        if session.expires_at <= self._loop.time() or session.lost.reason is not None:
            return False
        self.entered = place
        if not self.seats.pop(number, False):
            return False
        self.leave()
        terms.enter(place.number, place.rank, place.size, place.addr, place.port, place.revision)
        return True


def _is_expected(terms: Terms, place: Place) -> bool:
    return (terms.number, terms.join, terms.incarnation) == (place.number, place.join, place.incarnation)
