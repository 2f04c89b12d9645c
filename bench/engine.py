"""How fast the store engine is on one core: puts with and without watchers, transactions, adds, scans, keep-alives.

The operations are made beforehand, so only `Engine.apply` is timed. Each case is repeated on a fresh engine and the
median is reported, with the slowest and the fastest beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Add, Exists, Grant, KeepAlive, ModRevisionIs, Op, Origin, Put, Range, Txn, ValueIs

TARGET_CASE = "put, 10,000 watchers on other keys"
TARGET_PER_S = 100_000
KEYS = tuple(f"run/nodes/{number:04}" for number in range(1_000))
VALUE = b"v" * 64
TXN_KEY, TXN_FENCE = "run/state/round", "run/coordinator"

Request = tuple[Op, float, Origin | None]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure. `prepare` makes an engine and the requests to time on it, `size` of them if it can."""

    name: str
    prepare: Callable[[int], tuple[Engine, list[Request]]]
    share: float = 1.0
    """Of the operations of a put case: cases with dearer operations do fewer."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The rates of all repetitions of a case, in operations per second."""

    name: str
    operations: int
    rates: tuple[float, ...]

    @property
    def per_s(self) -> float:
        return statistics.median(self.rates)


def puts(size: int) -> list[Request]:
    return [(Txn((), (Put(KEYS[number % len(KEYS)], VALUE),)), 1.0, None) for number in range(size)]


def put_with_watchers(others: int = 0, matching: int = 0) -> Callable[[int], tuple[Engine, list[Request]]]:
    """Watchers on keys that are not written, and watchers on a prefix of all that are written."""

    def prepare(size: int) -> tuple[Engine, list[Request]]:
        engine = Engine()
        for number in range(others):
            engine.watch(number, f"run/assign/{number:06}", engine.revision)
        for number in range(others, others + matching):
            engine.watch(number, "run/nodes/", engine.revision)
        return engine, puts(size)

    return prepare


def put_with_origin(size: int) -> tuple[Engine, list[Request]]:
    """As a client over the network sends them: numbered, each acknowledging the one before it."""
    engine = Engine()
    requests: list[Request] = [
        (op, now, Origin("client", seq, seq - 1)) for seq, (op, now, _) in enumerate(puts(size), start=1)
    ]
    return engine, requests


def txn_with_two_compares(size: int) -> tuple[Engine, list[Request]]:
    """What a coordinator does: a write that is fenced and compared with the revision it was decided on."""
    engine = Engine()
    engine.apply(Txn((), (Put(TXN_FENCE, VALUE), Put(TXN_KEY, VALUE))), 0.0)
    first = engine.revision
    return engine, [
        (Txn((Exists(TXN_FENCE), ModRevisionIs(TXN_KEY, first + number)), (Put(TXN_KEY, VALUE),)), 1.0, None)
        for number in range(size)
    ]


def refused_txn(size: int) -> tuple[Engine, list[Request]]:
    """Two compares of which one fails: the answer carries what was found."""
    engine = Engine()
    engine.apply(Txn((), (Put(TXN_FENCE, VALUE), Put(TXN_KEY, VALUE))), 0.0)
    op = Txn((Exists(TXN_FENCE), ValueIs(TXN_KEY, b"another")), (Put(TXN_KEY, VALUE),))
    return engine, [(op, 1.0, None)] * size


def adds(size: int) -> tuple[Engine, list[Request]]:
    return Engine(), [(Add(f"run/store/{number % 10}", 1), 1.0, None) for number in range(size)]


def scans(size: int) -> tuple[Engine, list[Request]]:
    """Ten keys under each of ten thousand prefixes."""
    engine = Engine()
    for group in range(10_000):
        engine.apply(Txn((), tuple([Put(f"run/{group:05}/{number}", VALUE) for number in range(10)])), 0.0)
    return engine, [(Txn((), (Range(f"run/{number * 7919 % 10_000:05}/"),)), 1.0, None) for number in range(size)]


