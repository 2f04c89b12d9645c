"""The round's store on the memory backend: conformance with and without faults, unknown outcomes, races and errors."""

import asyncio
import gc
from dataclasses import replace
from datetime import timedelta

import pytest

import rallypoint
from rallypoint.backends.contract import Limits
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import OutcomeUnknown, Rejected, StoreError, StoreTimeoutError
from rallypoint.kv.types import Put
from rallypoint.store import AsyncStore
from rallypoint.testing.chaos import Faults
from rallypoint.testing.conformance import store_keys, store_rounds, store_waits
from rallypoint.testing.conformance.kit import NotConforming
from rallypoint.testing.conformance.store import STORE_CHECKS, StoreKit, run_store_checks
from rallypoint.testing.conformance.store_kit import started
from rallypoint.testing.loop import run
from tests.patience import in_thread, result_of, unique, until

MILD = Faults(
    delay_s=(0.0, 0.02),
    unavailable=0.1,
    watch_delay_s=(0.0, 0.1),
    watch_interrupted=0.1,
    watch_down_s=(0.0, 0.1),
)
UNKNOWN = replace(MILD, history_gone=0.1, unknown_done=0.15, unknown_not_done=0.15, unknown_late=0.1)


class Narrow(MemoryBackend):
    """A backend that enforces the lowest limits that a backend may have."""

    limits = Limits(max_txn_ops=8, max_txn_bytes=500_000)

    async def txn(self, compares, then, otherwise=()):
        size = sum(len(op.value) for op in then if isinstance(op, Put))
        if max(len(compares), len(then), len(otherwise)) > self.limits.max_txn_ops or size > self.limits.max_txn_bytes:
            raise Rejected(f"too large: {len(then)} operations, {size} bytes")
        return await super().txn(compares, then, otherwise)


def kit_of(backend=MemoryBackend, **changes) -> StoreKit:
    server = MemoryServer()

    async def connect():
        return backend(server)

    return StoreKit(connect, asyncio.sleep, **{"run_id": "run", "lease_slack_s": 0.0} | changes)


# --- conformance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", STORE_CHECKS)
def test_store_conforms_on_virtual_time(check):
    run(check(kit_of()), limit_s=600.0)


@pytest.mark.parametrize("seed", range(3))
def test_store_conforms_in_any_order_of_tasks(seed):
    report = run(run_store_checks(kit_of(seed=seed)), seed=seed, limit_s=3_600.0)
    assert report.conforming, str(report)
    assert len(report.passed) == len(STORE_CHECKS)


@pytest.mark.parametrize("seed", range(5))
def test_store_conforms_under_mild_faults(seed):
    report = run(run_store_checks(kit_of(seed=seed, faults=MILD)), seed=seed, limit_s=3_600.0)
    assert report.conforming, str(report)


@pytest.mark.parametrize("seed", range(5))
def test_store_conforms_if_watches_lose_their_history(seed):
    checks = [check for check in STORE_CHECKS if check is not store_waits.check_watch_gives_every_change_of_a_key]
    faults = replace(MILD, history_gone=0.2)
    report = run(run_store_checks(kit_of(seed=seed, faults=faults), checks), seed=seed, limit_s=3_600.0)
    assert report.conforming, str(report)


def test_store_conforms_on_a_backend_with_low_limits():
    checks = [*store_keys.CHECKS, *store_waits.CHECKS]
    checks.remove(store_keys.check_values_of_all_kinds)  # its largest value exceeds the limit
    report = run(run_store_checks(kit_of(Narrow), checks), limit_s=3_600.0)
    assert report.conforming, str(report)


def test_every_store_check_documents_its_guarantee():
    for check in STORE_CHECKS:
        assert check.__name__.startswith("check_")
        assert check.__doc__.endswith("."), check.__name__
    assert len({check.__name__ for check in STORE_CHECKS}) == len(STORE_CHECKS)


async def _unfenced(self, what, compares, ops, *, idempotent=False):
    return await self._backend.txn(compares or (), ops)


async def _add_in_two_steps(self, key, amount):
    number = int(await self.get(key)) + amount if await self.check([key]) else amount
    await asyncio.sleep(0)
    await self.set(key, f"{number}")
    return number


async def _meet_without_waiting(self, verb, name, value, timeout_s):
    return [value] * self.world_size


