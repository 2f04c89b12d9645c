"""The records and writes of an attempt: when it is formed, and when it becomes active. Pure.

The order of the writes is rule 10: the roster first, then `state/round`, then what depends on it. The roster is fixed
when the attempt is decided and never edited (Agreement).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rallypoint.kv.types import Compare, DeleteRange, Put
from rallypoint.rendezvous.decide import Form, active_sentence, forming_sentence
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import (
    AssignRecord,
    HistoryRecord,
    NodeRecord,
    RosterMember,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    encode,
    roster_digest,
    split_roster,
)
from rallypoint.rendezvous.view import Plan, View


@dataclass(slots=True)
class Writes:
    """Writes in the order in which they must be committed. `ops[marker]` is the write of `state/round`."""

    ops: list[Put | DeleteRange] = field(default_factory=list)
    marker: int = 0
    compares: list[Compare] = field(default_factory=list)
    """Further compares of the transaction that holds `ops[marker]`."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A decided attempt: its members in rank order, their encoded roster, and the record of its forming."""

    members: tuple[RosterMember, ...]
    chunks: tuple[bytes, ...]
    record: RoundRecord
    """`state/round` while the attempt is forming."""

    def plan(self, now: float) -> Plan:
        """The coordinator's plan, with all confirmations pending."""
        return Plan(
            number=self.record.number,
            ranks={member.id: (member.join, rank) for rank, member in enumerate(self.members)},
            pending=dict.fromkeys([member.id for member in self.members]),
            started_at=now,
            why=self.record.why,
        )


def new_attempt(view: View, decision: Form, term: int) -> Attempt:
    """The attempt of a decision, before anything is written."""
    assert view.config is not None
    nodes, last = view.nodes, view.round
    members = tuple([RosterMember(c.id, nodes[c.id].record.join, c.name, c.addr) for c in decision.ranked])
    chunks = tuple(split_roster(decision.number, members))
    record = RoundRecord(
        number=decision.number,
        phase=RoundPhase.FORMING,
        incarnation=view.config.incarnation,
        size=len(members),
        term=term,
        chunks=len(chunks),
        digest=roster_digest(chunks),
        last_active=last.last_active if last and view.ever_active else 0,
        kept_from=last.kept_from if last else decision.number,
        why=decision.why,
    )
    return Attempt(members, chunks, record)


def forming_status(record: RoundRecord, view: View) -> WaitingRecord:
    """`state/waiting` while the attempt is forming."""
    reason = forming_sentence(record.number, record.size, record.why)
    return WaitingRecord(number=record.number, reason=reason, end=view.last_end, members=record.size)


def active_record(forming: RoundRecord, rank_0: NodeRecord, why: str) -> RoundRecord:
    """`state/round` when all members have confirmed; `rank_0` is the confirmation of rank 0."""
    return msgspec.structs.replace(
        forming,
        phase=RoundPhase.ACTIVE,
        addr=rank_0.addr0,
        port=rank_0.port0,
        last_active=forming.number,
        kept_from=forming.last_active or forming.kept_from,
        why=why,
    )


def active_status(view: View, forming: RoundRecord) -> WaitingRecord:
    """`state/waiting` at the moment the round becomes active."""
    assert view.rules is not None
    others = len(view.candidates) - forming.size
    open_places = view.rules.max_nodes - forming.size
    return WaitingRecord(
        number=forming.number,
        spare=max(0, others - open_places),
        open_places=open_places,
        reason=active_sentence(forming.number, forming.size, forming.size),
        members=forming.size,
        candidates=others,
    )


@dataclass(frozen=True, slots=True)
class Leases:
    """The leases of a run's keys: `run` for the control keys, `data` for rosters and history."""

    run: int
    data: int


def forming_writes(keys: RunKeys, attempt: Attempt, status: WaitingRecord, view: View, leases: Leases) -> Writes:
    """The roster, then `state/round` and `state/waiting`, then the assignments (rule 10)."""
    writes = Writes(_roster(keys, attempt, leases))
    writes.marker = len(writes.ops)
    writes.ops += [Put(keys.round, encode(attempt.record), leases.run), Put(keys.waiting, encode(status), leases.run)]
    writes.ops += _assignments(keys, attempt, view)
    return writes


def activation_writes(
    keys: RunKeys, record: RoundRecord, status: WaitingRecord, report: HistoryRecord, leases: Leases
) -> Writes:
    """The writes when all members have confirmed."""
    old_store = DeleteRange(keys.store(record.number))  # an earlier life of the run may have used the same number
    return Writes([old_store, *_active(keys, record, status, report, leases)], marker=1)


def _roster(keys: RunKeys, attempt: Attempt, leases: Leases) -> list[Put | DeleteRange]:
    number = attempt.record.number
    return [Put(keys.roster_chunk(number, index), chunk, leases.data) for index, chunk in enumerate(attempt.chunks)]


def _assignments(keys: RunKeys, attempt: Attempt, view: View) -> list[Put]:
    """One per member, under the member's session: each names the join that it answers (rule 2)."""
    number, nodes = attempt.record.number, view.nodes
    return [
        Put(keys.assign(m.id), encode(AssignRecord(number=number, rank=rank, join=m.join)), nodes[m.id].lease)
        for rank, m in enumerate(attempt.members)
    ]


def _active(
    keys: RunKeys, record: RoundRecord, status: WaitingRecord, report: HistoryRecord, leases: Leases
) -> list[Put]:
    return [
        Put(keys.round, encode(record), leases.run),
        Put(keys.waiting, encode(status), leases.run),
        Put(keys.history(record.number), encode(report), leases.data),
    ]
