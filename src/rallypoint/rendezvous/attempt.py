"""What a coordinator writes of an attempt: when it forms one, and when that becomes active. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rallypoint.kv.types import DeleteRange, Put
from rallypoint.rendezvous.decide import Form, active_sentence, forming_sentence
from rallypoint.rendezvous.fenced_writer import Writes
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


@dataclass(frozen=True, slots=True)
class Attempt:
    """One that was decided: its members in order of rank, and their roster as it is written."""

    members: tuple[RosterMember, ...]
    chunks: tuple[bytes, ...]
    record: RoundRecord
    """As it forms."""

    def plan(self, now: float) -> Plan:
        """Of which nobody has confirmed yet."""
        return Plan(
            number=self.record.number,
            ranks={member.id: (member.join, rank) for rank, member in enumerate(self.members)},
            pending=dict.fromkeys([member.id for member in self.members]),
            started_at=now,
            why=self.record.why,
        )


def attempt(view: View, decision: Form, term: int) -> Attempt:
    """What is decided, as it stands before anybody knows."""
    assert view.config is not None
    nodes, before = view.nodes, view.round
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
        last_active=before.last_active if before and view.ever_active else 0,
        kept_from=before.kept_from if before else decision.number,
        why=decision.why,
    )
    return Attempt(members, chunks, record)


def forming_words(record: RoundRecord) -> WaitingRecord:
    """`state/waiting` while it forms."""
    return WaitingRecord(number=record.number, reason=forming_sentence(record.number, record.size, record.why))


def active(forming: RoundRecord, first: NodeRecord, why: str) -> RoundRecord:
    """`state/round` when all have confirmed; `first` is how rank 0 has."""
    return msgspec.structs.replace(
        forming,
        phase=RoundPhase.ACTIVE,
        addr=first.addr0,
        port=first.port0,
        last_active=forming.number,
        kept_from=forming.last_active or forming.kept_from,
        why=why,
    )


def active_words(view: View, forming: RoundRecord) -> WaitingRecord:
    """`state/waiting` then."""
    assert view.rules is not None
    others = len(view.candidates) - forming.size
    open_places = view.rules.max_nodes - forming.size
    return WaitingRecord(
        number=forming.number,
        spare=max(0, others - open_places),
        open_places=open_places,
        reason=active_sentence(forming.number, forming.size, forming.size),
    )


@dataclass(frozen=True, slots=True)
class Leases:
    """What the keys of a run hang on."""

    run: int
    data: int


def forms(keys: RunKeys, new: Attempt, words: WaitingRecord, view: View, leases: Leases) -> Writes:
    """The roster, then `state/round`, then the assignments."""
    writes = Writes(_roster(keys, new, leases))
    writes.marker = len(writes.ops)
    writes.ops += [Put(keys.round, encode(new.record), leases.run), Put(keys.waiting, encode(words), leases.run)]
    writes.ops += _assignments(keys, new, view)
    return writes


def becomes_active(
    keys: RunKeys, record: RoundRecord, words: WaitingRecord, report: HistoryRecord, leases: Leases
) -> Writes:
    """What is written when all have confirmed."""
    store = DeleteRange(keys.store(record.number))  # of an earlier life that had the number, too
    return Writes([store, *_active(keys, record, words, report, leases)], marker=1)


def _roster(keys: RunKeys, new: Attempt, leases: Leases) -> list[Put | DeleteRange]:
    number = new.record.number
    return [Put(keys.roster_chunk(number, index), chunk, leases.data) for index, chunk in enumerate(new.chunks)]


def _assignments(keys: RunKeys, new: Attempt, view: View) -> list[Put]:
    number, nodes = new.record.number, view.nodes
    return [
        Put(keys.assign(one.id), encode(AssignRecord(number=number, rank=rank, join=one.join)), nodes[one.id].lease)
        for rank, one in enumerate(new.members)
    ]


def _active(
    keys: RunKeys, record: RoundRecord, words: WaitingRecord, report: HistoryRecord, leases: Leases
) -> list[Put]:
    return [
        Put(keys.round, encode(record), leases.run),
        Put(keys.waiting, encode(words), leases.run),
        Put(keys.history(record.number), encode(report), leases.data),
    ]
