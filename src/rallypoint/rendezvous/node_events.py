"""The typed events that a node emits. Each change is reported once."""

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
    """Events of one node of one run."""

    def __init__(self, emit: Emitter, run_id: str, by: str) -> None:
        self._emit = emit
        self._run_id = run_id
        self._by = by
        self._waiting_reason = ""

    def join_started(self, join: int) -> None:
        self._emit(JoinStarted(run_id=self._run_id, by=self._by, join=join))

    def waiting(self, reason: str) -> None:
        """Emitted when the reason changes."""
        if reason and reason != self._waiting_reason:
            self._waiting_reason = reason
            self._emit(WaitingFor(run_id=self._run_id, by=self._by, reason=reason))

    def waiting_ended(self) -> None:
        self._waiting_reason = ""

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
        """A call of `next_round` raised `error`. A graceful exit is reported as leaving."""
        if isinstance(error, RendezvousGracefulExitError):
            self.left(str(error))
        else:
            why = str(error)
            self._emit(JoinFailed(run_id=self._run_id, by=self._by, error=type(error).__name__, reason=why))

    def closed(self, why: str) -> None:
        self._emit(RunClosed(run_id=self._run_id, by=self._by, reason=why))

    def reopened(self, why: str) -> None:
        self._emit(RunReopened(run_id=self._run_id, by=self._by, reason=why))
