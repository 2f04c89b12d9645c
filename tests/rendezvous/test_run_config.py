"""The config of a run: making, checking, closing, reopening, draining, and races between nodes that do it."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, TypeVar

import pytest

from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import (
    BackendError,
    OutcomeUnknown,
    RendezvousClosedError,
    RendezvousError,
    SettingsMismatchError,
    Unavailable,
)
from rallypoint.events import Emitter
from rallypoint.kv.types import Item, Put, TxnResult
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.reachability import Reachability
from rallypoint.rendezvous.records import (
    ClosedRecord,
    ConfigRecord,
    DrainRecord,
    Record,
    RefusedRecord,
    decode,
    encode,
)
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings
from rallypoint.testing import loop as virtual
from tests.rendezvous.fake_run import node
from tests.rendezvous.kit import ForwardingBackend, InterceptingBackend

KEYS = RunKeys("rallypoint", "run")
T = TypeVar("T")
R = TypeVar("R", bound=Record)


class SharedRun:
    """A server, and access for several nodes to one run on it."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.backend = MemoryBackend(self.server)
        self._ids = count(1)

    def run_config(self, by: str = "a", backend: Any = None, **options: object) -> RunConfig:
        given: dict[str, Any] = {"min_nodes": 2, **options}
        settings = Settings.build(scheme="memory", run_id="run", **given)
        return RunConfig(
            backend or MemoryBackend(self.server), KEYS, settings, by, lambda: f"id{next(self._ids)}", lambda: 1234.5
        )

    def item(self, key: str) -> Item:
        return self.server.engine.items[key]

    def record(self, kind: type[R], key: str) -> R:
        return decode(kind, self.item(key))

    @property
    def config(self) -> ConfigRecord:
        return self.record(ConfigRecord, KEYS.config)

    @property
    def closed(self) -> ClosedRecord:
        return self.record(ClosedRecord, KEYS.closed)

    @property
    def leases(self) -> set[int]:
        return {lease.id for lease in self.server.engine.leases}

    async def add_node(self, name: str, ttl_s: float = 15.0) -> int:
        """Write a node's key under a new lease; returns the lease."""
        lease = await self.backend.grant(ttl_s)
        await self.backend.txn(
            [], [Put(KEYS.node(f"id-{name}"), encode(node(name, id=f"id-{name}", session=lease)), lease)]
        )
        return lease


def run_scenario(scenario: Callable[[SharedRun], Awaitable[T]], seed: int | None = None) -> T:
    async def main() -> T:
        return await scenario(SharedRun())

    return virtual.run(main(), seed=seed, limit_s=100_000)


# Making and checking


def test_first_node_makes_the_run() -> None:
    async def scenario(run: SharedRun) -> None:
        assert await run.run_config().read() is None
        snapshot = await run.run_config(max_nodes=4, keep_alive_interval=1, reopen_after=7).check()
        assert run.config == snapshot.config
        assert snapshot.config.incarnation == "id1"
        assert snapshot.config.by == "a"
        assert snapshot.config.shared["max_nodes"] == 4
        assert snapshot.config.timing.session_ttl_s == 3
        assert snapshot.config_revision == run.item(KEYS.config).mod_revision
        assert snapshot.closed_revision == run.item(KEYS.closed).mod_revision
        assert snapshot.empty
        assert run.leases == {snapshot.config.run_lease, snapshot.config.data_lease}
        assert run.item(KEYS.config).lease == run.item(KEYS.closed).lease == snapshot.config.run_lease

    run_scenario(scenario)


def test_second_node_finds_the_existing_run() -> None:
    async def scenario(run: SharedRun) -> None:
        first = await run.run_config("a").check()
        await run.add_node("a")
        second = await run.run_config("b").check()
        assert second.config == first.config
        assert not second.empty

    run_scenario(scenario)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_race_of_many_creators_makes_one_run_and_leaves_no_leases(seed: int | None) -> None:
    async def scenario(run: SharedRun) -> None:
        found = await asyncio.gather(*(run.run_config(f"n{index}").check() for index in range(8)))
        assert len({snapshot.config.incarnation for snapshot in found}) == 1
        assert run.leases == {run.config.run_lease, run.config.data_lease}

    run_scenario(scenario, seed)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_concurrent_calls_of_one_node_leave_no_leases(seed: int | None) -> None:
    async def scenario(run: SharedRun) -> None:
        run_config = run.run_config()
        await asyncio.gather(*(run_config.find_or_make() for _ in range(4)))
        assert run.leases == {run.config.run_lease, run.config.data_lease}

    run_scenario(scenario, seed)


