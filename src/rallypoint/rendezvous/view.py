"""What the coordinator knows of a run: its control keys at one revision, kept ready to decide on.

Pure: changes and times come in as arguments, nothing is read or sent. A change costs O(1); only a change of
`state/round` sorts all nodes anew. Times are the coordinator's own clock and are compared with nothing else.

Every node with a readable key is in exactly one group:

    members      confirmed the active round, still there
    candidates   wants in (joining, or confirmed an attempt that was given up) and may be chosen
    aside        wants in and may not be chosen now: asked to go, held back, or did not confirm in time
    (none)       said goodbye
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from rallypoint.errors import RendezvousStateError
from rallypoint.kv.types import Change, Item
from rallypoint.rendezvous.holdback import HoldBack
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import (
    ClosedRecord,
    ConfigRecord,
    DrainRecord,
    HealthRecord,
    NodePhase,
    NodeRecord,
    Record,
    RosterMember,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
)
from rallypoint.rendezvous.returning_nodes import ReturningNodes
from rallypoint.rendezvous.rules import Rules

FEW = 5
"""How many names a sentence holds at most."""

R = TypeVar("R", bound=Record)

# Up to Python 3.11, asking an enumeration for one of its members takes as long as all else that a comparison needs.
_MEMBER, _LEFT, _ACTIVE = NodePhase.MEMBER, NodePhase.LEFT, RoundPhase.ACTIVE


class SeenNode(msgspec.Struct, frozen=True, gc=False):
    """A node's key as it was seen. `order` and `joined_at` belong to its current join."""

    record: NodeRecord
    lease: int
    mod_revision: int
    order: int
    joined_at: float


@dataclass(slots=True)
class Plan:
    """The attempt that this coordinator is forming."""

    number: int
    ranks: dict[str, tuple[int, int]]
    """id -> (join, rank), in order of rank"""
    pending: dict[str, None]
    """Who has not confirmed yet."""
    started_at: float
    why: str
    heard_at: float = 0.0  # when the last confirmation came; 0: none has
    broken: str | None = None
    last_confirmed: deque[str] = field(default_factory=lambda: deque(maxlen=FEW))


