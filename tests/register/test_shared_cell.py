"""One process's use of a cell: how often it calls it, how it handles failures, and that it executes writes once."""

import asyncio
import random
from itertools import pairwise

import pytest

from rallypoint.backends.register.backend import RegisterBackend
from rallypoint.backends.register.cell import AsyncCell, BlockingCell
from rallypoint.backends.register.connect import connect
from rallypoint.backends.register.shared_cell import SharedCell
from rallypoint.errors import HistoryGone, OutcomeUnknown, Rejected, RendezvousStateError, Unavailable
from rallypoint.kv import document as documents
from rallypoint.kv.document import Document
from rallypoint.kv.types import Put
from rallypoint.testing.cells import CellFaults, FaultyCell, MemoryCell
from rallypoint.testing.conformance.backend import run_checks
from rallypoint.testing.conformance.backend_concurrency import check_a_read_sees_what_was_written_before_it
from rallypoint.testing.loop import run
from tests.register.kit import Distant, backend_kit
from tests.sim.edits import Edit, edited


def backend_on(cell, seed=0, **options):
    rng = random.Random(seed)
    return RegisterBackend(SharedCell(BlockingCell(cell), rng), rng=rng, **options)


def test_idle_process_polls_once_a_second_and_writes_only_to_renew():
    cell = MemoryCell()

    async def main():
        backend = backend_on(cell)
        session = await backend.open_session(15.0, interval_s=5.0)
        watch = backend.watch("/", (await backend.scan("/")).revision)
        reading = asyncio.create_task(anext(watch, None))
        await asyncio.sleep(30.0)
        reads, writes = cell.reads, cell.writes
        await asyncio.sleep(100.0)
        await session.close()
        await backend.close()
        await reading
        return cell.reads - reads, cell.writes - writes

    reads, writes = run(main(), limit_s=1_000.0)
    assert reads >= 75
    assert reads + writes <= 101, "a write replaces a poll"
    assert writes <= 27


class Timed(AsyncCell):
    """Records the time of each call, and whether it was a write that lost a race."""

    name = "timed"

    def __init__(self, cell: MemoryCell):
        self.cell = cell
        self.calls: list[tuple[float, bool]] = []

    async def get(self):
        self.calls.append((asyncio.get_running_loop().time(), False))
        return self.cell.get_state()

    async def set(self, state, token):
        answer = self.cell.set_state(state, token)
        self.calls.append((asyncio.get_running_loop().time(), not answer[2]))
        return answer


@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_idle_process_uses_the_cell_at_most_once_a_second_including_renewals(nodes):
    shared = MemoryCell()
    cells = [Timed(shared) for _ in range(nodes)]
    calm_at = 40.0

    async def one(seed, cell):
        rng = random.Random(seed)
        backend = RegisterBackend(SharedCell(cell, rng), rng=rng)
        session = await backend.open_session(15.0, interval_s=4.7)
        watch = backend.watch("/", (await backend.scan("/")).revision)
        reading = asyncio.create_task(anext(watch, None))
        await asyncio.sleep(calm_at + 200.0 - asyncio.get_running_loop().time())
        assert not session.lost.is_set()
        session.abandon()
        await backend.close()
        await reading

    async def main():
        await asyncio.gather(*(one(seed, cell) for seed, cell in enumerate(cells)))

    run(main(), limit_s=1_000.0)
    for cell in cells:
        calm = [call for call in cell.calls if calm_at <= call[0]]
        turns = [at for (_, was_slow), (at, _) in pairwise(calm) if not was_slow]
        assert 190 <= len(turns) <= 200
        assert all(later - at >= 1.0 - 1e-9 for at, later in pairwise(turns))


@pytest.mark.parametrize("ttl_s", [0.3, 1.0, 3.0, 9.0])
def test_renewals_of_short_sessions_do_not_wait_for_a_poll(ttl_s):
    async def main():
        backend = backend_on(MemoryCell())
        session = await backend.open_session(ttl_s)
        watch = backend.watch("/", (await backend.scan("/")).revision)
        reading = asyncio.create_task(anext(watch, None))
        await asyncio.sleep(60.0)
        loop = asyncio.get_running_loop()
        waits = []
        for _ in range(20):
            began_at = loop.time()
            assert await backend.keep_alive(session.lease) is not None
            waits.append(loop.time() - began_at)
            await asyncio.sleep(1.237 * ttl_s / 5)
        await session.close()
        await backend.close()
        await reading
        return max(waits)

    assert run(main(), limit_s=1_000.0) <= 0.01


class Rivalled(Distant):
    """A cell on which another writer is faster `rivals` times."""

    rivals = 0

    async def set(self, state, token):
        if self.rivals:
            self.rivals -= 1
            newer, current = self.cell.get_state()
            document = documents.Document.decode(newer, documents.DEFAULT_HISTORY)
            document.sign("rival", self.rivals + 1)
            self.cell.set_state(document.encode(), current)
        return await super().set(state, token)


