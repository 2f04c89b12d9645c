"""A run as it stands, in one value: what the command line, a dashboard and metrics show. Pure.

The field names are what `--json` prints: they are added to, never renamed. Instants (`..._at`) are wall-clock times, of
whoever wrote them, in seconds since 1970: for people, nothing compares them.
"""

from __future__ import annotations

import enum

import msgspec

SCHEMA = 1


class Phase(enum.Enum):
    """Where a run stands."""

    ABSENT = "absent"
    """There is no such run."""
    GATHERING = "gathering"
    """No round is current: nodes come together."""
    FORMING = "forming"
    """An attempt was decided; its members confirm it."""
    ACTIVE = "active"
    """A round is current (the run may be closed: then it is the last one)."""
    CLOSED = "closed"
    """Nobody can join, and no round is current."""


class Standing(enum.Enum):
    """Where a node stands, in the words of the algorithm."""

    __hash__ = object.__hash__  # there is one of each; that of an enumeration is computed anew every time

    MEMBER = "member"
    CONFIRMED = "confirmed"
    """Of the attempt that is forming."""
    CONFIRMING = "confirming"
    """It has a place in the attempt that is forming and has not confirmed it yet."""
    JOINING = "joining"
    """It wants in and there is no round."""
    WAITING = "waiting"
    """It would be admitted if the members re-joined."""
    SPARE = "spare"
    """It wants in while the round is full."""
    HELD_BACK = "held back"
    DRAINED = "drained"
    """It was asked to go and is no member."""
    LEFT = "left"
    """It said goodbye just now."""
    GONE = "gone"
    """A member of the current round that is no longer there: it was lost, or it left; the reason says which."""


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """Who asked a node to go, and why."""

    by: str
    why: str
    drained_at: float | None


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One node. `rank` is its place in the current round or attempt."""

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
    """The current attempt or round; `present` of its `size` members are in it (or have confirmed it)."""

    number: int
    phase: str
    size: int
    present: int
    why: str
    addr: str
    port: int
    active_at: float | None = None


class PastRound(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a round, as its coordinator wrote it. `ended` is empty while it is not over."""

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
    lasted_s: float | None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes stand where."""

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
    """What all nodes of the run share, and the times that its coordinator goes by."""

    incarnation: str
    started_by: str
    shared: dict[str, int | str]
    timing: dict[str, float]


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """Who closed or reopened the run last, and why."""

    is_closed: bool
    by: str
    why: str
    changed_at: float | None


class Coordinator(msgspec.Struct, frozen=True, kw_only=True):
    """Who decides."""

    id: str
    name: str
    term: int


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A node (by name) that is held back now (`is_held`), or was and is not forgiven yet."""

    name: str
    is_held: bool
    losses: int
    hold_s: float
    why: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was not let in: option -> (the node's value, the run's)."""

    name: str
    why: str
    differences: dict[str, tuple[int | str | None, int | str | None]]
    refused_at: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one revision. `reason` is the coordinator's own sentence on how things stand."""

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
    nodes: tuple[NodeReport, ...] = ()
    missing: tuple[str, ...] = ()
    """Members of the last active round, by name, that are not there in any role."""
    held: tuple[Held, ...] = ()
    refused: tuple[Refusal, ...] = ()
    """Nodes that were not let in and are not there by now."""
    rounds: tuple[PastRound, ...] = ()
    """The last rounds that were active, oldest first."""
    unreadable: dict[str, str] = {}
    """Keys of the run that hold something else, and why they cannot be read."""

    @property
    def exists(self) -> bool:
        return self.phase is not Phase.ABSENT

    @property
    def is_closed(self) -> bool:
        return self.closing is not None and self.closing.is_closed

    def shared(self, option: str) -> int:
        """A size that all nodes share; 0 if it is not known."""
        value = self.config.shared.get(option, 0) if self.config is not None else 0
        return value if isinstance(value, int) else 0

    def standing(self, *standings: Standing) -> list[NodeReport]:
        """The nodes that stand like this: by rank, then by order of name."""
        found = [node for node in self.nodes if node.standing in standings]
        return sorted(found, key=lambda node: (node.rank is None, node.rank or 0, node.name, node.id))
