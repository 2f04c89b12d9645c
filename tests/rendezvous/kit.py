"""Helpers of the tests of the rendezvous layer: backends that count or intercept requests, and worlds that use them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rallypoint.backends.contract import Backend, BackendStatus, Got, Limits, Scanned, Session, Watch
from rallypoint.backends.session import LeaseSession
from rallypoint.errors import RendezvousStateError
from rallypoint.events import Event
from rallypoint.kv.types import AddResult, Batch, BranchOp, Compare, CreateRevisionIs, Item, Put, TxnResult
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Joined
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.records import (
    ClosedRecord,
    ConfigRecord,
    CoordinatorRecord,
    NodePhase,
    NodeRecord,
    Record,
    RosterMember,
    RoundPhase,
    RoundRecord,
    WaitingRecord,
    decode,
    join_roster,
)
from rallypoint.rendezvous.rules import Rules
from rallypoint.testing import loop as virtual
from rallypoint.testing.world import Process, World

T = TypeVar("T")
R = TypeVar("R", bound=Record)
E = TypeVar("E", bound=Event)


class ForwardingBackend(Backend):
    """Forwards all requests to another backend, including the renewals of sessions."""

    def __init__(self, inner: Backend, limits: Limits | None = None) -> None:
        self.name = inner.name
        self.limits = limits or inner.limits
        self.has_coordinator = inner.has_coordinator
        self.inner = inner

    async def get(self, key: str) -> Got:
        return await self.call("get", lambda: self.inner.get(key))

    async def scan(self, prefix: str) -> Scanned:
        return await self.call("scan", lambda: self.inner.scan(prefix))

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        return await self.call("txn", lambda: self.inner.txn(compares, then, otherwise))

    async def add(self, key: str, amount: int, *, compares: Sequence[Compare] = (), lease: int = 0) -> AddResult:
        return await self.call("add", lambda: self.inner.add(key, amount, compares=compares, lease=lease))

    def watch(self, prefix: str, after_revision: int) -> Watch:
        return self.inner.watch(prefix, after_revision)

    async def grant(self, ttl_s: float) -> int:
        return await self.call("grant", lambda: self.inner.grant(ttl_s))

    async def keep_alive(self, lease: int) -> bool:
        return await self.call("keep_alive", lambda: self.inner.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self.call("revoke", lambda: self.inner.revoke(lease))

    async def open_session(
        self,
        ttl_s: float,
        *,
        interval_s: float | None = None,
        renew_timeout_s: float | None = None,
        on_missed: Callable[[str], None] | None = None,
    ) -> Session:
        return await LeaseSession.open(
            self, ttl_s, interval_s=interval_s, renew_timeout_s=renew_timeout_s, on_missed=on_missed
        )

    async def status(self) -> BackendStatus:
        return await self.inner.status()

    async def close(self) -> None:
        await self.inner.close()

    async def call(self, name: str, execute: Callable[[], Awaitable[T]]) -> T:
        """Execute one request; subclasses override it."""
        return await execute()


class CountingBackend(ForwardingBackend):
    """Counts requests by kind, delivered batches as `batch`, and notes the largest delivered value of each key."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self.pushed: dict[str, int] = {}
        """key -> size of the largest value that a watch delivered."""

    async def call(self, name: str, execute: Callable[[], Awaitable[T]]) -> T:
        self.counts[name] += 1
        return await execute()

    def watch(self, prefix: str, after_revision: int) -> Watch:
        self.counts["watch"] += 1
        return CountingWatch(self, self.inner.watch(prefix, after_revision))


class CountingWatch(Watch):
    def __init__(self, owner: CountingBackend, inner: Watch) -> None:
        self._owner = owner
        self._inner = inner

    async def __anext__(self) -> Batch:
        return self._note(await anext(self._inner))

    def ready(self) -> Batch | None:
        batch = self._inner.ready()
        return None if batch is None else self._note(batch)

    def cancel(self) -> None:
        self._inner.cancel()

    def _note(self, batch: Batch) -> Batch:
        self._owner.counts["batch"] += 1
        for change in batch.changes:
            if change.item is not None:
                pushed = self._owner.pushed
                pushed[change.key] = max(pushed.get(change.key, 0), len(change.item.value))
        return batch


def is_by_coordinator(compares: Sequence[Compare]) -> bool:
    """Whether a coordinator sends the transaction: only coordinators compare the create revision of their key."""
    return any(isinstance(compare, CreateRevisionIs) for compare in compares)


def kinds(then: Sequence[BranchOp]) -> set[str]:
    """The kinds of writes in a transaction: join, confirm, left, form, active, roster, assign, status, config, ..."""
    return {_kind(op) for op in then if isinstance(op, Put)}


