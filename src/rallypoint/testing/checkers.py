"""Checkers of the guarantees: one class each, which raises an error named after its guarantee.

They observe a run from outside: the commits of the store (with their writers), and the rounds that nodes return. They
know the records but not the algorithm, so the simulator, the exhaustive worlds and real processes use the same ones.
Give them every commit in order of revision (`Safety.committed`) and every return of `next_rendezvous`
(`Safety.returned`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from rallypoint._marks import mark
from rallypoint.errors import RendezvousStateError
from rallypoint.events import RoundActive
from rallypoint.kv.types import Change, Item
from rallypoint.rendezvous.kept_events import EventsRecord, read_events
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.records import (
    ClosedRecord,
    ConfigRecord,
    CoordinatorRecord,
    HistoryRecord,
    LeaveCause,
    LeaveKind,
    NodePhase,
    NodeRecord,
    Record,
    RosterMember,
    RosterRecord,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
)


class Broke(AssertionError):
    """A guarantee does not hold; the subclass says which one."""


class BrokeBarrier(Broke):
    """A round became active without enough confirmed members, or a node returned from a round that was not active."""


class BrokeAgreement(Broke):
    """Two views of one round differ."""


class BrokeRanks(Broke):
    """The ranks of a round are not 0 … n-1, each once."""


class BrokeExclusivity(Broke):
    """A round was decided while a member of the current one had neither left it nor lost its session."""


class BrokeMonotonicity(Broke):
    """A round number decreased or was used again."""


class BrokeFreshness(Broke):
    """A node without a session became a member."""


class BrokeFencing(Broke):
    """A node or coordinator committed something after its session was lost."""


class BrokeFinality(Broke):
    """A round became active after the run was closed."""


class BrokeCompletion(Broke):
    """Enough nodes were up and connected, but no round became active in time."""


class BrokeDetection(Broke):
    """A survivor was not told of a loss in time."""


class BrokeAdmission(Broke):
    """A waiting node was not admitted although there was room."""


class BrokeRelease(Broke):
    """A node waited past its deadline."""


class BrokeOutageTolerance(Broke):
    """Losing the control plane stopped a running job."""


class BrokeMemory(Broke):
    """What happened in the run is kept with a gap, or twice."""


class BrokeCause(Broke):
    """The reported cause of a round's end is not true."""


@dataclass(slots=True)
class Picture:
    """The decoded records of the run in the store."""

    keys: RunKeys
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    round: RoundRecord | None = None
    closed: ClosedRecord | None = None
    closed_revision: int = 0
    incarnation: str = ""
    waiting: WaitingRecord | None = None
    coordinator: CoordinatorRecord | None = None
    term: int = 0
    rosters: dict[int, dict[str, tuple[RosterMember, ...]]] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        """Apply one change; a record that cannot be decoded counts as absent."""
        keys, key, item = self.keys, change.key, change.item
        if key.startswith(keys.nodes):
            record = _read(NodeRecord, item)
            if record is None:
                self.nodes.pop(key[len(keys.nodes) :], None)
            else:
                self.nodes[record.id] = record
        elif key == keys.round:
            self.round = _read(RoundRecord, item)
        elif key == keys.closed:
            self.closed = _read(ClosedRecord, item)
            self.closed_revision = item.mod_revision if item else 0
        elif key == keys.config:
            config = _read(ConfigRecord, item)
            self.incarnation = config.incarnation if config is not None else ""
        elif key == keys.waiting:
            self.waiting = _read(WaitingRecord, item)
        elif key == keys.coordinator:
            self.coordinator = _read(CoordinatorRecord, item)
            self.term = item.create_revision if item else 0
        elif (number := self.roster_number(key)) is not None:
            roster = _read(RosterRecord, item)
            if roster is None:
                self.rosters.get(number, {}).pop(key, None)
            else:
                self.rosters.setdefault(number, {})[key] = roster.members

    def roster_number(self, key: str) -> int | None:
        """The round whose roster a key belongs to, if any."""
        prefix = self.keys.rosters
        return int(key[len(prefix) :].split("/")[0]) if key.startswith(prefix) else None

    def members(self, record: RoundRecord) -> tuple[RosterMember, ...]:
        """The roster of a round in the store."""
        chunks = self.rosters.get(record.number, {})
        return tuple(member for key in sorted(chunks)[: record.chunks] for member in chunks[key])

    @property
    def is_closed(self) -> bool:
        return self.closed is not None and self.closed.closed


