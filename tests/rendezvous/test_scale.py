"""The cost of a round: messages per node do not grow with the number of nodes, and an idle run only renews leases."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rallypoint.backends.contract import Backend
from rallypoint.testing import loop as virtual
from rallypoint.testing.world import World
from tests.rendezvous.kit import CountingBackend

SIZES = (100, 1_000, 10_000)
ARRIVALS_S = 1.0
IDLE_S = 60.0


@dataclass
class Phase:
    """Messages of one phase by kind, per node."""

    per_node: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.per_node.values())


@dataclass
class Measured:
    """The measurements of a run of one size."""

    ranks: list[int]
    first: Phase
    idle: Phase
    again: Phase
    loss: Phase
    idle_revisions: int
    pushed_to_all: dict[str, int]
    pushed_to_one: int


class Meter:
    """Counts the messages that all nodes of a world send and receive."""

    def __init__(self) -> None:
        self.counting: list[CountingBackend] = []

    def wrap(self, _: str, backend: Backend) -> Backend:
        self.counting.append(CountingBackend(backend))
        return self.counting[-1]

    def take(self) -> Phase:
        total: Counter[str] = Counter()
        for one in self.counting:
            total.update(one.counts)
            one.counts.clear()
        return Phase({kind: count / len(self.counting) for kind, count in total.items()})

    def largest(self, part: str) -> int:
        """The size of the largest value that any node received under a key with this part."""
        return max(size for one in self.counting for key, size in one.pushed.items() if part in key)


async def measure(size: int) -> Measured:
    meter = Meter()
    world = World(wrap=meter.wrap, min_nodes=size - 1, max_nodes=size, last_call_timeout=5)
    names = [f"node{index}" for index in range(size)]
    for name in names:
        world.start(name)

    async def arrive(name: str, after_s: float) -> int:
        await asyncio.sleep(after_s)
        return (await world.join(name)).rank

    async def all_join() -> list[int]:
        arrivals = [arrive(name, ARRIVALS_S * index / size) for index, name in enumerate(names)]
        return await asyncio.gather(*arrivals)

    ranks = await all_join()
    await asyncio.sleep(2.0)
    first = meter.take()
    revision = world.server.engine.revision
    await asyncio.sleep(IDLE_S)
    idle = meter.take()
    idle_revisions = world.server.engine.revision - revision
    again = loss = Phase({})
    if size <= 1_000:
        await all_join()
        again = meter.take()
        world.crash(names[-1])
        await asyncio.sleep(30.0)
        loss = meter.take()
    pushed_to_all = {part: meter.largest(part) for part in ("state/round", "state/waiting", "state/closed")}
    return Measured(ranks, first, idle, again, loss, idle_revisions, pushed_to_all, meter.largest("/assign/"))


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[int, Measured]]:
    gc.collect()
    gc.disable()  # with a million live objects, collections would take most of the time
    try:
        yield {size: virtual.run(measure(size)) for size in SIZES}
    finally:
        gc.enable()


def assert_equal_within(percent: float, values: list[float]) -> None:
    assert min(values) > 0
    assert max(values) <= min(values) * (1 + percent / 100), values


def test_ten_thousand_nodes_form_one_round(measured: dict[int, Measured]) -> None:
    for size in SIZES:
        assert sorted(measured[size].ranks) == list(range(size))


def test_messages_of_a_first_round_per_node_do_not_grow(measured: dict[int, Measured]) -> None:
    assert_equal_within(5, [measured[size].first.total for size in SIZES])


def test_messages_of_a_later_round_per_node_do_not_grow(measured: dict[int, Measured]) -> None:
    assert_equal_within(5, [measured[size].again.total for size in SIZES[:2]])


def test_messages_about_a_loss_per_node_do_not_grow(measured: dict[int, Measured]) -> None:
    assert_equal_within(5, [measured[size].loss.total for size in SIZES[:2]])


def test_idle_run_only_renews_and_as_often_for_every_size(measured: dict[int, Measured]) -> None:
    for size in SIZES:
        idle = measured[size].idle.per_node
        assert set(idle) == {"keep_alive"}
    assert_equal_within(1, [measured[size].idle.total for size in SIZES])


def test_idle_run_rewrites_no_key(measured: dict[int, Measured]) -> None:
    assert [measured[size].idle_revisions for size in SIZES] == [0, 0, 0]


def test_keys_that_every_node_watches_do_not_grow(measured: dict[int, Measured]) -> None:
    """Only digits differ: of numbers, sizes, and names of nodes."""
    small, large = measured[SIZES[0]], measured[SIZES[-1]]
    for part, size in large.pushed_to_all.items():
        assert size <= small.pushed_to_all[part] + 60, part
        assert size < 600
    assert large.pushed_to_one <= small.pushed_to_one + 10