@dataclass(frozen=True, slots=True)
class Departure:
    """A node that went away, with a word (`left`) or without one (None: nobody knows, it was before our time).

    Ages count from `View.started_at`; None: unknown.
    """

    name: str
    joined_s: float
    gone_s: float | None
    round: int
    """The active round that it was a member of; 0: none."""
    left: bool | None
    why: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A key whose content was skipped."""

    key: str
    why: str


class View:
    """The run at `revision`. See the module for its groups."""

    def __init__(self, keys: RunKeys, now: float) -> None:
        self.keys = keys
        self.revision = 0
        self.started_at = now
        """When this coordinator began to look, or the last round became active."""
        self.unreadable: dict[str, str] = {}
        """Keys of the whole run (config, state/...) that cannot be read, and why."""
        self.config: ConfigRecord | None = None
        self.rules: Rules | None = None
        self.coordinator_revision = 0
        self.round: RoundRecord | None = None
        self.round_revision = 0
        self.closed: ClosedRecord | None = None
        self.closed_revision = 0
        self.told: WaitingRecord | None = None
        self.told_revision = 0
        self.nodes: dict[str, SeenNode] = {}
        self.members: dict[str, SeenNode] = {}
        self.candidates: dict[str, SeenNode] = {}
        self.aside: dict[str, SeenNode] = {}
        self.above: dict[str, None] = {}
        """Members of attempts above `state/round`: memory was lost; nothing may form until they have gone."""
        self.rejoined: dict[str, None] = {}
        """Members of the active round's roster that want in again."""
        self.drains: dict[str, DrainRecord] = {}
        self.hold_back = HoldBack()
        self.left_out: dict[str, int] = {}
        """id -> mod revision of the key that did not confirm in time."""
        self.roster: dict[str, RosterMember] = {}
        self.roster_number = 0
        self.last_ranks: dict[str, tuple[int, str]] = {}
        """name -> (rank, id) in the last active round"""
        self.returning: ReturningNodes | None = None
        """Whoever comes back to a server that has lost its memory."""
        self.plan: Plan | None = None
        self.minimum_since: float | None = None
        self.first_arrival_at: float | None = None
        self.last_arrival_at = now
        self.departures: deque[Departure] = deque(maxlen=FEW)
        self.facts: list[Departure | Unreadable] = []
        """What happened since somebody last took it: for events."""
        self._ids_of: dict[str, dict[str, None]] = {}
        self._seen: dict[str, int] = {}

    # --- changes ------------------------------------------------------------------------------------------------------

    def load(self, items: Iterable[Item], revision: int, now: float) -> None:
        """Make the view equal to a scan of all control keys, as if the changes since then had been seen one by one."""
        present = {item.key: item for item in items}
        for key in [key for key in self._seen if key not in present]:
            self._change(key, None, now)
        for key, item in sorted(present.items(), key=lambda pair: pair[1].mod_revision):
            if self._seen.get(key) != item.mod_revision:
                self._change(key, item, now)
        self.revision = revision

    def apply(self, changes: Sequence[Change], revision: int, now: float) -> None:
        """Take in one batch of a watch on the control keys."""
        for change in changes:
            self._change(change.key, change.item, now)
        self.revision = revision

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
            self.told = self._read(WaitingRecord, key, item)
            self.told_revision = item.mod_revision if item else 0
        elif key == keys.closed:
            self.closed = self._read(ClosedRecord, key, item)
            self.closed_revision = item.mod_revision if item else 0
            if self.plan is not None:  # even if it is open again: an attempt from before a close is over
                self.plan.broken = "the run was closed while it was forming"
        elif key == keys.config:
            self._config(item)
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
            if not key.startswith((self.keys.nodes, self.keys.drains, self.keys.healths)):
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
        before = self.round
        self.round = self._read(RoundRecord, self.keys.round, item)
        self.round_revision = item.mod_revision if item else 0
        if self.plan is not None and (self.round is None or self.round.number != self.plan.number):
            self.plan = None
        known = before.number if before is not None and before.phase is _ACTIVE else 0
        if self.is_active and self.round is not None and self.round.number != known:
            self.started_at = now
            self.departures.clear()
            self.minimum_since = None
            self.plan = None
        self._sort_all()
        self.last_arrival_at = now
        self.first_arrival_at = now if self.is_active and self.candidates else None

    def _drain(self, key: str, item: Item | None, now: float) -> None:
        node_id = key[len(self.keys.drains) :]
        record = self._read(DrainRecord, key, item)
        if record is None:
            self.drains.pop(node_id, None)
        else:
            self.drains[node_id] = record
        self._sort(node_id, now)

    def _health(self, key: str, item: Item | None, now: float) -> None:
        record = self._read(HealthRecord, key, item)
        if record is not None:
            self.hold_back.note_record(record, self.rules.timing if self.rules else None, now)
            self._sort_name(record.name, now)
            return
        for name in [name for name in self.hold_back.records if self.keys.health(name) == key]:
            self.hold_back.note_gone(name)
            self._sort_name(name, now)

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
        self._ids_of.setdefault(record.name, {})[node_id] = None
        if record.phase is _LEFT and (before is None or before.record.phase is not _LEFT):
            self._note_departure(before or seen, record.why or "it said goodbye", left=True, now=now)
        if self.plan is not None:
            self._check_plan(node_id, record.name, seen, now)
        self._sort(node_id, now)

    def _remove(self, node_id: str, before: SeenNode, now: float) -> None:
        del self.nodes[node_id]
        ids = self._ids_of[before.record.name]
        del ids[node_id]
        if not ids:
            del self._ids_of[before.record.name]
        if before.record.phase is not _LEFT:
            planned = self.plan is not None and node_id in self.plan.ranks
            if self.rules is not None and (node_id in self.members or planned):
                self.hold_back.note_loss(before.record.name, self.rules.timing, now)
                self._sort_name(before.record.name, now)
            self._note_departure(before, "its session ended", left=False, now=now)
        self._check_plan(node_id, before.record.name, None, now)
        self.left_out.pop(node_id, None)
        self._sort(node_id, now)
        if not self.nodes:
            self.hold_back.forget_losses()

    def _note_departure(self, node: SeenNode, why: str, *, left: bool, now: float) -> None:
        number = self.round.number if self.round and self.is_active and node.record.id in self.roster else 0
        joined_s = max(0.0, node.joined_at - self.started_at)
        gone = Departure(node.record.name, joined_s, now - self.started_at, number, left, why)
        self.departures.append(gone)
        self.facts.append(gone)

    def _check_plan(self, node_id: str, name: str, seen: SeenNode | None, now: float) -> None:
        """Does a node's new state confirm its place in the plan, or break it?"""
        plan = self.plan
        if plan is None or node_id not in plan.ranks or plan.broken is not None:
            return
        join, rank = plan.ranks[node_id]
        if seen is None:
            plan.broken = f"{name} (rank {rank}) was lost before the round was active"
        elif seen.record.phase is _LEFT:
            plan.broken = f"{name} (rank {rank}) left before the round was active"
        elif seen.record.join != join:
            plan.broken = f"{name} (rank {rank}) joined anew before the round was active"
        elif seen.record.phase is _MEMBER and seen.record.round == plan.number and node_id in plan.pending:
            del plan.pending[node_id]
            plan.heard_at = now
            plan.last_confirmed.append(name)

    def _sort(self, node_id: str, now: float) -> None:
        """Put one node into its group."""
        node = self.nodes.get(node_id)
        groups = (self.members, self.candidates, self.aside)
        if node is None or node.record.phase is _LEFT:
            for group in groups:
                group.pop(node_id, None)
            self.above.pop(node_id, None)
            self.rejoined.pop(node_id, None)
            return
        target, is_active = self._group(node), self.is_active
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
        _set(self.rejoined, node_id, is_active and target is not self.members and node_id in self.roster)

    def _sort_all(self) -> None:
        """Put every node into its group: `_sort` for all, when a round has changed what the groups are."""
        number = self.round.number if self.round else 0
        active = number if self.is_active else None
        is_held, drains, left_out = self.hold_back.is_held, self.drains, self.left_out
        self.members, self.candidates, self.aside = members, candidates, aside = {}, {}, {}
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
            elif node_id in drains or left_out.get(node_id) == node.mod_revision or is_held(record.name):
                aside[node_id] = node
            else:
                candidates[node_id] = node
        self._sort_rejoined()

    def _sort_rejoined(self) -> None:
        self.rejoined = {}
        if self.is_active:
            members, others = self.members, (self.candidates, self.aside)
            for node_id in self.roster:
                if node_id not in members and any(node_id in group for group in others):
                    self.rejoined[node_id] = None

    def _group(self, node: SeenNode) -> dict[str, SeenNode]:
        record, current = node.record, self.round
        is_in = record.phase is _MEMBER and current is not None and record.round == current.number
        if is_in and self.is_active:
            return self.members
        held = self.hold_back.is_held(record.name)
        if record.id in self.drains or held or self.left_out.get(record.id) == node.mod_revision:
            return self.aside
        return self.candidates

    def _sort_name(self, name: str, now: float) -> None:
        for node_id in list(self._ids_of.get(name, ())):
            self._sort(node_id, now)

    # --- what the coordinator tells its view --------------------------------------------------------------------------

    def set_roster(self, number: int, members: Sequence[RosterMember]) -> None:
        """The members of the last active round: for sticky ranks, and to know who is lost."""
        self.roster_number = number
        self.roster = {member.id: member for member in members}
        self.last_ranks = {}
        for rank, member in enumerate(members):
            self.last_ranks.setdefault(member.name, (rank, member.id))
        if self.is_active:
            self._note_absent([member.name for member in members if member.id not in self.nodes], number)
        self._sort_rejoined()

    def succeed(self, name: str) -> None:
        """The coordinator before this one has gone. Its lease took its record along: nothing else is left to tell."""
        self.departures.append(Departure(name, 0.0, None, 0, None, "it was the coordinator before this one"))

    def _note_absent(self, names: Sequence[str], number: int) -> None:
        """Members of the round that had gone before this coordinator looked: it knows who, but not how."""
        gone = [Departure(name, 0.0, None, number, None, "it went before this coordinator took over") for name in names]
        self.departures = deque([*(known for known in self.departures if known.name not in names), *gone], FEW)
        told = self.told.lost if self.told is not None and self.told.number == number else 0
        if len(gone) > told:  # else an earlier coordinator has said it all
            self.facts.extend(gone)

    def start_plan(self, plan: Plan) -> None:
        """This coordinator's attempt was committed."""
        self.plan = plan
        for node_id in plan.ranks:
            seen = self.nodes.get(node_id)
            self._check_plan(node_id, seen.record.name if seen else "a node", seen, plan.started_at)

    def give_up(self, late: Iterable[str], now: float) -> None:
        """The attempt is over; those that did not confirm in time are left out until their keys change."""
        self.plan = None
        for node_id in late:
            node = self.nodes.get(node_id)
            if node is not None:
                self.left_out[node_id] = node.mod_revision
                if self.rules is not None:
                    self.hold_back.note_loss(node.record.name, self.rules.timing, now)
                self._sort_name(node.record.name, now)

    def tick(self, now: float) -> None:
        """Let time pass: holds end, the last call starts or is cancelled."""
        for name in self.hold_back.released(now):
            self._sort_name(name, now)
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
        """`state/round` says active (its members may be gone already)."""
        return self.round is not None and self.round.phase is _ACTIVE

    @property
    def is_gathering(self) -> bool:
        """No round is current and this coordinator forms none: the next may be decided."""
        return self.plan is None and not self.members and not self.above

    @property
    def is_closed(self) -> bool:
        return self.closed is not None and self.closed.closed

    def is_present(self, name: str) -> bool:
        """Some node of this name has a key."""
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
        """A round was active before the server lost its memory, and all of its members that came back are here."""
        returning = self.returning
        if returning is None or returning.round == 0 or self.round is not None:
            return False
        return all(node_id in self.nodes for node_id in returning.members)

    @property
    def lost(self) -> int:
        """Members of the active round that are neither in it nor joining again."""
        if not self.is_active or self.round is None:
            return 0
        return max(0, self.round.size - len(self.members) - len(self.rejoined))

    def next_number(self) -> int:
        """A number that nobody has ever seen."""
        floors = [max(node.record.floor, node.record.round) for node in self.nodes.values()]
        shown = self.returning.floor if self.returning is not None else 0
        return 1 + max(self.round.number if self.round else 0, shown, max(floors, default=0))


def _set(group: dict[str, None], key: str, wanted: bool) -> None:
    if wanted:
        group[key] = None
    else:
        group.pop(key, None)
