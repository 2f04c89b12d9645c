"""The snapshot of a run: making, checking, closing, reopening and draining, and the races between those who do it."""

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
from tests.rendezvous.board import node
from tests.rendezvous.kit import Meddling, Through

KEYS = RunKeys("rallypoint", "run")
T = TypeVar("T")
R = TypeVar("R", bound=Record)


class Doors:
    """A server and entries to one run on it."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.backend = MemoryBackend(self.server)
        self._ids = count(1)

    def entry(self, by: str = "a", backend: Any = None, **options: object) -> RunConfig:
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

    async def appear(self, name: str, ttl_s: float = 15.0) -> int:
        """A node's key, under a lease."""
        lease = await self.backend.grant(ttl_s)
        await self.backend.txn(
            [], [Put(KEYS.node(f"id-{name}"), encode(node(name, id=f"id-{name}", session=lease)), lease)]
        )
        return lease


def play(scene: Callable[[Doors], Awaitable[T]], seed: int | None = None) -> T:
    async def main() -> T:
        return await scene(Doors())

    return virtual.run(main(), seed=seed, limit_s=100_000)


# Making and checking


def test_first_node_makes_the_run() -> None:
    async def scene(doors: Doors) -> None:
        assert await doors.entry().read() is None
        snapshot = await doors.entry(max_nodes=4, keep_alive_interval=1, reopen_after=7).check()
        assert doors.config == snapshot.config
        assert snapshot.config.incarnation == "id1"
        assert snapshot.config.by == "a"
        assert snapshot.config.shared["max_nodes"] == 4
        assert snapshot.config.timing.session_ttl_s == 3
        assert snapshot.config_revision == doors.item(KEYS.config).mod_revision
        assert snapshot.closed_revision == doors.item(KEYS.closed).mod_revision
        assert snapshot.empty
        assert doors.leases == {snapshot.config.run_lease, snapshot.config.data_lease}
        assert doors.item(KEYS.config).lease == doors.item(KEYS.closed).lease == snapshot.config.run_lease

    play(scene)


def test_second_node_finds_the_run_as_it_is() -> None:
    async def scene(doors: Doors) -> None:
        first = await doors.entry("a").check()
        await doors.appear("a")
        second = await doors.entry("b").check()
        assert second.config == first.config
        assert not second.empty

    play(scene)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_race_of_many_creators_leaves_one_run_and_no_leases(seed: int | None) -> None:
    async def scene(doors: Doors) -> None:
        found = await asyncio.gather(*(doors.entry(f"n{index}").check() for index in range(8)))
        assert len({snapshot.config.incarnation for snapshot in found}) == 1
        assert doors.leases == {doors.config.run_lease, doors.config.data_lease}

    play(scene, seed)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_calls_of_one_node_that_make_the_run_together_leave_no_leases(seed: int | None) -> None:
    async def scene(doors: Doors) -> None:
        entry = doors.entry()
        await asyncio.gather(*(entry.find_or_make() for _ in range(4)))
        assert doors.leases == {doors.config.run_lease, doors.config.data_lease}

    play(scene, seed)


