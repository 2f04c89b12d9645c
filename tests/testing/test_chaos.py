"""Each fault occurs, has the documented effect, and stays within the contract."""

import asyncio
import hashlib
import random

import pytest

from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import BackendError, HistoryGone, LeaseGone, OutcomeUnknown, Unavailable
from rallypoint.kv.types import Put, VersionIs
from rallypoint.testing.chaos import ChaosBackend, Faults
from rallypoint.testing.loop import run

LIMIT_S = 10_000.0


def now() -> float:
    return asyncio.get_running_loop().time()


class World:
    """A server with a faulty connection and one without faults."""

    def __init__(self, faults: Faults, seed: int = 0) -> None:
        self.server = MemoryServer()
        self.clean = MemoryBackend(self.server)
        self.inner = CountingBackend(self.server)
        self.chaos = ChaosBackend(self.inner, random.Random(seed), faults)

    async def value(self, key: str) -> bytes | None:
        item = (await self.clean.get(key)).item
        return None if item is None else item.value


class CountingBackend(MemoryBackend):
    """Counts the requests for watches."""

    def __init__(self, server):
        super().__init__(server)
        self.watches = 0

    def watch(self, prefix, after_revision):
        self.watches += 1
        return super().watch(prefix, after_revision)


async def put(backend, key, value=b"x", lease=0) -> int:
    return (await backend.txn((), (Put(key, value, lease),))).revision


async def take(watch, count) -> list[int]:
    return [(await anext(watch)).revision for _ in range(count)]


# --- calls ------------------------------------------------------------------------------------------------------------


def test_calls_are_delayed_before_and_after_they_are_executed():
    async def main():
        world = World(Faults(delay_s=(1.0, 2.0)))
        call = asyncio.create_task(put(world.chaos, "/a"))
        await asyncio.sleep(0.99)
        assert await world.value("/a") is None
        await asyncio.sleep(1.02)
        assert await world.value("/a") == b"x"
        await call
        assert 2.0 <= now() <= 4.0

    run(main(), limit_s=LIMIT_S)


def test_unavailable_call_was_not_executed():
    async def main():
        world = World(Faults(unavailable=1.0))
        for call in (put(world.chaos, "/a"), world.chaos.add("/a", 1), world.chaos.get("/a"), world.chaos.grant(1.0)):
            with pytest.raises(Unavailable):
                await call
        await asyncio.sleep(100.0)
        assert await world.value("/a") is None

    run(main(), limit_s=LIMIT_S)


def test_unknown_outcome_can_mean_that_it_was_executed():
    async def main():
        world = World(Faults(unknown_done=1.0))
        with pytest.raises(OutcomeUnknown):
            await world.chaos.add("/n", 1)
        assert await world.value("/n") == b"1"
        await asyncio.sleep(100.0)
        assert await world.value("/n") == b"1"

    run(main(), limit_s=LIMIT_S)


def test_unknown_outcome_can_mean_that_it_was_never_executed():
    async def main():
        world = World(Faults(unknown_not_done=1.0))
        with pytest.raises(OutcomeUnknown):
            await world.chaos.add("/n", 1)
        await asyncio.sleep(100.0)
        assert await world.value("/n") is None

    run(main(), limit_s=LIMIT_S)


def test_unknown_outcome_can_mean_that_it_is_executed_later_and_once():
    async def main():
        world = World(Faults(unknown_late=1.0, ghost_delay_s=(3.0, 4.0)))
        with pytest.raises(OutcomeUnknown):
            await world.chaos.add("/n", 1)
        assert await world.value("/n") is None
        await asyncio.sleep(2.9)
        assert await world.value("/n") is None
        await world.chaos.settled()
        assert 3.0 <= now() <= 4.0
        assert await world.value("/n") == b"1"
        await asyncio.sleep(100.0)
        assert await world.value("/n") == b"1"

    run(main(), limit_s=LIMIT_S)


def test_ghost_outlives_the_connection_that_sent_it():
    async def main():
        world = World(Faults(unknown_late=1.0, ghost_delay_s=(3.0, 4.0)))
        with pytest.raises(OutcomeUnknown):
            await put(world.chaos, "/a")
        await world.chaos.close()
        assert now() == 0.0
        with pytest.raises(Unavailable):
            await world.chaos.get("/a")
        await world.chaos.settled()
        assert await world.value("/a") == b"x"
        with pytest.raises(Unavailable):
            await world.inner.get("/a")

    run(main(), limit_s=LIMIT_S)