def test_retry_finds_a_run_whose_creation_had_an_unknown_outcome() -> None:
    async def scenario(run: SharedRun) -> None:
        async def executed_without_answer(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            result = await execute()
            if "config" in writes:
                raise OutcomeUnknown("no answer")
            return result

        run_config = run.run_config(backend=InterceptingBackend(MemoryBackend(run.server), executed_without_answer))
        with pytest.raises(OutcomeUnknown):
            await run_config.check()
        snapshot = await run_config.check()
        assert snapshot.config == run.config
        assert run.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    run_scenario(scenario)


def test_creation_that_was_not_executed_leaves_no_leases() -> None:
    async def scenario(run: SharedRun) -> None:
        failures = [OutcomeUnknown("no answer"), Unavailable("away")] * 3

        async def not_executed(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" in writes and failures:
                raise failures.pop()
            return await execute()

        run_config = run.run_config(backend=InterceptingBackend(MemoryBackend(run.server), not_executed))
        while failures:
            with pytest.raises(BackendError):
                await run_config.check()
        assert len(run.leases) == 2
        snapshot = await run_config.check()
        assert run.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    run_scenario(scenario)


def test_creation_that_is_executed_late_makes_one_run_with_its_leases() -> None:
    async def scenario(run: SharedRun) -> None:
        late: list[Callable[[], Awaitable[TxnResult]]] = []

        async def executed_late(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" not in writes:
                return await execute()
            if late:
                await late.pop()()  # executed just before the second try, which is refused therefore
                return await execute()
            late.append(execute)
            raise OutcomeUnknown("no answer")

        run_config = run.run_config(backend=InterceptingBackend(MemoryBackend(run.server), executed_late))
        with pytest.raises(OutcomeUnknown):
            await run_config.check()
        snapshot = await run_config.check()
        assert snapshot.config.incarnation == "id1"
        assert run.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    run_scenario(scenario)


def test_granted_leases_are_revoked_when_another_node_made_the_run() -> None:
    async def scenario(run: SharedRun) -> None:
        async def not_executed(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" in writes:
                raise OutcomeUnknown("no answer")
            return await execute()

        run_config = run.run_config(backend=InterceptingBackend(MemoryBackend(run.server), not_executed))
        with pytest.raises(OutcomeUnknown):
            await run_config.check()
        await run.run_config("b").check()
        await run_config.check()
        assert run.config.by == "b"
        assert run.leases == {run.config.run_lease, run.config.data_lease}

    run_scenario(scenario)


def test_granted_leases_that_ended_meanwhile_are_replaced() -> None:
    async def scenario(run: SharedRun) -> None:
        failures = [OutcomeUnknown("no answer")]

        async def not_executed(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" in writes and failures:
                raise failures.pop()
            return await execute()

        run_config = run.run_config(backend=InterceptingBackend(MemoryBackend(run.server), not_executed))
        with pytest.raises(OutcomeUnknown):
            await run_config.check()
        await asyncio.sleep(100.0)  # longer than the lease of the run, shorter than that of its data
        snapshot = await run_config.check()
        assert run.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    run_scenario(scenario)


def test_lease_with_unanswered_revoke_is_not_used_for_another_run() -> None:
    async def scenario(run: SharedRun) -> None:
        class UnansweredRevoke(MemoryBackend):
            failures = 1

            async def revoke(self, lease: int) -> None:
                await super().revoke(lease)
                if self.failures:
                    self.failures -= 1
                    raise OutcomeUnknown("no answer")

        backend = UnansweredRevoke(run.server)

        async def make_before(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" in writes and backend.failures:
                await run.run_config("b").check()
            return await execute()

        run_config = run.run_config(backend=InterceptingBackend(backend, make_before))
        with pytest.raises(OutcomeUnknown):
            await run_config.check()
        for lease in (run.config.data_lease, run.config.run_lease):
            await MemoryBackend(run.server).revoke(lease)
        snapshot = await run_config.check()
        assert snapshot.config.by == "a"
        assert run.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    run_scenario(scenario)


def test_run_that_is_not_renewed_expires() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config(reopen_after=60).check()
        await asyncio.sleep(74)
        assert await run.run_config().read() is not None
        await asyncio.sleep(2)
        assert await run.run_config().read() is None

    run_scenario(scenario)


def test_check_renews_the_run() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config().check()
        await run.add_node("a", ttl_s=1000)
        for _ in range(5):
            await asyncio.sleep(70)
            await run.run_config("b").check()
        assert run.config.incarnation == "id1"

    run_scenario(scenario)


# Settings


def test_mismatch_names_each_setting_with_both_values() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a", min_nodes=2, max_nodes=4).check()
        await run.add_node("a")
        with pytest.raises(SettingsMismatchError) as caught:
            await run.run_config("b", min_nodes=3, max_nodes=4, ranks="natural").check()
        assert caught.value.differences == {"min_nodes": (3, 2), "ranks": ("natural", "sticky")}
        assert "min_nodes is 3 here and 2 there" in str(caught.value)
        assert "ranks is 'natural' here and 'sticky' there" in str(caught.value)
        assert "which a started" in str(caught.value)

    run_scenario(scenario)


def test_other_timing_is_no_mismatch() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a").check()
        await run.add_node("a")
        snapshot = await run.run_config("b", last_call_timeout=1, keep_alive_interval=1, reopen_after=5).check()
        assert snapshot.config.timing.last_call_timeout_s == 30

    run_scenario(scenario)


@pytest.mark.parametrize("options", [{"min_nodes": 3}, {"last_call_timeout": 1}], ids=["shared", "timing"])
def test_config_of_a_run_without_nodes_is_replaced(options: dict[str, object]) -> None:
    async def scenario(run: SharedRun) -> None:
        first = await run.run_config("a").check()
        second = await run.run_config("b", **options).check()
        assert second.config == run.config
        assert second.config.incarnation != first.config.incarnation
        assert second.config.run_lease == first.config.run_lease
        assert second.config.by == "b"

    run_scenario(scenario)


def test_refused_node_leaves_a_record_with_its_error() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a").check()
        await run.add_node("a")
        with pytest.raises(SettingsMismatchError) as caught:
            await run.run_config("b/1", min_nodes=3).check()
        refused = run.record(RefusedRecord, KEYS.refusal("b/1"))
        assert (refused.name, refused.why, refused.at) == ("b/1", str(caught.value), 1234.5)
        assert refused.differences == caught.value.differences
        assert run.item(KEYS.refusal("b/1")).lease == run.config.data_lease, "it must expire with the run's data"

    run_scenario(scenario)


def test_node_with_failed_preflight_leaves_a_record_and_blocks_no_other() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("b").note_failed_preflight("no GPU")
        await run.run_config("b").note_failed_preflight("still no GPU")
        refused = run.record(RefusedRecord, KEYS.refusal("b"))
        assert (refused.name, refused.why, refused.differences, refused.at) == ("b", "still no GPU", {}, 1234.5)
        assert run.item(KEYS.refusal("b")).lease == run.config.data_lease, "it must expire with the run's data"
        await run.run_config("a", min_nodes=3).check()  # other settings are possible: the run has no nodes

    run_scenario(scenario)


def test_failed_write_of_the_record_does_not_hide_the_mismatch() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a").check()
        await run.add_node("a")

        async def fail_write(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if not writes:
                return await execute()
            raise OutcomeUnknown("the connection broke")

        with pytest.raises(SettingsMismatchError):
            await run.run_config(
                "b", backend=InterceptingBackend(MemoryBackend(run.server), fail_write), min_nodes=3
            ).check()
        assert KEYS.refusal("b") not in run.server.engine.items

    run_scenario(scenario)


def test_closing_makes_an_absent_run_only_if_requested() -> None:
    async def scenario(run: SharedRun) -> None:
        assert not await run.run_config("operator").close("enough", make=False)
        assert not run.server.engine.items
        assert await run.run_config("a").close("enough")
        assert not await run.run_config("operator").close("enough", make=False)

    run_scenario(scenario)


def test_run_is_listed_as_long_as_it_exists() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a").check()
        assert run.item(KEYS.listed_run).lease == run.config.run_lease
        await run.backend.revoke(run.config.run_lease)
        assert KEYS.listed_run not in run.server.engine.items

    run_scenario(scenario)


def test_config_is_not_replaced_after_a_node_has_joined() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a").check()

        async def join_before(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" in writes:
                await run.add_node("a")
            return await execute()

        intercepting = InterceptingBackend(MemoryBackend(run.server), join_before)
        with pytest.raises(SettingsMismatchError):
            await run.run_config("b", backend=intercepting, min_nodes=5).check()
        assert run.config.by == "a"

    run_scenario(scenario)


def test_concurrent_replacements_of_the_config_agree_on_one() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a").check()
        found = await asyncio.gather(*(run.run_config(f"n{index}", min_nodes=5).check() for index in range(4)))
        assert {snapshot.config.incarnation for snapshot in found} == {run.config.incarnation}

    run_scenario(scenario)


# Closing and reopening


def test_error_of_a_closed_run_names_the_closing_node_and_its_reason() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a").check()
        assert await run.run_config("ops").close("maintenance")
        assert run.closed == ClosedRecord(closed=True, by="ops", why="maintenance", at=1234.5)
        with pytest.raises(RendezvousClosedError) as caught:
            await run.run_config("b").check()
        assert "closed by ops: maintenance" in str(caught.value)
        assert "free again 60 s after" in str(caught.value)

    run_scenario(scenario)


def test_closing_is_idempotent_and_keeps_the_first_reason() -> None:
    async def scenario(run: SharedRun) -> None:
        answers = await asyncio.gather(*(run.run_config(f"n{index}").close("reason") for index in range(4)))
        assert sorted(answers) == [False, False, False, True]
        by = run.closed.by
        assert not await run.run_config("late").close("another")
        assert run.closed.by == by

    run_scenario(scenario)


def test_run_that_does_not_exist_can_be_closed() -> None:
    async def scenario(run: SharedRun) -> None:
        assert await run.run_config("ops").close("never again")
        with pytest.raises(RendezvousClosedError):
            await run.run_config("a").check()

    run_scenario(scenario)


def test_reopening_rewrites_the_key() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config().close("x")
        created = run.item(KEYS.closed).create_revision
        before = run.item(KEYS.closed).mod_revision
        assert await run.run_config("ops").reopen("again")
        assert run.item(KEYS.closed).create_revision == created
        assert run.item(KEYS.closed).mod_revision > before
        assert not run.closed.closed
        assert not await run.run_config("ops").reopen("again")
        await run.run_config("a").check()

    run_scenario(scenario)


def test_run_that_does_not_exist_cannot_be_reopened() -> None:
    async def scenario(run: SharedRun) -> None:
        assert not await run.run_config("ops").reopen("again")
        assert not run.server.engine.items

    run_scenario(scenario)


def test_run_without_reopen_after_is_reopened_when_it_has_no_nodes() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a", reopen_after=0).check()
        lease = await run.add_node("a")
        await run.run_config("a", reopen_after=0).close("done")
        with pytest.raises(RendezvousClosedError):
            await run.run_config("b", reopen_after=0).check()
        await run.backend.revoke(lease)
        snapshot = await run.run_config("b", reopen_after=0).check()
        assert not snapshot.closed.closed
        assert run.closed.why == "no node was left"

    run_scenario(scenario)


def test_run_with_reopen_after_stays_closed_when_it_has_no_nodes() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.run_config("a").close("done")
        with pytest.raises(RendezvousClosedError):
            await run.run_config("b").check()

    run_scenario(scenario)


def test_closed_run_expires_although_nodes_keep_trying_to_join() -> None:
    """Nodes that restart again and again must not keep a closed run alive."""

    async def scenario(run: SharedRun) -> None:
        await run.run_config("a", reopen_after=60).close("done")
        for _ in range(200):
            try:
                await run.run_config("b", reopen_after=60).check()
                break
            except RendezvousClosedError:
                await asyncio.sleep(5)
        else:
            raise AssertionError("the closed run does not expire")
        assert asyncio.get_running_loop().time() <= 60 + 15 + 5

    run_scenario(scenario)


# Draining


def test_node_is_drained_by_name_or_id() -> None:
    async def scenario(run: SharedRun) -> None:
        lease = await run.add_node("a")
        await run.add_node("b")
        assert await run.run_config("ops").drain("a", "repair") == ["id-a"]
        assert await run.run_config("ops").drain("id-b", "repair") == ["id-b"]
        assert run.record(DrainRecord, KEYS.drain("id-a")) == DrainRecord(by="ops", why="repair", at=1234.5)
        assert run.item(KEYS.drain("id-a")).lease == lease
        await run.backend.revoke(lease)
        assert KEYS.drain("id-a") not in run.server.engine.items

    run_scenario(scenario)


def test_all_nodes_of_a_name_are_drained() -> None:
    async def scenario(run: SharedRun) -> None:
        for node_id in ("x", "y"):
            lease = await run.backend.grant(10)
            await run.backend.txn([], [Put(KEYS.node(node_id), encode(node("a", id=node_id, session=lease)), lease)])
        assert await run.run_config("ops").drain("a", "") == ["x", "y"]

    run_scenario(scenario)


def test_draining_an_unknown_node_lists_the_existing_ones() -> None:
    async def scenario(run: SharedRun) -> None:
        with pytest.raises(RendezvousError, match="no node with the name or id 'x'; its nodes: none"):
            await run.run_config("ops").drain("x", "")
        await run.add_node("b")
        await run.add_node("a")
        with pytest.raises(RendezvousError, match=r"no node with the name or id 'x'; its nodes: a, b$"):
            await run.run_config("ops").drain("x", "")

    run_scenario(scenario)


def test_draining_a_node_that_leaves_meanwhile_is_no_error() -> None:
    async def scenario(run: SharedRun) -> None:
        lease = await run.add_node("a")

        async def leave_before(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            await run.backend.revoke(lease)
            return await execute()

        run_config = run.run_config("ops", backend=InterceptingBackend(MemoryBackend(run.server), leave_before))
        assert await run_config.drain("a", "") == ["id-a"]
        assert KEYS.drain("id-a") not in run.server.engine.items

    run_scenario(scenario)


def test_damaged_record_of_one_node_does_not_keep_others_from_being_drained() -> None:
    async def scenario(run: SharedRun) -> None:
        await run.add_node("a")
        await run.backend.txn([], [Put(KEYS.node("0"), b"damaged")])
        assert await run.run_config("ops").drain("a", "") == ["id-a"]

    run_scenario(scenario)


# Renewing the run


class FailingRenewals(ForwardingBackend):
    """Renewals fail between two instants."""

    def __init__(self, inner: MemoryBackend, since: float, until: float) -> None:
        super().__init__(inner)
        self.since, self.until = since, until
        self.renewed_at: list[float] = []

    async def keep_alive(self, lease: int) -> bool:
        now = asyncio.get_running_loop().time()
        self.renewed_at.append(now)
        if self.since <= now < self.until:
            raise Unavailable("away")
        return await super().keep_alive(lease)


def test_run_is_renewed_soon_after_an_outage() -> None:
    async def scenario(run: SharedRun) -> None:
        run_config = run.run_config("a", keep_alive_interval=1, reopen_after=0)
        snapshot = await run_config.check()
        backend = FailingRenewals(MemoryBackend(run.server), since=2.5, until=4.3)
        session = await MemoryBackend(run.server).open_session(3.0)
        reachability = Reachability(Emitter(), "run", "a")
        renewing = asyncio.create_task(
            run.run_config("a", backend=backend, keep_alive_interval=1, reopen_after=0).keep_alive(
                session, lambda: snapshot.config, reachability
            )
        )
        await asyncio.sleep(8.0)
        assert snapshot.config.run_lease in run.leases, "it expires three seconds after a renewal"
        after = [at for at in backend.renewed_at if at >= 4.3]
        assert after[0] <= 4.5
        renewing.cancel()
        await session.close()

    run_scenario(scenario)