@pytest.mark.parametrize("seed", range(5))
def test_pause_after_a_lost_race_does_not_grow_for_renewals(seed):
    call_s, rivals = 0.05, 6

    async def main():
        cell, rng = Rivalled(MemoryCell(), delay_s=call_s), random.Random(seed)
        backend = RegisterBackend(SharedCell(cell, rng), rng=rng)
        lease = await backend.grant(15.0)
        cell.rivals = rivals
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        await asyncio.gather(backend.keep_alive(lease), backend.txn((), [Put("/a", b"1")]))
        took_s = loop.time() - began_at
        await backend.close()
        return took_s

    assert run(main()) <= 3 * call_s * (rivals + 1), "a read, a write and a pause that is no longer than a write"


def test_change_is_seen_soon_after_another_change_and_within_a_second_otherwise():
    cell = MemoryCell()
    lags = []

    async def main():
        writer, reader = backend_on(cell, 1), backend_on(cell, 2)
        loop = asyncio.get_running_loop()
        watch = reader.watch("/", (await reader.scan("/")).revision)
        for pause_s in (0.0, 0.1, 1.0, 30.0):
            reading = asyncio.create_task(anext(watch))
            await asyncio.sleep(pause_s)
            began_at = loop.time()
            await writer.txn((), [Put("/a", b"%g" % pause_s)])
            await reading
            lags.append(loop.time() - began_at)
        await writer.close()
        await reader.close()

    run(main(), limit_s=1_000.0)
    assert lags[0] <= 0.05
    assert lags[1] <= 0.05
    assert lags[2] <= 0.2
    assert lags[3] <= 1.0


def test_concurrent_requests_are_written_together():
    cell = MemoryCell()

    async def main():
        backend = backend_on(cell)
        await backend.scan("/")
        before = cell.writes
        await asyncio.gather(*(backend.txn((), [Put(f"/{n}", b"x")]) for n in range(50)))
        await backend.close()
        return cell.writes - before

    assert run(main()) <= 2


def test_connections_of_one_process_share_reads_and_writes():
    cell = MemoryCell()

    async def main():
        backends = [connect("key", lambda: BlockingCell(cell), 60.0) for _ in range(5)]
        await asyncio.gather(*(backend.open_session(15.0) for backend in backends))
        assert len({id(backend.shared) for backend in backends}) == 1
        writes = cell.writes
        for backend in backends[1:]:
            await backend.close()
        await backends[0].scan("/")
        await backends[0].close()
        return writes

    assert run(main(), limit_s=100.0) <= 2


def test_request_waits_for_a_cell_that_is_available_late():
    cell = MemoryCell()
    faulty = FaultyCell(cell, random.Random(1), CellFaults(unavailable=1.0))
    reached = []

    async def main():
        backend = backend_on(faulty)
        backend.on_reachability(lambda error: reached.append(error is None))
        asking = asyncio.create_task(backend.txn((), [Put("/a", b"x")]))
        await asyncio.sleep(10.0)
        assert not asking.done()
        faulty.faults = CellFaults()
        result = await asking
        await backend.close()
        return result.committed

    assert run(main(), limit_s=100.0)
    assert reached == [False, True]


@pytest.mark.parametrize("seed", range(5))
def test_cell_that_is_back_is_written_at_once_however_long_the_failed_write_took(seed):
    cell = MemoryCell()
    distant = Distant(cell, patience_s=0.9)

    async def main():
        loop, rng = asyncio.get_running_loop(), random.Random(seed)
        backend = RegisterBackend(SharedCell(distant, rng), rng=rng)
        await backend.txn((), [Put("/a", b"1")])
        distant.is_up = False
        asking = asyncio.create_task(backend.txn((), [Put("/a", b"2")]))
        await asyncio.sleep(0.5)
        distant.is_up = True  # the pending write fails all the same, after its 0.9 s
        other = backend_on(cell, 10)
        await other.txn((), [Put("/b", b"1")])
        await asking
        await backend.close()
        await other.close()
        return loop.time()

    assert run(main(), limit_s=100.0) <= 1.0


def test_call_that_times_out_says_why():
    faulty = FaultyCell(MemoryCell(), random.Random(1), CellFaults(unavailable=1.0))

    async def main():
        backend = backend_on(faulty, call_timeout_s=3.0)
        with pytest.raises(Unavailable) as caught:
            await backend.txn((), [Put("/a", b"x")])
        await backend.close()
        return str(caught.value)

    said = run(main(), limit_s=100.0)
    assert "3 s" in said
    assert "could not be reached" in said


class Silent(MemoryCell):
    """Does not execute writes and gives no answer to them."""

    is_silent = False

    def set_state(self, state, token=None):
        return None if self.is_silent else super().set_state(state, token)


def test_write_without_an_answer_ends_with_outcome_unknown():
    cell = Silent()

    async def main():
        backend = backend_on(cell)
        await backend.scan("/")
        cell.is_silent = True
        with pytest.raises(OutcomeUnknown):
            await backend.txn((), [Put("/a", b"x")])
        cell.is_silent = False
        assert not (await backend.scan("/")).items
        await backend.close()

    run(main(), limit_s=100.0)