async def _peek(self, what, path):
    item = (await self._backend.get(path)).item
    if item is None:
        raise StoreTimeoutError(what)
    return item


BROKEN = {
    "_transact": (_unfenced, store_rounds.check_who_left_is_fenced),
    "add": (_add_in_two_steps, store_keys.check_adds_of_many_members_lose_nothing),
    "_meet": (_meet_without_waiting, store_waits.check_barrier_holds_everybody_until_the_last_comes),
    "_await_item": (_peek, store_waits.check_get_waits_until_another_member_sets),
    "_path": (lambda self, key: f"/rallypoint/shared/{key}", store_rounds.check_rounds_do_not_see_each_other),
    "_put": (lambda self, key, value: Put(self._path(key), value[:9]), store_keys.check_values_of_all_kinds),
}


@pytest.mark.parametrize("method", BROKEN)
def test_broken_store_does_not_conform(monkeypatch, method):
    broken, check = BROKEN[method]
    monkeypatch.setattr(AsyncStore, method, broken)
    with pytest.raises((NotConforming, StoreError)):
        run(check(kit_of()), limit_s=600.0)


# --- unknown outcomes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_barrier_and_gather_succeed_despite_unknown_outcomes(seed):
    async def main():
        kit = kit_of(seed=seed, faults=UNKNOWN)
        async with kit.members(3) as group:
            for turn in range(10):
                await kit.soon("all pass", asyncio.gather(*(store.barrier("b") for store in group.stores)))
                values = await kit.soon("g", asyncio.gather(*(store.gather("g", f"{turn}") for store in group.stores)))
                assert values == [[b"%d" % turn] * 3] * 3

    run(main(), seed=seed, limit_s=600.0)


@pytest.mark.parametrize("seed", range(10))
def test_read_with_an_unknown_outcome_is_repeated(seed):
    async def main():
        async with kit_of(seed=seed).members(1) as group:
            (store,) = group.stores
            await store.multi_set(["a", "b"], ["1", "2"])
            store._backend.faults = UNKNOWN
            for _ in range(20):
                assert await store.check(["a", "b"])
                assert await store.num_keys() == 2
                assert await store.multi_get(["a", "b"]) == [b"1", b"2"]
            with pytest.raises(StoreTimeoutError) as caught:
                await store.wait(["a", "c"], 3.0)
            return caught.value.missing

    assert run(main(), seed=seed, limit_s=600.0) in [("c",), ("a", "c")]  # the latter if the backend did not answer


def test_write_with_an_unknown_outcome_is_not_repeated():
    async def main():
        async with kit_of().members(1) as group:
            (store,) = group.stores
            store._backend.faults = replace(Faults.none(), unknown_done=1.0)
            for write in (store.set("a", b""), store.append("b", b"1"), store.add("c", 1), store.delete_key("d")):
                with pytest.raises(OutcomeUnknown):
                    await write
            store._backend.faults = Faults.none()
            assert await store.multi_get(["a", "b", "c"]) == [b"", b"1", b"1"]

    run(main(), limit_s=60.0)


class DyingLast(MemoryBackend):
    """The last rank to arrive hangs before it can finish the barrier or gather."""

    hangs = False

    async def txn(self, compares, then, otherwise=()):
        if self.hangs and any(isinstance(op, Put) and op.key.endswith("/done") for op in then):
            await asyncio.get_running_loop().create_future()
        return await super().txn(compares, then, otherwise)


# --- races and errors -------------------------------------------------------------------------------------------------


def test_compare_set_with_empty_expected_value_writes_if_an_empty_key_is_deleted_concurrently():
    async def main():
        async with kit_of().members(2) as group:
            one, other = group.stores
            await other.set("k", b"")
            refused = []

            async def txn(compares, then, otherwise=()):
                result = await MemoryBackend.txn(inner, compares, then, otherwise)
                if not result.committed and not refused:
                    refused.append(result)
                    await other.delete_key("k")
                return result

            inner = one._backend._inner
            inner.txn = txn
            assert await one.compare_set("k", b"", b"new") == b"new"
            assert await other.get("k") == b"new"
            assert refused

    run(main(), limit_s=60.0)