def test_cancelled_call_may_be_executed_later():
    async def main():
        world = World(Faults(delay_s=(5.0, 5.0), unknown_late=1.0, ghost_delay_s=(3.0, 3.0)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await put(world.chaos, "/a")
        assert await world.value("/a") is None
        await world.chaos.settled()
        assert (now(), await world.value("/a")) == (4.0, b"x")

    run(main(), limit_s=LIMIT_S)


def test_reads_never_have_an_unknown_outcome():
    async def main():
        world = World(Faults(unknown_done=0.3, unknown_not_done=0.3, unknown_late=0.4))
        for _ in range(50):
            await world.chaos.get("/a")
            await world.chaos.scan("/")
            await world.chaos.status()

    run(main(), limit_s=LIMIT_S)


def test_rejection_arrives_or_is_lost_like_any_answer():
    async def main():
        world = World(Faults.none())
        with pytest.raises(LeaseGone):
            await put(world.chaos, "/a", b"x", lease=77)
        world.chaos.faults = Faults(unknown_done=1.0)
        with pytest.raises(OutcomeUnknown):
            await put(world.chaos, "/a", b"x", lease=77)
        assert await world.value("/a") is None

    run(main(), limit_s=LIMIT_S)


def test_all_outcomes_occur_and_every_sum_is_accounted_for():
    async def main():
        world = World(Faults(unavailable=0.2, unknown_done=0.2, unknown_not_done=0.2, unknown_late=0.2), seed=5)
        done = unknown = unavailable = 0
        for _ in range(200):
            try:
                await world.chaos.add("/n", 1)
                done += 1
            except OutcomeUnknown:
                unknown += 1
            except Unavailable:
                unavailable += 1
        await world.chaos.settled()
        assert min(done, unknown, unavailable) > 20
        assert done < int(await world.value("/n")) < done + unknown

    run(main(), limit_s=LIMIT_S)


# --- cuts -------------------------------------------------------------------------------------------------------------


def test_cut_makes_calls_hang_until_they_time_out_without_executing_them():
    async def main():
        world = World(Faults(call_timeout_s=5.0))
        world.chaos.cut()
        assert world.chaos.is_cut
        with pytest.raises(Unavailable):
            await world.chaos.get("/a")
        assert now() == 5.0
        seen = set()
        for _ in range(20):
            began = now()
            with pytest.raises((Unavailable, OutcomeUnknown)) as caught:
                await put(world.chaos, "/a")
            assert now() == began + 5.0
            seen.add(caught.type)
        assert seen == {Unavailable, OutcomeUnknown}
        world.chaos.heal()
        await asyncio.sleep(100.0)
        assert await world.value("/a") is None

    run(main(), limit_s=LIMIT_S)


def test_call_continues_if_the_cut_is_healed_in_time():
    async def main():
        world = World(Faults(call_timeout_s=5.0))
        world.chaos.cut()
        asyncio.get_running_loop().call_later(4.0, world.chaos.heal)
        await put(world.chaos, "/a")
        assert (now(), world.chaos.is_cut, await world.value("/a")) == (4.0, False, b"x")

    run(main(), limit_s=LIMIT_S)


def test_call_whose_answer_is_cut_off_was_executed():
    async def main():
        world = World(Faults(call_timeout_s=5.0))
        world.chaos.cut(requests=False)
        with pytest.raises(OutcomeUnknown):
            await put(world.chaos, "/a")
        assert (now(), await world.value("/a")) == (5.0, b"x")
        with pytest.raises(Unavailable):
            await world.chaos.get("/a")

    run(main(), limit_s=LIMIT_S)


def test_ghost_waits_for_the_cut_to_be_healed():
    async def main():
        world = World(Faults(unknown_late=1.0, ghost_delay_s=(1.0, 1.0), call_timeout_s=2.0))
        world.chaos.cut()
        with pytest.raises(OutcomeUnknown):
            await put(world.chaos, "/a")
        await asyncio.sleep(50.0)
        assert await world.value("/a") is None
        world.chaos.heal()
        await world.chaos.settled()
        assert await world.value("/a") == b"x"

    run(main(), limit_s=LIMIT_S)


@pytest.mark.parametrize("ways", [{}, {"requests": False}, {"answers": False}])
def test_watch_stalls_while_cut_and_misses_nothing(ways):
    async def main():
        world = World(Faults.none())
        watch = world.chaos.watch("/", 1)
        written = [await put(world.clean, "/a")]
        seen = await take(watch, 1)
        reading = asyncio.create_task(take(watch, 3))
        await asyncio.sleep(1.0)
        world.chaos.cut(**ways)
        written += [await put(world.clean, "/a") for _ in range(3)]
        await asyncio.sleep(100.0)
        assert not reading.done()
        assert watch.ready() is None
        world.chaos.heal()
        seen += await reading
        assert (seen, now()) == (written, 101.0)

    run(main(), limit_s=LIMIT_S)


# --- watches ----------------------------------------------------------------------------------------------------------


def test_delays_of_watches_are_independent_of_each_other():
    async def main(seed):
        world = World(Faults(watch_delay_s=(0.0, 2.0)), seed)
        order = []

        async def read(name, watch):
            async for batch in watch:
                order.append((name, batch.revision))  # noqa: PERF401 (the order in time matters)

        tasks = [asyncio.create_task(read(name, world.chaos.watch("/", 1))) for name in "ab"]
        written = []
        for _ in range(10):
            written.append(await put(world.clean, "/a"))
            await asyncio.sleep(1.0)
        await asyncio.sleep(100.0)
        for task, name in zip(tasks, "ab", strict=True):
            assert [revision for reader, revision in order if reader == name] == written
            task.cancel()
        return order

    orders = [run(main(seed), limit_s=LIMIT_S) for seed in range(5)]
    assert any(order.index(("a", n)) > order.index(("b", n + 1)) for order in orders for n in range(2, 11))
    assert any(order.index(("b", n)) > order.index(("a", n + 1)) for order in orders for n in range(2, 11))


def test_interrupted_watch_resumes_without_gap_or_repetition():
    async def main():
        world = World(Faults(watch_interrupted=0.5, watch_delay_s=(0.0, 0.2)))
        watch = world.chaos.watch("/", 1)
        reading = asyncio.create_task(take(watch, 50))
        written = []
        for _ in range(50):
            written.append(await put(world.clean, "/a"))
            await asyncio.sleep(0.3)
        assert await reading == written
        assert world.inner.watches > 10

    run(main(), limit_s=LIMIT_S)


def test_history_gone_is_raised_again_by_every_further_read():
    async def main():
        world = World(Faults(history_gone=1.0))
        revision = await put(world.clean, "/a")
        watch = world.chaos.watch("/", 1)
        for _ in range(2):
            with pytest.raises(HistoryGone) as caught:
                await anext(watch)
            assert caught.value.oldest == revision
        world.chaos.faults = Faults.none()
        scanned = await world.chaos.scan("/")
        fresh = world.chaos.watch("/", scanned.revision)
        later = await put(world.clean, "/a")
        assert await take(fresh, 1) == [later]

    run(main(), limit_s=LIMIT_S)


def test_cancelled_reader_loses_no_batch():
    async def main():
        world = World(Faults(watch_delay_s=(0.0, 3.0), watch_interrupted=0.2))
        written = [await put(world.clean, "/a") for _ in range(20)]
        watch = world.chaos.watch("/", 1)
        seen, given_up = [], 0
        while len(seen) < 20:
            try:
                async with asyncio.timeout(0.5):
                    seen += await take(watch, 1)
            except TimeoutError:
                given_up += 1
            while (batch := watch.ready()) is not None:
                seen.append(batch.revision)
        assert seen == written
        assert given_up > 0

    run(main(), limit_s=LIMIT_S)


@pytest.mark.parametrize("cut", [False, True])
def test_cancel_ends_a_watch_at_once_even_while_it_is_late_or_cut(cut):
    async def main():
        world = World(Faults(watch_delay_s=(50.0, 60.0)))
        await put(world.clean, "/a")
        watch = world.chaos.watch("/", 1)
        reading = asyncio.create_task(anext(watch, "ended"))
        await asyncio.sleep(1.0)
        if cut:
            world.chaos.cut()
        watch.cancel()
        assert (await reading, now()) == ("ended", 1.0)

    run(main(), limit_s=LIMIT_S)


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_missed_renewals_are_reported_to_the_session():
    missed = []

    async def main():
        world = World(Faults(keep_alive_missed=0.5))
        session = await world.chaos.open_session(30.0, interval_s=1.0, on_missed=missed.append)
        await asyncio.sleep(100.0)
        lost = session.lost.is_set()
        await session.close()
        return lost

    assert run(main(), limit_s=LIMIT_S) is False
    assert len(missed) > 20


def test_revoked_lease_is_a_lost_session():
    async def main():
        world = World(Faults(lease_ended=1.0))
        session = await world.chaos.open_session(6.0)
        await put(world.clean, "/a", b"x", session.lease)
        assert "the backend ended the session" in await session.lost
        assert (now(), await world.value("/a")) == (2.0, None)

    run(main(), limit_s=LIMIT_S)


def test_cut_loses_the_session_no_later_than_the_backend_does():
    async def main():
        world = World(Faults.none())
        session = await world.chaos.open_session(6.0)
        revision = await put(world.clean, "/a", b"x", session.lease)
        await asyncio.sleep(3.0)
        world.chaos.cut()
        gone = asyncio.create_task(anext(world.clean.watch("/a", revision)))
        await session.lost
        assert now() == 8.0
        await gone
        assert now() == 8.0

    run(main(), limit_s=LIMIT_S)


def test_closing_ends_sessions_and_watches():
    async def main():
        world = World(Faults.none())
        session = await world.chaos.open_session(6.0)
        revision = await put(world.clean, "/a", b"x", session.lease)
        reading = asyncio.create_task(anext(world.chaos.watch("/", revision), "ended"))
        await asyncio.sleep(1.0)
        await world.chaos.close()
        assert await reading == "ended"
        with pytest.raises(Unavailable):
            world.chaos.watch("/", 1)
        await asyncio.sleep(6.0)
        assert await world.value("/a") is None

    run(main(), limit_s=LIMIT_S)


# --- all together -----------------------------------------------------------------------------------------------------


async def claim_places(world: World, names: str) -> dict[str, int]:
    """Each client takes the first free place, create-only, despite all faults. Place by name of the client."""
    taken: dict[str, int] = {}

    async def claim(name: str) -> None:
        place = 0
        while name not in taken:
            try:
                key = f"/place/{place}"
                result = await world.chaos.txn((VersionIs(key, 0),), (Put(key, name.encode()),))
                holder = name.encode() if result.committed else result.results[0].item.value
            except Unavailable:
                continue
            except OutcomeUnknown:
                await asyncio.sleep(20.0)  # all ghosts have been executed by then
                holder = None
                while holder is None:
                    try:
                        item = (await world.chaos.get(key)).item
                        holder = item.value if item is not None else b""
                    except BackendError:
                        continue
            if holder == name.encode():
                taken[name] = place
            elif holder:
                place += 1

    await asyncio.gather(*(claim(name) for name in names))
    return taken


@pytest.mark.parametrize("seed", range(20))
def test_careful_clients_get_distinct_places_despite_all_faults(seed):
    async def main():
        world = World(Faults.cruel(), seed)
        taken = await claim_places(world, "abcdefgh")
        await world.chaos.settled()
        scanned = await world.clean.scan("/place/")
        assert sorted(taken.values()) == list(range(8))
        assert {item.key: item.value for item in scanned.items} == {f"/place/{n}": k.encode() for k, n in taken.items()}

    run(main(), seed=seed, limit_s=LIMIT_S)


def test_same_seed_gives_the_same_trace():
    def trace(seed):
        async def main():
            world = World(Faults.cruel(), seed)
            await claim_places(world, "abcdefgh")
            watch = world.clean.watch("/", 1)
            return repr(await take(watch, 8)), repr(await world.clean.scan("/")), now()

        return hashlib.sha256(repr(run(main(), seed=seed, limit_s=LIMIT_S)).encode()).hexdigest()

    traces = [trace(seed) for seed in range(5)]
    assert traces == [trace(seed) for seed in range(5)]
    assert len(set(traces)) == 5
