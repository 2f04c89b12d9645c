"""Lanes in a wire world: what a caller does on its own thread and connection, as callbacks of the same loop.

The terms, the server's part and what the node makes of it are the real ones, and so are the conditions, said once more:
the real caller (`TcpLane.wait`) blocks, which nobody may do in simulated time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rallypoint.backends.contract import Begun, Done, Start, Terms
from rallypoint.backends.tcp_lane import OPEN_S
from rallypoint.backends.tcp_link import Link
from rallypoint.backends.tcp_offers import OfferedLane, done_at
from rallypoint.backends.tcp_pledge import (
    PLEDGE_EVERY_S,
    PLEDGED_S,
    may_pledge,
    may_pledge_at_once,
    pledge_at_once,
    pledge_of,
)
from rallypoint.kv.types import Grant, TxnResult
from rallypoint.wire.frames import frame
from rallypoint.wire.messages import (
    NEWEST_VERSION,
    OLDEST_VERSION,
    Answer,
    ClientFrame,
    ClientMessage,
    Do,
    Hello,
    Hold,
    Place,
    Pledge,
    ServerMessage,
    Stand,
    Welcome,
    encoder,
)

if TYPE_CHECKING:
    from rallypoint.testing.sim.wired_client import WiredBackend


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
        self._pledged_for = 0
        """For which offer a place was confirmed beforehand."""
        self._next_pledge: asyncio.TimerHandle | None = None

    def attend(self) -> None:
        """There may be something new to wait for."""
        if self._link is not None:
            self._stand_there()
            self._pledge()
        elif self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open(), name="lane")

    def leave(self) -> None:
        """Wait no more."""
        link, self._link, self._confirmed, self._is_standing = self._link, None, None, False
        self._pledge_no_more()
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
            self._send(self._stand, *session, Do(self._seq, join), *self._pledges_at_once(start))
        said = await self._next_said(heard, alone_s)
        if isinstance(said, Place) and said.is_active and _is_expected(start, said):  # it was confirmed beforehand
            begun.done = done_at(said) if self._loop.time() < begun.sent_at + start.ttl_s else None
            self.leave()
            return begun.done
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
                        self._pledge()
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
            self._pledge_no_more()

    def _pledges_at_once(self, start: Start) -> list[Pledge]:
        if not self._backend.pledges or not may_pledge_at_once(start):
            return []
        pledge, confirmations = pledge_at_once(start), [start.confirms(rank, 0) for rank in (1, 0)]
        assert confirmations[0] is not None
        if self._backend.vanishes(confirmations[0]):
            return []
        for confirmation in confirmations:
            self._backend.pledged(confirmation)
        return [pledge]

    def _pledge(self) -> None:
        """Confirm beforehand what is offered, again and again while somebody waits."""
        self._pledge_no_more()
        number, terms = next(iter(self.terms.items()), (0, None))
        if terms is None or self._link is None or not self._backend.pledges:
            return
        self._next_pledge = self._loop.call_later(PLEDGE_EVERY_S + self._backend.dawdle_s(), self._pledge)
        if not may_pledge(terms, self._loop.time()):
            return
        if number == self._pledged_for:
            self._send(Pledge(PLEDGED_S))
        elif not self._backend.vanishes(terms.op):
            self._pledged_for = number
            for op in (terms.op, terms.as_zero):
                self._backend.pledged(op)
            self._send(pledge_of(terms))

    def _pledge_no_more(self) -> None:
        timer, self._next_pledge = self._next_pledge, None
        if timer is not None:
            timer.cancel()

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
        if confirmed is not None:
            is_right = self._enters(*confirmed, place)
        else:
            is_right = self._enters_at_once(place) if place.is_active else self._confirms(place)
        if not is_right:
            self.leave()

    def _enters_at_once(self, place: Place) -> bool:
        number, terms = next(iter(self.terms.items()), (0, None))
        if terms is None or number != self._pledged_for or not _is_expected(terms, place):
            return False
        self.place = frame(encoder.encode((place,)))
        return self._enters(number, terms, place, is_pledged=True)

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

    def _enters(self, number: int, terms: Terms, place: Place, is_pledged: bool = False) -> bool:
        session = terms.session
        if not place.is_active or not _is_expected(terms, place):
            return False
        if session.expires_at <= self._loop.time() or session.lost.reason is not None:
            return False
        self.entered = place
        if is_pledged and self.terms.pop(number, None) is None:
            return False
        if not self.seats.pop(number, False):
            return False
        self.leave()
        terms.enter(place)
        return True


def _is_expected(terms: Terms | Start, place: Place) -> bool:
    return (terms.number, terms.join, terms.incarnation) == (place.number, place.join, place.incarnation)