def test_watch_that_lost_its_history_reports_only_changes_that_happened():
    async def main():
        async with kit_of().members(2) as group:
            one, other = group.stores
            one._backend.faults = replace(Faults.none(), history_gone=1.0)
            seen = []

            async def follow():
                async for value in one.watch("a"):
                    seen.append(value)  # noqa: PERF401  the list is read concurrently

            async with started(follow()):
                for n in range(5):  # each change of a longer key breaks the watch
                    await other.set("a/b", f"{n}")
                    await asyncio.sleep(1.0)
                assert seen == []
                await other.set("a", b"1")
                await asyncio.sleep(1.0)
                await other.set("a/b", b"")
                await asyncio.sleep(1.0)
                await other.delete_key("a")
                await asyncio.sleep(1.0)
                await other.set("a/b", b"")
                await asyncio.sleep(1.0)
        assert seen == [b"1", None]

    run(main(), limit_s=60.0)


def test_request_that_the_backend_rejects_is_a_store_error():
    async def main():
        async with kit_of(Narrow).members(1) as group:
            (store,) = group.stores
            for write in (store.set("k", b"x" * 600_000), store.multi_set(["a", "k"], ["", b"x" * 600_000])):
                with pytest.raises(StoreError, match="too large"):
                    await write

    run(main(), limit_s=60.0)


def test_store_of_a_closed_backend_raises_at_once():
    async def main():
        async with kit_of().members(2) as group:
            store = group.stores[0]
            async with started(store.get("absent")) as getting, started(store.barrier("b")) as meeting:
                await asyncio.sleep(1.0)
                store.end("the handler was shut down")
                await store._backend.close()
                before = asyncio.get_running_loop().time()
                for waiting in (getting, meeting, store.set("a", b""), store.check(["a"])):
                    with pytest.raises(StoreError, match="the handler was shut down"):
                        await waiting
                assert asyncio.get_running_loop().time() - before < 1.0

    run(main(), limit_s=60.0)


def test_long_lists_of_missing_keys_are_shortened():
    async def main():
        async with kit_of().members(1) as group:
            with pytest.raises(StoreTimeoutError) as caught:
                await group.stores[0].wait([f"key{n}" for n in range(1000)], 1.0)
        assert len(caught.value.missing) == 1000
        assert len(str(caught.value)) < 500
        assert "980 more" in str(caught.value)

    run(main(), limit_s=60.0)


@pytest.mark.parametrize("cancelled", [False, True])
def test_ranks_meet_when_one_retries_after_a_time_out(cancelled):
    async def give_up(meeting):
        if cancelled:
            async with started(meeting) as task:
                await asyncio.sleep(1.0)
                task.cancel()
                await asyncio.wait({task})
        else:
            with pytest.raises(StoreTimeoutError, match="absent: 1"):
                await meeting

    async def main():
        async with kit_of().members(2) as group:
            one, other = group.stores
            for turn in range(3):
                await give_up(one.barrier("b", 1.0))
                await other.barrier("b", 1.0)  # the first rank has arrived, and will arrive again
                await one.barrier("b", 1.0)
                await give_up(one.gather("g", "old", 1.0))
                values = await asyncio.gather(one.gather("g", f"{turn}", 1.0), other.gather("g", "x", 1.0))
                assert values == [[b"%d" % turn, b"x"]] * 2

    run(main(), limit_s=60.0)


@pytest.mark.parametrize("verb", ["barrier", "gather"])
def test_ranks_meet_although_the_last_one_died_on_arrival(verb):
    def meet(store, name):
        return store.barrier(name, 2.0) if verb == "barrier" else store.gather(name, str(store.rank), 2.0)

    async def main():
        async with kit_of(DyingLast).members(3) as group:
            one, other, last = group.stores
            dying = last._backend._inner
            dying.hangs = True
            async with started(meet(one, "b")) as first, started(meet(other, "b")) as second, started(meet(last, "b")):
                met = await asyncio.gather(first, second)
            assert met == ([None] * 2 if verb == "barrier" else [[b"0", b"1", b"2"]] * 2)
            dying.hangs = False
            await meet(last, "b")  # if it was only slow: the others have already met
            assert len(await asyncio.gather(*(meet(store, "b") for store in group.stores))) == 3

    run(main(), limit_s=60.0)


# --- the blocking API -------------------------------------------------------------------------------------------------


