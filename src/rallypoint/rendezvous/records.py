"""What the keys of a run hold: JSON records with a schema version, because a person will read them in an incident.

Versions one apart understand each other: fields that are not known here are ignored, fields that are missing have
defaults. A record from further ahead is `NewerSchemaError`; anything else that cannot be read is
`RendezvousStateError`, with the key it is under.
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

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""The number of an attempt or round, and what is compared with it."""
Floor: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A node's word on numbers: far from the last one, because the next attempt has to be above it."""


class NodePhase(enum.Enum):
    """Where a node stands, by its own word."""

    JOINING = "joining"
    MEMBER = "member"
    LEFT = "left"
    """Said goodbye; its session ends next. Neither a member nor a candidate."""


class RoundPhase(enum.Enum):
    """Where an attempt stands."""

    FORMING = "forming"
    ACTIVE = "active"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records."""

    v: int = SCHEMA


class ListedRunRecord(Record, frozen=True, kw_only=True):
    """A line of the list of runs: its key says it all."""


class ConfigRecord(Record, frozen=True, kw_only=True):
    """What the run is. `shared` must be the same on every node; `timing` is the first node's and is only used."""

    incarnation: str
    shared: dict[str, int | str]
    timing: Timing
    run_lease: int
    data_lease: int
    run_ttl_s: float = 0.0
    """The time to live of `run_lease`: the nodes that renew it may have other times than the one that made it."""
    by: str = ""


class NodeRecord(Record, frozen=True, kw_only=True):
    """One node, by its own word. `round` is the attempt it confirmed; `floor` the highest it ever did."""

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
    at: float = 0.0
    """When it asked to join, by its own wall clock: for people, nothing compares it."""


class ClaimRecord(Record, frozen=True, kw_only=True):
    """What a node tells a server that has lost its memory: the last active round it knew of, and its part in it."""

    id: str
    round: Floor = 0
    size: int = 0
    is_member: bool = False
    floor: Floor = 0
    ttl_s: float = 0.0


class CoordinatorRecord(Record, frozen=True, kw_only=True):
    """Who decides, for people; the key's create revision is what counts."""

    id: str
    name: str


class RoundRecord(Record, frozen=True, kw_only=True):
    """The current attempt or round. Small whatever the size; `term` is the coordinator that wrote it.

    `last_active` is the last number that was active (this one, once it is); data of rounds below `kept_from` is gone.
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
    """How things stand around round `number`: read as zero for any other. `reason` is for people."""

    number: Number
    waiting: int = 0
    spare: int = 0
    held_back: int = 0
    lost: int = 0
    open_places: int = 0
    reason: str = ""
    held: tuple[str, ...] = ()
    """The first few names of nodes that are held back now."""


class ClosedRecord(Record, frozen=True, kw_only=True):
    """Whether the run is closed, by whom and why. `at` is a wall clock, for people: nothing compares it."""

    closed: bool
    by: str = ""
    why: str = ""
    at: float = 0.0


class AssignRecord(Record, frozen=True, kw_only=True):
    """One node's place in an attempt, and the join it answers."""

    number: Number
    rank: int
    join: int


class RosterMember(msgspec.Struct, frozen=True, array_like=True):
    """One member as it was decided."""

    id: str
    join: int
    name: str
    addr: str


class RosterRecord(Record, frozen=True, kw_only=True):
    """A part of a round's members, in rank order."""

    number: int
    members: tuple[RosterMember, ...]


class DrainRecord(Record, frozen=True, kw_only=True):
    """A node is asked to go."""

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
    """A node that was not let in because of its settings: option -> (the node's, the run's). `at` is for people.

    Without differences: one that holds itself back, because its own check of itself failed.
    """

    name: str
    differences: dict[str, tuple[int | str | None, int | str | None]]
    why: str
    at: float = 0.0


class HistoryRecord(Record, frozen=True, kw_only=True):
    """The report of a round. `formed_at` is a wall clock, for people; the durations are the coordinator's own clock."""

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
    lasted_s: float | None = None
    """None: not over, or another coordinator saw its beginning."""


R = TypeVar("R", bound=Record)

_encoder = msgspec.json.Encoder(order="deterministic")
_decoders: dict[type[Record], msgspec.json.Decoder[Any]] = {}
_NOT_READABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading any bytes may raise; the last for what is nested too deeply."""


class _Header(msgspec.Struct):
    v: int


def encode(record: Record) -> bytes:
    """The bytes that go into the backend; equal records give equal bytes."""
    return _encoder.encode(record)


def prepare(*kinds: type[Record]) -> None:
    """Be ready to decode these. Making a decoder takes longer than a round: not when somebody waits for one."""
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
            f"{item.key} holds no {kind.__name__}: {error}. Something else wrote there, or it is damaged: "
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


# --- rosters: in chunks, with a digest over all of them -----------------------------------------------------------


def split_roster(number: int, members: Sequence[RosterMember]) -> list[bytes]:
    """The chunks of a roster, encoded."""
    return [
        encode(RosterRecord(number=number, members=tuple(members[start : start + ROSTER_CHUNK])))
        for start in range(0, len(members), ROSTER_CHUNK)
    ]


def roster_digest(chunks: Iterable[bytes]) -> str:
    """What `RoundRecord.digest` holds for these chunks."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def join_roster(record: RoundRecord, items: Sequence[Item]) -> tuple[RosterMember, ...]:
    """The members of a round from its chunks; superfluous ones are ignored. RendezvousStateError: it is not whole."""
    chunks = sorted(items, key=lambda item: item.key)[: record.chunks]
    if len(chunks) != record.chunks or roster_digest(item.value for item in chunks) != record.digest:
        raise RendezvousStateError(
            f"the roster of round {record.number} is not whole: {len(items)} of {record.chunks} parts, "
            f"or their content is not what was decided",
            key=items[0].key if items else None,
        )
    members = tuple(member for item in chunks for member in decode(RosterRecord, item).members)
    if len(members) != record.size:
        raise RendezvousStateError(
            f"the roster of round {record.number} has {len(members)} members instead of {record.size}",
            key=items[0].key if items else None,
        )
    return members
