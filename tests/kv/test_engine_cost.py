"""The cost of operations, counted and not timed.

Two counts. *Lines*: executed lines of `rallypoint.kv` and of the sorted list below it. *Touches*: how often a key or
prefix is hashed or compared, which also covers loops in C. An operation whose cost depends only on its result has the
same counts in a small store and in one that is a thousand times larger; where a sorted list is searched, touches may
grow with the logarithm.
"""

import sys
from collections import Counter
from collections.abc import Callable
from math import log2

import pytest

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import (
    Delete,
    GotRange,
    Grant,
    KeepAlive,
    LeaseResult,
    Op,
    Origin,
    Outcome,
    Put,
    Range,
    RangeEmpty,
    Revoke,
    Shorten,
    Tick,
    Txn,
    TxnResult,
)

touches = 0


def _counted(name: str) -> Callable[..., object]:
    method = getattr(str, name)

    def counting(*args: object) -> object:
        global touches
        touches += 1
        return method(*args)

    return counting


class Touched(str):
    """A string that counts its uses."""

    __slots__ = ()
    __hash__ = _counted("__hash__")
    __eq__ = _counted("__eq__")
    __lt__ = _counted("__lt__")
    __gt__ = _counted("__gt__")
    __le__ = _counted("__le__")
    __ge__ = _counted("__ge__")
    startswith = _counted("startswith")


class Cost:
    """The cost of one call."""

    def __init__(self, call: Callable[[], object]) -> None:
        lines: Counter[str] = Counter()

        def trace(frame, event, _arg):
            package = frame.f_globals.get("__name__", "").split(".")[0]
            if package not in ("rallypoint", "sortedcontainers"):
                return None
            if event == "line":
                lines[package] += 1
            return trace

        before, tracer = touches, sys.gettrace()
        sys.settrace(trace)
        try:
            self.result = call()
        finally:
            sys.settrace(tracer)
        self.touches = touches - before
        self.lines = lines["rallypoint"]
        self.search_lines = lines["sortedcontainers"]
        assert self.lines > 0


def cost_of(engine: Engine, op: Op, now: float = 0.0, origin: Origin | None = None) -> Cost:
    return Cost(lambda: engine.apply(op, now, origin))


def is_the_same(small: Cost, large: Cost) -> bool:
    return (small.lines, small.search_lines, small.touches) == (large.lines, large.search_lines, large.touches)


def is_a_search(small: Cost, large: Cost, size: int) -> bool:
    """The same number of lines of our own code; the sorted list does a few binary searches."""
    depth = log2(size)
    return (
        small.lines == large.lines
        and large.search_lines <= small.search_lines + 10 * depth
        and large.touches <= small.touches + 5 * depth
    )


def put(key: str) -> Txn:
    return Txn((), (Put(key, b""),))


def engine_with_keys(*names: str) -> Engine:
    engine = Engine()
    for start in range(0, len(names), 1_000):
        engine.apply(Txn((), tuple([Put(Touched(name), b"") for name in names[start : start + 1_000]])), 0.0)
    engine.apply(Txn((), (Range("", count_only=True),)), 0.0)  # makes the sorted list build its index
    return engine


def items_of(cost: Cost) -> GotRange:
    assert isinstance(cost.result, Outcome)
    assert isinstance(cost.result.result, TxnResult)
    (got,) = cost.result.result.results
    assert isinstance(got, GotRange)
    return got


# The counts can fail


def test_a_loop_over_all_watches_would_be_noticed() -> None:
    names = [Touched(f"other/{number}") for number in range(100)]
    assert Cost(lambda: (Engine(), [name for name in names if name.startswith("key")])).touches == 100
    assert Cost(lambda: (Engine(), sorted(names))).touches >= 99


# Watches


def engine_with_watches(prefixes: list[str], matching: int = 0) -> Engine:
    engine = engine_with_keys("key")
    for number, prefix in enumerate(prefixes):
        engine.watch(number, Touched(prefix), 1)
    for number in range(matching):
        engine.watch(-1 - number, Touched("key"[: number % 4]), engine.revision)
    return engine


