"""What a launcher does next: `Policy.handle(event) -> instructions`. Pure: no clock, no process, no network.

One `Policy` is one node's part in one run, from its first join to its exit code. The events are facts that somebody
saw; the instructions are done by others, in the order given, and their outcome comes back as an event.

What it keeps:

- Workers run only between `Start` and the `Stopped` that answers: nothing is started twice, nothing is joined while
  workers are left.
- A failed worker costs the run one restart, whatever number of workers and nodes notice it: it is counted per round.
- Whoever is told to go leaves the round first (the others need not time out), and stops its workers then.
- A node that has finished waits for the others; if the round ends otherwise, it takes part in the next one.
- There is one end: after `End` there are no more instructions.
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
"""On Linux; a code beyond is a program's own, such as 255 for exit(-1)."""


class Fate(enum.Enum):
    """What becomes of a round, as its launchers agree on it in the round's store. The first word counts, but for
    `AGAIN` and `FAILED` of somebody whose worker failed: those replace `FINISH`."""

    FINISH = "finish"
    """A node's workers have all finished: the round is not given up for nodes that would like to join."""
    AGAIN = "again"
    """Everybody re-joins."""
    FAILED = "failed"
    """The run is over; the code says how."""


class Why(enum.Enum):
    """Why a member should look up, as far as a launcher cares."""

    GONE = "gone"
    """A member is lost, the round is over, or this node's own session is: there is nothing to work in any more."""
    WAITING = "waiting"
    DRAIN = "drain"


class NoEntry(enum.Enum):
    """Why a join ended without a place."""

    CLOSED = "closed"
    LET_GO = "let go"
    """A spare of a run that ended, or asked to go: no failure."""
    TIMED_OUT = "timed out"
    NOT_REACHED = "not reached"
    REFUSED = "refused"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entered:
    """This node has a place in a round."""

    round: int
    workers: int
    """How many workers it starts."""


@dataclass(frozen=True, slots=True)
class JoinEnded:
    """The join ended without a place. `outcome` is the run's own, if it has ended and this node had a part in it."""

    kind: NoEntry
    why: str
    outcome: int | None = None


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The workers of a round could not be started, because the round did not last."""

    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has ended; a signal is 128 + its number."""

    round: int
    local_rank: int
    rank: int
    code: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """None of the round's workers is left, nor of their children."""

    round: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The round is not what it was."""

    round: int
    what: Why
    why: str


@dataclass(frozen=True, slots=True)
class Spent:
    """The answer to `Spend`: whether the run may go on, and its exit code if not."""

    round: int
    allowed: bool
    code: int
    why: str


@dataclass(frozen=True, slots=True)
class Fated:
    """What becomes of the round: an answer to `Propose`, or somebody else's word."""

    round: int
    fate: Fate
    why: str
    code: int = 0


@dataclass(frozen=True, slots=True)
class AllFinished:
    """Every node of the round has finished."""

    round: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The others did not finish in time; `why` names them."""

    round: int
    why: str


@dataclass(frozen=True, slots=True)
class Told:
    """This launcher got a signal."""

    number: int
    name: str


Event: TypeAlias = (
    Entered | JoinEnded | StartFailed | Exited | Stopped | Changed | Spent | Fated | AllFinished | Unfinished | Told
)

# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Leave the round, if in one, and ask for a place in the next."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start the workers of the round."""

    round: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the round's workers, with their grace period (at once if not `gently`), and say when none is left."""

    round: int
    why: str
    gently: bool = True


@dataclass(frozen=True, slots=True)
class Spend:
    """Count a restart of the run for this round, and tell the others."""

    round: int
    why: str
    code: int
    """The worker's."""


@dataclass(frozen=True, slots=True)
class Propose:
    """Say what should become of the round; the answer is what does."""

    round: int
    fate: Fate
    why: str


@dataclass(frozen=True, slots=True)
class AwaitOthers:
    """Wait until every node of the round has finished."""

    round: int


@dataclass(frozen=True, slots=True)
class CloseFinished:
    """Close the run as finished."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the run, at once, with the reason for the others; `early`: while they work, so that they re-join."""

    why: str
    early: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """The launcher ends with this code."""

    code: int
    why: str


Instruction: TypeAlias = Join | Start | Stop | Spend | Propose | AwaitOthers | CloseFinished | Leave | End

# --- the machine ------------------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """Where a launcher stands."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    """Workers end, or a restart is being counted; `_next` says what follows."""
    FINISHING = "finishing"
    """All workers have ended with 0."""
    ENDED = "ended"


