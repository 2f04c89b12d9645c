"""What `make bench` measures: one cell for each bench, side and number of nodes, the most important first. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch

import msgspec

from rallypoint.bench.plan import LATE_NODE, LOSS_REJOIN, Bench, Case, Side


class Cell(msgspec.Struct, frozen=True):
    """A case, and about how many seconds it takes on an otherwise idle machine with two cores."""

    case: Case
    about_s: float

    @property
    def key(self) -> str:
        """Its name, for `--only` and in the results."""
        return key_of(self.case)

    @property
    def timeout_s(self) -> float:
        """When it is killed: a cell that hangs must not take the time of the others."""
        return 45.0 + 4 * self.about_s


def key_of(case: Case) -> str:
    """`rendezvous/rallypoint/8`; with the first word of the measure if the case has only one."""
    words = [case.bench.value, case.side.value, str(case.nodes)]
    return "/".join([*words, *case.only.partition(",")[0].split(" ")[:1]] if case.only else words)


def full() -> tuple[Cell, ...]:
    """About 28 minutes."""
    return tuple(_rendezvous_full()) + tuple(_others_full())


def _rendezvous_full() -> Iterable[Cell]:
    yield from _cells(Bench.RENDEZVOUS, Side.RALLYPOINT, {1_000: 20, 3_000: 32, 10_000: 68})
    for side in (Side.RALLYPOINT, Side.TORCHFT, Side.TORCHFT_TWICE, Side.JAX):
        yield from _cells(Bench.RENDEZVOUS, side, {2: 15, 128: 38}, repeat=5)
        yield from _cells(Bench.RENDEZVOUS, side, {8: 30, 32: 43}, repeat=9)
    yield from _cells(Bench.RENDEZVOUS, Side.TORCH_STOCK, {2: 15, 8: 18, 32: 25, 128: 32}, limit_s=20)
    yield from _cells(Bench.RENDEZVOUS, Side.TORCH_LEAN, {32: 26, 128: 28}, limit_s=20)
    yield from _cells(Bench.RENDEZVOUS, Side.RALLYPOINT_ETCD, {2: 11, 8: 12, 32: 21}, repeat=2)
    yield from _cells(Bench.RENDEZVOUS, Side.TORCH_ETCD_V2, {2: 13, 8: 14, 32: 25}, repeat=2, limit_s=20)


def _others_full() -> Iterable[Cell]:
    yield from _cells(Bench.SCALE, Side.RALLYPOINT, dict.fromkeys((250, 500, 1_000, 2_000), 15), repeat=1, seconds=10)
    yield from _cells(Bench.SCALE, Side.RALLYPOINT, {5_000: 20, 10_000: 25}, repeat=1, seconds=10)
    yield from _cells(Bench.TRIPS, Side.RALLYPOINT, {4: 30}, repeat=1)
    yield from _cells(Bench.RECOVERY, Side.RALLYPOINT, {2: 25, 8: 27})
    yield from _cells(Bench.RECOVERY, Side.RALLYPOINT, {128: 40, 1_000: 35}, repeat=2)
    yield from _cells(Bench.RECOVERY, Side.TORCH_UNSHARED, {2: 50}, repeat=1, limit_s=20)
    for side in (Side.TORCH_STOCK, Side.TORCH_UNSHARED):
        for only, about_s in ((LOSS_REJOIN, 30), (LATE_NODE, 25)):
            yield from _cells(Bench.RECOVERY, side, {8: about_s}, repeat=1, limit_s=20, only=only)
    yield from _cells(Bench.STORE, Side.RALLYPOINT, {1: 14, 16: 16}, repeat=1, seconds=1)
    yield from _cells(Bench.STORE, Side.TORCH_STOCK, {1: 18, 16: 20}, repeat=1, seconds=1)
    yield from _cells(Bench.STORE, Side.JAX, {1: 12, 16: 14}, repeat=1, seconds=1)
    yield from _cells(Bench.IDLE, Side.RALLYPOINT, {8: 15, 128: 17, 1_000: 17, 10_000: 25}, repeat=1, seconds=10)
    yield from _cells(Bench.IDLE, Side.TORCH_STOCK, {8: 20, 128: 30}, repeat=1, seconds=10, limit_s=30)
    yield from _cells(Bench.IDLE, Side.TORCH_POLLING, {128: 30}, repeat=1, seconds=10, limit_s=30)
    yield from _cells(Bench.IDLE, Side.JAX, {8: 20, 128: 30}, repeat=1, seconds=10)
    yield from _cells(Bench.RENDEZVOUS, Side.TORCH_LEAN, {256: 60}, repeat=1, limit_s=20)
    yield from _cells(Bench.RENDEZVOUS, Side.TORCH_ETCD, {8: 12, 32: 20}, repeat=1, limit_s=20)


def quick() -> tuple[Cell, ...]:
    """About eight minutes: enough to see that everything works, and the order of magnitude."""
    return tuple(_quick())


def _quick() -> Iterable[Cell]:
    yield from _cells(Bench.RENDEZVOUS, Side.RALLYPOINT, {2: 7, 8: 7, 32: 9, 128: 16, 1_000: 12, 10_000: 22}, repeat=1)
    yield from _cells(Bench.RENDEZVOUS, Side.TORCH_STOCK, {2: 10, 8: 11, 32: 15}, repeat=1, limit_s=20)
    yield from _cells(Bench.RENDEZVOUS, Side.TORCHFT, {2: 8, 8: 8, 32: 10}, repeat=1)
    yield from _cells(Bench.RENDEZVOUS, Side.TORCHFT_TWICE, {2: 8, 8: 8, 32: 10}, repeat=1)
    yield from _cells(Bench.RENDEZVOUS, Side.JAX, {2: 9, 8: 9, 32: 11}, repeat=1)
    yield from _cells(Bench.RENDEZVOUS, Side.RALLYPOINT_ETCD, {2: 9, 8: 10}, repeat=1)
    yield from _cells(Bench.RENDEZVOUS, Side.TORCH_ETCD_V2, {2: 9, 8: 10}, repeat=1, limit_s=20)
    yield from _cells(Bench.SCALE, Side.RALLYPOINT, {250: 17, 500: 17, 1_000: 17}, repeat=1, seconds=10)
    yield from _cells(Bench.TRIPS, Side.RALLYPOINT, {4: 30}, repeat=1)
    yield from _cells(Bench.RECOVERY, Side.RALLYPOINT, {2: 11, 8: 12}, repeat=1)
    for only, about_s in ((LOSS_REJOIN, 30), (LATE_NODE, 22)):
        yield from _cells(Bench.RECOVERY, Side.TORCH_UNSHARED, {8: about_s}, repeat=1, limit_s=20, only=only)
    yield from _cells(Bench.STORE, Side.RALLYPOINT, {1: 9}, repeat=1, seconds=0.4)
    yield from _cells(Bench.STORE, Side.TORCH_STOCK, {1: 12}, repeat=1, seconds=0.4)
    yield from _cells(Bench.STORE, Side.JAX, {1: 10}, repeat=1, seconds=0.4)
    yield from _cells(Bench.IDLE, Side.RALLYPOINT, {8: 14, 1_000: 15}, repeat=1, seconds=10)
    yield from _cells(Bench.IDLE, Side.TORCH_STOCK, {8: 18}, repeat=1, seconds=10)
    yield from _cells(Bench.IDLE, Side.JAX, {8: 18}, repeat=1, seconds=10)


def _cells(
    bench: Bench,
    side: Side,
    about_s: dict[int, float],
    *,
    repeat: int = 3,
    seconds: float = 0.0,
    limit_s: float = 60.0,
    only: str = "",
) -> Iterable[Cell]:
    for nodes, about in about_s.items():
        yield Cell(Case(bench, side, nodes, repeat, seconds, limit_s, only=only), about)


def chosen(cells: Iterable[Cell], patterns: Iterable[str], most_nodes: int | None = None) -> tuple[Cell, ...]:
    """Those whose key matches any of the patterns (`rendezvous/*/8`; none: all), with at most `most_nodes` nodes."""
    wanted = tuple(patterns)
    return tuple(
        cell
        for cell in cells
        if (not wanted or any(fnmatch(cell.key, pattern) for pattern in wanted))
        and (most_nodes is None or cell.case.nodes <= most_nodes)
    )


def grouped(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells that take turns: those of the same bench and number of nodes."""
    groups: dict[tuple[Bench, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.case.bench, cell.case.nodes), []).append(cell)
    return list(groups.values())
