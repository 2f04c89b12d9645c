"""The state of a run in one value, as the command line, the dashboard and metrics show it. Pure.

The field names are those of `--json`: new ones are added, none is renamed. Instants (`..._at`) are wall-clock times of
the process that wrote them, in seconds since 1970; they are for people, and no code compares them.
"""

from __future__ import annotations

import enum

import msgspec

from rallypoint.observe.phase import Phase

SCHEMA = 1


class Standing(enum.Enum):
    """The role of a node in its run."""

    __hash__ = object.__hash__  # members are singletons; the hash of Enum is computed anew on every call

    MEMBER = "member"
    CONFIRMED = "confirmed"
    """It has confirmed the forming attempt."""
    CONFIRMING = "confirming"
    """It has a place in the forming attempt and has not confirmed it yet."""
    JOINING = "joining"
    """It asks to join while no round is current."""
    WAITING = "waiting"
    """It would be admitted if the members re-joined."""
    SPARE = "spare"
    """It asks to join while the round is full."""
    HELD_BACK = "held back"
    DRAINED = "drained"
    """It was asked to go and is not a member."""
    LEFT = "left"
    """It has just left the run."""
    GONE = "gone"
    """A member of the current round that was lost or has left; the reason says which."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """The request that a node go."""

    by: str
    why: str
    drained_at: float | None


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One node. `rank` is its rank in the current round or attempt."""

    id: str
    name: str
    addr: str
    standing: Standing
    rank: int | None = None
    pid: int = 0
    local_id: int = 0
    labels: dict[str, str] = {}
    join: int = 0
    joined_at: float | None = None
    drain: Drain | None = None


class RoundReport(msgspec.Struct, frozen=True, kw_only=True):
    """The current attempt or round. `present` of its `size` members have confirmed it and are still there."""

    number: int
    phase: str
    size: int
    present: int
    why: str
    addr: str
    port: int
    active_at: float | None = None


class PastRound(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's report of a round. `ended` says why the round ended; empty while it is not over.

    `ended_kind`: a value of `LeaveKind`.
    """

    number: int
    size: int
    active_at: float
    why: str
    gather_s: float
    last_call_s: float
    confirm_s: float
    first_arrival: str
    last_arrivals: tuple[tuple[str, float], ...]
    last_confirmed: tuple[str, ...]
    ended: str
    ended_kind: str
    lasted_s: float | None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes have each standing."""

    member: int = 0
    confirmed: int = 0
    confirming: int = 0
    joining: int = 0
    waiting: int = 0
    spare: int = 0
    held_back: int = 0
    drained: int = 0
    gone: int = 0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all nodes of the run share, and the coordinator's time limits."""

    incarnation: str
    started_by: str
    shared: dict[str, int | str]
    timing: dict[str, float]


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """The last closing or reopening of the run."""

    is_closed: bool
    by: str
    why: str
    changed_at: float | None
    outcome: int | None = None
    """The exit code of the run, if its launchers closed it because it has ended."""


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """The restarts that `rallypoint run` counts. `why`: of the last one; empty after the run's end."""

    used: int
    limit: int
    why: str

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


class Coordinator(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    term: int


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A node (by name) with recent losses. `is_held`: it is held back now."""

    name: str
    is_held: bool
    losses: int
    hold_s: float
    why: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was refused, or whose preflight check failed (then `differences` is empty)."""

    name: str
    why: str
    differences: dict[str, tuple[int | str | None, int | str | None]]
    """Option -> (the node's value, the run's value)."""
    refused_at: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one revision. `reason` is the coordinator's sentence on what the run waits for, or on its round."""

    schema: int = SCHEMA
    run_id: str
    where: str
    revision: int
    phase: Phase
    reason: str = ""
    round: RoundReport | None = None
    counts: Counts = Counts()
    open_places: int = 0
    config: Config | None = None
    closing: Closing | None = None
    coordinator: Coordinator | None = None
    restarts: Restarts | None = None
    """None: the run has no launchers of `rallypoint run`."""
    nodes: tuple[NodeReport, ...] = ()
    missing: tuple[str, ...] = ()
    """Names of members of the last active round that are no longer in the run in any role."""
    held: tuple[Held, ...] = ()
    refused: tuple[Refusal, ...] = ()
    """Nodes that were not admitted and have not joined since."""
    rounds: tuple[PastRound, ...] = ()
    """The last active rounds, oldest first."""
    unreadable: dict[str, str] = {}
    """Keys of the run whose records cannot be read, and why."""

    @property
    def exists(self) -> bool:
        return self.phase is not Phase.ABSENT

    @property
    def last_end(self) -> PastRound | None:
        """The last round, if it is over and none has been active since."""
        last = self.rounds[-1] if self.rounds else None
        return last if last is not None and last.ended and not self.has_round else None

    @property
    def has_round(self) -> bool:
        """A round is current: some of its members are in it."""
        return self.counts.member > 0

    @property
    def is_closed(self) -> bool:
        return self.closing is not None and self.closing.is_closed

    def shared(self, option: str) -> int:
        """The value of a shared size option; 0 if it is not known."""
        value = self.config.shared.get(option, 0) if self.config is not None else 0
        return value if isinstance(value, int) else 0

    def standing(self, *standings: Standing) -> list[NodeReport]:
        """The nodes with one of these standings, sorted by rank, then by name."""
        found = [node for node in self.nodes if node.standing in standings]
        return sorted(found, key=lambda node: (node.rank is None, node.rank or 0, node.name, node.id))
