"""The values of the keys of a run: JSON records with a schema version. Pure.

JSON, because people read them in an incident. Versions one apart understand each other: unknown fields are ignored,
missing fields have defaults. A record of a version further ahead raises `NewerSchemaError`; any other value that cannot
be decoded raises `RendezvousStateError`. Both name the key.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from rallypoint.errors import NewerSchemaError, RendezvousStateError
from rallypoint.kv.types import Item
from rallypoint.settings import Timing

SCHEMA = 1
ROSTER_CHUNK = 256
LONGEST_WHY = 300
"""Most characters of `LeaveCause.why`: the last line of a traceback has no limit of its own."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""The number of an attempt or round."""
Floor: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number reported by a node. Bounded far below the largest `Number`, because the next attempt must be above it."""


class NodePhase(enum.Enum):
    """The phase of a node, written by the node itself."""

    JOINING = "joining"
    MEMBER = "member"
    LEFT = "left"
    """It left in order, and ends its session next. Neither a member nor a candidate."""


class RoundPhase(enum.Enum):
    """The phase of an attempt."""

    FORMING = "forming"
    ACTIVE = "active"


class LeaveKind(enum.Enum):
    """Why a member left its round, gravest first."""

    WORKER_FAILED = "worker failed"
    STALLED = "stalled"
    MEMBER_LOST = "member lost"
    SESSION_LOST = "session lost"
    DRAIN = "drain"
    OPERATOR = "operator"
    STOPPED = "stopped"
    """The node itself was told to stop, by a signal for example."""
    ADMISSION = "admission"
    """To let waiting nodes in."""
    ROUND_OVER = "round over"
    """Only because other members had left."""
    FINISHED = "finished"
    REQUESTED = "requested"
    """The program just asked for the next round."""

    @classmethod
    def _missing_(cls, value: object) -> LeaveKind:
        return cls.REQUESTED  # a kind of a newer version must not make the record of a node unreadable


class LeaveCause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a member left its round. `why`: one sentence that names the node, as in "rank 3 on b exited with 1"."""

    kind: LeaveKind
    why: str
    round: int = 0
    """The round that was left."""
    rank: int | None = None
    """The global rank of the failed worker, if a worker failed."""


class RoundEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why the members of a round have left it, or are about to. `why` is one sentence that names the nodes."""

    round: int
    kind: LeaveKind
    why: str
    lasted_s: float | None = None
    """None: the round is not over yet, or became active under another coordinator."""
    nodes: tuple[str, ...] = ()
    """The names of the nodes that `why` is about."""
    unseen: bool = False
    """These nodes were gone before the coordinator looked: how they went is not known."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records."""

    v: int = SCHEMA


class ListedRunRecord(Record, frozen=True, kw_only=True):
    """An entry of the list of runs. The run id is in its key."""


class ConfigRecord(Record, frozen=True, kw_only=True):
    """The run's settings. `shared` must be the same on every node; `timing` is the first node's and applies to all."""

    incarnation: str
    shared: dict[str, int | str]
    timing: Timing
    run_lease: int
    data_lease: int
    run_ttl_s: float = 0.0
    """The time to live of `run_lease`: a node that renews it may have other time-outs than the node that granted it."""
    by: str = ""


class NodeRecord(Record, frozen=True, kw_only=True):
    """One node, written by itself. `round`: the attempt it confirmed; `floor`: the highest number it ever confirmed.

    `addr0` and `port0` are the bootstrap address of rank 0, else empty.
    """

    id: str
    name: str
    addr: str
    session: int
    join: int
    phase: NodePhase
    pid: int = 0
    local_id: int = 0
    labels: dict[str, str] = {}
    node_rank: int | None = None
    round: Floor = 0
    floor: Floor = 0
    addr0: str = ""
    port0: int = 0
    why: str = ""
    left: LeaveCause | None = None
    """Why it left the last round that it was in. Written with the join that follows, and when it leaves the run."""
    at: float = 0.0
    """When it asked to join, by its own wall clock: for people, never compared."""