R = TypeVar("R", bound=Record)


def _read(kind: type[R], item: Item | None) -> R | None:
    try:
        return decode(kind, item) if item is not None else None
    except RendezvousStateError:
        return None


@dataclass(frozen=True, slots=True)
class Commit:
    """One revision of the store. `writer` is the id of the node that asked for it, "" for time (a lease that ended)
    and for whoever is no node (an operator)."""

    revision: int
    changes: tuple[Change, ...]
    writer: str = ""


class Checker:
    """Checks one guarantee. `picture` is the run after the commit, `before` the round before it."""

    def committed(self, picture: Picture, commit: Commit, before: RoundRecord | None) -> None:
        """A revision was committed; `picture` includes it."""

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        """`state/round` was written by this commit."""

    def returned(self, picture: Picture, process: str, node_id: str, joined: Joined) -> None:
        """A process returned from `next_rendezvous`."""

    def wiped(self, picture: Picture) -> None:
        """The store lost its content, or the run's incarnation ended: its earlier rounds no longer count."""


class Barrier(Checker):
    """An active round has min to max members, all of which confirmed it; no node returns from any other round.

    The first `compared` members must still have confirmed; the others may have left since.
    """

    def __init__(self, min_nodes: int, max_nodes: int, step: int = 1, compared: int = 1_000_000) -> None:
        self._min, self._max, self._step = min_nodes, max_nodes, step
        self._compared = compared
        self._active: set[int] = set()

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        if now.phase is not RoundPhase.ACTIVE:
            return
        self._active.add(now.number)
        members = picture.members(now)
        if not self._min <= len(members) <= self._max or len(members) % self._step or len(members) != now.size:
            raise BrokeBarrier(
                f"round {now.number} is active with {len(members)} members (size {now.size}), allowed are "
                f"{self._min} to {self._max} in steps of {self._step}"
            )
        for rank, member in enumerate(members):
            record = picture.nodes.get(member.id)
            if record is None or (rank >= self._compared and record.floor >= now.number):
                continue
            confirmed = record.phase is NodePhase.MEMBER and record.round == now.number
            if not confirmed or record.join != member.join:
                raise BrokeBarrier(f"round {now.number} is active, but the record of {member.name} is {record}")

    def returned(self, picture: Picture, process: str, node_id: str, joined: Joined) -> None:
        if joined.number not in self._active:
            raise BrokeBarrier(f"{process} returned from round {joined.number}, which was never active")


class Agreement(Checker):
    """All nodes that return from a round return the same members and ranks; a decided roster never changes."""

    def __init__(self) -> None:
        self._decided: dict[int, tuple[RosterMember, ...]] = {}
        self._earlier_lives: list[dict[int, tuple[RosterMember, ...]]] = []
        """The rosters from before each `wiped`: nodes may still return from these rounds."""

    def committed(self, picture: Picture, commit: Commit, before: RoundRecord | None) -> None:
        for change in commit.changes:
            number = picture.roster_number(change.key)
            if number is None or change.item is None or number not in self._decided:
                continue
            if not self._same(picture, number):
                raise BrokeAgreement(f"the roster of round {number} was changed after it was decided")

    def _same(self, picture: Picture, number: int) -> bool:
        chunks = picture.rosters.get(number, {})
        return tuple(member for key in sorted(chunks) for member in chunks[key]) == self._decided[number]

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        members = picture.members(now)
        if self._decided.setdefault(now.number, members) != members:
            raise BrokeAgreement(f"round {now.number} was decided twice, with different members")

    def returned(self, picture: Picture, process: str, node_id: str, joined: Joined) -> None:
        lives = [self._decided, *self._earlier_lives]
        rosters = [decided[joined.number] for decided in lives if joined.number in decided]
        for members in rosters:
            if len(members) == joined.size and 0 <= joined.rank < joined.size and members[joined.rank].id == node_id:
                return
        known = "; ".join(", ".join(member.name for member in members) for members in rosters) or "no roster"
        raise BrokeAgreement(
            f"{process} returned from round {joined.number} as rank {joined.rank} of {joined.size}; decided: {known}"
        )

    def wiped(self, picture: Picture) -> None:
        self._earlier_lives.append(self._decided)
        self._decided = {}


