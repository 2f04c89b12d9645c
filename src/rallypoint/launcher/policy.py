"""The decisions of a launcher: `Policy.handle(event) -> instructions`. Pure: no clock, no process, no network.

One `Policy` is one node's part in one run, from its first join to its exit code. Events are facts that the supervisor
observed. It carries out the instructions in the order given, and reports their results as events.

Invariants:

- Workers run only between `Start` and the `Stopped` that follows it: workers are never started twice, and the launcher
  does not join while workers are left.
- Restarts are counted per round: a failure costs the run one restart, however many workers fail and nodes notice it.
- A failure is reported first, then attributed, and only then costs anything. When a node is lost, the workers of the
  others fail within milliseconds, long before the loss is known. So the launcher whose report is in force counts a
  restart only after all launchers of the round have answered that they live. If a member is lost or leaves first, that
  explains the failure, and nothing is counted.
- A worker that was ended by SIGTERM, SIGINT or SIGHUP may have been told to go together with its launcher. Its failure
  is neither reported nor hidden by an answer until the launcher's own signal would have come.
- A launcher that is asked to go leaves the round first, so that the others need not time out, and then stops its
  workers.
- A node that has finished waits for the others. If the round ends without `FINISH`, the node joins the next round.
- After `End` there are no more instructions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from rallypoint.launcher.failure import TERMINATED, ended, worker_name
from rallypoint.rendezvous.membership import Cause, derived_cause
from rallypoint.rendezvous.records import LeaveCause, LeaveKind

BUDGET_USED_UP = 80
CLOSED = 81
TIMED_OUT = 82
HELD_BACK = 83
NOT_REACHED = 4
REFUSED = 5
FINISHED = "its workers have finished"


class RoundOutcome(enum.Enum):
    """The outcome of a round, on which its launchers agree in the round's store (`round_outcome.py`).

    The first proposal wins, except that a `FAILURE` replaces `FINISH`, the `RESTART` of a launcher that leaves replaces
    both, and `FAILED` replaces all.
    """

    FINISH = "finish"
    """All workers of a node have finished: the round no longer ends early to admit waiting nodes."""
    FAILURE = "failure"
    """A worker has failed. `RESTART` or `FAILED` follows, unless the round changes first."""
    RESTART = "restart"
    """All nodes re-join."""
    FAILED = "failed"
    """The run is over, with a code."""


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
    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """No process of the round's workers is left, including their children."""

    round: int


@dataclass(frozen=True, slots=True)
class RoundChanged:
    """The current round has changed."""

    round: int
    cause: Cause
    why: str


@dataclass(frozen=True, slots=True)
class SignalsSettled:
    """The answer to `SettleSignals`: a signal to this launcher would have come by now."""

    round: int


@dataclass(frozen=True, slots=True)
class OutcomeDecided:
    """The outcome of the round that is now in force: the answer to `Propose`, `Report` or `SpendRestart`, or another
    launcher's proposal."""

    round: int
    outcome: RoundOutcome
    cause: LeaveCause
    code: int = 0
    worker: str = ""
    """The worker that failed."""
    is_own: bool = False
    """Whether this launcher proposed it."""


@dataclass(frozen=True, slots=True)
class AllAnswered:
    """The answer to `AwaitAnswers`: all launchers of the round lived after the failure was reported.

    Or a silent one has kept its session longer than the backend keeps that of a dead process.
    """

    round: int


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
    | SignalsSettled
    | OutcomeDecided
    | AllAnswered
    | AllFinished
    | OthersUnfinished
    | SignalReceived
)

# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Leave the current round, if there is one, and join the next. `cause`: why it is left."""

    cause: LeaveCause | None = None


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
class SettleSignals:
    """Wait until a signal to all processes of a node would have reached its launcher. `SignalsSettled` follows."""

    round: int


