"""The reference model of the engine: a naive store of dicts and lists.

It keeps the whole history and all answers, derives what it can (a lease's keys are the items that name it), and
ignores cost.
"""

from dataclasses import dataclass, field

from rallypoint.kv.types import (
    Add,
    AddResult,
    Batch,
    Change,
    CreateRevisionIs,
    Delete,
    Deleted,
    DeleteRange,
    Exists,
    FailureCode,
    Get,
    GotItem,
    GotRange,
    Grant,
    Item,
    KeepAlive,
    LeaseResult,
    ModRevisionIs,
    Origin,
    Put,
    PutDone,
    Range,
    RangeEmpty,
    Revoke,
    Shorten,
    Tick,
    Ticked,
    Txn,
    TxnResult,
    ValueIs,
    VersionIs,
    WatchStarted,
    WatchTooOld,
)


@dataclass
class Model:
    """`apply` returns a result, or only a code where the engine returns a Failure with a message."""

    history: int
    now: float = float("-inf")
    revision: int = 1
    items: dict[str, Item] = field(default_factory=dict)
    leases: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Id -> time to live, deadline."""
    granted: int = 0
    log: list[Batch] = field(default_factory=list)
    watches: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Id -> prefix, start."""
    told: dict[int, list[Batch]] = field(default_factory=dict)
    answers: dict[tuple[str, int], object] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)

    def apply(self, op, now: float, origin: Origin | None = None):
        self.now = max(self.now, now)
        ended = 0
        while due := sorted((end, lease) for lease, (_, end) in self.leases.items() if end <= self.now):
            self.end_lease(due[0][1])
            ended += 1
        if origin is None:
            return self.execute(op, ended)
        if origin.seq <= self.settled.get(origin.client, 0):
            return FailureCode.TOO_OLD
        request = (origin.client, origin.seq)
        if request not in self.answers:
            self.answers[request] = self.execute(op, ended)
            self.settled[origin.client] = max(self.settled.get(origin.client, 0), min(origin.acked, origin.seq - 1))
        return self.answers[request]

    def execute(self, op, ended: int):
        match op:
            case Tick():
                return Ticked(ended)
            case Grant(_, chosen) if chosen < 0 or chosen in self.leases:
                return FailureCode.INVALID
            case Grant(ttl_s, chosen):
                while not chosen or (chosen == self.granted and chosen in self.leases):
                    self.granted += 1
                    chosen = self.granted
                self.leases[chosen] = (ttl_s, self.now + ttl_s)
                return LeaseResult(chosen, ttl_s, True)
            case KeepAlive(lease) if lease in self.leases:
                ttl_s, _ = self.leases[lease]
                self.leases[lease] = (ttl_s, self.now + ttl_s)
                return LeaseResult(lease, ttl_s, True)
            case Revoke(lease) if lease in self.leases:
                self.end_lease(lease)
                return LeaseResult(lease, 0.0, False)
            case Shorten(lease, within_s) if lease in self.leases:
                ttl_s, end = self.leases[lease]
                self.leases[lease] = (ttl_s, min(end, self.now + max(0.0, within_s)))
                return LeaseResult(lease, ttl_s, True)
            case KeepAlive(lease) | Revoke(lease) | Shorten(lease):
                return LeaseResult(lease, 0.0, False)
            case Add(key, amount, lease, compares):
                return self.add(key, amount, lease, compares)
            case Txn():
                return self.txn(op)

    def end_lease(self, lease: int) -> None:
        del self.leases[lease]
        self.write({key: None for key in sorted(self.items) if self.items[key].lease == lease})

    def add(self, key: str, amount: int, lease: int, compares):
        if not all(self.holds(compare) for compare in compares):
            return AddResult(False, self.revision, 0)
        old = self.items[key].value if key in self.items else b"0"
        if not old.lstrip(b"-").isdigit():
            return FailureCode.NOT_A_NUMBER
        if lease and lease not in self.leases:
            return FailureCode.LEASE_GONE
        if not key:
            return FailureCode.INVALID
        number = int(old) + amount
        self.write({key: (str(number).encode(), lease)})
        return AddResult(True, self.revision, number)

    def txn(self, op: Txn):
        committed = all(self.holds(compare) for compare in op.compares)
        steps = op.then if committed else op.otherwise
        if not committed and not steps:
            steps = [Range(c.prefix, limit=1) if isinstance(c, RangeEmpty) else Get(c.key) for c in op.compares]
        if code := self.refusal(steps):
            return code
        new: dict[str, tuple[bytes, int] | None] = {}
        results = tuple([self.step(step, new) for step in steps])
        self.write(new)
        return TxnResult(committed, self.revision, results)

    def refusal(self, steps) -> FailureCode | None:
        """The code of the first invalid step; overlaps with deleted ranges are checked last."""
        written: list[str] = []
        for step in steps:
            if isinstance(step, Put) and step.lease and step.lease not in self.leases:
                return FailureCode.LEASE_GONE
            if isinstance(step, Put) and not step.key:
                return FailureCode.INVALID
            if isinstance(step, Put | Delete) and step.key in written:
                return FailureCode.INVALID
            if isinstance(step, Put | Delete):
                written.append(step.key)
        for step in steps:
            if isinstance(step, DeleteRange) and any(key.startswith(step.prefix) for key in written):
                return FailureCode.INVALID
        return None

    def step(self, step, new: dict[str, tuple[bytes, int] | None]):
        seen = self.after(new)
        match step:
            case Put(key, value, lease):
                new[key] = (value, lease)
                return PutDone()
            case Get(key):
                return GotItem(seen.get(key))
            case Delete(key):
                return Deleted(self.erase([key] if key in seen else [], new))
            case DeleteRange(prefix):
                return Deleted(self.erase([key for key in sorted(seen) if key.startswith(prefix)], new))
            case Range(prefix, limit, count_only):
                found = [seen[key] for key in sorted(seen) if key.startswith(prefix)]
                shown = [] if count_only else found[:limit] if limit else found
                return GotRange(tuple(shown), len(found))

    def erase(self, keys: list[str], new: dict[str, tuple[bytes, int] | None]) -> int:
        for key in keys:
            new[key] = None
        return len(keys)

    def after(self, new: dict[str, tuple[bytes, int] | None]) -> dict[str, Item]:
        """The items as they will be at the next revision."""
        items = dict(self.items)
        revision = self.revision + 1
        for key, written in new.items():
            old = items.pop(key, None)
            if written is not None and old is None:
                items[key] = Item(key, written[0], revision, revision, 1, written[1])
            elif written is not None:
                items[key] = Item(key, written[0], old.create_revision, revision, old.version + 1, written[1])
        return items

    def write(self, new: dict[str, tuple[bytes, int] | None]) -> None:
        if not new:
            return
        self.items = self.after(new)
        self.revision += 1
        batch = Batch(self.revision, tuple(Change(key, self.items.get(key)) for key in new))
        self.log.append(batch)
        for watch, (prefix, after) in self.watches.items():
            self.told[watch] += covered([batch], prefix, after)

    def holds(self, compare) -> bool:
        if isinstance(compare, RangeEmpty):
            return not any(key.startswith(compare.prefix) for key in self.items)
        item = self.items.get(compare.key, Item(compare.key, b"", 0, 0, 0))
        match compare:
            case Exists(_, wanted):
                return (item.version > 0) == wanted
            case ValueIs(_, value):
                return item.version > 0 and item.value == value
            case VersionIs(_, version):
                return item.version == version
            case CreateRevisionIs(_, revision):
                return item.create_revision == revision
            case ModRevisionIs(_, revision):
                return item.mod_revision == revision

    def watch(self, watch: int, prefix: str, after: int) -> WatchStarted | WatchTooOld:
        oldest = self.revision
        changes = 0
        for batch in reversed(self.log):
            changes += len(batch.changes)
            if changes > self.history and batch is not self.log[-1]:
                break
            oldest = batch.revision - 1
        if oldest <= 1:
            oldest = 0  # the history is complete, and nothing changed before revision 2
        if after < oldest:
            return WatchTooOld(oldest)
        self.watches[watch] = (prefix, after)
        self.told[watch] = []
        return WatchStarted(self.revision, tuple(covered(self.log, prefix, after)))

    def unwatch(self, watch: int) -> None:
        self.watches.pop(watch, None)


def covered(batches, prefix: str, after: int) -> list[Batch]:
    """The batches as a watch with this prefix and start sees them."""
    found = []
    for batch in batches:
        changes = tuple(change for change in batch.changes if change.key.startswith(prefix))
        if changes and batch.revision > after:
            found.append(Batch(batch.revision, changes))
    return found