class Ranks(Checker):
    """The ranks of a round are 0 … n-1, each once."""

    def __init__(self) -> None:
        self._returned: dict[tuple[int, int, int], str] = {}
        self._lives: list[dict[int, list[str]]] = [{}]
        """The ids of each round by rank, for each life of the store: nodes may return late from an earlier life."""

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        ids = [member.id for member in picture.members(now)]
        if len(set(ids)) != len(ids):
            raise BrokeRanks(f"a node is twice in round {now.number}")
        if len(ids) != now.size:
            raise BrokeRanks(f"round {now.number} has {len(ids)} ranks for {now.size} places")
        self._lives[-1][now.number] = ids

    def returned(self, picture: Picture, process: str, node_id: str, joined: Joined) -> None:
        holder = self._returned.setdefault((self._life_of(node_id, joined), joined.number, joined.rank), node_id)
        if holder != node_id:
            raise BrokeRanks(f"two nodes returned from round {joined.number} as rank {joined.rank}")

    def _life_of(self, node_id: str, joined: Joined) -> int:
        """The life of the store that this round belongs to: the last one that gave the rank to this node."""
        for life in reversed(range(len(self._lives))):
            ids = self._lives[life].get(joined.number, [])
            if joined.rank < len(ids) and ids[joined.rank] == node_id:
                return life
        return len(self._lives) - 1

    def wiped(self, picture: Picture) -> None:
        self._lives.append({})


class Exclusivity(Checker):
    """At most one round is current: the next is decided only when every member has left it or lost its session."""

    def __init__(self) -> None:
        self._active: dict[int, frozenset[str]] = {}
        """The members of each round that became active: a late confirmation of another node does not count."""
        self._left_over: dict[str, tuple[int, int]] = {}
        """Members (join, round) at the last `wiped`: they are still a group until they leave the round."""
        self._returned: dict[str, tuple[int, int]] = {}
        """The last return of each node (join, round): it leaves the round with a new join or the end of its session."""

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        for record in picture.nodes.values():
            join, last = self._returned.get(record.id, (0, now.number))
            stayed = join == record.join and record.phase is NodePhase.JOINING and last < now.number
            if stayed or (record.round != now.number and self._is_inside(record)):
                raise BrokeExclusivity(
                    f"round {now.number} was decided ({now.phase.value}) while {record.name} is in round "
                    f"{last if stayed else record.round}"
                )
        if now.phase is RoundPhase.ACTIVE:
            self._active[now.number] = frozenset(member.id for member in picture.members(now))

    def returned(self, picture: Picture, process: str, node_id: str, joined: Joined) -> None:
        record = picture.nodes.get(node_id)
        if record is not None:
            self._returned[node_id] = (record.join, joined.number)

    def _is_inside(self, record: NodeRecord) -> bool:
        is_left_over = self._left_over.get(record.id) == (record.join, record.round)
        return record.phase is NodePhase.MEMBER and (record.id in self._active.get(record.round, ()) or is_left_over)

    def wiped(self, picture: Picture) -> None:
        inside = [record for record in picture.nodes.values() if self._is_inside(record)]
        self._left_over = {record.id: (record.join, record.round) for record in inside}
        self._active.clear()