def test_creation_of_unknown_outcome_is_found_when_tried_again() -> None:
    async def scene(doors: Doors) -> None:
        async def executed_without_answer(
            what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            result = await execute()
            if "config" in what:
                raise OutcomeUnknown("no answer")
            return result

        entry = doors.entry(backend=Meddling(MemoryBackend(doors.server), executed_without_answer))
        with pytest.raises(OutcomeUnknown):
            await entry.check()
        snapshot = await entry.check()
        assert snapshot.config == doors.config
        assert doors.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    play(scene)


def test_creation_that_was_not_executed_leaves_no_leases_behind() -> None:
    async def scene(doors: Doors) -> None:
        failures = [OutcomeUnknown("no answer"), Unavailable("away")] * 3

        async def not_executed(
            what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" in what and failures:
                raise failures.pop()
            return await execute()

        entry = doors.entry(backend=Meddling(MemoryBackend(doors.server), not_executed))
        while failures:
            with pytest.raises(BackendError):
                await entry.check()
        assert len(doors.leases) == 2
        snapshot = await entry.check()
        assert doors.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    play(scene)


def test_creation_that_is_executed_late_leaves_one_run_and_its_leases() -> None:
    async def scene(doors: Doors) -> None:
        late: list[Callable[[], Awaitable[TxnResult]]] = []

        async def executed_late(
            what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" not in what:
                return await execute()
            if late:
                await late.pop()()  # it arrives just before its second try, which is refused because of it
                return await execute()
            late.append(execute)
            raise OutcomeUnknown("no answer")

        entry = doors.entry(backend=Meddling(MemoryBackend(doors.server), executed_late))
        with pytest.raises(OutcomeUnknown):
            await entry.check()
        snapshot = await entry.check()
        assert snapshot.config.incarnation == "id1"
        assert doors.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    play(scene)


def test_leases_for_a_run_that_somebody_else_made_meanwhile_are_ended() -> None:
    async def scene(doors: Doors) -> None:
        async def not_executed(
            what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" in what:
                raise OutcomeUnknown("no answer")
            return await execute()

        entry = doors.entry(backend=Meddling(MemoryBackend(doors.server), not_executed))
        with pytest.raises(OutcomeUnknown):
            await entry.check()
        await doors.entry("b").check()
        await entry.check()
        assert doors.config.by == "b"
        assert doors.leases == {doors.config.run_lease, doors.config.data_lease}

    play(scene)


def test_leases_that_ended_while_the_outcome_was_unknown_are_replaced() -> None:
    async def scene(doors: Doors) -> None:
        failures = [OutcomeUnknown("no answer")]

        async def not_executed(
            what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" in what and failures:
                raise failures.pop()
            return await execute()

        entry = doors.entry(backend=Meddling(MemoryBackend(doors.server), not_executed))
        with pytest.raises(OutcomeUnknown):
            await entry.check()
        await asyncio.sleep(100.0)  # longer than the run's lease lives, not as long as that of its data
        snapshot = await entry.check()
        assert doors.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    play(scene)


def test_lease_whose_end_was_not_acknowledged_is_not_used_for_another_run() -> None:
    async def scene(doors: Doors) -> None:
        class Deaf(MemoryBackend):
            failures = 1

            async def revoke(self, lease: int) -> None:
                await super().revoke(lease)
                if self.failures:
                    self.failures -= 1
                    raise OutcomeUnknown("no answer")

        deaf = Deaf(doors.server)

        async def too_late(what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]) -> TxnResult:
            if "config" in what and deaf.failures:
                await doors.entry("b").check()
            return await execute()

        entry = doors.entry(backend=Meddling(deaf, too_late))
        with pytest.raises(OutcomeUnknown):
            await entry.check()
        for lease in (doors.config.data_lease, doors.config.run_lease):
            await MemoryBackend(doors.server).revoke(lease)
        snapshot = await entry.check()
        assert snapshot.config.by == "a"
        assert doors.leases == {snapshot.config.run_lease, snapshot.config.data_lease}

    play(scene)


def test_run_that_nobody_renews_is_free_again() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry(reopen_after=60).check()
        await asyncio.sleep(74)
        assert await doors.entry().read() is not None
        await asyncio.sleep(2)
        assert await doors.entry().read() is None

    play(scene)


def test_check_renews_the_run_for_the_one_who_joins() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry().check()
        await doors.appear("a", ttl_s=1000)
        for _ in range(5):
            await asyncio.sleep(70)
            await doors.entry("b").check()
        assert doors.config.incarnation == "id1"

    play(scene)


# Settings


def test_other_settings_than_the_runs_are_named_with_both_values() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a", min_nodes=2, max_nodes=4).check()
        await doors.appear("a")
        with pytest.raises(SettingsMismatchError) as caught:
            await doors.entry("b", min_nodes=3, max_nodes=4, ranks="natural").check()
        assert caught.value.differences == {"min_nodes": (3, 2), "ranks": ("natural", "sticky")}
        assert "min_nodes is 3 here and 2 there" in str(caught.value)
        assert "ranks is 'natural' here and 'sticky' there" in str(caught.value)
        assert "which a started" in str(caught.value)

    play(scene)


def test_other_times_are_no_mismatch() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a").check()
        await doors.appear("a")
        snapshot = await doors.entry("b", last_call_timeout=1, keep_alive_interval=1, reopen_after=5).check()
        assert snapshot.config.timing.last_call_timeout_s == 30

    play(scene)


@pytest.mark.parametrize("options", [{"min_nodes": 3}, {"last_call_timeout": 1}], ids=["shared", "timing"])
def test_config_of_a_run_without_nodes_is_replaced(options: dict[str, object]) -> None:
    async def scene(doors: Doors) -> None:
        first = await doors.entry("a").check()
        second = await doors.entry("b", **options).check()
        assert second.config == doors.config
        assert second.config.incarnation != first.config.incarnation
        assert second.config.run_lease == first.config.run_lease
        assert second.config.by == "b"

    play(scene)


def test_node_that_is_refused_leaves_a_note_in_the_words_of_its_error() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a").check()
        await doors.appear("a")
        with pytest.raises(SettingsMismatchError) as caught:
            await doors.entry("b/1", min_nodes=3).check()
        note = doors.record(RefusedRecord, KEYS.refusal("b/1"))
        assert (note.name, note.why, note.at) == ("b/1", str(caught.value), 1234.5)
        assert note.differences == caught.value.differences
        assert doors.item(KEYS.refusal("b/1")).lease == doors.config.data_lease, "it goes with the run's data"

    play(scene)


def test_node_that_is_not_fit_leaves_a_note_and_is_in_nobodys_way() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("b").note_unfit("no GPU")
        await doors.entry("b").note_unfit("still no GPU")
        note = doors.record(RefusedRecord, KEYS.refusal("b"))
        assert (note.name, note.why, note.differences, note.at) == ("b", "still no GPU", {}, 1234.5)
        assert doors.item(KEYS.refusal("b")).lease == doors.config.data_lease, "it goes with the run's data"
        await doors.entry("a", min_nodes=3).check()  # other settings: nobody is in

    play(scene)


def test_note_that_cannot_be_written_does_not_hide_why_a_node_is_refused() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a").check()
        await doors.appear("a")

        async def fails(what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]) -> TxnResult:
            if not what:
                return await execute()
            raise OutcomeUnknown("the connection broke")

        with pytest.raises(SettingsMismatchError):
            await doors.entry("b", backend=Meddling(MemoryBackend(doors.server), fails), min_nodes=3).check()
        assert KEYS.refusal("b") not in doors.server.engine.items

    play(scene)


def test_run_that_does_not_exist_is_not_made_to_be_closed_unless_that_is_asked_for() -> None:
    async def scene(doors: Doors) -> None:
        assert not await doors.entry("operator").close("enough", make=False)
        assert not doors.server.engine.items
        assert await doors.entry("a").close("enough")
        assert not await doors.entry("operator").close("enough", make=False)

    play(scene)


def test_run_is_in_the_list_of_runs_as_long_as_it_lives() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a").check()
        assert doors.item(KEYS.listed_run).lease == doors.config.run_lease
        await doors.backend.revoke(doors.config.run_lease)
        assert KEYS.listed_run not in doors.server.engine.items

    play(scene)


def test_config_is_not_replaced_under_a_node_that_came_meanwhile() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a").check()

        async def somebody_comes_first(
            what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if "config" in what:
                await doors.appear("a")
            return await execute()

        meddling = Meddling(MemoryBackend(doors.server), somebody_comes_first)
        with pytest.raises(SettingsMismatchError):
            await doors.entry("b", backend=meddling, min_nodes=5).check()
        assert doors.config.by == "a"

    play(scene)


def test_two_who_replace_a_config_agree_on_one() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a").check()
        found = await asyncio.gather(*(doors.entry(f"n{index}", min_nodes=5).check() for index in range(4)))
        assert {snapshot.config.incarnation for snapshot in found} == {doors.config.incarnation}

    play(scene)


# Closing and reopening


def test_closed_run_is_refused_with_by_whom_and_why() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a").check()
        assert await doors.entry("ops").close("maintenance")
        assert doors.closed == ClosedRecord(closed=True, by="ops", why="maintenance", at=1234.5)
        with pytest.raises(RendezvousClosedError) as caught:
            await doors.entry("b").check()
        assert "closed by ops: maintenance" in str(caught.value)
        assert "free again 60 s after" in str(caught.value)

    play(scene)


def test_closing_is_idempotent_and_keeps_the_first_reason() -> None:
    async def scene(doors: Doors) -> None:
        answers = await asyncio.gather(*(doors.entry(f"n{index}").close("reason") for index in range(4)))
        assert sorted(answers) == [False, False, False, True]
        by = doors.closed.by
        assert not await doors.entry("late").close("another")
        assert doors.closed.by == by

    play(scene)


def test_run_that_does_not_exist_can_be_closed() -> None:
    async def scene(doors: Doors) -> None:
        assert await doors.entry("ops").close("never again")
        with pytest.raises(RendezvousClosedError):
            await doors.entry("a").check()

    play(scene)


def test_reopened_run_is_open_and_its_key_was_rewritten() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry().close("x")
        created = doors.item(KEYS.closed).create_revision
        before = doors.item(KEYS.closed).mod_revision
        assert await doors.entry("ops").reopen("again")
        assert doors.item(KEYS.closed).create_revision == created
        assert doors.item(KEYS.closed).mod_revision > before
        assert not doors.closed.closed
        assert not await doors.entry("ops").reopen("again")
        await doors.entry("a").check()

    play(scene)


def test_run_that_does_not_exist_cannot_be_reopened() -> None:
    async def scene(doors: Doors) -> None:
        assert not await doors.entry("ops").reopen("again")
        assert not doors.server.engine.items

    play(scene)


def test_run_without_grace_reopens_itself_when_nobody_is_left() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a", reopen_after=0).check()
        lease = await doors.appear("a")
        await doors.entry("a", reopen_after=0).close("done")
        with pytest.raises(RendezvousClosedError):
            await doors.entry("b", reopen_after=0).check()
        await doors.backend.revoke(lease)
        snapshot = await doors.entry("b", reopen_after=0).check()
        assert not snapshot.closed.closed
        assert doors.closed.why == "nobody was left"

    play(scene)


def test_run_with_grace_does_not_reopen_itself_when_nobody_is_left() -> None:
    async def scene(doors: Doors) -> None:
        await doors.entry("a").close("done")
        with pytest.raises(RendezvousClosedError):
            await doors.entry("b").check()

    play(scene)


def test_closed_run_is_free_again_however_often_somebody_tries_to_join() -> None:
    """Nodes that restart and restart must not keep a closed run closed for ever."""

    async def scene(doors: Doors) -> None:
        await doors.entry("a", reopen_after=60).close("done")
        for _ in range(200):
            try:
                await doors.entry("b", reopen_after=60).check()
                break
            except RendezvousClosedError:
                await asyncio.sleep(5)
        else:
            raise AssertionError("closed for ever")
        assert asyncio.get_running_loop().time() <= 60 + 15 + 5

    play(scene)


# Draining


def test_node_is_drained_by_name_or_id() -> None:
    async def scene(doors: Doors) -> None:
        lease = await doors.appear("a")
        await doors.appear("b")
        assert await doors.entry("ops").drain("a", "repair") == ["id-a"]
        assert await doors.entry("ops").drain("id-b", "repair") == ["id-b"]
        assert doors.record(DrainRecord, KEYS.drain("id-a")) == DrainRecord(by="ops", why="repair", at=1234.5)
        assert doors.item(KEYS.drain("id-a")).lease == lease
        await doors.backend.revoke(lease)
        assert KEYS.drain("id-a") not in doors.server.engine.items

    play(scene)


def test_all_nodes_of_a_name_are_drained() -> None:
    async def scene(doors: Doors) -> None:
        for node_id in ("x", "y"):
            lease = await doors.backend.grant(10)
            await doors.backend.txn([], [Put(KEYS.node(node_id), encode(node("a", id=node_id, session=lease)), lease)])
        assert await doors.entry("ops").drain("a", "") == ["x", "y"]

    play(scene)


def test_draining_an_unknown_node_lists_those_that_there_are() -> None:
    async def scene(doors: Doors) -> None:
        with pytest.raises(RendezvousError, match="no node with the name or id 'x'; its nodes: none"):
            await doors.entry("ops").drain("x", "")
        await doors.appear("b")
        await doors.appear("a")
        with pytest.raises(RendezvousError, match=r"no node with the name or id 'x'; its nodes: a, b$"):
            await doors.entry("ops").drain("x", "")

    play(scene)


def test_node_that_goes_while_it_is_drained_is_fine() -> None:
    async def scene(doors: Doors) -> None:
        lease = await doors.appear("a")

        async def it_goes(what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]) -> TxnResult:
            await doors.backend.revoke(lease)
            return await execute()

        entry = doors.entry("ops", backend=Meddling(MemoryBackend(doors.server), it_goes))
        assert await entry.drain("a", "") == ["id-a"]
        assert KEYS.drain("id-a") not in doors.server.engine.items

    play(scene)


def test_damaged_record_of_one_node_does_not_keep_others_from_being_drained() -> None:
    async def scene(doors: Doors) -> None:
        await doors.appear("a")
        await doors.backend.txn([], [Put(KEYS.node("0"), b"damaged")])
        assert await doors.entry("ops").drain("a", "") == ["id-a"]

    play(scene)


# Keeping the run


class Failing(Through):
    """Renewals of the run's lease fail between two moments."""

    def __init__(self, inner: MemoryBackend, since: float, until: float) -> None:
        super().__init__(inner)
        self.since, self.until = since, until
        self.asked_at: list[float] = []

    async def keep_alive(self, lease: int) -> bool:
        now = asyncio.get_running_loop().time()
        self.asked_at.append(now)
        if self.since <= now < self.until:
            raise Unavailable("away")
        return await super().keep_alive(lease)


def test_run_is_renewed_soon_after_an_outage_not_a_whole_interval_later() -> None:
    async def scene(doors: Doors) -> None:
        entry = doors.entry("a", keep_alive_interval=1, reopen_after=0)
        snapshot = await entry.check()
        backend = Failing(MemoryBackend(doors.server), since=2.5, until=4.3)
        session = await MemoryBackend(doors.server).open_session(3.0)
        reach = Reachability(Emitter(), "run", "a")
        keeping = asyncio.create_task(
            doors.entry("a", backend=backend, keep_alive_interval=1, reopen_after=0).keep_alive(
                session, lambda: snapshot.config, reach
            )
        )
        await asyncio.sleep(8.0)
        assert snapshot.config.run_lease in doors.leases, "it lives for three seconds without a renewal"
        after = [at for at in backend.asked_at if at >= 4.3]
        assert after[0] <= 4.5
        keeping.cancel()
        await session.close()

    play(scene)
