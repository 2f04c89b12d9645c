"""What a node says of itself, in typed events."""

from __future__ import annotations

from rallypoint.errors import RendezvousError, RendezvousGracefulExitError
from rallypoint.events import (
    Confirmed,
    Emitter,
    JoinFailed,
    JoinStarted,
    NodeLeft,
    RoundEntered,
    RunClosed,
    RunReopened,
    WaitingFor,
    WorldChanged,
)
from rallypoint.rendezvous.membership import Cause, Joined


class NodeEvents:
    """Of one node of one run."""

    def __init__(self, emit: Emitter, run_id: str, by: str) -> None:
        self._emit = emit
        self._run_id = run_id
        self._by = by
        self._waits_for = ""

    def joins(self, join: int) -> None:
        self._emit(JoinStarted(run_id=self._run_id, by=self._by, join=join))

    def waits(self, reason: str) -> None:
        """Said when it changes."""
        if reason and reason != self._waits_for:
            self._waits_for = reason
            self._emit(WaitingFor(run_id=self._run_id, by=self._by, reason=reason))

    def waits_no_more(self) -> None:
        self._waits_for = ""

    def confirmed(self, number: int, rank: int) -> None:
        self._emit(Confirmed(run_id=self._run_id, by=self._by, round=number, rank=rank))

    def entered(self, joined: Joined) -> None:
        number, rank, size = joined.number, joined.rank, joined.size
        self._emit(RoundEntered(run_id=self._run_id, by=self._by, round=number, rank=rank, world_size=size))

    def changed(self, number: int, cause: Cause, reason: str) -> None:
        self._emit(WorldChanged(run_id=self._run_id, by=self._by, round=number, cause=cause.value, reason=reason))

    def left(self, why: str) -> None:
        self._emit(NodeLeft(run_id=self._run_id, by=self._by, reason=why))

    def failed(self, error: RendezvousError) -> None:
        """A call has; one that ends well all the same is a goodbye."""
        if isinstance(error, RendezvousGracefulExitError):
            self.left(str(error))
        else:
            why = str(error)
            self._emit(JoinFailed(run_id=self._run_id, by=self._by, error=type(error).__name__, reason=why))

    def closed(self, why: str) -> None:
        self._emit(RunClosed(run_id=self._run_id, by=self._by, reason=why))

    def reopened(self, why: str) -> None:
        self._emit(RunReopened(run_id=self._run_id, by=self._by, reason=why))