@dataclass(frozen=True, slots=True)
class Report:
    """Report a worker's failure to the launchers of the round. `OutcomeDecided` follows, with the outcome in force."""

    round: int
    failed: Exited | Stalled


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the report of another launcher: this one lives, and its session was not lost."""

    round: int


@dataclass(frozen=True, slots=True)
class AwaitAnswers:
    """Wait until all other launchers of the round have answered. `AllAnswered` follows."""

    round: int


@dataclass(frozen=True, slots=True)
class SpendRestart:
    """Count a restart of the run for the reported failure. `OutcomeDecided` follows: `RESTART`, or `FAILED` if there is
    none left."""

    round: int


@dataclass(frozen=True, slots=True)
class Propose:
    """Propose an outcome of the round. `OutcomeDecided` follows, with the outcome in force."""

    round: int
    outcome: RoundOutcome
    cause: LeaveCause


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
    kind: LeaveKind
    early: bool = False


@dataclass(frozen=True, slots=True)
class Tell:
    """Say this on the console."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """End the launcher with this exit code."""

    code: int
    why: str


Instruction: TypeAlias = (
    Join
    | Start
    | Stop
    | SettleSignals
    | Report
    | Answer
    | AwaitAnswers
    | SpendRestart
    | Propose
    | AwaitOthers
    | CloseFinished
    | Leave
    | Tell
    | End
)

# --- the state machine ------------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """The phase of a launcher."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    """Workers are being stopped; then `_next` follows."""
    ATTRIBUTING = "attributing"
    """A worker of the round has failed, the others are being stopped, and it is being found out why."""
    FINISHING = "finishing"
    """All workers have exited with 0."""
    ENDED = "ended"


class Policy:
    """The state of one launcher. Call `begin()` first. `name`: the node's."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.phase = Phase.JOINING
        self.round = 0
        self._running: set[int] = set()
        """Local ranks of the workers that have not ended."""
        self._has_processes = False
        """Whether there may be processes of workers: true from `Start` until `Stopped`."""
        self._is_stopping = False
        """Whether the workers of the round were told to stop."""
        self._is_awaiting = False
        self._next: Join | _Ending = Join()
        self._was_signalled = False
        # The failure of the round, while it is attributed.
        self._failed: Exited | None = None
        """The first worker of this node that failed."""
        self._failed_worker = ""
        self._is_settling = False
        self._is_asked = False
        """Whether another launcher's report waits for the answer of this one."""
        self._has_answered = False
        self._is_collecting = False
        """Whether the report in force is this launcher's, so that it waits for the answers."""
        self._is_spending = False

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
                if self.phase is not Phase.JOINING:
                    return []
                return self._end(_Ending(_code_of(event), event.why, LeaveKind.REQUESTED))
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
                cause = LeaveCause(kind=LeaveKind.ROUND_OVER, why=why, round=self.round)
                return self._stop(Join(cause), why) if self.phase is Phase.RUNNING else []
            case Stopped():
                return self._stopped()
            case RoundChanged():
                return self._changed(event)
            case SignalsSettled():
                return self._settled()
            case OutcomeDecided():
                return self._outcome_decided(event)
            case AllAnswered():
                return self._all_answered()
            case AllFinished():
                if not self._is_awaiting:
                    return []
                return [CloseFinished(), *self._end(_Ending(0, "all nodes have finished", LeaveKind.FINISHED))]
            case OthersUnfinished(why=why):
                return self._end(_Ending(TIMED_OUT, why, LeaveKind.FINISHED)) if self._is_awaiting else []
            case _:
                assert_never(event)

    # --- one method for each kind of event ----------------------------------------------------------------------------

    def _enter(self, event: Entered) -> list[Instruction]:
        if self.phase is not Phase.JOINING:
            return []
        self.phase, self.round = Phase.RUNNING, event.round
        self._running = set(range(event.workers))
        self._has_processes, self._is_stopping, self._is_awaiting = True, False, False
        self._failed, self._failed_worker = None, ""
        self._is_settling = self._is_asked = self._has_answered = self._is_collecting = self._is_spending = False
        return [Start(event.round)]

    def _exited(self, event: Exited) -> list[Instruction]:
        self._running.discard(event.local_rank)
        if self.phase is not Phase.RUNNING:
            return []
        if event.code != 0:
            return self._failed_here(event)
        if self._running:
            return []
        self.phase = Phase.FINISHING
        return self._stop_workers(FINISHED)  # they may have left child processes behind

    def _stalled(self, event: Stalled) -> list[Instruction]:
        if self.phase is not Phase.RUNNING:
            return []
        self.phase, self._failed_worker = Phase.ATTRIBUTING, worker_name(event.rank, event.node)
        return [*self._stop_workers(event.why), Report(self.round, event)]

    def _stopped(self) -> list[Instruction]:
        if not self._has_processes:
            return []  # a second `Stopped`: the workers had ended by themselves when they were to be stopped
        self._has_processes = False
        self._running.clear()
        if self.phase is Phase.FINISHING:
            cause = LeaveCause(kind=LeaveKind.FINISHED, why=FINISHED, round=self.round)
            return [Propose(self.round, RoundOutcome.FINISH, cause)]
        return self._go_on()

    def _changed(self, event: RoundChanged) -> list[Instruction]:
        cause = derived_cause(self.name, event.cause, event.why)
        if event.cause is Cause.DRAIN:
            if self._is_ending:
                return []
            then = _Ending(0, event.why, cause.kind)
            return [Leave(event.why, cause.kind, early=True), *self._stop(then, event.why)]
        if self.phase is Phase.STOPPING:
            return []  # a join or the end follows anyway
        if event.cause is Cause.WAITING:
            return [Propose(self.round, RoundOutcome.RESTART, cause)] if self.phase is Phase.RUNNING else []
        return self._join_because(cause)

    def _outcome_decided(self, event: OutcomeDecided) -> list[Instruction]:
        if self._is_ending:
            return []
        match event.outcome:
            case RoundOutcome.FINISH:
                if self.phase is not Phase.FINISHING or self._is_awaiting or self._has_processes:
                    return []  # once this node has finished, it proposes FINISH itself and gets this as the answer
                self._is_awaiting = True
                return [AwaitOthers(self.round)]
            case RoundOutcome.FAILURE:
                return self._failure_reported(event)
            case RoundOutcome.RESTART:
                return self._join_because(event.cause) if self.phase is not Phase.STOPPING else []
            case RoundOutcome.FAILED:
                return self._stop(_Ending(event.code, event.cause.why, event.cause.kind), event.cause.why)

    def _signalled(self, event: SignalReceived) -> list[Instruction]:
        why = f"stopped by {event.name}"
        then = _Ending(128 + event.number, why, LeaveKind.STOPPED)
        if self._was_signalled:  # the second signal ends the grace period
            return [Stop(self.round, why, gently=False)] if self._has_processes else self._end(then)
        self._was_signalled = True
        return [Leave(why, LeaveKind.STOPPED, early=True), *self._stop(then, why)]

    # --- the failure of a worker --------------------------------------------------------------------------------------

    def _failed_here(self, event: Exited) -> list[Instruction]:
        """The first worker of this node has failed, and no other failure is known here."""
        self.phase, self._failed, self._failed_worker = Phase.ATTRIBUTING, event, worker_name(event.rank, self.name)
        stop = self._stop_workers(f"{self._failed_worker} {ended(event.code)}")
        if event.code not in TERMINATED:
            return [*stop, Report(self.round, event)]
        self._is_settling = True
        return [*stop, SettleSignals(self.round)]

    def _settled(self) -> list[Instruction]:
        if self.phase is not Phase.ATTRIBUTING or not self._is_settling or self._failed is None:
            return []
        self._is_settling = False
        return self._answer() if self._is_asked else [Report(self.round, self._failed)]

    def _failure_reported(self, event: OutcomeDecided) -> list[Instruction]:
        """The first failure of the round is reported; any other is its echo. Workers stop, and every launcher answers.

        A launcher that joins again anyway also answers: otherwise the others would wait for it.
        """
        stop: list[Instruction] = []
        if self.phase is not Phase.STOPPING:
            self.phase, self._is_awaiting, self._failed_worker = Phase.ATTRIBUTING, False, event.worker
            stop = self._stop_workers(event.cause.why)
        if not event.is_own:
            return [*stop, *self._answer()]
        if self._is_collecting or self.phase is Phase.STOPPING:
            return stop
        self._is_collecting = True
        return [*stop, AwaitAnswers(self.round)]

    def _answer(self) -> list[Instruction]:
        self._is_asked = True
        if self._has_answered or self._is_settling:
            return []
        self._has_answered = True
        return [Answer(self.round)]

    def _all_answered(self) -> list[Instruction]:
        """No member was lost when the worker failed: the failure is its own."""
        if self.phase is not Phase.ATTRIBUTING or not self._is_collecting or self._is_spending:
            return []
        self._is_spending = True
        return [SpendRestart(self.round)]

    def _join_because(self, cause: LeaveCause) -> list[Instruction]:
        """Stop and join again. Any other cause than a failure explains the failure that is being attributed."""
        is_attributed = self.phase is not Phase.ATTRIBUTING or self._is_spending
        if is_attributed or cause.kind in (LeaveKind.WORKER_FAILED, LeaveKind.STALLED):
            return self._stop(Join(cause), cause.why)
        why = f"{cause.why}; the failure of {self._failed_worker} is taken for its echo, and no restart is counted"
        cause = LeaveCause(kind=cause.kind, why=why, round=self.round)
        return [Tell(why), *self._stop(Join(cause), why)]

    # --- stopping -----------------------------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        """Whether the end of the launcher has been decided."""
        return self.phase is Phase.STOPPING and isinstance(self._next, _Ending)

    def _stop(self, then: Join | _Ending, why: str) -> list[Instruction]:
        """Stop the workers that are left; `then` follows."""
        self.phase, self._next, self._is_awaiting = Phase.STOPPING, then, False
        return self._stop_workers(why) if self._has_processes else self._go_on()

    def _stop_workers(self, why: str) -> list[Instruction]:
        """Tell the workers that are left to stop, unless they were told already."""
        if not self._has_processes or self._is_stopping:
            return []
        self._is_stopping = True
        return [Stop(self.round, why)]

    def _go_on(self) -> list[Instruction]:
        """Join or end, once no process is left."""
        if self.phase is not Phase.STOPPING or self._has_processes:
            return []
        if isinstance(self._next, _Ending):
            return self._end(self._next)
        self.phase = Phase.JOINING
        return [self._next]

    def _end(self, ending: _Ending) -> list[Instruction]:
        self.phase = Phase.ENDED
        return [Leave(ending.why, ending.kind), End(ending.code, ending.why)]


@dataclass(frozen=True, slots=True)
class _Ending:
    """The end of a launcher that is still stopping its workers."""

    code: int
    why: str
    kind: LeaveKind


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