def _kind(op: Put) -> str:
    last_two = "/".join(op.key.split("/")[-2:])
    if "/nodes/" in op.key:
        return {b'"joining"': "join", b'"member"': "confirm"}.get(_field(op.value, b"phase"), "left")
    if last_two == "state/round":
        return "active" if _field(op.value, b"phase") == b'"active"' else "form"
    if last_two == "state/waiting":
        return "status"
    for part in ("roster", "assign", "history", "health", "drain", "events"):
        if f"/{part}/" in op.key:
            return part
    return op.key.rsplit("/", 1)[-1]


def _field(value: bytes, name: bytes) -> bytes:
    return value.partition(b'"' + name + b'":')[2].partition(b",")[0].rstrip(b"}")


TxnHook = Callable[[set[str], bool, Callable[[], Awaitable[TxnResult]]], Awaitable[TxnResult]]


class InterceptingBackend(ForwardingBackend):
    """Passes each transaction to a hook: the kinds of its writes, whether a coordinator sends it, and its execution."""

    def __init__(self, inner: Backend, hook: TxnHook | None = None, limits: Limits | None = None) -> None:
        super().__init__(inner, limits)
        self.hook = hook

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        if self.limits.max_txn_ops < max(len(compares), len(then)):
            raise AssertionError(f"{len(compares)} compares and {len(then)} operations in one transaction")
        if self.hook is None:
            return await self.inner.txn(compares, then, otherwise)
        return await self.hook(
            kinds(then), is_by_coordinator(compares), lambda: self.inner.txn(compares, then, otherwise)
        )


# --- worlds ---------------------------------------------------------------------------------------------------------


class CheckedWorld(World):
    """A world that keeps all of its processes, and checks the guarantees on its whole history."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.all: list[Process] = []
        self.keys = RunKeys("rallypoint", options.get("run_id", "run"))

    def random_event(self, rng: random.Random, names: Sequence[str]) -> None:
        """A random event for one of these nodes: it starts, dies, leaves, or joins again."""
        name = rng.choice(names)
        process = self.processes.get(name)
        if process is None:
            self.enter(name)
        elif rng.random() < 0.3:
            self.crash(name)
        elif rng.random() < 0.2:
            self.call(name, process.node.leave("done"))
        elif process.call is not None and process.call.done() and process.call.exception() is None:
            self.join(name)

    def start(self, name: str, **options: object) -> Process:
        process = super().start(name, **options)
        self.all.append(process)
        return process

    def enter(self, *names: str, **options: object) -> list[asyncio.Task[Joined]]:
        """Start a process for each name that has none, and let all of them join. Returns their calls."""
        for name in names:
            if name not in self.processes:
                self.start(name, **options)
        return [self.join(name) for name in names]

    async def join_all(self, *names: str, **options: object) -> dict[str, Joined]:
        """`enter`, and wait until all calls have returned."""
        joined = await asyncio.gather(*self.enter(*names, **options))
        return dict(zip(names, joined, strict=True))

    def node(self, name: str) -> Node:
        return self.processes[name].node

    def record(self, kind: type[R], key: str) -> R | None:
        """The current record of a key; None if it is absent."""
        item = self.server.engine.items.get(key)
        return None if item is None else decode(kind, item)

    @property
    def round(self) -> RoundRecord | None:
        return self.record(RoundRecord, self.keys.round)

    @property
    def status(self) -> WaitingRecord | None:
        return self.record(WaitingRecord, self.keys.waiting)

    def present(self) -> dict[str, NodeRecord]:
        """The records of the nodes that have a key, by name."""
        items = [item for key, item in self.server.engine.items.items() if key.startswith(self.keys.nodes)]
        return {record.name: record for record in (decode(NodeRecord, item) for item in items)}

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind so far."""
        return [event for _, event in self.events if isinstance(event, kind)]

    def coordinator(self) -> str:
        """The name of the current coordinator; empty if there is none."""
        record = self.record(CoordinatorRecord, self.keys.coordinator)
        return record.name if record else ""

    def check(self) -> None:
        """Check the guarantees on the whole history of this world. AssertionError with the name of a broken one."""
        checker = HistoryChecker(self.keys)
        for batch in self.server.engine.history.batches:
            checker.apply(batch)
        for process in self.all:
            numbers = [joined.number for joined in process.rounds]
            if len(checker.lives) == 1:
                assert numbers == sorted(set(numbers)), f"Monotonicity: {process.name} saw {numbers}"
            for joined in process.rounds:
                rosters = [active[joined.number] for active in checker.lives if joined.number in active]
                own = process.node.identity.id
                agreed = [len(r) == joined.size and r[joined.rank].id == own for r in rosters]
                assert any(agreed), f"Agreement: {process.name} is not rank {joined.rank} of round {joined.number}"


