"""The unanswered requests of a client, by number: which to send again after a reconnect, and how each ends.

Nothing here sends: `client` does, and it must send requests in the order of their numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from rallypoint.errors import BackendError, OutcomeUnknown, Rejected, Unavailable
from rallypoint.kv.types import Result
from rallypoint.wire.messages import AskStatus, Do, Status


class Pending:
    """An unanswered request."""

    __slots__ = ("answer", "changes", "deadline", "first_sent_at", "is_sent", "message", "sent_at")

    def __init__(
        self, message: Do | AskStatus, answer: asyncio.Future[Result | Status], changes: bool, deadline: float
    ) -> None:
        self.message = message
        self.answer = answer
        self.changes = changes
        """Whether executing the request changes data."""
        self.deadline = deadline
        self.is_sent = False
        self.sent_at = self.first_sent_at = 0.0
        """When it was last sent, and first sent: it cannot have been executed before."""

    def sent(self, now: float) -> None:
        """Record that the request is being sent, perhaps again."""
        if not self.is_sent:
            self.is_sent = True
            self.first_sent_at = now
        self.sent_at = now

    def fail(self, error: BackendError) -> None:
        """End the request, unless it has ended. Unavailable becomes OutcomeUnknown if it may have been executed."""
        if self.answer.done():
            return
        if isinstance(error, Unavailable) and self.is_sent and self.changes:
            error = OutcomeUnknown(f"{error}: it may have happened")
        self.answer.set_exception(error)
        self.answer.exception()  # mark as retrieved: the caller may have stopped waiting


class Requests:
    """All unanswered requests of one client, in the order of their numbers, which is the order of sending."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._last = 0
        self._pending: dict[int, Pending] = {}

    def number(self) -> int:
        """A new request number."""
        self._last += 1
        return self._last

    @property
    def acked(self) -> int:
        """No request up to this number is waiting for an answer."""
        return next(iter(self._pending), self._last + 1) - 1

    def add(self, message: Do | AskStatus, changes: bool) -> Pending:
        """Register a request under its number."""
        pending = Pending(message, self._loop.create_future(), changes, self._loop.time() + self.timeout_s)
        self._pending[message.seq] = pending
        return pending

    def open(self) -> Iterator[Pending]:
        """The unanswered requests, in order."""
        for seq, pending in list(self._pending.items()):
            if pending.answer.done():  # its caller was cancelled
                self._pending.pop(seq, None)
            else:
                yield pending

    def answered(self, seq: int, result: Result | Status) -> None:
        """Deliver an answer. The request may have ended already."""
        pending = self._pending.pop(seq, None)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(result)

    def forget(self, pending: Pending) -> None:
        """Remove a request whose caller no longer waits."""
        self._pending.pop(pending.message.seq, None)

    def too_large(self, seq: int, size: int, limit: int) -> None:
        """Fail a request that exceeds the frame limit of the server."""
        pending = self._pending.pop(seq, None)
        if pending is not None:
            pending.fail(Rejected(f"a request of {size} bytes is too large: the server accepts at most {limit}"))

    def fail(self, error: BackendError, which: Callable[[Pending], bool] = lambda _: True) -> None:
        """End the requests that match `which` with an error."""
        for pending in self.open():
            if which(pending):
                self._pending.pop(pending.message.seq, None)
                pending.fail(error)