def keep_alives(size: int) -> tuple[Engine, list[Request]]:
    """Ten thousand sessions of 15 s, each renewed in turn every 5 s."""
    count, ttl_s, interval_s = 10_000, 15.0, 5.0
    engine = Engine()
    for _ in range(count):
        engine.apply(Grant(ttl_s), 0.0)
    return engine, [
        (KeepAlive(1 + number % count), interval_s * number / count, None) for number in range(max(size, 2 * count))
    ]


CASES = (
    Case(TARGET_CASE, put_with_watchers(others=10_000)),
    Case("put, no watchers", put_with_watchers()),
    Case("put, 100 watchers on a prefix of the key", put_with_watchers(matching=100), share=0.1),
    Case("put, numbered against being sent twice", put_with_origin),
    Case("transaction with two compares", txn_with_two_compares),
    Case("transaction that is refused", refused_txn),
    Case("add", adds),
    Case("scan of 10 keys in 100,000", scans, share=0.3),
    Case("keep-alive, 10,000 leases", keep_alives),
)


def time_once(case: Case, size: int) -> tuple[int, float]:
    """How many operations were done, and how many a second."""
    engine, requests = case.prepare(max(1, int(size * case.share)))
    apply = engine.apply
    gc.collect()
    started = time.perf_counter()
    for op, now, origin in requests:
        apply(op, now, origin)
    return len(requests), len(requests) / (time.perf_counter() - started)


def measure(size: int, repetitions: int, progress: Callable[[str], None]) -> list[Measured]:
    """All cases. Repetitions go round all of them, so that a slow moment of the machine hits no case alone."""
    rates: dict[str, list[float]] = {case.name: [] for case in CASES}
    operations: dict[str, int] = {}
    for repetition in range(1, repetitions + 1):
        for case in CASES:
            progress(f"repetition {repetition} of {repetitions}: {case.name}")
            operations[case.name], rate = time_once(case, size)
            rates[case.name].append(rate)
    return [Measured(name, operations[name], tuple(found)) for name, found in rates.items()]


def as_table(results: Sequence[Measured]) -> Table:
    table = Table(title="store engine, one core, operations per second")
    table.add_column("operation")
    for column in ("median", "slowest", "fastest", "µs each"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.per_s:,.0f}",
            f"{min(result.rates):,.0f}",
            f"{max(result.rates):,.0f}",
            f"{1e6 / result.per_s:.1f}",
        )
    return table


def as_json(results: Sequence[Measured], met: bool) -> str:
    return json.dumps(
        {
            "bench": "engine",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "target": {"case": TARGET_CASE, "per_s": TARGET_PER_S, "met": met},
            "results": [
                {
                    "case": r.name,
                    "operations": r.operations,
                    "per_s": round(r.per_s),
                    "rates": list(map(round, r.rates)),
                }
                for r in results
            ],
        },
        indent=2,
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the store engine on one core.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--repetitions", type=positive, default=5, help="the median of so many is reported (%(default)s)"
    )
    parser.add_argument("--operations", type=positive, default=50_000, help="puts per repetition (%(default)s)")
    parser.add_argument("--assert-target", action="store_true", help="exit with 1 if the target is not met")
    options = parser.parse_args(arguments)

    with Console(stderr=True).status("engine") as status:  # on stderr, and only if that is a terminal
        results = measure(options.operations, options.repetitions, lambda text: status.update(f"engine: {text}"))
    found = next(result.per_s for result in results if result.name == TARGET_CASE)
    met = found >= TARGET_PER_S
    if options.json:
        print(as_json(results, met))
    else:
        console = Console()
        console.print(as_table(results))
        console.print(
            f'target: {TARGET_PER_S:,} a second for "{TARGET_CASE}": {"met" if met else "NOT met"} ({found:,.0f})',
            highlight=False,
        )
    return 1 if options.assert_target and not met else 0


if __name__ == "__main__":
    sys.exit(main())