class HistoryChecker:
    """Replays all changes of a run and checks the guarantees at each revision."""

    def __init__(self, keys: RunKeys) -> None:
        self.lives: list[dict[int, tuple[RosterMember, ...]]] = [{}]
        """For each incarnation: number -> members, for every round that became active."""
        self._keys = keys
        self._items: dict[str, Item] = {}
        self._numbers: list[int] = []

    def apply(self, batch: Batch) -> None:
        touched = {change.key for change in batch.changes}
        before = self._items.get(self._keys.round)
        for change in batch.changes:
            if change.item is None:
                self._items.pop(change.key, None)
            else:
                self._items[change.key] = change.item
        now = self._items.get(self._keys.round)
        if self._keys.config in touched and not {self._keys.config, self._keys.round} & self._items.keys():
            self._numbers.clear()  # the incarnation is over, its lease has ended: the next one starts its numbers again
            self.lives.append({})
        if self._keys.round in touched and now is not None and now.value != getattr(before, "value", None):
            with suppress(RendezvousStateError):
                self._round(decode(RoundRecord, now), decode(RoundRecord, before) if before else None)

    def _round(self, record: RoundRecord, before: RoundRecord | None) -> None:
        closed = self._items.get(self._keys.closed)
        assert closed is None or not decode(ClosedRecord, closed).closed, "Finality: a round was decided after close"
        nodes = {record.id: record for record in self._nodes()}
        current = before.number if before is not None and before.phase is RoundPhase.ACTIVE else None
        left = [node.name for node in nodes.values() if node.phase is NodePhase.MEMBER and node.round == current]
        assert not left, f"Exclusivity: round {record.number} was decided while {left} were in round {current}"
        if record.phase is RoundPhase.FORMING:
            assert record.number not in self._numbers, f"number {record.number} was used twice"
            assert record.number > max(self._numbers, default=0), "Monotonicity: numbers went back"
            self._numbers.append(record.number)
            return
        assert before is not None
        assert (before.number, before.phase) == (record.number, RoundPhase.FORMING)
        assert before.term == record.term, "a coordinator continued an attempt of another term"
        roster = join_roster(
            record, [i for k, i in self._items.items() if k.startswith(self._keys.roster(record.number))]
        )
        rules = Rules.of(decode(ConfigRecord, self._items[self._keys.config]))
        assert rules.min_nodes <= record.size <= rules.max_nodes, f"Barrier: {record.size} members"
        assert record.size % rules.step == 0, f"Barrier: {record.size} is no multiple of {rules.step}"
        assert len({member.id for member in roster}) == record.size, "Ranks: a member twice"
        for member in roster:
            node = nodes.get(member.id)
            assert node is not None, f"Freshness: {member.name} of round {record.number} was gone"
            confirmed = (node.phase, node.round, node.join) == (NodePhase.MEMBER, record.number, member.join)
            assert confirmed, f"Barrier: {member.name} had not confirmed round {record.number}"
        self.lives[-1][record.number] = roster

    def _nodes(self) -> list[NodeRecord]:
        found = []
        for key, item in self._items.items():
            if key.startswith(self._keys.nodes):
                with suppress(RendezvousStateError):
                    found.append(decode(NodeRecord, item))
        return found


def now() -> float:
    return asyncio.get_running_loop().time()


async def wait_until(condition: Callable[[], bool], limit_s: float) -> float:
    """Wait until the condition holds; returns how long it took. AssertionError after the limit."""
    started_at = now()
    while not condition():
        assert now() < started_at + limit_s, f"not within {limit_s} s"
        await asyncio.sleep(0.05)
    return now() - started_at


def run_scenario(
    scenario: Callable[[CheckedWorld], Awaitable[T]],
    *,
    seed: int | None = None,
    limit_s: float = 100_000.0,
    max_iterations: int = virtual.MAX_ITERATIONS,
    **options: Any,
) -> T:
    """Run a scenario in a new world under virtual time, then check its whole history and that no task failed."""
    failures: list[str] = []

    async def main() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context)))
        world = CheckedWorld(seed=seed or 0, **options)
        result = await scenario(world)
        world.check()
        await world.stop()
        world.check()
        return result

    result = virtual.run(main(), seed=seed, limit_s=limit_s, max_iterations=max_iterations)
    assert not failures, failures
    return result