@pytest.mark.parametrize("matching", [0, 1, 7])
@pytest.mark.parametrize(
    "op", [put("key"), put("new"), Txn((), (Delete("key"),)), Txn((), (Put("a", b""), Put("b", b"")))]
)
def test_a_change_costs_the_watches_that_match_and_not_the_others(op: Op, matching: int) -> None:
    small, large = (
        cost_of(engine_with_watches([f"other/{number:05}" for number in range(count)], matching), op)
        for count in (100, 10_000)
    )
    assert isinstance(small.result, Outcome)
    assert small.result == large.result
    assert is_the_same(small, large)


def test_watches_on_longer_prefixes_cost_nothing_even_if_each_has_another_length() -> None:
    small, large = (
        cost_of(engine_with_watches(["other/" + "x" * number for number in range(count)]), put("key"))
        for count in (10, 3_000)
    )
    assert is_the_same(small, large)


def test_watches_that_start_in_the_future_cost_nothing_until_they_match() -> None:
    costs = []
    for count in (10, 10_000):
        engine = engine_with_keys("key")
        for number in range(count):
            engine.watch(number, Touched(f"other/{number:05}"), 1_000_000)
        costs.append(cost_of(engine, put("key")))
    assert is_the_same(*costs)


def test_starting_and_stopping_a_watch_costs_nothing_for_the_others() -> None:
    costs = []
    for count in (100, 10_000):
        engine = engine_with_watches([f"other/{number:05}" for number in range(count)])
        costs.append(Cost(lambda engine=engine: engine.watch(-1, "other/x", engine.revision)))
        costs.append(Cost(lambda engine=engine: engine.unwatch(-1)))
    assert is_the_same(costs[0], costs[2])
    assert is_the_same(costs[1], costs[3])


def test_a_late_watch_costs_the_revisions_since_its_start() -> None:
    costs = []
    for count in (100, 5_000):
        engine = Engine()
        for number in range(count):
            engine.apply(put(f"key/{number}"), 0.0)
        costs.append(Cost(lambda engine=engine: engine.watch(1, "key/", engine.revision - 10)))
    assert is_the_same(*costs)


# Keys


SMALL, LARGE = 100, 100_000


@pytest.fixture(scope="module")
def stores() -> tuple[Engine, Engine]:
    """Ten keys under `m/` among a hundred and among a hundred thousand others under `a/` and `z/`."""
    few = [f"m/{number}" for number in range(10)]
    return tuple(
        engine_with_keys(*few, *[f"{'az'[number % 2]}/{number:06}" for number in range(count)])
        for count in (SMALL, LARGE)
    )


@pytest.mark.parametrize("step", [Range("m/"), Range("m/", limit=4), Range("m/", count_only=True), Range("m/1")])
def test_a_prefix_scan_costs_its_result(stores: tuple[Engine, Engine], step: Range) -> None:
    small, large = (cost_of(engine, Txn((), (step,))) for engine in stores)
    assert len(items_of(small).items) == len(items_of(large).items)
    assert items_of(small).count == items_of(large).count
    assert is_a_search(small, large, LARGE)


@pytest.mark.parametrize("prefix", ["", "a/", "z/", "z"])
def test_a_limited_scan_of_many_keys_costs_its_limit(stores: tuple[Engine, Engine], prefix: str) -> None:
    small, large = (cost_of(engine, Txn((), (Range(prefix, limit=5),))) for engine in stores)
    assert len(items_of(large).items) == 5
    assert items_of(large).count >= LARGE // 2
    assert is_a_search(small, large, LARGE)


@pytest.mark.parametrize("prefix", ["", "a/", "z/"])
def test_counting_many_keys_reads_none_of_them(stores: tuple[Engine, Engine], prefix: str) -> None:
    small, large = (cost_of(engine, Txn((), (Range(prefix, count_only=True),))) for engine in stores)
    assert items_of(large).count >= LARGE // 2
    assert is_a_search(small, large, LARGE)


