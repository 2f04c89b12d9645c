"""What a caller may do by itself on a lane, and has done: what it and the event loop have in common.

Two threads, and no lock: the handler of a signal may ask for anything at any point of the caller's thread. What both
may take is taken out of a container in one step, and who has it acts. The loop asks for what was taken (`account`)
before it does anything about a round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rallypoint.backends.contract import Begun, Done, Terms
from rallypoint.wire.frames import HEADER_BYTES
from rallypoint.wire.messages import Place, place_decoder


class Offers:
    """What a caller may do by itself, and has done: what the loop and the caller have in common."""

    def __init__(self) -> None:
        self.terms: dict[int, Terms] = {}
        """What is offered, by its number. Whoever takes it out of here decides whether it is confirmed."""
        self.place = b""
        """The frame with the place that the caller has confirmed, or was about to: noted before it takes the terms."""
        self.seats: dict[int, bool] = {}
        """Whoever takes the one under the same number decides whether the caller is in."""
        self.entered: Place | None = None
        """Where it is: noted before it takes the seat."""
        self._number = 0
        self._is_offered = False
        """Whether something was offered whose fate nobody has asked for."""

    def offer(self, terms: Terms) -> None:
        """The caller may do this by itself from now on. What was offered before has to be accounted for first."""
        self._number += 1
        self.place, self.entered = b"", None
        self.seats = {self._number: True}
        self._is_offered = True
        self.terms = {self._number: terms}

    def account(self) -> Done | None:
        """What the caller has done by itself; None: nothing. It may do nothing more."""
        if not self._is_offered:
            return None
        self._is_offered = False
        if self.terms.pop(self._number, None) is not None:
            return None
        confirmed = place_of(self.place)
        if self.seats.pop(self._number, False):
            return Done(confirmed.rank)
        assert self.entered is not None
        return done_at(self.entered)


class OfferedLane(Offers, ABC):
    """A lane, for the loop and for the caller."""

    @property
    @abstractmethod
    def is_standing(self) -> bool: ...

    @abstractmethod
    def stand_by(self) -> None: ...

    @abstractmethod
    def begin(self, begun: Begun) -> Done | None: ...

    @abstractmethod
    def wait(self, bell: int, within_s: float) -> object | None: ...

    @abstractmethod
    def keep_warm(self, bell: int) -> None: ...

    @abstractmethod
    def leave(self) -> None: ...


def place_of(data: bytes) -> Place:
    """What the first frame says. DecodeError if it is not whole."""
    length = int.from_bytes(data[:HEADER_BYTES], "big")
    return place_decoder.decode(data[HEADER_BYTES : HEADER_BYTES + length])[0]


def done_at(place: Place) -> Done:
    """Somebody is there."""
    return Done(place.rank, place.revision, place.number, place.size, place.addr, place.port)
