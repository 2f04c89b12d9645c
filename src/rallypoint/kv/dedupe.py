"""Suppression of resent requests: a request that was executed is answered again, not executed again.

A client numbers its requests and says up to where it has received answers; those are forgotten. What is kept is
bounded per client and in the number of clients (the longest silent one goes first).
"""

from __future__ import annotations

from collections import OrderedDict

from rallypoint.kv.types import Failure, FailureCode, Origin, Result


class ClientAnswers:
    """Answers to one client that it may still ask for again."""

    __slots__ = ("answers", "forgotten")

    def __init__(self, forgotten: int = 0, answers: dict[int, Result] | None = None) -> None:
        self.forgotten = forgotten
        """Requests up to this number were executed or will never be: their answers are gone."""
        self.answers: dict[int, Result] = answers or {}


class Dedupe:
    """What was answered to whom."""

    def __init__(self, max_clients: int = 65_536, max_answers: int = 1_024) -> None:
        self._max_clients = max_clients
        self._max_answers = max_answers
        self.clients: OrderedDict[str, ClientAnswers] = OrderedDict()

    def lookup(self, origin: Origin) -> Result | None:
        """The answer if the request was executed before, or why it must not be; None if it is new."""
        if origin.seq < 1:
            return Failure(FailureCode.INVALID, f"requests are numbered from 1, and this one is {origin.seq}")
        known = self.clients.get(origin.client)
        if known is None:
            return None
        if origin.seq <= known.forgotten:
            return Failure(
                FailureCode.TOO_OLD,
                f"request {origin.seq} of client {origin.client} is older than what is remembered "
                f"(up to {known.forgotten} is settled): whether it was executed cannot be said",
            )
        return known.answers.get(origin.seq)

    def remember(self, origin: Origin, result: Result) -> None:
        """Note the answer, and forget what the client has acknowledged or what exceeds the bounds.

        A request cannot acknowledge itself: whatever it claims, its own answer is kept.
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
        if upto == known.forgotten + 1:  # most often
            known.forgotten = upto
            known.answers.pop(upto, None)
        else:
            self._forget(known, upto)
        while len(known.answers) > self._max_answers:
            self._forget(known, min(known.answers))

    @staticmethod
    def _forget(known: ClientAnswers, upto: int) -> None:
        """Costs what there is to forget, usually one answer, or what is remembered if that is less."""
        answers, since = known.answers, known.forgotten
        if upto <= since:
            return
        known.forgotten = upto
        if upto - since <= len(answers):
            for seq in range(since + 1, upto + 1):
                answers.pop(seq, None)
        else:
            known.answers = {seq: answer for seq, answer in answers.items() if seq > upto}
