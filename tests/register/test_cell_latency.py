"""How fast a cell must be for a time to live, the error if it is too slow, and the cost of idling."""

import asyncio
import random

import pytest

from rallypoint.backends.register.backend import RegisterBackend
from rallypoint.backends.register.cell_latency import CellLatency
from rallypoint.backends.register.shared_cell import SharedCell
from rallypoint.errors import Rejected, RendezvousConnectionError
from rallypoint.kv.document import Document
from rallypoint.kv.types import Grant
from rallypoint.testing.cells import MemoryCell
from rallypoint.testing.loop import run
from rallypoint.testing.world import World
from tests.register.kit import Distant


def document_with(ttls: list[float]) -> Document:
    document = Document.fresh(1, 1)
    for ttl_s in ttls:
        document.apply(Grant(ttl_s))
    return document


def backend_at(cell: Distant, seed: int = 0) -> RegisterBackend:
    rng = random.Random(seed)
    return RegisterBackend(SharedCell(cell, rng), rng=rng)


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_time_to_live_must_have_room_for_ten_turns_of_each_session():
    latency = CellLatency()
    latency.read(0.02)
    latency.written(0.03)
    others = [75.0, 7275.0]  # the run's own leases are no sessions
    assert latency.turn_s == pytest.approx(0.05)
    assert latency.too_short(2.0, document_with([2.0] * 4 + others)) is None
    why = latency.too_short(2.0, document_with([2.0] * 5 + others))
    assert "5 nodes" in why
    assert "at least 2.5 s, not 2 s" in why
    assert "keep_alive_interval" in why


def test_nothing_is_too_short_before_anything_was_measured():
    assert CellLatency().too_short(0.001, None) is None


def test_fastest_of_the_last_calls_counts():
    latency = CellLatency()
    for took_s in (5.0, 0.1, 9.0):
        latency.read(took_s)
        latency.written(took_s)
    assert latency.turn_s == pytest.approx(0.2)
    for _ in range(16):  # it has become slow
        latency.read(1.0)
        latency.written(1.0)
    assert latency.turn_s == pytest.approx(2.0)


def test_rate_of_observed_writes_shows_the_latency_when_all_calls_wait():
    latency = CellLatency()
    latency.read(0.5)
    latency.written(0.5)
    for n in range(4):
        latency.observed(n * 0.1, 100 + n * 2)
    assert latency.turn_s == pytest.approx(1.0), "six writes are too few"
    latency.observed(0.4, 110)
    assert latency.turn_s == pytest.approx(0.04)
    latency.observed(0.5, 1)
    assert latency.turn_s == pytest.approx(1.0), "another document"


# --- opening a session ------------------------------------------------------------------------------------------------


def test_session_that_the_cell_is_too_slow_for_is_refused_and_leaves_nothing():
    cell = Distant(MemoryCell(), delay_s=0.05)

    async def main():
        backends = [backend_at(cell, seed) for seed in range(3)]
        sessions = [await backend.open_session(2.5) for backend in backends[:2]]
        with pytest.raises(Rejected) as caught:
            await backends[2].open_session(2.5)
        leases = len((await backends[0].status()).details["leases"])
        assert not any(session.lost.is_set() for session in sessions)
        for backend in backends:
            await backend.close()
        return str(caught.value), leases

    said, leases = run(main(), limit_s=100.0)
    assert "too slow" in said
    assert "3 nodes" in said
    assert "at least 3 s, not 2.5 s" in said
    assert leases == len("2")


def test_leases_of_dead_nodes_do_not_keep_out_their_replacements():
    """These leases exist until their counters were seen unchanged for a time to live."""
    cell = Distant(MemoryCell(), delay_s=0.05)

    async def main():
        dead = [backend_at(cell, seed) for seed in range(2)]
        for backend in dead:
            (await backend.open_session(2.5)).abandon()
            await backend.close()
        again = [backend_at(cell, seed) for seed in range(2, 4)]
        sessions = await asyncio.gather(*(backend.open_session(2.5) for backend in again))
        assert not any(session.lost.is_set() for session in sessions)
        for backend in again:
            await backend.close()

    run(main(), limit_s=100.0)


def test_one_slow_call_does_not_refuse_a_session():
    cell = Distant(MemoryCell(), delay_s=0.5)

    async def main():
        backend = backend_at(cell)
        opening = asyncio.create_task(backend.open_session(3.0))
        await asyncio.sleep(0.9)
        cell.delay_s = 0.01
        session = await opening
        await session.close()
        await backend.close()

    run(main(), limit_s=100.0)


def test_error_of_a_node_on_a_slow_cell_says_which_option_to_set():
    cell = Distant(MemoryCell(), delay_s=0.1)

    async def main():
        world = World(wrap=lambda name, _: backend_at(cell), min_nodes=1, keep_alive_interval=0.5)
        world.start("a")
        with pytest.raises(RendezvousConnectionError) as caught:
            await world.join("a")
        return str(caught.value)

    said = run(main(), limit_s=100.0)
    assert "too slow for these time-outs" in said
    assert "Set keep_alive_interval" in said
    assert "0.67 or more" in said


# --- idling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 8, 20])
def test_idle_node_reads_the_cell_at_most_once_a_second_whatever_it_renews(nodes):
    """All causes together: polls, renewals of the session and of the run's lease, and lost races."""
    cell = MemoryCell()
    lines = {f"n{n}": Distant(cell, delay_s=0.002 + n * 0.0001) for n in range(nodes)}

    async def main():
        world = World(wrap=lambda name, _: backend_at(lines[name], int(name[1:])), min_nodes=nodes, last_call_timeout=1)
        for name in lines:
            world.start(name)
        await asyncio.gather(*(world.join(name) for name in lines))
        await asyncio.sleep(30.0)
        before = {name: (line.reads, line.writes) for name, line in lines.items()}
        await asyncio.sleep(100.0)
        return [(line.reads - before[name][0], line.writes - before[name][1]) for name, line in lines.items()]

    calls = run(main(), limit_s=1_000.0)
    assert max(reads for reads, _ in calls) <= 100
    assert min(reads for reads, _ in calls) >= 40, "it still polls"
