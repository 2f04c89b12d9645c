"""A random history, run on a backend and on the pure engine as its model: answers and watch events must be equal.

The operations are drawn from a seed and depend only on the model, so the same seed gives the same history on every
backend. Revisions are compared relative to the start of the history, leases by the order in which they were granted.
Time passes only in steps in which one particular lease expires; all others live longer than the history.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rallypoint.backends.contract import Backend
from rallypoint.errors import BackendError, LeaseGone, Rejected
from rallypoint.kv.engine import Engine
from rallypoint.kv.types import (
    Add,
    AddResult,
    Batch,
    BranchOp,
    BranchResult,
    Change,
    Compare,
    CreateRevisionIs,
    Delete,
    DeleteRange,
    Exists,
    Failure,
    FailureCode,
    Get,
    GotItem,
    GotRange,
    Grant,
    Item,
    KeepAlive,
    LeaseResult,
    ModRevisionIs,
    Op,
    Put,
    Range,
    RangeEmpty,
    Result,
    Revoke,
    Shorten,
    Tick,
    Ticked,
    Txn,
    TxnResult,
    ValueIs,
    VersionIs,
    WatchEvent,
)
from rallypoint.testing.conformance.backend_watch import take
from rallypoint.testing.conformance.kit import BackendKit, Check, NotConforming, expect_same

STEPS = 300
EXPIRIES = 2
LONG_TTLS = 1_000_000
NAMES = ("a", "b", "c", "d/1", "d/2", "d/3", "n")
PREFIXES = ("", "d/", "d/2", "n", "nothing/")


async def check_random_history(kit: BackendKit) -> None:
    """A random history gives the same answers and changes as the model."""
    rng = random.Random(f"history {kit.seed}")
    async with kit.two_connections() as (one, other):
        history = await History.begin(kit, one, rng)
        short_steps = set(rng.sample(range(STEPS), EXPIRIES))
        for step in range(STEPS):
            backend = rng.choice((one, other))
            if step in short_steps:
                await history.let_a_lease_expire(backend)
            else:
                await history.step(step, backend)
        await history.compare_watch(other)


@dataclass
class History:
    """A model, and the mapping of revisions and leases to the backend."""

    kit: BackendKit
    rng: random.Random
    start: int
    """The revision of the backend that is revision 1 of the model."""
    model: Engine = field(default_factory=Engine)
    now: float = 0.0
    theirs: dict[int, int] = field(default_factory=dict)
    """Model's lease -> backend's lease."""
    ours: dict[int, int] = field(default_factory=dict)
    """Backend's lease -> model's lease."""
    events: list[WatchEvent] = field(default_factory=list)

    @classmethod
    async def begin(cls, kit: BackendKit, backend: Backend, rng: random.Random) -> History:
        history = cls(kit, rng, (await backend.scan(kit.prefix)).revision)
        history.model.watch(1, kit.prefix, 1)
        return history

    async def step(self, step: int, backend: Backend) -> None:
        """Execute one random operation on both sides and compare the answers."""
        op = self._draw()
        wanted = self._apply(op)
        promise = f"step {step} of the history of seed {self.kit.seed}, {op}, is answered as by the model"
        try:
            seen = await self._execute(op, backend, wanted)
        except BackendError as error:
            seen = error
        if isinstance(wanted, Failure):
            error_type = LeaseGone if wanted.code is FailureCode.LEASE_GONE else Rejected
            if not isinstance(seen, error_type):
                raise NotConforming(promise, f"{seen!r} instead of {error_type.__name__}")
        elif isinstance(seen, BackendError):
            raise NotConforming(promise, f"{seen!r} instead of {wanted}") from seen
        else:
            expect_same(promise, seen, wanted)

    async def let_a_lease_expire(self, backend: Backend) -> None:
        """Grant a short lease with some keys, and wait until it has expired."""
        granted = self._apply(Grant(self.kit.ttl_s))
        assert isinstance(granted, LeaseResult)
        self._know(granted.lease, await backend.grant(self.kit.ttl_s))
        branch = tuple(Put(self.kit.key(name), b"7", granted.lease) for name in self._names(3))
        wanted = self._apply(Txn((), branch))
        seen = await self._execute(Txn((), branch), backend, wanted)
        expect_same("writing under a lease is answered as by the model", seen, wanted)
        await self.kit.until_expired()
        self.now += self.kit.ttl_s
        self._apply(Tick())

    async def compare_watch(self, backend: Backend) -> None:
        """Compare the changes of the whole history with those of one watch."""
        wanted = [_sorted(event.batch) for event in self.events]
        watch = backend.watch(self.kit.prefix, self.start)
        batches = await take(self.kit, watch, len(wanted))
        watch.cancel()
        for batch, one in zip(batches, wanted, strict=True):
            changes = tuple(Change(c.key, None if c.item is None else self._item(c.item)) for c in batch.changes)
            seen = _sorted(Batch(self._revision(batch.revision), changes))
            expect_same(f"a watch gives the changes of the history of seed {self.kit.seed}", seen, one)

    # --- the model ----------------------------------------------------------------------------------------------------

    def _apply(self, op: Op) -> Result:
        outcome = self.model.apply(op, self.now)
        self.events += outcome.events
        return outcome.result

    def _draw(self) -> Op:
        rng = self.rng
        kind = rng.random()
        if kind < 0.70:
            compares = tuple(self._compare() for _ in range(rng.choice((0, 0, 1, 1, 2))))
            return Txn(compares, self._branch(), self._branch() if rng.random() < 0.3 else ())
        if kind < 0.82:
            compares = tuple(self._compare() for _ in range(rng.choice((0, 0, 1))))
            return Add(self.kit.key(rng.choice(NAMES)), rng.randint(-9, 9), self._lease(), compares)
        if kind < 0.90:
            return Grant(LONG_TTLS)
        return KeepAlive(self._some_lease()) if kind < 0.95 else Revoke(self._some_lease())

    def _branch(self) -> tuple[BranchOp, ...]:
        """Some operations that write different keys."""
        rng = self.rng
        branch: list[BranchOp] = []
        for name in self._names(3):
            key = self.kit.key(name)
            value = b"%d" % rng.randint(0, 99) if rng.random() < 0.8 else b"text"
            branch.append(rng.choice((Put(key, value, self._lease()), Put(key, value), Delete(key), Get(key))))
        if rng.random() < 0.15 and not any(isinstance(op, Put | Delete) for op in branch):
            branch.append(DeleteRange(self.kit.key(rng.choice(PREFIXES))))
        if rng.random() < 0.4:
            limit, count_only = rng.choice(((0, False), (1, False), (2, False), (0, True)))
            branch.append(Range(self.kit.key(rng.choice(PREFIXES)), limit, count_only))
        rng.shuffle(branch)
        return tuple(branch)

    def _compare(self) -> Compare:
        rng = self.rng
        key = self.kit.key(rng.choice(NAMES))
        item = self.model.items.get(key) or Item(key, b"7", 0, 0, 0)
        wrong = int(rng.random() < 0.3)
        # A wrong revision is one of the past: future revisions are not known on either side.
        past = self.rng.randint(1, self.model.revision)
        return rng.choice(
            (
                Exists(key, rng.random() < 0.5),
                ValueIs(key, b"7" if wrong else item.value),
                VersionIs(key, item.version + wrong),
                CreateRevisionIs(key, past if wrong else item.create_revision),
                ModRevisionIs(key, past if wrong else item.mod_revision),
                RangeEmpty(self.kit.key(rng.choice(PREFIXES))),
            )
        )

    def _names(self, most: int) -> list[str]:
        return self.rng.sample(NAMES, self.rng.randint(1, most))

    def _lease(self) -> int:
        return self._some_lease() if self.theirs and self.rng.random() < 0.5 else 0

    def _some_lease(self) -> int:
        """Usually a living lease; 0 if there never was one."""
        alive = [lease.id for lease in self.model.leases]
        return self.rng.choice(alive if alive and self.rng.random() < 0.9 else list(self.theirs) or [0])

    # --- conversion to the model's revisions and leases ---------------------------------------------------------------

    async def _execute(self, op: Op, backend: Backend, wanted: Result) -> Result | BackendError:
        match op:
            case Txn():
                compares = [self._their_compare(compare) for compare in op.compares]
                branches = ([self._their_step(step) for step in branch] for branch in (op.then, op.otherwise))
                result = await backend.txn(compares, *branches)
                answers = tuple(self._answer(answer) for answer in result.results)
                return TxnResult(result.committed, self._revision(result.revision), answers)
            case Add():
                compares = [self._their_compare(compare) for compare in op.compares]
                lease = self.theirs.get(op.lease, 0)
                added = await backend.add(op.key, op.amount, compares=compares, lease=lease)
                return AddResult(added.committed, self._revision(added.revision), added.value)
            case Grant():
                assert isinstance(wanted, LeaseResult)
                self._know(wanted.lease, await backend.grant(op.ttl_s))
                return wanted
            case KeepAlive():
                alive = await backend.keep_alive(self.theirs.get(op.lease, 0))
                return LeaseResult(op.lease, float(LONG_TTLS) if alive else 0.0, alive)
            case Revoke():
                await backend.revoke(self.theirs.get(op.lease, 0))
                return LeaseResult(op.lease, 0.0, False)
            case Tick() | Shorten():  # not part of the contract
                return Ticked(0)

    def _know(self, ours: int, theirs: int) -> None:
        self.theirs[ours] = theirs
        self.ours[theirs] = ours

    def _their_compare(self, compare: Compare) -> Compare:
        match compare:
            case ModRevisionIs(key, revision):
                return ModRevisionIs(key, self._their_revision(revision))
            case CreateRevisionIs(key, revision):
                return CreateRevisionIs(key, self._their_revision(revision))
        return compare

    def _their_step(self, step: BranchOp) -> BranchOp:
        return Put(step.key, step.value, self.theirs.get(step.lease, 0)) if isinstance(step, Put) else step

    def _their_revision(self, revision: int) -> int:
        return revision + self.start - 1 if revision else 0

    def _revision(self, revision: int) -> int:
        return revision - self.start + 1

    def _item(self, item: Item) -> Item:
        created, modified = self._revision(item.create_revision), self._revision(item.mod_revision)
        lease = self.ours.get(item.lease, -1) if item.lease else 0
        return Item(item.key, item.value, created, modified, item.version, lease)

    def _answer(self, answer: BranchResult) -> BranchResult:
        match answer:
            case GotItem(item):
                return GotItem(None if item is None else self._item(item))
            case GotRange(items, count):
                return GotRange(tuple(self._item(item) for item in items), count)
        return answer


def _sorted(batch: Batch) -> Batch:
    """The changes of one revision in a canonical order: the contract defines none."""
    return Batch(batch.revision, tuple(sorted(batch.changes, key=lambda change: change.key)))


CHECKS: tuple[Check, ...] = (check_random_history,)
