"""The decisions of a launcher: `Policy.handle(event) -> instructions`. Pure: no clock, no process, no network.

One `Policy` is one node's part in one run, from its first join to its exit code. Events are facts that the supervisor
observed. It carries out the instructions in the order given, and reports their results as events.

Invariants:

- Workers run only between `Start` and the `Stopped` that follows it: workers are never started twice, and the launcher
  does not join while workers are left.
- Restarts are counted per round: a failure costs the run one restart, however many workers fail and nodes notice it.
- A launcher that is asked to go leaves the round first, so that the others need not time out, and then stops its
  workers.
- A node that has finished waits for the others. If the round ends without `FINISH`, the node joins the next round.
- After `End` there are no more instructions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias, assert_never

BUDGET_USED_UP = 80
CLOSED = 81
TIMED_OUT = 82
HELD_BACK = 83
NOT_REACHED = 4
REFUSED = 5
FINISHED = "its workers have finished"
LAST_SIGNAL = 64
"""The highest signal number of Linux: a code above 128 + 64 is a program's own, such as 255 for exit(-1)."""


class RoundOutcome(enum.Enum):
    """The outcome of a round, on which its launchers agree in the round's store (`round_outcome.py`).

    The first proposal wins, except that the `RESTART` or `FAILED` of a launcher whose worker failed replaces `FINISH`.
    """

    FINISH = "finish"
    """All workers of a node have finished: the round no longer ends early to admit waiting nodes."""
    RESTART = "restart"
    """All nodes re-join."""
    FAILED = "failed"
    """The run is over, with a code."""


class ChangeCause(enum.Enum):
    """Why the round changed, as far as a launcher distinguishes causes."""

    BROKEN = "broken"
    """A member was lost, the round is over, or this node's session has ended: the workers cannot go on."""
    WAITING = "waiting"
    DRAIN = "drain"


class JoinEndReason(enum.Enum):
    """Why a join ended without a place in a round."""

    CLOSED = "closed"
    RELEASED = "released"
    """The node was a spare of a run that ended, or was asked to go. Not a failure."""
    TIMED_OUT = "timed out"
    NOT_REACHED = "not reached"
    REFUSED = "refused"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entered:
    """This node is a member of a round and will start `workers` workers."""

    round: int
    workers: int


@dataclass(frozen=True, slots=True)
class JoinEnded:
    """The join ended without a place. `outcome` is the exit code of a run that has ended and that this node was in."""

    reason: JoinEndReason
    why: str
    outcome: int | None = None


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The workers could not be started, because the round ended first."""

    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has ended. The code of a worker killed by a signal is 128 + the signal's number."""

    round: int
    local_rank: int
    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """A worker of the round has stalled, on this node or another, and the stacks of all nodes are written."""

    round: int
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """No process of the round's workers is left, including their children."""

    round: int


@dataclass(frozen=True, slots=True)
class RoundChanged:
    """The current round has changed."""

    round: int
    cause: ChangeCause
    why: str


@dataclass(frozen=True, slots=True)
class RestartDecided:
    """The answer to `SpendRestart`: whether the run may go on, and its exit code if not."""

    round: int
    allowed: bool
    code: int
    why: str


@dataclass(frozen=True, slots=True)
class OutcomeDecided:
    """The outcome of the round that is now in force: the answer to `Propose`, or another launcher's proposal."""

    round: int
    outcome: RoundOutcome
    why: str
    code: int = 0


@dataclass(frozen=True, slots=True)
class AllFinished:
    """All nodes of the round have finished."""

    round: int


@dataclass(frozen=True, slots=True)
class OthersUnfinished:
    """Other nodes did not finish in time; `why` names them."""

    round: int
    why: str


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """This launcher received a signal."""

    number: int
    name: str


Event: TypeAlias = (
    Entered
    | JoinEnded
    | StartFailed
    | Exited
    | Stalled
    | Stopped
    | RoundChanged
    | RestartDecided
    | OutcomeDecided
    | AllFinished
    | OthersUnfinished
    | SignalReceived
)

# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Leave the current round, if there is one, and join the next."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start the workers of the round."""

    round: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the round's workers, with their grace period (without it if not `gently`). `Stopped` follows."""

    round: int
    why: str
    gently: bool = True


@dataclass(frozen=True, slots=True)
class SpendRestart:
    """Count a restart of the run for this round, and tell the other launchers. `RestartDecided` follows."""

    round: int
    why: str
    code: int
    """The failed worker's exit code."""


@dataclass(frozen=True, slots=True)
class Propose:
    """Propose an outcome of the round. `OutcomeDecided` follows, with the outcome in force."""

    round: int
    outcome: RoundOutcome
    why: str


@dataclass(frozen=True, slots=True)
class AwaitOthers:
    """Wait until all nodes of the round have finished. `AllFinished` or `OthersUnfinished` follows."""

    round: int


@dataclass(frozen=True, slots=True)
class CloseFinished:
    """Close the run as finished."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the run at once, with a reason for the others. `early`: they still work, so ask them to re-join."""

    why: str
    early: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """End the launcher with this exit code."""

    code: int
    why: str


Instruction: TypeAlias = Join | Start | Stop | SpendRestart | Propose | AwaitOthers | CloseFinished | Leave | End

# --- the state machine ------------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """The phase of a launcher."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    """Workers are being stopped, or a restart is being counted; then `_next` follows."""
    FINISHING = "finishing"
    """All workers have exited with 0."""
    ENDED = "ended"


