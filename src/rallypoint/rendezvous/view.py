"""The coordinator's view of a run: its control keys at one revision, in the form that `decide` reads.

Pure: changes and times are arguments, nothing is read or sent. A change costs O(1); only a change of `state/round`
sorts all nodes anew. Times are by the coordinator's own clock and are compared with nothing else.

Every node with a readable key is in exactly one group:

    members      confirmed the active round, and its key still exists
    candidates   wants in (joining, or confirmed an attempt that was given up) and may be admitted
    excluded     wants in and may not be admitted now: drained, held back, or did not confirm in time
    (none)       left in order
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

import msgspec

from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import Change, Item
from rallypoint.rendezvous.holdback import HoldBack
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import (
    BudgetRecord,
    ClosedRecord,
    ConfigRecord,
    DrainRecord,
    HealthRecord,
    LeaveKind,
    NodePhase,
    NodeRecord,
    Record,
    RosterMember,
    RoundEnd,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
)
from rallypoint.rendezvous.returning_nodes import ReturningNodes
from rallypoint.rendezvous.round_end import Leaving, Leavings
from rallypoint.rendezvous.rules import Rules
from rallypoint.sentences import FEW

R = TypeVar("R", bound=Record)

# Up to Python 3.11, `NodePhase.MEMBER` takes as long as the rest of a comparison.
_JOINING, _MEMBER, _LEFT, _ACTIVE = NodePhase.JOINING, NodePhase.MEMBER, NodePhase.LEFT, RoundPhase.ACTIVE


class SeenNode(msgspec.Struct, frozen=True, gc=False):
    """A node's key as last seen. `order` (of joining) and `joined_at` belong to its current join."""

    record: NodeRecord
    lease: int
    mod_revision: int
    order: int
    joined_at: float


@dataclass(slots=True)
class Plan:
    """The attempt that this coordinator is forming: a set of (id, join), each with its rank (rule 2)."""

    number: int
    ranks: dict[str, tuple[int, int]]
    """id -> (join, rank), in rank order."""
    pending: dict[str, None]
    """The ids that have not confirmed yet."""
    started_at: float
    why: str
    confirmed_at: float = 0.0
    """When the last confirmation arrived; 0: none has."""
    broken: str | None = None
    """Why the attempt cannot become active; None: it can."""
    last_confirmed: deque[str] = field(default_factory=lambda: deque(maxlen=FEW))


@dataclass(frozen=True, slots=True)
class Departure:
    """A node that is gone. `left`: in order (True), by a lost session (False), unknown (None, before this coordinator).

    `joined_s` and `gone_s` count from `View.started_at`; None: unknown.
    """

    name: str
    joined_s: float
    gone_s: float | None
    round: int
    """The active round of which it was a member; 0: none."""
    left: bool | None
    why: str


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A node that asks to join."""

    name: str
    join: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A key whose value could not be decoded."""

    key: str
    why: str