@pytest.fixture
def two_worlds():
    url = f"memory://{unique()}/run?min_nodes=2"
    handlers = [rallypoint.create_handler(url, name=f"n{n}") for n in range(2)]
    calls = [in_thread(handler.next_rendezvous) for handler in handlers]
    yield sorted((result_of(call) for call in calls), key=lambda world: world.rank)
    for handler in handlers:
        handler.close()


def test_blocking_store_has_all_calls_of_the_asynchronous_store(two_worlds):
    one, other = (world.store for world in two_worlds)
    one.set("k", "v")
    assert other.get("k") == b"v"
    assert other.get("k", timedelta(seconds=1)) == b"v"
    assert one.add("n", 2) == 2
    assert one.compare_set("k", "v", "w") == b"w"
    assert one.check(["k", "n"])
    one.append("k", "x")
    assert other.multi_get(["k", "n"], timeout=1.5) == [b"wx", b"2"]
    other.multi_set(["a", "b"], ["1", b"2"])
    one.wait(["a", "b"], timedelta(seconds=5))
    assert one.num_keys() == 4
    assert one.delete_key("a")
    meeting = in_thread(other.barrier, "b")
    one.barrier("b", 10.0)
    result_of(meeting)
    gathering = in_thread(other.gather, "g", b"1")
    assert one.gather("g", "0") == result_of(gathering) == [b"0", b"1"]


def test_blocking_get_wakes_when_another_thread_sets(two_worlds):
    one, other = (world.store for world in two_worlds)
    waiting = in_thread(one.get, "later")
    other.set("later", b"now")
    assert result_of(waiting) == b"now"


def test_blocking_store_is_used_by_many_threads_at_once(two_worlds):
    stores = [world.store for world in two_worlds]
    calls = [in_thread(lambda store=store: [store.add("n", 1) for _ in range(50)]) for store in stores * 4]
    numbers = sorted(number for call in calls for number in result_of(call))
    assert numbers == list(range(1, 401))


def test_time_out_of_the_blocking_store_can_be_read_and_set(two_worlds):
    store = two_worlds[0].store
    assert store.timeout == timedelta(seconds=300)
    store.set_timeout(timedelta(milliseconds=100))
    assert store.timeout == timedelta(milliseconds=100)
    with pytest.raises(StoreTimeoutError, match="absent"):
        store.get("absent")
    with pytest.raises(TimeoutError):  # as any time-out in Python
        store.wait(["absent"])
    store.set_timeout(2)
    assert store.timeout == timedelta(seconds=2)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), timedelta(0), timedelta(seconds=-1)])
def test_time_out_that_is_not_positive_is_refused(two_worlds, timeout):
    with pytest.raises(StoreError, match="positive"):
        two_worlds[0].store.set_timeout(timeout)
    with pytest.raises(StoreError, match="positive"):
        two_worlds[0].store.get("k", timeout)


def test_blocking_watch_yields_changes_and_can_be_closed(two_worlds):
    one, other = (world.store for world in two_worlds)
    one.set("k", "1")
    changes = other.watch("k")
    assert next(changes) == b"1"
    one.delete_key("k")
    assert next(changes) is None
    one.set("k", "2")
    assert next(changes) == b"2"
    changes.close()
    with pytest.raises(StopIteration):
        next(changes)


def test_watch_that_is_dropped_after_shutdown_prints_nothing(two_worlds, capsys):
    world = two_worlds[0]
    world.store.set("k", "1")
    changes = world.store.watch("k")
    assert next(changes) == b"1"
    world.store._owner.close()
    del changes
    gc.collect()
    assert capsys.readouterr().err == ""


def test_waiting_for_a_key_ends_when_the_handler_is_shut_down(two_worlds):
    one, other = two_worlds
    waiting = in_thread(one.store.get, "never")
    meeting = in_thread(one.store.barrier, "never")
    until(lambda: len(other.store._store._backend._server._watches) > 8, "both wait")
    one.store._owner.close()
    for call in (waiting, meeting):
        with pytest.raises(StoreError, match="its handler was closed"):
            result_of(call)
    other.store.set("k", b"still works")


def test_store_keeps_its_handler_alive(two_worlds):
    url = f"memory://{unique()}/run?min_nodes=1"
    store = rallypoint.create_handler(url).next_rendezvous().store
    gc.collect()
    store.set("k", b"v")
    assert store.get("k") == b"v"
    store._owner.close()