class Policy:
    """The state of one launcher. Call `begin()` first."""

    def __init__(self) -> None:
        self.phase = Phase.JOINING
        self.round = 0
        self._running: set[int] = set()
        """Local ranks of the workers that have not ended."""
        self._has_processes = False
        """Whether there may be processes of workers: true from `Start` until `Stopped`."""
        self._is_spending = False
        self._is_awaiting = False
        self._next: Join | End = Join()
        self._was_signalled = False

    def begin(self) -> list[Instruction]:
        """The first instructions."""
        return [Join()]

    def handle(self, event: Event) -> list[Instruction]:
        """The instructions that follow from an event. Events of an earlier round are ignored."""
        if self.phase is Phase.ENDED:
            return []
        match event:
            case Entered():
                return self._enter(event)
            case JoinEnded():
                return self._end(_code_of(event), event.why) if self.phase is Phase.JOINING else []
            case SignalReceived():
                return self._signalled(event)
        if event.round != self.round or self.phase is Phase.JOINING:
            return []
        match event:
            case Exited():
                return self._exited(event)
            case Stalled():
                return self._stalled(event)
            case StartFailed(why=why):
                return self._stop(Join(), why) if self.phase is Phase.RUNNING else []
            case Stopped():
                return self._stopped()
            case RoundChanged():
                return self._changed(event)
            case RestartDecided():
                return self._restart_decided(event)
            case OutcomeDecided():
                return self._outcome_decided(event)
            case AllFinished():
                if not self._is_awaiting:
                    return []
                return [CloseFinished(), *self._end(0, "all nodes have finished")]
            case OthersUnfinished(why=why):
                return self._end(TIMED_OUT, why) if self._is_awaiting else []
            case _:
                assert_never(event)

    # --- one method for each kind of event ----------------------------------------------------------------------------

    def _enter(self, event: Entered) -> list[Instruction]:
        if self.phase is not Phase.JOINING:
            return []
        self.phase, self.round = Phase.RUNNING, event.round
        self._running = set(range(event.workers))
        self._has_processes, self._is_spending, self._is_awaiting = True, False, False
        return [Start(event.round)]

    def _exited(self, event: Exited) -> list[Instruction]:
        self._running.discard(event.local_rank)
        if self.phase is not Phase.RUNNING:
            return []
        if event.code != 0:
            why = f"the worker of rank {event.rank} {ended(event.code)}"
            self._is_spending = True
            return [*self._stop(Join(), why), SpendRestart(self.round, why, event.code)]
        if self._running:
            return []
        self.phase = Phase.FINISHING
        return [Stop(self.round, FINISHED)]  # they may have left child processes behind

    def _stalled(self, event: Stalled) -> list[Instruction]:
        if self.phase is not Phase.RUNNING:
            return []
        self._is_spending = True
        return [*self._stop(Join(), event.why), SpendRestart(self.round, event.why, BUDGET_USED_UP)]

    def _stopped(self) -> list[Instruction]:
        if not self._has_processes:
            return []  # a second `Stopped`: the workers had ended by themselves when they were to be stopped
        self._has_processes = False
        self._running.clear()
        if self.phase is Phase.FINISHING:
            return [Propose(self.round, RoundOutcome.FINISH, FINISHED)]
        return self._go_on()

    def _changed(self, event: RoundChanged) -> list[Instruction]:
        if event.cause is ChangeCause.DRAIN:
            if self._is_ending:
                return []
            return [Leave(event.why, early=True), *self._stop(End(0, event.why), event.why)]
        if self.phase is Phase.STOPPING:
            return []  # a join or the end follows anyway
        if event.cause is ChangeCause.WAITING:
            return [Propose(self.round, RoundOutcome.RESTART, event.why)] if self.phase is Phase.RUNNING else []
        return self._stop(Join(), event.why)

    def _outcome_decided(self, event: OutcomeDecided) -> list[Instruction]:
        if self._is_ending:
            return []
        match event.outcome:
            case RoundOutcome.FINISH:
                if self.phase is not Phase.FINISHING or self._is_awaiting or self._has_processes:
                    return []  # once this node has finished, it proposes FINISH itself and gets this as the answer
                self._is_awaiting = True
                return [AwaitOthers(self.round)]
            case RoundOutcome.RESTART:
                return self._stop(Join(), event.why) if self.phase is not Phase.STOPPING else []
            case RoundOutcome.FAILED:
                return self._stop(End(event.code, event.why), event.why)

    def _restart_decided(self, event: RestartDecided) -> list[Instruction]:
        self._is_spending = False
        if not event.allowed and not self._is_ending:
            self._next = End(event.code, event.why)
        return self._go_on()

    def _signalled(self, event: SignalReceived) -> list[Instruction]:
        why = f"stopped by {event.name}"
        if self._was_signalled:  # the second signal ends the grace period
            return [Stop(self.round, why, gently=False)] if self._has_processes else self._end(128 + event.number, why)
        self._was_signalled = True
        self._is_spending = False  # the answer no longer matters
        return [Leave(why, early=True), *self._stop(End(128 + event.number, why), why)]

    # --- stopping -----------------------------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        """Whether the end of the launcher has been decided."""
        return self.phase is Phase.STOPPING and isinstance(self._next, End)

    def _stop(self, then: Join | End, why: str) -> list[Instruction]:
        """Stop the workers that are left; `then` follows."""
        was_stopping = self.phase in (Phase.STOPPING, Phase.FINISHING)
        self.phase, self._next, self._is_awaiting = Phase.STOPPING, then, False
        if not self._has_processes:
            return self._go_on()
        return [] if was_stopping else [Stop(self.round, why)]

    def _go_on(self) -> list[Instruction]:
        """Join or end, once no process is left and no restart is being counted."""
        if self.phase is not Phase.STOPPING or self._has_processes or self._is_spending:
            return []
        if isinstance(self._next, End):
            return self._end(self._next.code, self._next.why)
        self.phase = Phase.JOINING
        return [Join()]

    def _end(self, code: int, why: str) -> list[Instruction]:
        self.phase = Phase.ENDED
        return [Leave(why), End(code, why)]


def ended(code: int) -> str:
    """How a process ended, in words."""
    return f"was killed by signal {code - 128}" if 128 < code <= 128 + LAST_SIGNAL else f"exited with {code}"


def _code_of(event: JoinEnded) -> int:
    """The exit code of a launcher whose join ended."""
    match event.reason:
        case JoinEndReason.CLOSED:
            return CLOSED if event.outcome is None else event.outcome
        case JoinEndReason.RELEASED:
            return 0
        case JoinEndReason.TIMED_OUT:
            return TIMED_OUT
        case JoinEndReason.NOT_REACHED:
            return NOT_REACHED
        case JoinEndReason.REFUSED:
            return REFUSED