class View:
    """The run at `revision`. The module docstring defines the groups of nodes."""

    def __init__(self, keys: RunKeys, now: float) -> None:
        self.keys = keys
        self.revision = 0
        self.started_at = now
        """When this coordinator started, or the last round became active."""
        self.unreadable: dict[str, str] = {}
        """Keys of the whole run (`config`, `state/...`) that cannot be decoded, and why. They stop all decisions."""
        self.config: ConfigRecord | None = None
        self.rules: Rules | None = None
        self.coordinator_revision = 0
        self.round: RoundRecord | None = None
        self.round_revision = 0
        self.closed: ClosedRecord | None = None
        self.closed_revision = 0
        self.waiting: WaitingRecord | None = None
        self.waiting_revision = 0
        self._budget: BudgetRecord | None = None
        self.nodes: dict[str, SeenNode] = {}
        self.members: dict[str, SeenNode] = {}
        self.candidates: dict[str, SeenNode] = {}
        self.excluded: dict[str, SeenNode] = {}
        self.above: dict[str, None] = {}
        """Members of attempts above `state/round`: data was lost, nothing may form until they left (rule 9)."""
        self.rejoined: dict[str, None] = {}
        """Nodes of the active round's roster that have joined again."""
        self.arrived: dict[str, None] = {}
        """Candidates that are not of the active round's roster."""
        self.drains: dict[str, DrainRecord] = {}
        self.hold_back = HoldBack()
        self.unconfirmed: dict[str, int] = {}
        """id -> mod revision of its key, for nodes that did not confirm in time: excluded until the key changes."""
        self.roster: dict[str, RosterMember] = {}
        self.roster_number = 0
        self.last_ranks: dict[str, tuple[int, str]] = {}
        """name -> (rank, id) in the last active round."""
        self.returning: ReturningNodes | None = None
        """On the embedded server: the nodes that return after it lost its data."""
        self.plan: Plan | None = None
        self.minimum_since: float | None = None
        """Since when there are enough candidates: the start of the last call."""
        self.first_arrival_at: float | None = None
        """First arrival of a candidate since the round became active; with `last_arrival_at`, the admission window."""
        self.last_arrival_at = now
        self.departures: deque[Departure] = deque(maxlen=FEW)
        self.leavings = Leavings()
        """How the members of the active round left it."""
        self.last_end: RoundEnd | None = None
        """The end of the last active round, while there is no other."""
        self.facts: list[Arrival | Departure | Unreadable] = []
        """What happened since the owner last cleared this list: for events."""
        self._ids_of: dict[str, dict[str, None]] = {}
        self._seen: dict[str, int] = {}

    # --- changes ------------------------------------------------------------------------------------------------------

    def load(self, items: Iterable[Item], revision: int, now: float) -> None:
        """Make the view equal to a scan of all control keys. Missed changes are applied as if seen one by one."""
        self.revision = revision
        present = {item.key: item for item in items}
        for key in [key for key in self._seen if key not in present]:
            self._change(key, None, now)
        for key, item in sorted(present.items(), key=lambda pair: pair[1].mod_revision):
            if self._seen.get(key) != item.mod_revision:
                self._change(key, item, now)

    def apply(self, changes: Sequence[Change], revision: int, now: float) -> None:
        """Apply one batch of the watch on the control keys."""
        self.revision = revision
        for change in changes:
            self._change(change.key, change.item, now)

    def _change(self, key: str, item: Item | None, now: float) -> None:
        if item is None:
            self._seen.pop(key, None)
        else:
            self._seen[key] = item.mod_revision
        keys = self.keys
        if key.startswith(keys.nodes):
            self._node(key[len(keys.nodes) :], item, now)
        elif key == keys.round:
            self._round(item, now)
        elif key == keys.waiting:
            self.waiting = self._read(WaitingRecord, key, item)
            self.waiting_revision = item.mod_revision if item else 0
        elif key == keys.closed:
            self.closed = self._read(ClosedRecord, key, item)
            self.closed_revision = item.mod_revision if item else 0
            if self.plan is not None:  # also if it is open again: an attempt from before a close is over (Finality)
                self.plan.broken = "the run was closed while it was forming"
        elif key == keys.config:
            self._config(item)
        elif key == keys.budget:
            self._budget = self._read(BudgetRecord, key, item)
        elif key == keys.coordinator:
            self.coordinator_revision = item.create_revision if item else 0
        elif key.startswith(keys.drains):
            self._drain(key, item, now)
        elif key.startswith(keys.healths):
            self._health(key, item, now)

    def _read(self, kind: type[R], key: str, item: Item | None) -> R | None:
        self.unreadable.pop(key, None)
        if item is None:
            return None
        try:
            return decode(kind, item)
        except RendezvousStateError as error:
            self.facts.append(Unreadable(key, str(error)))
            if not key.startswith((self.keys.nodes, self.keys.drains, self.keys.healths, self.keys.budget)):
                self.unreadable[key] = str(error)
            return None

    def _config(self, item: Item | None) -> None:
        self.config = self._read(ConfigRecord, self.keys.config, item)
        self.rules = None
        if self.config is not None:
            try:
                self.rules = Rules.of(self.config)
            except RendezvousStateError as error:
                self.unreadable[self.keys.config] = str(error)

    def _round(self, item: Item | None, now: float) -> None:
        previous = self.round
        self.round = self._read(RoundRecord, self.keys.round, item)
        self.round_revision = item.mod_revision if item else 0
        if self.plan is not None and (self.round is None or self.round.number != self.plan.number):
            self.plan = None
        known = previous.number if previous is not None and previous.phase is _ACTIVE else 0
        if self.is_active and self.round is not None and self.round.number != known:
            gone = self._gone_before_active(self.round.number)
            self.started_at = now
            self.departures.clear()
            self.leavings.clear()
            for node_id, departure in gone:
                self.departures.append(replace(departure, joined_s=0.0, gone_s=0.0, round=self.round.number))
                self.leavings.note_lost(node_id, departure.name, self.revision)
            self.last_end = None
            self.minimum_since = None
            self.plan = None
        self._regroup_all()
        self.last_arrival_at = now
        self.first_arrival_at = now if self.is_active and self.candidates else None

    def _gone_before_active(self, number: int) -> list[tuple[str, Departure]]:
        """The members of this round (by id) that were lost before it was active: not every confirmation is compared."""
        if self.roster_number != number:
            return []
        lost = {node.name: node for node in self.departures if node.left is False}
        return [(m.id, lost[m.name]) for m in self.roster.values() if m.id not in self.nodes and m.name in lost]

    def _drain(self, key: str, item: Item | None, now: float) -> None:
        node_id = key[len(self.keys.drains) :]
        record = self._read(DrainRecord, key, item)
        if record is None:
            self.drains.pop(node_id, None)
        else:
            self.drains[node_id] = record
        self._regroup(node_id, now)

    def _health(self, key: str, item: Item | None, now: float) -> None:
        record = self._read(HealthRecord, key, item)
        if record is not None:
            self.hold_back.note_record(record, self.rules.timing if self.rules else None, now)
            self._regroup_name(record.name, now)
            return
        for name in [name for name in self.hold_back.records if self.keys.health(name) == key]:
            self.hold_back.note_gone(name)
            self._regroup_name(name, now)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _node(self, node_id: str, item: Item | None, now: float) -> None:
        before = self.nodes.get(node_id)
        record = self._read(NodeRecord, self.keys.node(node_id), item)
        if record is not None and record.id != node_id:
            self.facts.append(Unreadable(self.keys.node(node_id), f"it holds the record of node {record.id!r}"))
            record = None
        if item is None or record is None:
            if before is not None:
                self._remove(node_id, before, now)
            return
        same_join = before if before is not None and before.record.join == record.join else None
        order, joined_at = (same_join.order, same_join.joined_at) if same_join else (item.mod_revision, now)
        seen = SeenNode(record, item.lease, item.mod_revision, order, joined_at)
        self.nodes[node_id] = seen
        if same_join is None and record.phase is _JOINING:
            self.facts.append(Arrival(record.name, record.join))
        self._ids_of.setdefault(record.name, {})[node_id] = None
        if record.phase is _LEFT and (before is None or before.record.phase is not _LEFT):
            self._note_departure(before or seen, record.why or "no reason given", left=True, now=now)
        if record.phase is not _MEMBER:
            self._note_leaving(seen, was_member=node_id in self.members)
        if self.plan is not None:
            self._check_plan(node_id, record.name, seen, now)
        self._regroup(node_id, now)

    def _remove(self, node_id: str, before: SeenNode, now: float) -> None:
        del self.nodes[node_id]
        ids = self._ids_of[before.record.name]
        del ids[node_id]
        if not ids:
            del self._ids_of[before.record.name]
        if before.record.phase is not _LEFT:
            is_planned = self.plan is not None and node_id in self.plan.ranks
            if self.rules is not None and (node_id in self.members or is_planned):
                self.hold_back.note_loss(before.record.name, self.rules.timing, now)
                self._regroup_name(before.record.name, now)
            if node_id in self.members:
                self.leavings.note_lost(node_id, before.record.name, self.revision)
            self._note_departure(before, "its session ended", left=False, now=now)
        self._check_plan(node_id, before.record.name, None, now)
        self.unconfirmed.pop(node_id, None)
        self._regroup(node_id, now)
        if not self.nodes:
            self.hold_back.forget_losses()

    def _note_leaving(self, node: SeenNode, was_member: bool) -> None:
        """A node is not in the active round any more, and says why. Nodes of earlier versions do not."""
        record, number = node.record, self.round.number if self.round is not None and self.is_active else 0
        left = record.left
        if number and left is not None and left.round == number:
            self.leavings.note(record.id, Leaving(node.mod_revision, record.name, left.kind, left.why))
        elif was_member:
            why = f"{record.name} left: {record.why}" if record.phase is _LEFT else f"{record.name} joined again"
            self.leavings.note(record.id, Leaving(node.mod_revision, record.name, LeaveKind.REQUESTED, why))

    def _note_departure(self, node: SeenNode, why: str, *, left: bool, now: float) -> None:
        number = self.round.number if self.round and node.record.id in self.members else 0
        joined_s = max(0.0, node.joined_at - self.started_at)
        departure = Departure(node.record.name, joined_s, now - self.started_at, number, left, why)
        self.departures.append(departure)
        self.facts.append(departure)

    def _check_plan(self, node_id: str, name: str, seen: SeenNode | None, now: float) -> None:
        """Update the plan for a node's new state: a confirmation, or the end of the attempt."""
        plan = self.plan
        if plan is None or node_id not in plan.ranks or plan.broken is not None:
            return
        join, rank = plan.ranks[node_id]
        if seen is None:
            plan.broken = f"{name} (rank {rank}) was lost before the round was active"
        elif seen.record.phase is _LEFT:
            plan.broken = f"{name} (rank {rank}) left before the round was active"
        elif seen.record.join != join:  # rule 2
            plan.broken = f"{name} (rank {rank}) joined anew before the round was active"
        elif seen.record.phase is _MEMBER and seen.record.round == plan.number and node_id in plan.pending:
            del plan.pending[node_id]
            plan.confirmed_at = now
            plan.last_confirmed.append(name)

    def _regroup(self, node_id: str, now: float) -> None:
        """Move one node into its group."""
        node = self.nodes.get(node_id)
        groups = (self.members, self.candidates, self.excluded)
        if node is None or node.record.phase is _LEFT:
            for group in groups:
                group.pop(node_id, None)
            self.above.pop(node_id, None)
            self.rejoined.pop(node_id, None)
            self.arrived.pop(node_id, None)
            return
        target, is_active = self._group_of(node), self.is_active
        if node_id not in target:
            if is_active and target is self.candidates and node_id not in self.roster:
                self.last_arrival_at = now
                if self.first_arrival_at is None:
                    self.first_arrival_at = now
            for group in groups:
                group.pop(node_id, None)
        target[node_id] = node
        number = self.round.number if self.round is not None else 0
        _set(self.above, node_id, node.record.phase is _MEMBER and node.record.round > number)
        is_of_round = node_id in self.roster
        _set(self.rejoined, node_id, is_active and target is not self.members and is_of_round)
        _set(self.arrived, node_id, is_active and target is self.candidates and not is_of_round)

    def _regroup_all(self) -> None:
        """Move every node into its group, after a change of `state/round`. As `_regroup` for each node, but faster."""
        number = self.round.number if self.round else 0
        active = number if self.is_active else None
        is_held, drains, unconfirmed = self.hold_back.is_held, self.drains, self.unconfirmed
        self.members, self.candidates, self.excluded = members, candidates, excluded = {}, {}, {}
        above: dict[str, None] = {}
        self.above = above
        for node_id, node in self.nodes.items():
            record = node.record
            if record.phase is _LEFT:
                continue
            if record.phase is _MEMBER and record.round > number:
                above[node_id] = None
            if record.phase is _MEMBER and record.round == active:
                members[node_id] = node
            elif node_id in drains or unconfirmed.get(node_id) == node.mod_revision or is_held(record.name):
                excluded[node_id] = node
            else:
                candidates[node_id] = node
        self._compare_with_roster()

    def _compare_with_roster(self) -> None:
        self.rejoined, self.arrived = {}, {}
        if self.is_active:
            self.arrived = {node_id: None for node_id in self.candidates if node_id not in self.roster}
            members, others = self.members, (self.candidates, self.excluded)
            for node_id in self.roster:
                if node_id not in members and any(node_id in group for group in others):
                    self.rejoined[node_id] = None

    def _group_of(self, node: SeenNode) -> dict[str, SeenNode]:
        record, current = node.record, self.round
        has_confirmed = record.phase is _MEMBER and current is not None and record.round == current.number
        if has_confirmed and self.is_active:
            return self.members
        is_held = self.hold_back.is_held(record.name)
        if record.id in self.drains or is_held or self.unconfirmed.get(record.id) == node.mod_revision:
            return self.excluded
        return self.candidates

    def _regroup_name(self, name: str, now: float) -> None:
        for node_id in list(self._ids_of.get(name, ())):
            self._regroup(node_id, now)

    # --- set by the coordinator ---------------------------------------------------------------------------------------

    def set_roster(self, number: int, members: Sequence[RosterMember]) -> None:
        """Set the members of the last active round: for sticky ranks, and to name lost members."""
        self.roster_number = number
        self.roster = {member.id: member for member in members}
        self.last_ranks = {}
        for rank, member in enumerate(members):
            self.last_ranks.setdefault(member.name, (rank, member.id))
        if self.is_active:
            self._note_absent({member.id: member.name for member in members if member.id not in self.nodes}, number)
        self._compare_with_roster()

    def note_predecessor(self, name: str) -> None:
        """Note that the previous coordinator is gone. Its node key ended before this view began: no change shows it."""
        self.departures.append(Departure(name, 0.0, None, 0, None, "it was the coordinator before this one"))

    def inherit_end(self) -> None:
        """Take over what the previous coordinator wrote about the end of the last active round."""
        end = self.waiting.end if self.waiting is not None else None
        if end is None or self.round is None or end.round != self.round.last_active or not self.ever_active:
            return
        if self.is_active:
            self.leavings.inherit(end)
        else:
            self.last_end = end

    def root_cause(self) -> RoundEnd | None:
        """Why the members of the active round leave it, or have left; None: nothing is known of any leaving."""
        return self.leavings.root(self.round.number if self.round is not None else 0, self.newcomers())

    def newcomers(self) -> list[str]:
        """The first few candidates that are not of the active round."""
        return [self.nodes[node_id].record.name for node_id in islice(self.arrived, FEW + 1)]

    def _note_absent(self, absent: Mapping[str, str], number: int) -> None:
        """Members (id -> name) that were gone before this coordinator's scan: how they went is unknown."""
        names, why = set(absent.values()), "it went before this coordinator took over"
        gone = [Departure(name, 0.0, None, number, None, why) for name in absent.values()]
        self.departures = deque([*(known for known in self.departures if known.name not in names), *gone], FEW)
        reported = self.waiting.lost if self.waiting is not None and self.waiting.number == number else 0
        if len(gone) > reported:  # else an earlier coordinator has reported them all
            self.facts.extend(gone)
        self.leavings.note_vanished(absent)

    def start_plan(self, plan: Plan) -> None:
        """This coordinator's attempt was committed."""
        self.plan = plan
        for node_id in plan.ranks:
            seen = self.nodes.get(node_id)
            self._check_plan(node_id, seen.record.name if seen else "a node", seen, plan.started_at)

    def give_up(self, late: Iterable[str], now: float) -> None:
        """The attempt is over. The nodes in `late` did not confirm: excluded until their keys change."""
        self.plan = None
        for node_id in late:
            node = self.nodes.get(node_id)
            if node is not None:
                self.unconfirmed[node_id] = node.mod_revision
                if self.rules is not None:
                    self.hold_back.note_loss(node.record.name, self.rules.timing, now)
                self._regroup_name(node.record.name, now)

    def tick(self, now: float) -> None:
        """Apply the passing of time: holds end, the last call starts or is cancelled."""
        for name in self.hold_back.released(now):
            self._regroup_name(name, now)
        if not self.candidates:
            self.first_arrival_at = None
        if self.plan is not None or self.rules is None:
            return
        if self.is_gathering and self.rules.usable(len(self.candidates)) >= self.rules.min_nodes:
            if self.minimum_since is None:
                self.minimum_since = now
        else:
            self.minimum_since = None

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """`state/round` is active (its members may all be gone)."""
        return self.round is not None and self.round.phase is _ACTIVE

    @property
    def budget(self) -> BudgetRecord | None:
        """The restarts of this incarnation, for people; None: the run has no launchers that count them."""
        budget, config = self._budget, self.config
        return (
            budget if budget is not None and config is not None and budget.incarnation == config.incarnation else None
        )

    @property
    def is_gathering(self) -> bool:
        """No round is current and this coordinator is forming none: the next may be decided (Exclusivity)."""
        return self.plan is None and not self.members and not self.above

    @property
    def is_closed(self) -> bool:
        return self.closed is not None and self.closed.closed

    def is_present(self, name: str) -> bool:
        """A node of this name has a key."""
        return name in self._ids_of

    @property
    def ever_active(self) -> bool:
        """A round of this incarnation has been active."""
        return (
            self.round is not None
            and self.config is not None
            and self.round.last_active > 0
            and self.round.incarnation == self.config.incarnation
        )

    @property
    def all_returned(self) -> bool:
        """A round was active before the server lost its data, and all its members that returned have joined."""
        returning = self.returning
        if returning is None or returning.round == 0 or self.round is not None:
            return False
        return all(node_id in self.nodes for node_id in returning.members)

    @property
    def lost(self) -> int:
        """Number of the active round's members that have neither a member key nor joined again."""
        if not self.is_active or self.round is None:
            return 0
        return max(0, self.round.size - len(self.members) - len(self.rejoined))

    def next_number(self) -> int:
        """The number of the next attempt: above every number that was ever used (rules 1 and 9)."""
        floors = [max(node.record.floor, node.record.round) for node in self.nodes.values()]
        returned = self.returning.floor if self.returning is not None else 0
        return 1 + max(self.round.number if self.round else 0, returned, max(floors, default=0))


def _set(group: dict[str, None], key: str, wanted: bool) -> None:
    if wanted:
        group[key] = None
    else:
        group.pop(key, None)
