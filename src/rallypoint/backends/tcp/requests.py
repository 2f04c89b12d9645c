"""The requests of a client that wait for their answers, by number: what is sent again, and how each ends in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from rallypoint.errors import BackendError, OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import Result
from rallypoint.wire.messages import AskStatus, Do, Status


class Pending:
    """One of them."""

    __slots__ = ("answer", "changes", "deadline", "first_sent_at", "is_sent", "message", "sent_at")

    def __init__(
        self, message: Do | AskStatus, answer: asyncio.Future[Result | Status], changes: bool, deadline: float
    ) -> None:
        self.message = message
        self.answer = answer
        self.changes = changes
        """Whether it makes a difference that it was executed."""
        self.deadline = deadline
        self.is_sent = False
        self.sent_at = self.first_sent_at = 0.0
        """When it was sent last, and first: it cannot have been executed before that."""

    def sent(self, now: float) -> None:
        """It goes out, perhaps again."""
        if not self.is_sent:
            self.is_sent = True
            self.first_sent_at = now
        self.sent_at = now

    def fail(self, error: BackendError) -> None:
        """End it, if it has not ended. Unavailable becomes OutcomeUnknown if it may have been executed."""
        if self.answer.done():
            return
        if isinstance(error, Unavailable) and self.is_sent and self.changes:
            error = OutcomeUnknown(f"{error}: it may have happened")
        self.answer.set_exception(error)
        self.answer.exception()  # nobody may be left to take it


class Requests:
    """All of them, in the order of their numbers, which is the order they are sent in."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._last = 0
        self._pending: dict[int, Pending] = {}

    def number(self) -> int:
        """The number of the next request."""
        self._last += 1
        return self._last

    @property
    def acked(self) -> int:
        """Nobody waits for an answer up to this number."""
        return next(iter(self._pending), self._last + 1) - 1

    def add(self, message: Do | AskStatus, changes: bool) -> Pending:
        """A request under its number."""
        pending = Pending(message, self._loop.create_future(), changes, self._loop.time() + self.timeout_s)
        self._pending[message.seq] = pending
        return pending

    def open(self) -> Iterator[Pending]:
        """Those that are not answered, in order."""
        for seq, pending in list(self._pending.items()):
            if pending.answer.done():  # given up by whoever had asked
                self._pending.pop(seq, None)
            else:
                yield pending

    def answered(self, seq: int, result: Result | Status) -> None:
        """An answer has arrived, perhaps to nobody."""
        pending = self._pending.pop(seq, None)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(result)

    def forget(self, pending: Pending) -> None:
        """Whoever had asked is no longer interested."""
        self._pending.pop(pending.message.seq, None)

    def too_large(self, seq: int, size: int, most: int) -> None:
        """It cannot be sent."""
        pending = self._pending.pop(seq, None)
        if pending is not None:
            pending.fail(Rejected(f"a request of {size} bytes is too large: the server takes {most} at most"))

    def fail(self, error: BackendError, which: Callable[[Pending], bool] = lambda _: True) -> None:
        """End some of them with an error."""
        for pending in self.open():
            if which(pending):
                self._pending.pop(pending.message.seq, None)
                pending.fail(error)
