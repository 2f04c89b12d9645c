"""A store under test: the engine with a clock set by the test, and a record of the events of each watch."""

from collections import defaultdict
from itertools import count

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import (
    Batch,
    BranchOp,
    BranchResult,
    Failure,
    FailureCode,
    Get,
    GotItem,
    GotRange,
    Grant,
    Item,
    LeaseResult,
    Op,
    Origin,
    Put,
    Range,
    Result,
    Txn,
    TxnResult,
    WatchStarted,
    WatchTooOld,
)


class Store:
    """An engine and the time of its operations."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine or Engine()
        self.now = 0.0
        self.told: dict[int, list[Batch]] = defaultdict(list)
        self._watch_ids = count(1)

    @property
    def revision(self) -> int:
        return self.engine.revision

    def apply(self, op: Op, origin: Origin | None = None) -> Result:
        outcome = self.engine.apply(op, self.now, origin)
        for event in outcome.events:
            self.told[event.watch].append(event.batch)
        return outcome.result

    def txn(self, *then: BranchOp) -> TxnResult:
        """A transaction without compares."""
        result = self.apply(Txn((), then))
        assert isinstance(result, TxnResult)
        assert result.committed
        return result

    def do(self, step: BranchOp) -> BranchResult:
        (result,) = self.txn(step).results
        return result

    def put(self, key: str, value: bytes = b"", lease: int = 0) -> int:
        """Write a key; the revision of the write."""
        return self.txn(Put(key, value, lease)).revision

    def get(self, key: str) -> Item | None:
        got = self.do(Get(key))
        assert isinstance(got, GotItem)
        return got.item

    def item(self, key: str) -> Item:
        """A key that must exist."""
        item = self.get(key)
        assert item is not None
        return item

    def keys(self, prefix: str = "") -> list[str]:
        got = self.do(Range(prefix))
        assert isinstance(got, GotRange)
        assert got.count == len(got.items)
        return [item.key for item in got.items]

    def grant(self, ttl_s: float) -> int:
        result = self.apply(Grant(ttl_s))
        assert isinstance(result, LeaseResult)
        assert result.alive
        return result.lease

    def start(self, prefix: str, after: int) -> WatchStarted | WatchTooOld:
        return self.engine.watch(next(self._watch_ids), prefix, after)

    def watch(self, prefix: str) -> int:
        """A watch on all changes from now on."""
        watch = next(self._watch_ids)
        started = self.engine.watch(watch, prefix, self.revision)
        assert started == WatchStarted(self.revision, ())
        return watch


def refusal(result: Result) -> FailureCode:
    """The code of an operation that must have been refused."""
    assert isinstance(result, Failure), result
    assert result.message
    return result.code