class Monotonicity(Checker):
    """Round numbers never decrease, for a node or for the run, and each attempt uses a new one."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._last: dict[str, int] = {}

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        if before is not None and now.number < before.number:
            raise BrokeMonotonicity(f"state/round went back from {before.number} to {now.number}")
        if now.phase is RoundPhase.FORMING:
            if now.number in self._used:
                raise BrokeMonotonicity(f"number {now.number} was used for a second attempt")
            self._used.add(now.number)

    def returned(self, picture: Picture, process: str, node_id: str, joined: Joined) -> None:
        last = self._last.get(process, 0)
        if joined.number <= last:
            raise BrokeMonotonicity(f"{process} returned from round {joined.number} after round {last}")
        self._last[process] = joined.number

    def wiped(self, picture: Picture) -> None:
        self._used.clear()


class Freshness(Checker):
    """A node whose session had ended when the round became active is not a member of it.

    Checks only the first `compared` members: as many as one activation can compare within the backend's limits.
    """

    def __init__(self, compared: int) -> None:
        self._compared = compared

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        if now.phase is not RoundPhase.ACTIVE:
            return
        for member in picture.members(now)[: self._compared]:
            if member.id not in picture.nodes:
                raise BrokeFreshness(f"round {now.number} became active with {member.name}, whose session had ended")


class Fencing(Checker):
    """Coordinators, nodes, and members (to the store of their round) commit nothing after they lost their session."""

    def committed(self, picture: Picture, commit: Commit, before: RoundRecord | None) -> None:
        if not commit.writer:
            return
        keys = picture.keys
        for change in commit.changes:
            if change.item is None:
                continue
            if change.key in (keys.round, keys.waiting) or change.key.startswith(keys.assigns):
                self._by_coordinator(picture, commit, change.key)
            elif change.key.startswith(keys.nodes):
                if change.key != keys.node(commit.writer):
                    raise BrokeFencing(f"{commit.writer} wrote {change.key}")
            elif change.key.startswith(keys.stores):
                self._by_member(picture, commit, change.key)

    def _by_coordinator(self, picture: Picture, commit: Commit, key: str) -> None:
        holder = picture.coordinator.id if picture.coordinator else None
        if holder != commit.writer:
            raise BrokeFencing(f"{commit.writer} wrote {key} while the coordinator was {holder}")

    def _by_member(self, picture: Picture, commit: Commit, key: str) -> None:
        number = int(key[len(picture.keys.stores) :].split("/")[0])
        record = picture.nodes.get(commit.writer)
        if record is None or record.phase is not NodePhase.MEMBER or record.round != number:
            raise BrokeFencing(f"{commit.writer} wrote {key} without being a member of round {number}")

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        if now.term != picture.term:
            raise BrokeFencing(f"round {now.number} was written in term {now.term}; the term is {picture.term}")


class Finality(Checker):
    """After a close no round becomes active until a reopen; an attempt from before the close never does.

    A node that was told of the close of an incarnation is in no later round of the run, also if the store has lost its
    data, until the run is reopened, its id is free again, or others have been in a round of it without such a node.
    """

    def __init__(self) -> None:
        self._closed_at_forming: dict[int, int] = {}
        self._told: dict[str, str] = {}
        """The nodes that were told of a close, and of which incarnation."""
        self._incarnations: set[str] = set()
        self._open_again: set[str] = set()
        """Incarnations whose close no longer counts."""
        self._was_closed = False

    def committed(self, picture: Picture, commit: Commit, before: RoundRecord | None) -> None:
        keys = picture.keys
        for change in commit.changes:
            if change.key == keys.config and change.item is None:
                self.forgive()
            elif change.key == keys.config and (config := _read(ConfigRecord, change.item)) is not None:
                self._incarnations.add(config.incarnation)
            elif change.key == keys.closed and change.item is not None:
                self._closed_or_reopened(picture)

    def _closed_or_reopened(self, picture: Picture) -> None:
        if picture.is_closed:
            self._open_again.discard(picture.incarnation)
        elif self._was_closed:
            self.forgive()
        self._was_closed = picture.is_closed

    def told_closed(self, node_id: str, incarnation: str) -> None:
        """A node was told that this incarnation is closed."""
        if incarnation not in self._open_again:
            self._told[node_id] = incarnation

    def forgive(self) -> None:
        """What was told so far no longer counts."""
        self._open_again |= self._incarnations
        self._told.clear()

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        if now.phase is RoundPhase.FORMING:
            self._closed_at_forming[now.number] = picture.closed_revision
            return
        if picture.is_closed:
            raise BrokeFinality(f"round {now.number} became active after the run was closed")
        if self._closed_at_forming.get(now.number) != picture.closed_revision:
            raise BrokeFinality(
                f"round {now.number} was decided before the run was closed and became active afterwards"
            )
        for member in picture.members(now):
            if member.id in self._told:
                raise BrokeFinality(
                    f"{member.name} is a member of round {now.number}, although it was told that the run is closed "
                    f"(incarnation {self._told[member.id]})"
                )
        if self._told:
            self.forgive()

    def wiped(self, picture: Picture) -> None:
        self._closed_at_forming.clear()
        self._was_closed = False


class Memory(Checker):
    """The kept events of a run are numbered one by one, and no round is active twice. Not a guarantee, but checked."""

    def __init__(self) -> None:
        self._last = 0
        self._active = (0, "")
        """The last active round, and its incarnation."""
        self._may_restart = True

    def committed(self, picture: Picture, commit: Commit, before: RoundRecord | None) -> None:
        for change in commit.changes:
            if change.item is None or not change.key.startswith(picture.keys.events):
                continue
            record = decode(EventsRecord, change.item)
            if record.first != self._last + 1 and not (self._may_restart and record.first == 1):
                raise BrokeMemory(f"kept events {record.first} … follow those up to {self._last}")
            self._last, self._may_restart = record.first + len(record.events) - 1, False
            for one in read_events(change.item, picture.keys.run_id):
                if isinstance(one.event, RoundActive):
                    last, life = self._active
                    if life == record.incarnation and one.event.round <= last:
                        raise BrokeMemory(f"round {one.event.round} is kept as active after round {last}")
                    self._active = (one.event.round, record.incarnation)

    def wiped(self, picture: Picture) -> None:
        self._active, self._may_restart = (0, ""), True


class Cause(Checker):
    """What the history says about the end of a round is what its members wrote when they left, or what became of them.

    A failure that was written is never reported as something less grave, and a member that left in order is never
    reported as lost, while its record exists: if the coordinator must have seen that record. A member that leaves
    before it is told that the round is active says no cause, but its record shows that it left.
    """

    def __init__(self) -> None:
        self._number = 0
        self._members: dict[str, str] = {}
        """The present members of the last active round: id -> name."""
        self._names: dict[str, str] = {}
        """All its members."""
        self._lost: set[str] = set()
        self._said: dict[str, tuple[int, LeaveCause]] = {}
        """What each former member wrote first, and when."""
        self._rewritten: set[str] = set()
        """Former members that have written their keys again: a coordinator that takes over sees a later revision."""
        self._legible: dict[str, int] = {}
        """Former members whose records say why they left: since which revision without a break."""
        self._outside: dict[str, int] = {}
        """Former members whose records show that they are not in the round: since which revision without a break."""
        self._empty_at = 0
        """The revision at which the last member had gone."""

    def decided(self, picture: Picture, commit: Commit, before: RoundRecord | None, now: RoundRecord) -> None:
        if now.phase is RoundPhase.ACTIVE:
            self._number = now.number
            self._names = {member.id: member.name for member in picture.members(now)}
            self._members = {node_id: name for node_id, name in self._names.items() if node_id in picture.nodes}
            self._lost = self._names.keys() - picture.nodes.keys()  # not every confirmation is compared
            self._said, self._rewritten, self._legible, self._outside = {}, set(), {}, {}

    def committed(self, picture: Picture, commit: Commit, before: RoundRecord | None) -> None:
        keys = picture.keys
        for change in commit.changes:
            if change.key.startswith(keys.nodes):
                self._node(picture, commit.revision, change.key[len(keys.nodes) :])
            elif change.key.startswith(keys.histories):
                report = _read(HistoryRecord, change.item)
                if report is not None and report.ended and report.number == self._number:
                    self._ended(picture, report)

    def _node(self, picture: Picture, revision: int, node_id: str) -> None:
        record = picture.nodes.get(node_id)
        if record is None or record.phase is not NodePhase.MEMBER:
            was_member = self._members.pop(node_id, None) is not None
            if was_member:
                self._empty_at = revision
                if record is None:
                    self._lost.add(node_id)
        if record is None:
            self._outside.pop(node_id, None)
        elif node_id not in self._members:
            self._outside.setdefault(node_id, revision)
        if record is None or record.left is None or record.left.round != self._number:
            self._legible.pop(node_id, None)
            return
        self._legible.setdefault(node_id, revision)
        if node_id in self._said:
            self._rewritten.add(node_id)
        else:
            self._said[node_id] = (revision, record.left)

    def _ended(self, picture: Picture, report: HistoryRecord) -> None:
        number, kind = report.number, report.ended_kind
        if kind is None:
            raise BrokeCause(f"the end of round {number} has no kind: {report.ended}")
        self._mark(kind)
        failed = sorted(
            (at, cause.why, node_id)
            for node_id, (at, cause) in self._said.items()
            if cause.kind in (LeaveKind.WORKER_FAILED, LeaveKind.STALLED)
        )
        is_known = [self._is_known(picture, self._legible, node_id) for _, _, node_id in failed]
        is_ordered = all(is_known) and not any(node_id in self._rewritten for _, _, node_id in failed)
        if kind in (LeaveKind.WORKER_FAILED, LeaveKind.STALLED):
            if report.ended not in [why for _, why, _ in failed]:
                raise BrokeCause(f"round {number} ended because of a failure that no member wrote: {report.ended}")
            if not self._lost and is_ordered and report.ended != failed[0][1]:
                raise BrokeCause(f"the first failure in round {number} was {failed[0][1]}, not {report.ended}")
        elif kind in (LeaveKind.MEMBER_LOST, LeaveKind.SESSION_LOST):
            former = self._names.keys() - self._members.keys()
            unknown = [node_id for node_id in former if not self._is_known(picture, self._outside, node_id)]
            if not any(self._names[node_id] in report.ended for node_id in (*self._lost, *unknown)):
                raise BrokeCause(f"round {number} lost no such member, but its end is reported as: {report.ended}")
        elif any(is_known):
            raise BrokeCause(f"a worker of round {number} failed, but its end is reported as: {report.ended}")

    def _mark(self, kind: LeaveKind) -> None:
        """That a world reached this kind of end. ROUND_OVER is left out: it takes a cause that nobody knows."""
        match kind:
            case LeaveKind.WORKER_FAILED:
                mark("end.worker_failed")
            case LeaveKind.STALLED:
                mark("end.stalled")
            case LeaveKind.MEMBER_LOST:
                mark("end.member_lost")
            case LeaveKind.SESSION_LOST:
                mark("end.session_lost")
            case LeaveKind.DRAIN:
                mark("end.drain")
            case LeaveKind.OPERATOR:
                mark("end.operator")
            case LeaveKind.STOPPED:
                mark("end.stopped")
            case LeaveKind.FINISHED:
                mark("end.finished")
            case LeaveKind.ADMISSION:
                mark("end.admission")
            case LeaveKind.REQUESTED:
                mark("end.requested")
            case LeaveKind.ROUND_OVER:
                pass

    def _is_known(self, picture: Picture, shown: dict[str, int], node_id: str) -> bool:
        """The coordinator knows what the record of this node shows: it was there at the coordinator's election, or when
        the last member had gone, which the coordinator has seen; and it still is."""
        return node_id in shown and shown[node_id] <= max(picture.term, self._empty_at)

    def wiped(self, picture: Picture) -> None:
        self._number, self._names, self._members, self._empty_at = 0, {}, {}, 0
        self._lost, self._said, self._rewritten, self._legible, self._outside = set(), {}, set(), {}, {}


class Safety:
    """All safety checkers for one run."""

    def __init__(self, keys: RunKeys, min_nodes: int, max_nodes: int, step: int = 1, compared: int = 1_000_000) -> None:
        self.picture = Picture(keys)
        self._finality = Finality()
        self.checkers: tuple[Checker, ...] = (
            Barrier(min_nodes, max_nodes, step, compared),
            Agreement(),
            Ranks(),
            Exclusivity(),
            Monotonicity(),
            Freshness(compared),
            Fencing(),
            Memory(),
            Cause(),
            self._finality,
        )
        self._of_commits = tuple(
            checker for checker in self.checkers if type(checker).committed is not Checker.committed
        )
        """The checkers that check every commit."""

    def committed(self, revision: int, changes: Iterable[Change], writer: str = "") -> None:
        """A revision was committed. Raises the error of the first broken guarantee."""
        commit = Commit(revision, tuple(changes), writer)
        picture = self.picture
        before = picture.round
        wrote_round = ended = False
        for change in commit.changes:
            picture.apply(change)
            if change.key == picture.keys.round:
                wrote_round = wrote_round or change.item is not None
            elif change.key == picture.keys.config:
                ended = ended or change.item is None
        now = picture.round if wrote_round else None
        for checker in self.checkers if wrote_round or ended else self._of_commits:
            checker.committed(picture, commit, before)
            if now is not None:
                checker.decided(picture, commit, before, now)
            if ended:
                checker.wiped(picture)

    def returned(self, process: str, node_id: str, joined: Joined) -> None:
        """A process returned from `next_rendezvous`."""
        for checker in self.checkers:
            checker.returned(self.picture, process, node_id, joined)

    def told_closed(self, node_id: str, incarnation: str) -> None:
        """A node was told that this incarnation of the run is closed."""
        self._finality.told_closed(node_id, incarnation)

    def wiped(self, *, is_told: bool = False) -> None:
        """The store lost its content. `is_told`: returning nodes tell it what they were told."""
        if not is_told:
            self._finality.forgive()
        self.picture = Picture(self.picture.keys)
        for checker in self.checkers:
            checker.wiped(self.picture)
