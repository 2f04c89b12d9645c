"""The world of one who waits on another thread: made while there is time, given as soon as it has its place.

One who has only looked at its run so far may begin its call by itself (`Ready`), before the loop hears of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from rallypoint._world import AsyncWorld
from rallypoint.backends.contract import Begun, Lane
from rallypoint.rendezvous.express import joined_at
from rallypoint.rendezvous.membership import Joined

if TYPE_CHECKING:
    from rallypoint._background import LentCall, Release
    from rallypoint.aio import AsyncHandler
    from rallypoint.rendezvous.node import Node

W = TypeVar("W")


class Ready(Generic[W]):
    """What a caller may begin its next call with. Made on the loop; everything else is for the caller's thread."""

    def __init__(self, handler: AsyncHandler, node: Node, lane: Lane, world: AsyncWorld, shown: W) -> None:
        self.node = node
        self.lane = lane
        self.world = world
        self.shown = shown
        self.call: LentCall[W] | None = None
        self.begun: Begun | None = None
        """What the caller has done; None: nothing."""
        self.is_in = False
        self._handler = handler

    def begin(self) -> bool:
        """Join; whether the place was there at once. Else the loop goes on with what was `begun`."""
        start = self.node.starts.take()
        if start is None:
            return False
        begun = self.begun = Begun(start)
        done = self.lane.begin(begun)
        if not begun.sent_at:
            self.begun = None
        if done is None:
            return False
        start.entered(done.rank)
        joined = joined_at(done, start.door.config.data_lease)
        self.node.entered_early(joined)
        self._handler.place(self.world, joined)
        self.is_in = True
        return True

    def give_up(self) -> bool:
        """The caller was interrupted; whether something was begun, which the node takes back."""
        if self.begun is None or not self.begun.sent_at:
            return False
        self.begun.is_given_up = True
        return True

    @property
    def is_given_up_unseen(self) -> bool:
        """Whether something was given up that the node has not gone on with: it takes it back when it comes to it."""
        return self.begun is not None and self.begun.is_given_up and not self.begun.is_taken_over


class Early(Generic[W]):
    """The world of one who waits on another thread: made while there is time, given as soon as it has its place."""

    def __init__(
        self, handler: AsyncHandler, release: Release[W], face: Callable[[AsyncWorld], W], ready: Ready[W] | None = None
    ) -> None:
        self.made: list[tuple[AsyncWorld, W]] = [] if ready is None else [(ready.world, ready.shown)]
        self.is_released = ready is not None and ready.is_in
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
        self.is_released = True
        self._handler.changed = world.changed  # as `AsyncHandler.place`, with fewer steps: many wait for this core
        world.store.joined = joined
        return shown

    def _settle_if_released(self) -> None:
        if self.is_released:
            self.made[0][0].settle()
