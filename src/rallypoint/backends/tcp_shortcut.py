"""A client's shortcut: somebody who waits for one thing sees what arrives before everybody else does.

What that one does at once, it does without waking anybody else; what arrived is held, and given to everybody a little
later: as if it had been under way for longer. Most of what a process does on a push it does with cold caches, so that
every step between the push and the answer to it counts; the steps that nobody waits for are made afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Unpack

from rallypoint.backends.contract import Done, OnPush, Renewing, Session, Terms
from rallypoint.backends.tcp_offers import OfferedLane
from rallypoint.backends.tcp_requests import Pending, Ready, Requests
from rallypoint.backends.tcp_watch import TcpWatch
from rallypoint.kv.types import Txn, TxnResult
from rallypoint.wire.messages import Answer, Push, ServerMessage

HELD_S = 0.1
"""What nobody asks for is given to everybody after this."""


class TakeSession(Protocol):
    """As `Shortcut.take_session` has it."""

    def __call__(self, lease: int, ttl_s: float, granted_at: float, **how: Unpack[Renewing]) -> Session: ...


class TcpShortcut:
    """Of one client. `ask` sends an operation now, `look` sees to its answer; `give` is how everybody sees messages."""

    held_s = HELD_S
    take_session: TakeSession
    """The client's."""

    def __init__(
        self,
        watches: Mapping[int, TcpWatch],
        requests: Requests,
        ask: Callable[[Txn, Ready | None], Pending],
        look: Callable[[], None],
        give: Callable[[Sequence[ServerMessage]], None],
    ) -> None:
        self.on_push: OnPush | None = None
        """Who sees it first; None: nobody does."""
        self._watches = watches
        self._requests = requests
        self._ask = ask
        self._look = look
        self._give = give
        self.make_lane: Callable[[str], OfferedLane | None] = lambda _: None
        """Called with a node's id: where a caller on another thread may find its place by itself."""
        self._lane: OfferedLane | None = None
        self._on_done: Callable[[Done], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._op: Txn | None = None
        self._ready: Ready | None = None
        self._asked = 0
        self._held: list[Sequence[ServerMessage]] = []
        self._timer: asyncio.TimerHandle | None = None

    def open(
        self,
        on_push: OnPush,
        op: Txn | None,
        terms: Terms | None = None,
        on_done: Callable[[Done], None] | None = None,
    ) -> OfferedLane | None:
        """From now on, until `settle()` or until it says that it does not know what to do with something."""
        self.on_push = on_push
        self._op = op
        self._on_done = on_done
        self._prepare()
        if terms is None:
            return None
        lane = self.lane(terms.node_id)
        if lane is not None:
            self._book(lane)
            lane.offer(terms)
        return lane

    def lane(self, node_id: str) -> OfferedLane | None:
        """Of that node, which is the same one every time."""
        self._lane = self._lane or self.make_lane(node_id)
        return self._lane

    def send(self, op: Txn) -> Pending:
        """Send it now. What is shown next is shown with its answer, if that has come."""
        ready, self._ready = self._ready, None
        pending = self._ask(op, ready if ready is not None and ready.op is op else None)
        self._asked = pending.message.seq
        return pending

    def takes(self, on_push: OnPush, messages: Sequence[ServerMessage]) -> bool:
        """Show what has arrived; whether everybody else is to see it later. If not, they have seen all before it."""
        lane = self._lane
        if lane is not None and not all(type(message) is Answer for message in messages) and self._book(lane):
            self.settle()
            return False
        batches, answer = [], None
        for message in messages:
            if type(message) is Push and message.watch in self._watches:
                batches.append(message.batch)
            elif type(message) is Answer and message.seq == self._asked and type(message.result) is TxnResult:
                answer = message.result
            else:
                break
        else:
            if on_push(batches, answer):
                self._held.append(messages)
                if self._timer is None:
                    self._timer = self._loop.call_later(self.held_s, self.settle)
                return True
        if not self._held and all(type(message) is Answer for message in messages):
            self._prepare()  # something was asked since, for the session most likely: nothing that is waited for
        else:
            self.settle()
        return False

    def _book(self, lane: OfferedLane) -> bool:
        """Keep whoever waits on the lane from doing anything; whether it had, which was told."""
        done = lane.account()
        if done is None:
            return False
        if self._on_done is not None:
            self._on_done(done)
        return True

    def _prepare(self) -> None:
        self._ready = self._requests.prepare(self._op) if self._op is not None else None

    def settle(self) -> None:
        """Nobody sees anything first any more, and everybody sees what was held."""
        if self._lane is not None:
            self._book(self._lane)
        self.on_push = self._op = self._ready = self._on_done = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._asked:
            self._asked = 0
            self._look()
        try:
            while self._held:
                self._give(self._held.pop(0))
        except BaseException:  # of a listener, and no reason to keep the rest from everybody
            self._loop.call_soon(self.settle)
            raise
