"""The control keys of a run in a real engine, written by hand, and a view of them: for tests of `View` and `decide`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Batch, BranchOp, Delete, Item, Put, Txn, TxnResult
from rallypoint.rendezvous.decide import Decision, Wait, decide, summarise
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
    encode,
)
from rallypoint.rendezvous.view import Plan, View
from rallypoint.settings import Settings

KEYS = RunKeys("rallypoint", "run")


def config(incarnation: str = "first", **options: object) -> ConfigRecord:
    """The config that the first node writes, with these options."""
    given: dict[str, Any] = {"min_nodes": 2, "max_nodes": 4, **options}
    settings = Settings.build(scheme="memory", run_id="run", **given)
    return ConfigRecord(
        incarnation=incarnation, shared=settings.shared(), timing=settings.timing(), run_lease=1, data_lease=2
    )


def node(
    name: str, *, join: int = 1, phase: NodePhase = NodePhase.JOINING, round: int = 0, **fields: Any
) -> NodeRecord:
    """A node's record; the id is the name unless another is given."""
    fields = {"id": name, "addr": name, "session": 0, "floor": round, **fields}
    return NodeRecord(name=name, join=join, phase=phase, round=round, **fields)


def round_record(number: int, phase: RoundPhase = RoundPhase.ACTIVE, size: int = 2, **fields: Any) -> RoundRecord:
    fields = {"incarnation": "first", "last_active": number if phase is RoundPhase.ACTIVE else 0, **fields}
    return RoundRecord(number=number, phase=phase, size=size, term=1, **fields)


class FakeRun:
    """The keys, a view that receives every change, and a clock that is set by hand."""

    def __init__(self, **options: object) -> None:
        self.engine = Engine()
        self.now = 100.0
        self.view = View(KEYS, self.now)
        self.write(Put(KEYS.config, encode(config(**options))))

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, *ops: BranchOp) -> Batch | None:
        """Commit one transaction and apply it to the view."""
        before = self.engine.revision
        result = self.engine.apply(Txn((), ops), 0.0).result
        assert isinstance(result, TxnResult), result
        if self.engine.revision == before:
            return None
        batch = self.engine.history.batches[-1]
        self.view.apply(batch.changes, batch.revision, self.now)
        return batch

    def put(self, key: str, record: Record) -> None:
        self.write(Put(key, encode(record)))

    def join(self, *names: str, join: int = 1, **fields: Any) -> None:
        for name in names:
            self.put(KEYS.node(name), node(name, join=join, **fields))

    def confirm(self, number: int, *names: str, join: int = 1, **fields: Any) -> None:
        for name in names:
            self.put(KEYS.node(name), node(name, join=join, phase=NodePhase.MEMBER, round=number, **fields))

    def leave(self, *names: str, why: str = "") -> None:
        for name in names:
            before = self.view.nodes[name].record
            self.put(KEYS.node(name), msgspec.structs.replace(before, phase=NodePhase.LEFT, why=why))

    def lose(self, *names: str) -> None:
        for name in names:
            self.write(Delete(KEYS.node(name)))

    def close(self, closed: bool = True, **fields: Any) -> None:
        self.put(KEYS.closed, ClosedRecord(closed=closed, **fields))

    def drain(self, name: str) -> None:
        self.put(KEYS.drain(name), DrainRecord(by="ops", why="repair"))

    def hold(self, name: str, hold_s: float = 30.0) -> None:
        self.put(KEYS.health(name), HealthRecord(name=name, losses=3, hold_s=hold_s, why="it was lost 3 times"))

    def activate(self, number: int, *names: str, join: int = 1) -> None:
        """A round with these members: forming, confirmed and active."""
        for phase in RoundPhase:
            self.put(KEYS.round, round_record(number, phase, len(names)))
            self.confirm(number, *names, join=join)
        members = [RosterMember(name, join, name, name) for name in names]
        self.view.set_roster(number, members)

    def plan(self, number: int, *names: str, join: int = 1, why: str = "all nodes have joined") -> Plan:
        """An attempt of the coordinator that has this view."""
        self.put(KEYS.round, round_record(number, RoundPhase.FORMING, len(names), last_active=self.last_active))
        plan = Plan(
            number=number,
            ranks={name: (join, rank) for rank, name in enumerate(names)},
            pending=dict.fromkeys(names),
            started_at=self.now,
            why=why,
        )
        self.view.start_plan(plan)
        return plan

    # --- asking -------------------------------------------------------------------------------------------------------

    @property
    def last_active(self) -> int:
        return self.view.round.last_active if self.view.round else 0

    def decide(self, after_s: float = 0.0) -> Decision:
        """The decision now, or some time later."""
        self.now += after_s
        self.view.tick(self.now)
        return decide(self.view, self.now)

    def why(self, after_s: float = 0.0) -> str:
        """The reason of the decision, which must be to wait."""
        decision = self.decide(after_s)
        assert isinstance(decision, Wait), decision
        return decision.why

    def write_status(self, after_s: float = 0.0) -> WaitingRecord:
        """Write `state/waiting` as it should be now, and apply it to the view."""
        record = summarise(self.view, self.decide(after_s), self.now)
        self.put(KEYS.waiting, record)
        return record

    def scan(self) -> list[Item]:
        return [item for key, item in sorted(self.engine.items.items()) if key.startswith(KEYS.control)]


def steps(work: Callable[[], object]) -> int:
    """The number of bytecodes that a call executes: a measure of its cost without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