class Policy:
    """One launcher's decisions. `begin()` first."""

    def __init__(self) -> None:
        self.phase = Phase.JOINING
        self.round = 0
        self._running: set[int] = set()
        """Local ranks that have not ended."""
        self._are_left = False
        """Whether there may be processes: from `Start` until `Stopped`."""
        self._spending = False
        self._is_awaiting = False
        self._next: Join | End = Join()
        self._was_told = False

    def begin(self) -> list[Instruction]:
        """What to do first."""
        return [Join()]

    def handle(self, event: Event) -> list[Instruction]:
        """What to do now. An event of a round that is over says nothing any more."""
        if self.phase is Phase.ENDED:
            return []
        match event:
            case Entered():
                return self._enter(event)
            case JoinEnded():
                return self._end(*_of_no_entry(event)) if self.phase is Phase.JOINING else []
            case Told():
                return self._told(event)
        if event.round != self.round or self.phase is Phase.JOINING:
            return []
        match event:
            case Exited():
                return self._exited(event)
            case StartFailed(why=why):
                return self._stop(Join(), why) if self.phase is Phase.RUNNING else []
            case Stopped():
                return self._stopped()
            case Changed():
                return self._changed(event)
            case Spent():
                return self._spent(event)
            case Fated():
                return self._fated(event)
            case AllFinished():
                if not self._is_awaiting:
                    return []
                return [CloseFinished(), *self._end(0, "all nodes have finished")]
            case Unfinished(why=why):
                return self._end(TIMED_OUT, why) if self._is_awaiting else []
            case _:
                assert_never(event)

    # --- one method for each kind of event ----------------------------------------------------------------------------

    def _enter(self, event: Entered) -> list[Instruction]:
        if self.phase is not Phase.JOINING:
            return []
        self.phase, self.round = Phase.RUNNING, event.round
        self._running = set(range(event.workers))
        self._are_left, self._spending, self._is_awaiting = True, False, False
        return [Start(event.round)]

    def _exited(self, event: Exited) -> list[Instruction]:
        self._running.discard(event.local_rank)
        if self.phase is not Phase.RUNNING:
            return []
        if event.code != 0:
            why = f"the worker of rank {event.rank} {ended(event.code)}"
            self._spending = True
            return [*self._stop(Join(), why), Spend(self.round, why, event.code)]
        if self._running:
            return []
        self.phase = Phase.FINISHING
        return [Stop(self.round, FINISHED)]  # whatever processes they have left behind

    def _stopped(self) -> list[Instruction]:
        if not self._are_left:
            return []  # known already: they had ended by themselves when they were to be stopped
        self._are_left = False
        self._running.clear()
        if self.phase is Phase.FINISHING:
            return [Propose(self.round, Fate.FINISH, FINISHED)]
        return self._go_on()

    def _changed(self, event: Changed) -> list[Instruction]:
        if event.what is Why.DRAIN:
            if self._is_going:
                return []
            return [Leave(event.why, early=True), *self._stop(End(0, event.why), event.why)]
        if self.phase is Phase.STOPPING:
            return []  # what follows is a join, or the end, already
        if event.what is Why.WAITING:
            return [Propose(self.round, Fate.AGAIN, event.why)] if self.phase is Phase.RUNNING else []
        return self._stop(Join(), event.why)

    def _fated(self, event: Fated) -> list[Instruction]:
        if self._is_going:
            return []
        match event.fate:
            case Fate.FINISH:
                if self.phase is not Phase.FINISHING or self._is_awaiting or self._are_left:
                    return []  # if it has to do with us, it comes again as the answer to our own word
                self._is_awaiting = True
                return [AwaitOthers(self.round)]
            case Fate.AGAIN:
                return self._stop(Join(), event.why) if self.phase is not Phase.STOPPING else []
            case Fate.FAILED:
                return self._stop(End(event.code, event.why), event.why)

    def _spent(self, event: Spent) -> list[Instruction]:
        self._spending = False
        if not event.allowed and not self._is_going:
            self._next = End(event.code, event.why)
        return self._go_on()

    def _told(self, event: Told) -> list[Instruction]:
        why = f"{event.name}: told to stop"
        if self._was_told:  # impatience
            return [Stop(self.round, why, gently=False)] if self._are_left else self._end(128 + event.number, why)
        self._was_told = True
        self._spending = False  # nobody waits for that any more
        return [Leave(why, early=True), *self._stop(End(128 + event.number, why), why)]

    # --- stopping -----------------------------------------------------------------------------------------------------

    @property
    def _is_going(self) -> bool:
        """Whether the end is decided."""
        return self.phase is Phase.STOPPING and isinstance(self._next, End)

    def _stop(self, then: Join | End, why: str) -> list[Instruction]:
        """Stop what is left, then go on with that."""
        was_stopping = self.phase in (Phase.STOPPING, Phase.FINISHING)
        self.phase, self._next, self._is_awaiting = Phase.STOPPING, then, False
        if not self._are_left:
            return self._go_on()
        return [] if was_stopping else [Stop(self.round, why)]

    def _go_on(self) -> list[Instruction]:
        """What follows once all has stopped and is counted."""
        if self.phase is not Phase.STOPPING or self._are_left or self._spending:
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


def _of_no_entry(event: JoinEnded) -> tuple[int, str]:
    match event.kind:
        case NoEntry.CLOSED:
            return (CLOSED if event.outcome is None else event.outcome), event.why
        case NoEntry.LET_GO:
            return 0, event.why
        case NoEntry.TIMED_OUT:
            return TIMED_OUT, event.why
        case NoEntry.NOT_REACHED:
            return NOT_REACHED, event.why
        case NoEntry.REFUSED:
            return REFUSED, event.why
