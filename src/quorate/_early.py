"""The world of one who waits on another thread: made while there is time, given as soon as it has its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from quorate._world import AsyncWorld
from quorate.backends.contract import Lane
from quorate.rendezvous.membership import Joined

if TYPE_CHECKING:
    from quorate._background import Release
    from quorate.aio import AsyncHandler

W = TypeVar("W")


class Early(Generic[W]):
    """The world of one who waits on another thread: made while there is time, given as soon as it has its place."""

    def __init__(self, handler: AsyncHandler, release: Release[W], face: Callable[[AsyncWorld], W]) -> None:
        self.made: list[tuple[AsyncWorld, W]] = []
        self.is_released = False
        self._handler = handler
        self._release = release
        self._face = face

    def prepare(self) -> None:
        if not self.made:
            world = self._handler.new_world()
            self.made.append((world, self._face(world)))

    def __call__(self, joined: Joined) -> None:
        world, shown = self.made[0]
        self._handler.place(world, joined)
        self.is_released = True
        self._release(shown, world.settle)

    def lend(self, lane: Lane) -> None:
        self._release.lend(lane, self._settle_if_released)

    def enter(self, joined: Joined) -> object:
        world, shown = self.made[0]
        self._handler.place(world, joined)
        self.is_released = True
        return shown

    def _settle_if_released(self) -> None:
        if self.is_released:
            self.made[0][0].settle()
