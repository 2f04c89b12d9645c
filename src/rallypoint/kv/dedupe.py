"""Deduplication of resent requests: a request that was executed is answered again, not executed again.

A client numbers its requests and acknowledges the answers that it has received, which are then dropped. The number of
answers per client and the number of clients are bounded (the least recently active client is dropped first).
"""

from __future__ import annotations

from collections import OrderedDict

from rallypoint.kv.types import Failure, FailureCode, Origin, Result


class ClientAnswers:
    """Answers to one client that are not acknowledged."""

    __slots__ = ("answers", "forgotten")

    def __init__(self, forgotten: int = 0, answers: dict[int, Result] | None = None) -> None:
        self.forgotten = forgotten
        """Requests up to this number were executed or never will be: their answers are dropped."""
        self.answers: dict[int, Result] = answers or {}


class Dedupe:
    """The answers to all clients."""

    def __init__(self, max_clients: int = 65_536, max_answers: int = 1_024) -> None:
        self._max_clients = max_clients
        self._max_answers = max_answers
        self.clients: OrderedDict[str, ClientAnswers] = OrderedDict()

    def lookup(self, origin: Origin) -> Result | None:
        """The answer if the request was executed before, or a Failure if that is unknown; None if it is new."""
        if origin.seq < 1:
            return Failure(FailureCode.INVALID, f"requests are numbered from 1, and this one has number {origin.seq}")
        known = self.clients.get(origin.client)
        if known is None:
            return None
        if origin.seq <= known.forgotten:
            return Failure(
                FailureCode.TOO_OLD,
                f"request {origin.seq} of client {origin.client} is too old (answers up to {known.forgotten} are no "
                f"longer kept): it may have been executed",
            )
        return known.answers.get(origin.seq)

    def remember(self, origin: Origin, result: Result) -> None:
        """Keep the answer, and drop answers that are acknowledged or exceed the bounds.

        A request cannot acknowledge itself: its own answer is kept in any case.
        """
        known = self.clients.get(origin.client)
        if known is None:
            known = self.clients[origin.client] = ClientAnswers()
            if len(self.clients) > self._max_clients:
                self.clients.popitem(last=False)
        else:
            self.clients.move_to_end(origin.client)
        seq, acked = origin.seq, origin.acked
        known.answers[seq] = result
        upto = acked if acked < seq else seq - 1
        if upto == known.forgotten + 1:  # the common case
            known.forgotten = upto
            known.answers.pop(upto, None)
        else:
            self._forget(known, upto)
        while len(known.answers) > self._max_answers:
            self._forget(known, min(known.answers))

    @staticmethod
    def _forget(known: ClientAnswers, upto: int) -> None:
        """O(min(requests to drop, kept answers)), usually one."""
        answers, since = known.answers, known.forgotten
        if upto <= since:
            return
        known.forgotten = upto
        if upto - since <= len(answers):
            for seq in range(since + 1, upto + 1):
                answers.pop(seq, None)
        else:
            known.answers = {seq: answer for seq, answer in answers.items() if seq > upto}