@pytest.mark.parametrize("prefix", ["", "a/", "m/", "n/"])
def test_checking_whether_a_range_is_empty_reads_one_key(stores: tuple[Engine, Engine], prefix: str) -> None:
    small, large = (cost_of(engine, Txn((RangeEmpty(prefix),), ())) for engine in stores)
    assert is_a_search(small, large, LARGE)


def test_writing_and_deleting_a_key_costs_a_search(stores: tuple[Engine, Engine]) -> None:
    for op in (put("m/x"), put("m/x"), Txn((), (Delete("m/x"),))):
        small, large = (cost_of(engine, op) for engine in stores)
        assert is_a_search(small, large, LARGE)


# Leases


def engine_with_leases(count: int, ttl_s: float = 15.0) -> Engine:
    engine = Engine()
    for number in range(count):
        granted = engine.apply(Grant(ttl_s), 0.0).result
        assert isinstance(granted, LeaseResult)
        engine.apply(Txn((), (Put(f"node/{number}", b"", granted.lease),)), 0.0)
    return engine


@pytest.mark.parametrize("op", [KeepAlive(5), Revoke(5), Shorten(5, 1.0), Grant(5.0), put("key"), Tick()])
def test_an_operation_costs_nothing_for_the_leases_of_others(op: Op) -> None:
    small, large = (cost_of(engine_with_leases(count), op, now=1.0) for count in (10, 10_000))
    assert small.lines == large.lines


def test_a_renewal_costs_the_same_in_the_long_run_however_many_leases_there_are() -> None:
    per_renewal = []
    for count in (10, 1_000):
        engine = engine_with_leases(count)
        lines = 0
        for second in range(5, 50, 5):
            for lease in range(1, count + 1):
                cost = cost_of(engine, KeepAlive(lease), now=second + lease / count)
                lines += cost.lines
        assert len(engine.leases) == count
        per_renewal.append(lines / count)
    assert per_renewal[1] <= per_renewal[0] * 1.1


def test_shortening_and_renewing_costs_the_same_in_the_long_run_however_many_leases_there_are() -> None:
    per_cycle = []
    for count in (100, 1_000):
        engine = engine_with_leases(count)
        lines = 0
        for cycle in range(5):
            for lease in range(1, count + 1):
                for op in (Shorten(lease, 1.0), KeepAlive(lease)):
                    lines += cost_of(engine, op, now=cycle + lease / count).lines
        assert len(engine.leases) == count
        per_cycle.append(lines / count)
    assert per_cycle[1] <= per_cycle[0] * 1.2


def test_the_end_of_a_lease_costs_its_own_keys() -> None:
    costs = []
    for count in (10, 10_000):
        engine = engine_with_leases(count)
        engine.apply(Grant(2.0), 0.0)
        engine.apply(Txn((), tuple([Put(f"own/{number}", b"", count + 1) for number in range(3)])), 0.0)
        costs.append(cost_of(engine, Tick(), now=2.0))
    assert costs[0].lines == costs[1].lines


# Resent requests


def test_remembering_an_answer_costs_nothing_for_other_clients() -> None:
    costs = []
    for count in (10, 10_000):
        engine = engine_with_keys("key")
        for number in range(count):
            engine.apply(Tick(), 0.0, Origin(f"client{number}", 1))
        costs.append(cost_of(engine, put("key"), origin=Origin("client5", 2, 1)))
    assert is_the_same(*costs)


def test_acknowledging_one_answer_costs_nothing_for_those_that_are_still_open() -> None:
    costs = []
    for count in (10, 1_000):
        engine = engine_with_keys("key")
        for seq in range(1, count + 1):
            engine.apply(Tick(), 0.0, Origin("client", seq))
        costs.append(cost_of(engine, put("key"), origin=Origin("client", count + 1, 1)))
    assert is_the_same(*costs)