class ClaimRecord(Record, frozen=True, kw_only=True):
    """What a node reports to a server that has lost its data: the last active round it knows, and if it is a member.

    See `membership.claim_of`.
    """

    id: str
    round: Floor = 0
    size: int = 0
    is_member: bool = False
    floor: Floor = 0
    ttl_s: float = 0.0
    closed: ClosedMark | None = None
    """The node was told that the run is closed."""


class CoordinatorRecord(Record, frozen=True, kw_only=True):
    """The coordinator, for people. The algorithm reads only the key's create revision, which is the term."""

    id: str
    name: str


class RoundRecord(Record, frozen=True, kw_only=True):
    """The current attempt or round. It does not grow with the number of members; `term` is its coordinator's.

    `chunks` and `digest` describe the roster. `last_active` is the last number that became active (this one, once it is
    active). Data of rounds below `kept_from` has been removed.
    """

    number: Number
    phase: RoundPhase
    incarnation: str
    size: int
    term: int
    addr: str = ""
    port: int = 0
    chunks: int = 0
    digest: str = ""
    last_active: Number = 0
    kept_from: Number = 1
    why: str = ""


class WaitingRecord(Record, frozen=True, kw_only=True):
    """Counts of the nodes outside round `number`; readers take them as zero for any other. `reason` is for people."""

    number: Number
    waiting: int = 0
    spare: int = 0
    held_back: int = 0
    lost: int = 0
    open_places: int = 0
    reason: str = ""
    held: tuple[str, ...] = ()
    """The first few names of nodes that are held back now."""
    end: RoundEnd | None = None
    """Of the active round, if its members leave it or should; else of the last active round. See `round_end.py`."""
    members: int = 0
    """How many nodes of round `number`, active or forming, still have their place in it; 0: it is over."""
    candidates: int = 0
    """How many nodes ask to join and may be admitted."""


class ClosedRecord(Record, frozen=True, kw_only=True):
    """Whether the run is closed, by which node, and why. `at` is wall-clock time, for people, never compared."""

    closed: bool
    by: str = ""
    why: str = ""
    at: float = 0.0
    outcome: int | None = None
    """The exit code of the run, if a launcher closed it because the run has ended."""


class ClosedMark(msgspec.Struct, frozen=True, kw_only=True):
    """A node was told that this incarnation of its run is closed. See `closed_mark.py`."""

    config: ConfigRecord
    state: ClosedRecord
    revision: int = 0
    """The revision of `state/closed` as the node saw it."""


class AssignRecord(Record, frozen=True, kw_only=True):
    """One node's rank in an attempt, and the join that it answers (rule 2)."""

    number: Number
    rank: int
    join: int


class RosterMember(msgspec.Struct, frozen=True, array_like=True):
    """One member of a roster. The join is part of the plan: a member with another join is gone (rule 2)."""

    id: str
    join: int
    name: str
    addr: str


class RosterRecord(Record, frozen=True, kw_only=True):
    """One chunk of a round's members, in rank order."""

    number: int
    members: tuple[RosterMember, ...]


class DrainRecord(Record, frozen=True, kw_only=True):
    """A request that a node leaves."""

    by: str = ""
    why: str = ""
    at: float = 0.0


class HealthRecord(Record, frozen=True, kw_only=True):
    """A node (by name) that is or was held back."""

    name: str
    losses: int
    hold_s: float
    why: str = ""


class RefusedRecord(Record, frozen=True, kw_only=True):
    """A node that was refused because of its settings: option -> (the node's value, the run's). `at` is for people.

    Without differences: a node whose own preflight check failed, so that it does not join.
    """

    name: str
    differences: dict[str, tuple[int | str | None, int | str | None]]
    why: str
    at: float = 0.0


class BudgetRecord(Record, frozen=True, kw_only=True):
    """The restarts of a run, written by its launchers: how many it has used, and how many it has.

    `round` is the last round that was counted; `outcome` is the run's exit code once the run has ended.
    """

    incarnation: str
    used: int
    limit: int
    round: int = 0
    by: str = ""
    why: str = ""
    outcome: int | None = None


