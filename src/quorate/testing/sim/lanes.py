"""Lanes in a wire world: what a caller does on its own thread and connection, as callbacks of the same loop.

The terms, the server's part and what the node makes of it are the real ones, and so are the conditions, said once more:
the real caller (`TcpLane.wait`) blocks, which nobody may do in simulated time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quorate.backends.contract import Begun, Done, Start, Terms
from quorate.backends.tcp_lane import OPEN_S, OfferedLane, done_at
from quorate.backends.tcp_link import Link
from quorate.kv.types import Grant, TxnResult
from quorate.wire.frames import frame
from quorate.wire.messages import (
    NEWEST_VERSION,
    OLDEST_VERSION,
    Answer,
    ClientFrame,
    ClientMessage,
    Do,
    Hello,
    Hold,
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
        self._is_standing = False
        self._heard: asyncio.Queue[Place | Answer] | None = None
        """What is said to one who `begins`."""

    def attend(self) -> None:
        """There may be something new to wait for."""
        if self._link is not None:
            self._stand_there()
        elif self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open(), name="lane")

    def leave(self) -> None:
        """Wait no more."""
        link, self._link, self._confirmed, self._is_standing = self._link, None, None, False
        if link is not None:
            link.close()

    @property
    def is_standing(self) -> bool:
        return self._is_standing

    def stand_by(self) -> None:
        raise AssertionError("nobody blocks in simulated time")

    def begin(self, begun: Begun) -> Done | None:
        raise AssertionError("nobody blocks in simulated time")

    def wait(self, bell: int, within_s: float) -> object | None:
        raise AssertionError("nobody blocks in simulated time")

    def keep_warm(self, bell: int) -> None:
        raise AssertionError("nobody blocks in simulated time")

    async def stands_by(self) -> None:
        """`stand_by`."""
        if self._link is None:
            await self._open(stands=False)

    async def begins(self, begun: Begun, alone_s: float) -> Done | None:
        """`begin`, for one who waits for its place for so long before the node takes over."""
        self._heard = asyncio.Queue()
        try:
            return await self._begins(begun, begun.start, self._heard, alone_s)
        finally:
            self._heard = None

    async def _begins(
        self, begun: Begun, start: Start, heard: asyncio.Queue[Place | Answer], alone_s: float
    ) -> Done | None:
        if self._link is None or self._is_standing:
            return None
        begun.sent_at, join = self._loop.time(), start.joins()
        until = begun.sent_at + min(start.ttl_s, start.join_timeout_s) - start.held_s
        self._seq += 2
        session = Do(self._seq - 1, Grant(start.ttl_s, start.lease)), Hold(start.lease, self._backend._grace_s)
        if not self._backend.vanishes(join):
            self._is_standing = True
            self._send(self._stand, *session, Do(self._seq, join))
        said = await self._next_said(heard, alone_s)
        if isinstance(said, Answer):
            result = said.result
            begun.revision = result.revision if isinstance(result, TxnResult) and result.committed else 0
        if not isinstance(said, Place) or said.is_active or not _is_expected(start, said):
            if not begun.revision:
                self.leave()
            return None
        begun.revision = said.revision
        op = start.confirms(said.rank, said.revision)
        if op is None or self._loop.time() > until:
            self.leave()
            return None
        begun.done = Done(said.rank)
        self._seq += 1
        if not self._backend.vanishes(op):
            self._send(Do(self._seq, op))
        while isinstance(said := await self._next_said(heard, start.held_s), Answer):
            pass
        is_in_time = self._loop.time() < begun.sent_at + start.ttl_s
        if isinstance(said, Place) and said.is_active and _is_expected(start, said) and is_in_time:
            begun.done = done_at(said)
        self.leave()
        return begun.done if begun.done.revision else None

    async def _next_said(self, heard: asyncio.Queue[Place | Answer], within_s: float) -> Place | Answer | None:
        try:
            async with asyncio.timeout(within_s):
                said = await heard.get()
        except TimeoutError:
            return None
        await asyncio.sleep(self._backend.dawdle_s())
        return said

    async def _open(self, stands: bool = True) -> None:
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
                    if stands:
                        self._stand_there()
        except (OSError, TimeoutError):
            link.abort("given up")

    def _stand_there(self) -> None:
        if not self._is_standing:
            self._is_standing = True
            self._send(self._stand)

    def _closed(self, link: Link) -> None:
        if link is self._link:
            self._link = self._confirmed = None
            self._is_standing = False

    def _send(self, *messages: ClientMessage) -> None:
        if self._link is not None:
            self._link.send(encoder.encode(ClientFrame(0, messages)))

    def _received(self, messages: Sequence[ServerMessage]) -> None:
        for message in messages:
            if self._heard is not None and isinstance(message, Place | Answer):
                if isinstance(message, Place) or message.seq == self._seq:
                    self._heard.put_nowait(message)
            elif isinstance(message, Place):
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
        terms.enter(place)
        return True


def _is_expected(terms: Terms | Start, place: Place) -> bool:
    return (terms.number, terms.join, terms.incarnation) == (place.number, place.join, place.incarnation)