def test_damaged_document_is_an_error_of_every_call_and_is_not_changed():
    cell = MemoryCell()

    async def main():
        backend = backend_on(cell)
        session = await backend.open_session(5.0)
        watch = backend.watch("/", (await backend.scan("/")).revision)
        reading = asyncio.create_task(anext(watch))
        await asyncio.sleep(0.1)
        cell.corrupt(b"rallypt\x00 not really")
        for call in (
            lambda: backend.scan("/"),
            lambda: backend.txn((), [Put("/a", b"x")]),
            lambda: backend.keep_alive(session.lease),
            backend.status,
        ):
            with pytest.raises(RendezvousStateError, match="remove it"):
                await call()
        with pytest.raises(RendezvousStateError):
            await reading
        assert "remove it" in await session.lost
        await backend.close()

    run(main(), limit_s=100.0)
    assert cell.get_state()[0] == b"rallypt\x00 not really"


def test_cell_that_goes_back_in_time_is_not_followed():
    cell = MemoryCell()

    async def main():
        backend = backend_on(cell, call_timeout_s=2.0)
        await backend.txn((), [Put("/a", b"1")])
        old = cell.get_state()[0]
        await backend.txn((), [Put("/a", b"2")])
        new = cell.get_state()[0]
        cell.corrupt(old)
        with pytest.raises(Unavailable, match="returned version 1 after version 2"):
            await backend.scan("/")
        cell.corrupt(new)
        (item,) = (await backend.scan("/")).items
        await backend.close()
        return item.value

    assert run(main(), limit_s=100.0) == b"2"


def test_cell_that_was_emptied_starts_a_new_store_and_ends_watches():
    cell = MemoryCell()

    async def main():
        backend = backend_on(cell)
        first = await backend.txn((), [Put("/a", b"1")])
        lease = await backend.grant(60.0)
        watch = backend.watch("/", first.revision)
        reading = asyncio.create_task(anext(watch))
        await asyncio.sleep(0.1)
        cell._state = None
        second = await backend.txn((), [Put("/b", b"2")])
        assert second.revision > first.revision
        with pytest.raises(HistoryGone):
            await reading
        assert not await backend.keep_alive(lease)
        await backend.close()
        return [item.key for item in (await again()).items]

    async def again():
        backend = backend_on(cell, 5)
        scanned = await backend.scan("/")
        await backend.close()
        return scanned

    assert run(main(), limit_s=100.0) == ["/b"]


def test_only_the_request_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(documents, "LARGEST", 20_000)
    cell = MemoryCell()

    async def main():
        backend = backend_on(cell)
        sizes = (1_000, 30_000, 2_000)
        results = await asyncio.gather(
            *(backend.txn((), [Put(f"/{size}", b"x" * size)]) for size in sizes), return_exceptions=True
        )
        keys = [item.key for item in (await backend.scan("/")).items]
        await backend.close()
        return results, keys

    results, keys = run(main(), limit_s=100.0)
    assert isinstance(results[1], Rejected)
    assert "tcp://" in str(results[1])
    assert keys == ["/1000", "/2000"]


def test_bug_in_a_cell_is_an_error_of_each_call():
    class Defective(MemoryCell):
        def get_state(self):
            return "nonsense"

    async def main():
        backend = backend_on(Defective())
        for _ in range(2):
            with pytest.raises(Rejected, match="failed"):
                await backend.scan("/")
        await backend.close()

    run(main(), limit_s=100.0)


# --- exactly once -----------------------------------------------------------------------------------------------------

BAD = CellFaults(unavailable=0.05, unknown=0.1, broken=0.1, late=0.1)


def sum_over_a_bad_cell(seed: int) -> bytes:
    """Fifty times one, added by five processes."""
    cell = MemoryCell()

    async def main():
        backends = [backend_on(FaultyCell(cell, random.Random(f"{seed} {n}"), BAD), n) for n in range(5)]

        async def add(backend):
            for _ in range(10):
                await backend.add("/sum", 1)

        await asyncio.gather(*map(add, backends))
        value = (await backends[0].get("/sum")).item.value
        for backend in backends:
            await backend.close()
        return value

    return run(main(), seed=seed, limit_s=1_000.0)


@pytest.mark.parametrize("seed", range(10))
def test_adds_of_many_processes_over_a_bad_cell_count_once_each(seed):
    assert sum_over_a_bad_cell(seed) == b"50"


def test_register_that_forgets_what_it_wrote_is_noticed():
    with edited(Edit(Document, "has_write", "return known[0] >= seq", "return False")):
        assert any(int(sum_over_a_bad_cell(seed)) > 50 for seed in range(10))


def test_register_that_answers_reads_from_memory_is_noticed():
    edit = Edit(
        SharedCell, "_attempt", "if is_fresh:\n                self._settle", "if True:\n                self._settle"
    )
    cell = MemoryCell()
    with edited(edit):
        report = run(
            run_checks(backend_kit(lambda: cell), [check_a_read_sees_what_was_written_before_it]), limit_s=100.0
        )
    assert report.failed