class HistoryRecord(Record, frozen=True, kw_only=True):
    """The report of a round. `formed_at` is wall-clock time, for people; durations are by the coordinator's clock."""

    number: int
    size: int
    formed_at: float
    why: str
    gather_s: float
    last_call_s: float
    confirm_s: float
    first_arrival: str = ""
    last_arrivals: tuple[tuple[str, float], ...] = ()
    last_confirmed: tuple[str, ...] = ()
    ended: str = ""
    """Why the round ended; empty: it is not over. See `round_end.py`."""
    ended_kind: LeaveKind | None = None
    lasted_s: float | None = None
    """None: the round is not over, or became active under another coordinator."""


R = TypeVar("R", bound=Record)

_encoder = msgspec.json.Encoder(order="deterministic")
_decoders: dict[type[Record], msgspec.json.Decoder[Any]] = {}
_NOT_READABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of decoding arbitrary bytes; RecursionError for values nested too deeply."""


class _Header(msgspec.Struct):
    v: int


def encode(record: Record) -> bytes:
    """The bytes to store; equal records give equal bytes."""
    return _encoder.encode(record)


def prepare(*kinds: type[Record]) -> None:
    """Build the decoders of these records in advance: building one takes longer than a round."""
    for kind in kinds:
        if kind not in _decoders:
            _decoders[kind] = msgspec.json.Decoder(kind)


def decode(kind: type[R], item: Item) -> R:
    """The record that a key holds. Raises RendezvousStateError or NewerSchemaError, both naming the key."""
    if kind not in _decoders:
        prepare(kind)
    try:
        record: R = _decoders[kind].decode(item.value)
    except _NOT_READABLE as error:
        _raise_if_newer(_version(item.value), item.key)
        raise RendezvousStateError(
            f"{item.key} holds no {kind.__name__}: {error}. Another program wrote there, or the value is damaged: "
            f"remove the key, or use another run id or prefix",
            key=item.key,
        ) from error
    if record.v > SCHEMA + 1:
        _raise_if_newer(record.v, item.key)
    return record


def _version(value: bytes) -> int:
    try:
        return msgspec.json.decode(value, type=_Header).v
    except _NOT_READABLE:
        return SCHEMA


def _raise_if_newer(version: int, key: str) -> None:
    if version > SCHEMA + 1:
        raise NewerSchemaError(
            f"{key} has schema {version}; this version understands up to {SCHEMA + 1}: upgrade rallypoint on this node",
            key=key,
        )


def one_line(why: str) -> str:
    """A text from outside as one line of at most `LONGEST_WHY` characters."""
    line = " ".join(why.split())
    return line if len(line) <= LONGEST_WHY else f"{line[: LONGEST_WHY - 3]}..."


# --- rosters: in chunks, with a digest over all of them -----------------------------------------------------------


def split_roster(number: int, members: Sequence[RosterMember]) -> list[bytes]:
    """The chunks of a roster, encoded."""
    return [
        encode(RosterRecord(number=number, members=tuple(members[start : start + ROSTER_CHUNK])))
        for start in range(0, len(members), ROSTER_CHUNK)
    ]


def roster_digest(chunks: Iterable[bytes]) -> str:
    """The value of `RoundRecord.digest` for these chunks."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def join_roster(record: RoundRecord, items: Sequence[Item]) -> tuple[RosterMember, ...]:
    """The members of a round from its chunks. RendezvousStateError if chunks are missing or do not match the digest.

    Surplus chunks, left by an earlier roster of the same number, are ignored.
    """
    chunks = sorted(items, key=lambda item: item.key)[: record.chunks]
    if len(chunks) != record.chunks or roster_digest(item.value for item in chunks) != record.digest:
        raise RendezvousStateError(
            f"the roster of round {record.number} is not complete: {len(items)} of {record.chunks} chunks, "
            f"or their content does not match the digest",
            key=items[0].key if items else None,
        )
    members = tuple(member for item in chunks for member in decode(RosterRecord, item).members)
    if len(members) != record.size:
        raise RendezvousStateError(
            f"the roster of round {record.number} has {len(members)} members instead of {record.size}",
            key=items[0].key if items else None,
        )
    return members
