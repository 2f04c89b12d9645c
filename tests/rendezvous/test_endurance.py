"""Failures that last for hours or repeat: leases are renewed, retries have growing pauses, and the run goes on."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest

from rallypoint.backends.contract import Backend, Limits, Scanned, Watch
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import BackendError, LeaseGone, Unavailable
from rallypoint.events import CoordinatorDeposed, CoordinatorElected, RoundActive
from rallypoint.kv.types import Batch, BranchOp, Compare, Put, Range, TxnResult
from rallypoint.rendezvous import coordinator as coordinating
from rallypoint.rendezvous.records import ConfigRecord
from rallypoint.rendezvous.run_config import DATA_TTL_S
from rallypoint.rendezvous.watched_keys import WatchedKeys
from rallypoint.store import AsyncStore
from rallypoint.testing import loop as virtual
from tests.rendezvous.kit import CheckedWorld, InterceptingBackend, TxnHook, now, run_scenario, wait_until

Execute = Callable[[], Awaitable[TxnResult]]
MAX_ITERATIONS = 10_000
"""Turns of the loop at one instant that only a retry without pauses can reach."""


class ScanRecorder(InterceptingBackend):
    """Notes when a coordinator scans all control keys."""

    def __init__(self, inner: Backend, hook: TxnHook | None, scans: list[float], control: str) -> None:
        super().__init__(inner, hook, Limits())
        self._scans = scans
        self._control = control

    async def scan(self, prefix: str) -> Scanned:
        if prefix == self._control:
            self._scans.append(now())
        return await super().scan(prefix)


def config_of(world: CheckedWorld) -> ConfigRecord:
    config = world.record(ConfigRecord, world.keys.config)
    assert config is not None
    return config


# Leases


@pytest.mark.parametrize("end", ["crash", "leave"])
def test_run_with_short_sessions_forms_rounds_for_hours(end: str) -> None:
    """No session lasts for the half hour after which a node renews the data lease."""

    async def scenario(world: CheckedWorld) -> None:
        for life in range(1, 13):
            joined = await world.join_all("a", "b")
            assert {one.number for one in joined.values()} == {life}
            await asyncio.sleep(1000)
            for name in "ab":
                if end == "crash":
                    world.crash(name)
                else:
                    await world.node(name).stop()
                    del world.processes[name]
            await asyncio.sleep(20)
        assert now() > 3 * 3600 > DATA_TTL_S
        assert len(world.of(RoundActive)) == 12

    run_scenario(scenario, max_iterations=MAX_ITERATIONS, min_nodes=2, join_timeout=30, hold_back_losses=0)


def test_data_lease_that_ended_is_replaced_and_rounds_form_again() -> None:
    scans: list[float] = []

    async def scenario(world: CheckedWorld) -> None:
        world._wrap = lambda _, backend: ScanRecorder(backend, None, scans, world.keys.control)
        (first,) = world.enter("a")
        await asyncio.sleep(1)
        before = config_of(world)
        await MemoryBackend(world.server).revoke(before.data_lease)
        (second,) = world.enter("b")
        joined = await asyncio.gather(first, second)
        assert {one.number for one in joined} == {1}
        assert now() < 15
        assert len(scans) < 30, "it scans in a loop"
        after = config_of(world)
        assert after.data_lease != before.data_lease
        assert after.incarnation == before.incarnation
        again = await world.join_all("a", "b")
        assert {one.number for one in again.values()} == {2}
        node = world.node("a")
        store = AsyncStore(node.backend, node.keys, node.identity.id, again["a"])
        await store.set("k", b"v")
        assert await store.get("k") == b"v"

    run_scenario(scenario, max_iterations=MAX_ITERATIONS, min_nodes=2)


# Pauses


def test_coordinator_backs_off_when_its_writes_are_refused_repeatedly() -> None:
    scans: list[float] = []
    refused: list[float] = []

    async def scenario(world: CheckedWorld) -> None:
        async def refuse(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "form" in writes and now() < 20:
                refused.append(now())
                raise LeaseGone("it has just ended", lease=1)
            return await execute()

        world._wrap = lambda _, backend: ScanRecorder(backend, refuse, scans, world.keys.control)
        calls = world.enter("a", "b")
        await asyncio.sleep(10)
        assert refused
        for second in range(10):
            assert len([at for at in scans if second <= at < second + 1]) <= 10
        assert len([at for at in scans if 5 <= at < 10]) <= 10, "the pauses do not grow"
        joined = await asyncio.gather(*calls)
        assert {one.number for one in joined} == {1}
        assert now() < 22

    run_scenario(scenario, max_iterations=MAX_ITERATIONS, min_nodes=2, keep_alive_interval=60)


def test_one_refused_write_is_retried_at_once() -> None:
    async def scenario(world: CheckedWorld) -> None:
        refused_writes: list[set[str]] = []

        async def refuse_once(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "form" in writes and not refused_writes:
                refused_writes.append(writes)
                raise LeaseGone("it has just ended", lease=1)
            return await execute()

        world._wrap = lambda _, backend: InterceptingBackend(backend, refuse_once)
        await world.join_all("a", "b")
        assert refused_writes
        assert now() < 0.02

    run_scenario(scenario, min_nodes=2)


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("removed", [True, False], ids=["steps down", "cannot step down"])
def test_coordinator_that_always_fails_is_restarted_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, names: str, removed: bool
) -> None:
    def decide(*args: object) -> object:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(coordinating, "decide", decide)

    async def scenario(world: CheckedWorld) -> None:
        async def fail_deletion(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if not removed and by_coordinator and not writes:
                raise Unavailable("not executed")
            return await execute()

        world._wrap = lambda _, backend: InterceptingBackend(backend, fail_deletion)
        world.enter(*names)
        await asyncio.sleep(60)
        failed_at = [at for at, event in world.events if isinstance(event, CoordinatorDeposed)]
        assert 60 <= len(failed_at) <= 160 * len(names)
        assert len([at for at in failed_at if at >= 50]) <= 25 * len(names), "the pauses do not grow"
        deposed = [(event.by, event.term) for event in world.of(CoordinatorDeposed)]
        assert deposed == [(event.by, event.term) for event in world.of(CoordinatorElected)]
        assert {event.reason for event in world.of(CoordinatorDeposed)} == {"it failed: ZeroDivisionError('a defect')"}

    run_scenario(scenario, min_nodes=3)


# A defect of the backend


class Defective(MemoryBackend):
    """Raises once, at `where`, an error that is not in the contract."""

    where = ""

    def fail(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            raise ZeroDivisionError("a defect")

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[BranchOp], otherwise: Sequence[BranchOp] = ()
    ) -> TxnResult:
        if isinstance(then[0], Range):  # the scan of WatchedKeys
            self.fail("scan")
        return await super().txn(compares, then, otherwise)

    def watch(self, prefix: str, after_revision: int) -> Watch:
        self.fail("watch")
        return DefectiveWatch(self, super().watch(prefix, after_revision))


class DefectiveWatch(Watch):
    def __init__(self, owner: Defective, inner: Watch) -> None:
        self._owner = owner
        self._inner = inner

    async def __anext__(self) -> Batch:
        batch = await anext(self._inner)
        self._owner.fail("batch")
        return batch

    def ready(self) -> Batch | None:
        return self._inner.ready()

    def cancel(self) -> None:
        self._inner.cancel()


@pytest.mark.parametrize("where", ["scan", "watch", "batch", "listener"])
def test_watched_keys_go_on_after_a_defect(where: str) -> None:
    async def main() -> Sequence[BackendError | None]:
        backend = Defective(MemoryServer())
        backend.where = where
        errors: list[BackendError | None] = []
        watched = WatchedKeys(backend, ["/a/"], random.Random(1), lambda _: backend.fail("listener"), errors.append)
        for value in (b"1", b"2"):
            await asyncio.sleep(2)
            await backend.txn([], [Put("/a/x", value)])
        await asyncio.sleep(2)
        assert [item.value for item in watched.items.values()] == [b"2"]
        assert backend.where == ""
        watched.stop()
        return errors

    errors = virtual.run(main(), limit_s=100)
    assert "a defect" in str([error for error in errors if error is not None])
    assert errors[-1] is None


@pytest.mark.parametrize("where", ["scan", "watch", "batch"])
def test_node_joins_despite_a_defect_of_the_backend(where: str) -> None:
    async def scenario(world: CheckedWorld) -> None:
        made: dict[str, Defective] = {}

        def wrap(name: str, backend: Backend) -> Backend:
            made[name] = Defective(world.server)
            return made[name]

        world._wrap = wrap
        for name in "ab":
            world.start(name)
        made["b"].where = where
        calls = world.enter("a", "b")
        await asyncio.gather(*calls)
        assert made["b"].where == ""
        made["b"].where = where
        world.enter("a")
        await wait_until(lambda: world.node("b").waiting_count() == 1, 30)

    run_scenario(scenario, min_nodes=1, max_nodes=2, join_timeout=30)
