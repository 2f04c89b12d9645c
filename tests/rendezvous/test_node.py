"""The node driver: joining, being spare, time-outs, leaving, draining, closing, losing its session. Virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from rallypoint.backends.contract import Backend
from rallypoint.backends.memory import MemoryBackend
from rallypoint.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
    SettingsMismatchError,
)
from rallypoint.events import (
    BackendReachable,
    BackendUnreachable,
    JoinFailed,
    NodeLost,
    RoundActive,
    RoundEntered,
    SessionLost,
    WorldChanged,
)
from rallypoint.kv.types import Delete, Put, TxnResult
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.records import (
    AssignRecord,
    ClaimRecord,
    ConfigRecord,
    NodePhase,
    RoundPhase,
    RoundRecord,
    encode,
)
from rallypoint.testing.chaos import ChaosBackend, Faults
from tests.rendezvous.fake_run import node
from tests.rendezvous.kit import CheckedWorld, InterceptingBackend, now, run_scenario, wait_until

Execute = Callable[[], Awaitable[TxnResult]]


class Chaos:
    """Puts a `ChaosBackend` between each node and the backend."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.backends: dict[str, ChaosBackend] = {}
        self._faults = faults or Faults.none()

    def wrap(self, name: str, backend: Backend) -> Backend:
        self.backends[name] = ChaosBackend(backend, random.Random(len(self.backends)), self._faults)
        return self.backends[name]


async def duration_of(awaitable: Awaitable[object]) -> float:
    before = now()
    await awaitable
    return now() - before


# Joining


def test_no_call_returns_below_the_minimum() -> None:
    async def scenario(world: CheckedWorld) -> None:
        calls = world.enter("a", "b")
        await asyncio.sleep(100)
        assert not any(call.done() for call in calls)
        calls += world.enter("c")
        joined = await asyncio.gather(*calls)
        assert [one.rank for one in joined] == [0, 1, 2]
        assert {(one.number, one.size, one.addr, one.port) for one in joined} == {(1, 3, "a", 20_001)}

    run_scenario(scenario, min_nodes=3)


def test_round_forms_with_the_nodes_that_joined_in_the_last_call() -> None:
    async def scenario(world: CheckedWorld) -> None:
        calls = world.enter("a", "b")
        await asyncio.sleep(5)
        calls += world.enter("c")
        joined = await asyncio.gather(*calls)
        assert joined[0].size == 3
        assert now() == pytest.approx(10, abs=0.1)

    run_scenario(scenario, min_nodes=2, max_nodes=4, last_call_timeout=10)


def test_full_round_forms_at_once() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        assert now() < 0.1

    run_scenario(scenario, min_nodes=2, max_nodes=3)


def test_late_node_waits_for_the_next_round_and_never_forms_a_second_group() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        late = world.enter("c", "d")
        await asyncio.sleep(60)
        assert not any(call.done() for call in late)
        assert len(world.of(RoundActive)) == 1
        again = world.enter("a", "b")
        joined = await asyncio.gather(*again, *late)
        assert {(one.number, one.size) for one in joined} == {(2, 4)}

    run_scenario(scenario, min_nodes=2, max_nodes=4, last_call_timeout=1)


def test_members_keep_their_ranks_from_round_to_round() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c", "d")
        world.crash("b")
        await asyncio.sleep(20)
        second = await world.join_all("d", "c", "a")
        assert {name: one.rank for name, one in second.items()} == {"a": 0, "d": 1, "c": 2}
        newcomers = world.enter("b")
        await wait_until(lambda: world.node("a").waiting_count() == 1, 10)
        third = await world.join_all("c", "a", "d")
        assert (await newcomers[0]).number == third["a"].number
        ranks = {name: one.rank for name, one in third.items()}
        assert (ranks["a"], ranks["d"], ranks["c"]) == (0, 1, 2)

    run_scenario(scenario, min_nodes=3, max_nodes=4, last_call_timeout=1)


def test_all_members_read_the_same_roster() -> None:
    async def scenario(world: CheckedWorld) -> None:
        joined = await world.join_all("a", "b", "c")
        rosters = [await world.node(name).roster(joined[name]) for name in joined]
        assert rosters[0] == rosters[1] == rosters[2]
        assert [member.name for member in rosters[0]] == ["a", "b", "c"]

    run_scenario(scenario, min_nodes=3)


def test_second_call_at_the_same_time_is_an_error() -> None:
    async def scenario(world: CheckedWorld) -> None:
        world.enter("a")
        await asyncio.sleep(1)
        with pytest.raises(RendezvousError, match="one call at a time"):
            await world.node("a").next_round()
        assert set(world.present()) == {"a"}

    run_scenario(scenario, min_nodes=2)


def test_two_runs_on_one_backend_are_independent() -> None:
    async def scenario(world: CheckedWorld) -> None:
        other = CheckedWorld(server=world.server, run_id="run/2", min_nodes=2)
        first, second = await asyncio.gather(world.join_all("a", "b"), other.join_all("a", "x"))
        assert {one.number for one in first.values()} == {one.number for one in second.values()} == {1}
        await world.node("a").close_run("done")
        await asyncio.sleep(1)
        assert not other.node("a").view.is_closed
        other.crash("x")
        await asyncio.sleep(30)
        assert world.node("a").waiting_count() == 0
        other.check()
        await other.stop()

    run_scenario(scenario, min_nodes=2)


def test_assignment_for_another_join_is_not_confirmed() -> None:
    async def scenario(world: CheckedWorld) -> None:
        world.enter("a")
        await asyncio.sleep(1)
        number = 5
        config = world.record(ConfigRecord, world.keys.config)
        assert config is not None
        forming = RoundRecord(number=number, phase=RoundPhase.FORMING, incarnation=config.incarnation, size=1, term=1)
        for join, phase in ((99, NodePhase.JOINING), (world.present()["a"].join, NodePhase.MEMBER)):
            own = world.keys.assign(world.node("a").identity.id)
            assign = AssignRecord(number=number, rank=0, join=join)
            await MemoryBackend(world.server).txn(
                [], [Put(own, encode(assign)), Put(world.keys.round, encode(forming))]
            )
            await asyncio.sleep(1)
            assert world.present()["a"].phase is phase

    run_scenario(scenario, min_nodes=2)


def test_join_is_refused_if_the_run_is_closed_just_before_it() -> None:
    async def scenario(world: CheckedWorld) -> None:
        operator = world.start("operator")

        async def close_before_join(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "join" in writes:
                await operator.node.close_run("enough")
            return await execute()

        world._wrap = lambda name, backend: InterceptingBackend(backend, close_before_join)
        with pytest.raises(RendezvousClosedError):
            await world.enter("a")[0]
        changes = [change.key for batch in world.server.engine.history.batches for change in batch.changes]
        assert not [key for key in changes if key.startswith(world.keys.nodes)]

    run_scenario(scenario, min_nodes=2)


def test_join_is_repeated_if_the_config_is_replaced_just_before_it() -> None:
    async def scenario(world: CheckedWorld) -> None:
        other = world.start("other", min_nodes=7)
        replaced: list[str] = []

        async def replace_before_join(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "join" in writes and not replaced:
                replaced.append("config")
                await other.node._run_config.check()
            return await execute()

        world._wrap = lambda name, backend: InterceptingBackend(backend, replace_before_join)
        joined = await world.join_all("a", "b")
        assert replaced
        assert {one.size for one in joined.values()} == {2}
        config = world.record(ConfigRecord, world.keys.config)
        assert config is not None
        assert config.shared["min_nodes"] == 2

    run_scenario(scenario, min_nodes=2)


# Settings and damage


def test_node_with_other_settings_is_refused_and_leaves_no_keys_or_leases() -> None:
    async def scenario(world: CheckedWorld) -> None:
        world.enter("a")
        await asyncio.sleep(1)
        leases = len(world.server.engine.leases)
        world.start("b", min_nodes=3)
        with pytest.raises(SettingsMismatchError, match="min_nodes is 3 here and 2 there"):
            await world.join("b")
        assert len(world.server.engine.leases) == leases
        assert set(world.present()) == {"a"}

    run_scenario(scenario, min_nodes=2)


def test_settings_may_change_when_all_nodes_are_gone() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await world.node("a").leave("done")
        world.start("c", min_nodes=3)
        with pytest.raises(SettingsMismatchError):
            await world.join("c")
        await world.node("b").leave("done")
        joined = await world.join_all("c", "d", "e", min_nodes=3)
        assert {(one.number, one.size) for one in joined.values()} == {(2, 3)}

    run_scenario(scenario, min_nodes=2)


def test_run_does_not_expire_under_nodes_that_replaced_a_shorter_lease() -> None:
    """The run's lease was granted for keep-alives of half a second; the later nodes renew every five."""

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", keep_alive_interval=0.5, reopen_after=0)
        for name in ("a", "b"):
            await world.node(name).leave("done")
        joined = await world.join_all("c", "d")
        assert {one.number for one in joined.values()} == {2}
        await asyncio.sleep(100)
        assert world.round is not None
        assert world.of(WorldChanged) == []

    run_scenario(scenario, min_nodes=2)


def test_run_does_not_expire_when_the_node_with_the_shortest_time_to_live_leaves() -> None:
    async def scenario(world: CheckedWorld) -> None:
        world.start("a", keep_alive_interval=0.5, reopen_after=0)
        world.enter("a")
        await asyncio.sleep(0.1)
        await world.join_all("b", "c")
        await world.node("a").leave("done")
        await asyncio.sleep(100)
        assert world.round is not None
        assert {event.cause for event in world.of(WorldChanged)} == {"loss"}

    run_scenario(scenario, min_nodes=3)


@pytest.mark.parametrize("value", [b"damaged", b"{}", encode(node("b", id="another")), b'{"v": 99}'])
def test_damaged_record_of_one_node_never_affects_the_others(value: bytes) -> None:
    async def scenario(world: CheckedWorld) -> None:
        world.enter("a")
        await asyncio.sleep(1)
        await world.node("a").backend.txn([], [Put(world.keys.node("stranger"), value)])
        first = await world.join_all("b", "c")
        assert {one.number for one in first.values()} == {1}
        own = world.server.engine.items[world.keys.node(world.node("b").identity.id)]
        await world.node("a").backend.txn([], [Put(own.key, value, own.lease)])
        await asyncio.sleep(1)
        assert {event.cause for event in world.of(WorldChanged)} == {"loss"}
        second = await world.join_all("a", "b", "c")
        assert {one.number for one in second.values()} == {2}

    run_scenario(scenario, min_nodes=3)


def test_node_whose_key_was_written_by_another_program_fails_at_once() -> None:
    async def scenario(world: CheckedWorld) -> None:
        process = world.start("a")
        own = world.keys.node(process.node.identity.id)
        await process.node.backend.txn([], [Put(own, b"not under a session")])
        with pytest.raises(RendezvousStateError, match="remove the key") as caught:
            await world.join("a")
        assert caught.value.key == own
        assert now() < 1
        await process.node.backend.txn([], [Delete(own)])
        await world.join_all("a", "b")

    run_scenario(scenario, min_nodes=2)


def test_huge_floor_of_another_program_only_makes_the_numbers_jump() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        record = node("x", phase=NodePhase.LEFT, floor=2**40)
        await world.node("a").backend.txn([], [Put(world.keys.node("x"), encode(record))])
        second = await world.join_all("a", "b")
        assert {one.number for one in second.values()} == {2**40 + 1}
        third = await world.join_all("a", "b")
        assert {one.number for one in third.values()} == {2**40 + 2}

    run_scenario(scenario, min_nodes=2)


@pytest.mark.parametrize("part", ["round", "closed", "config"])
def test_damaged_key_of_the_run_is_a_state_error_that_names_the_key(part: str) -> None:
    async def scenario(world: CheckedWorld) -> None:
        calls = world.enter("a")
        await asyncio.sleep(1)
        key = getattr(world.keys, part)
        item = world.server.engine.items.get(key)
        await world.node("a").backend.txn([], [Put(key, b"damaged", item.lease if item else 0)])
        if part != "config":  # a node that has joined does not read the config again
            with pytest.raises(RendezvousStateError) as caught:
                await calls[0]
            assert caught.value.key == key
        world.start("b")
        with pytest.raises(RendezvousStateError) as caught:
            await world.join("b")
        assert caught.value.key == key
        assert "b" not in world.present()
        await world.node("b").backend.txn([], [Delete(key)])

    run_scenario(scenario, min_nodes=3)


def test_damaged_status_is_an_error_until_it_is_repaired() -> None:
    """Found a bug: the error was raised again after the repair."""

    async def scenario(world: CheckedWorld) -> None:
        (call,) = world.enter("a")
        await asyncio.sleep(1)
        backend, key = world.node("a").backend, world.keys.waiting
        item = world.server.engine.items[key]
        await backend.txn([], [Put(key, b"damaged", item.lease)])
        with pytest.raises(RendezvousStateError) as caught:
            await call
        assert caught.value.key == key
        await backend.txn([], [Put(key, item.value, item.lease)])
        await asyncio.sleep(1)
        await world.join_all("a", "b")

    run_scenario(scenario, min_nodes=2)


def test_session_lost_while_entering_is_reported_to_the_listener_of_the_new_round() -> None:
    """Found a bug: the listener of the previous round was called, and before the new round was reported."""

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a")
        node, causes = world.node("a"), []
        node.listen(lambda cause, reason: causes.append(cause))
        entered = node._node_session.entered

        def lose_session() -> None:
            assert node._node_session.session is not None
            node._node_session.session.lost.set("no renewal was answered in time")
            entered()

        node._node_session.entered = lose_session  # type: ignore[method-assign]
        joined = await world.join("a")
        assert causes == []
        node.listen(lambda cause, reason: causes.append(cause))
        await asyncio.sleep(1)
        assert causes == [Cause.SESSION_LOST]
        events = [type(event) for _, event in world.events if isinstance(event, RoundEntered | WorldChanged)]
        assert events == [RoundEntered, RoundEntered, WorldChanged]
        assert joined.number == 2

    run_scenario(scenario, min_nodes=1)


def test_damaged_assignment_is_an_error_until_it_is_repaired() -> None:
    async def scenario(world: CheckedWorld) -> None:
        (call,) = world.enter("a")
        await asyncio.sleep(1)
        own = world.keys.assign(world.node("a").identity.id)
        await world.node("a").backend.txn([], [Put(own, b"damaged")])
        with pytest.raises(RendezvousStateError) as caught:
            await call
        assert caught.value.key == own
        await world.node("a").backend.txn([], [Delete(own)])
        await asyncio.sleep(1)
        await world.join_all("a", "b")

    run_scenario(scenario, min_nodes=2)


def test_node_withdraws_when_its_bootstrap_fails() -> None:
    async def scenario(world: CheckedWorld) -> None:
        process = world.start("a")

        async def no_port(number: int, size: int) -> tuple[str, int]:
            raise OSError("no port is free")

        process.node._bootstrap = no_port
        calls = world.enter("a", "b")
        with pytest.raises(OSError, match="no port is free"):
            await calls[0]
        assert set(world.present()) == {"b"}
        calls += world.enter("c")
        assert {one.size for one in await asyncio.gather(*calls[1:])} == {2}

    run_scenario(scenario, min_nodes=2)


# Time-outs


def test_join_timeout_names_present_and_lost_nodes() -> None:
    async def scenario(world: CheckedWorld) -> None:
        (call,) = world.enter("a")
        await asyncio.sleep(12)
        world.enter("b", "c")
        await asyncio.sleep(8)
        world.crash("c")
        with pytest.raises(RendezvousTimeoutError) as caught:
            await call
        assert now() == pytest.approx(60, abs=0.1)
        text = str(caught.value)
        assert text.startswith("no round after 60 s: 2 of at least 4 nodes joined: ")
        assert "a" in text
        assert "b" in text
        assert "c (joined at 12 s, lost at 3" in text
        assert "a" not in world.present(), "it must withdraw at once"
        (failure,) = world.of(JoinFailed)
        assert (failure.by, failure.error) == ("a", "RendezvousTimeoutError")

    run_scenario(scenario, min_nodes=4, join_timeout=60)


def test_node_may_join_again_after_a_timeout() -> None:
    async def scenario(world: CheckedWorld) -> None:
        with pytest.raises(RendezvousTimeoutError):
            await world.enter("a")[0]
        joined = await world.join_all("a", "b")
        assert {one.number for one in joined.values()} == {1}

    run_scenario(scenario, min_nodes=2, join_timeout=10)


def test_node_withdraws_when_its_call_is_cancelled() -> None:
    async def scenario(world: CheckedWorld) -> None:
        calls = world.enter("a", "b")
        await asyncio.sleep(1)
        calls[0].cancel()
        await asyncio.wait([calls[0]])
        assert set(world.present()) == {"b"}
        assert now() == pytest.approx(1, abs=0.1)

    run_scenario(scenario, min_nodes=3)


def test_node_that_confirmed_waits_past_its_deadline_for_the_outcome() -> None:
    """Its deadline passes while another member has not confirmed yet: it gets the round, not an error."""

    async def scenario(world: CheckedWorld) -> None:
        async def slow(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "confirm" in writes:
                await asyncio.sleep(4)
            return await execute()

        world._wrap = lambda name, backend: InterceptingBackend(backend, slow if name == "b" else None)
        (call,) = world.enter("a")
        await asyncio.sleep(9)
        calls = [call, *world.enter("b")]
        joined = await asyncio.gather(*calls)
        assert {one.number for one in joined} == {1}
        assert now() == pytest.approx(13, abs=0.1)

    run_scenario(scenario, min_nodes=2, join_timeout=10, confirm_timeout=5)


def test_node_that_confirmed_waits_for_the_confirm_timeout_at_most() -> None:
    async def scenario(world: CheckedWorld) -> None:
        async def never(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "confirm" in writes:
                await asyncio.sleep(1000)
            return await execute()

        world._wrap = lambda name, backend: InterceptingBackend(backend, never if name == "b" else None)
        (call,) = world.enter("a")
        await asyncio.sleep(9)
        world.enter("b")
        with pytest.raises(RendezvousTimeoutError):
            await call
        assert now() <= 15.1

    run_scenario(scenario, min_nodes=2, join_timeout=10, confirm_timeout=5)


def test_claim_includes_a_confirmation_that_was_not_answered() -> None:
    """A backend that lost its data must not reuse the number: that round may have become active."""

    async def scenario(world: CheckedWorld) -> None:
        async def unanswered(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            result = await execute()
            if "confirm" in writes:
                await asyncio.sleep(1000)
            return result

        world._wrap = lambda name, backend: InterceptingBackend(backend, unanswered if name == "b" else None)
        calls = world.enter("a", "b")
        assert (await calls[0]).number == 1
        claim = msgspec.json.decode(world.node("b")._make_claim(), type=ClaimRecord)
        assert (claim.floor, claim.is_member) == (1, False)

    run_scenario(scenario, min_nodes=2)


# Spares


def test_spare_has_no_deadline_and_a_new_one_when_a_place_is_free() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        (spare,) = world.enter("c")
        await asyncio.sleep(500)
        assert not spare.done()
        assert world.status is not None
        assert (world.status.waiting, world.status.spare) == (0, 1)
        assert world.node("a").waiting_count() == 0
        world.crash("b")
        await asyncio.sleep(20)
        assert world.status.number == 1
        lost_at = now()
        with pytest.raises(RendezvousTimeoutError):
            await spare
        assert 500 + 10 + 60 <= now() <= lost_at + 60

    run_scenario(scenario, min_nodes=2, join_timeout=60)


def test_spare_is_promoted_when_a_member_is_lost() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        (spare,) = world.enter("c")
        await asyncio.sleep(500)
        world.crash("b")
        await asyncio.sleep(16)
        assert world.node("a").waiting_count() > 0
        (again,) = world.enter("a")
        joined = await asyncio.gather(again, spare)
        assert [(one.number, one.rank) for one in joined] == [(2, 0), (2, 1)]

    run_scenario(scenario, min_nodes=2, join_timeout=60)


def test_loss_of_a_spare_changes_nothing() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        world.enter("c")
        await asyncio.sleep(5)
        world.crash("c")
        await asyncio.sleep(60)
        assert world.of(WorldChanged) == []
        assert [world.node(name).waiting_count() for name in ("a", "b")] == [0, 0]

    run_scenario(scenario, min_nodes=2)


def test_spare_that_loses_the_backend_times_out() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        (spare,) = world.enter("c")
        await asyncio.sleep(100)
        chaos.backends["c"].cut()
        with pytest.raises(RendezvousTimeoutError, match="unreachable"):
            await spare
        assert now() <= 100 + 20 + 60 + 10
        chaos.backends["c"].heal()

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2, join_timeout=60)


def test_node_that_waits_with_too_few_others_has_a_deadline() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        world.crash("a")
        world.crash("b")
        await asyncio.sleep(20)
        (call,) = world.enter("d")
        with pytest.raises(RendezvousTimeoutError, match="2 of at least 3 nodes"):
            await call
        assert now() == pytest.approx(80, abs=0.5)

    run_scenario(scenario, min_nodes=3, join_timeout=60)


def test_node_that_waits_after_a_round_is_over_has_a_deadline() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        for name in "ab":
            await world.node(name).leave("done")
        (call,) = world.enter("c")
        with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes joined: c"):
            await call
        assert now() == pytest.approx(60, abs=0.5)

    run_scenario(scenario, min_nodes=2, join_timeout=60)


def test_waiting_node_is_admitted_within_one_further_round() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await asyncio.sleep(60)
        (late,) = world.enter("c")
        await asyncio.sleep(0.9)
        assert world.node("a").waiting_count() == 0
        await asyncio.sleep(0.3)
        assert world.node("a").waiting_count() == 1
        assert {(event.by, event.cause) for event in world.of(WorldChanged)} == {("a", "waiting"), ("b", "waiting")}
        again = world.enter("a", "b")
        assert {(one.number, one.size) for one in await asyncio.gather(*again, late)} == {(2, 3)}

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


# Loss


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_loss_of_a_member_is_known_to_every_survivor_in_time(victim: str) -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        await asyncio.sleep(32)
        world.crash(victim)
        survivors = [name for name in "abc" if name != victim]
        await wait_until(lambda: all(world.node(name).waiting_count() for name in survivors), 15 + 1)
        assert {(event.by, event.cause) for event in world.of(WorldChanged)} == {(name, "loss") for name in survivors}
        joined = await world.join_all(*survivors)
        assert {(one.number, one.size) for one in joined.values()} == {(2, 2)}

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_loss_below_the_minimum_is_reported_but_does_not_count_as_waiting() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        world.crash("b")
        await asyncio.sleep(20)
        assert world.node("a").waiting_count() == 0
        assert [event.cause for event in world.of(WorldChanged)] == ["loss"]

    run_scenario(scenario, min_nodes=2)


@pytest.mark.parametrize("victim", ["a", "b", "c", "d"])
@pytest.mark.parametrize("after", [False, True], ids=["before confirming", "after confirming"])
def test_round_forms_without_a_node_that_dies_around_its_confirmation(victim: str, after: bool) -> None:
    async def scenario(world: CheckedWorld) -> None:
        async def crash(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "confirm" not in writes:
                return await execute()
            if after:
                await execute()
            world.crash(victim)
            return await asyncio.Future()

        world._wrap = lambda name, backend: InterceptingBackend(backend, crash if name == victim else None)
        calls = dict(zip("abcd", world.enter(*"abcd"), strict=True))
        del calls[victim]
        joined = await asyncio.gather(*calls.values())
        sizes = {one.size for one in joined}
        assert sizes in ({3}, {4})  # all four had confirmed: it is lost from the active round
        if not after:
            assert sizes == {3}
            assert now() <= 15 + 30

    run_scenario(scenario, min_nodes=3, max_nodes=4, last_call_timeout=5, confirm_timeout=10)


def test_live_node_that_does_not_confirm_is_excluded() -> None:
    async def scenario(world: CheckedWorld) -> None:
        async def never(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "confirm" in writes:
                await asyncio.sleep(1000)
            return await execute()

        world._wrap = lambda name, backend: InterceptingBackend(backend, never if name == "b" else None)
        calls = world.enter("a", "b", "c")
        joined = await asyncio.gather(calls[0], calls[2])
        assert {one.size for one in joined} == {2}
        assert now() == pytest.approx(10, abs=0.5)
        assert "b" in world.present()

    run_scenario(scenario, min_nodes=2, max_nodes=3, confirm_timeout=10, last_call_timeout=5)


def test_lost_session_is_reported_and_the_node_may_join_again() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        chaos.backends["b"].cut()
        await wait_until(lambda: bool(world.of(SessionLost)), 15.1)
        assert world.of(SessionLost)[0].by == "b"
        assert world.node("b").waiting_count() == 1
        assert [event.cause for event in world.of(WorldChanged) if event.by == "b"] == ["session lost"]
        chaos.backends["b"].heal()
        await asyncio.sleep(2)
        joined = await world.join_all("a", "b", "c")
        assert {(one.number, one.size) for one in joined.values()} == {(2, 3)}
        assert {name: one.rank for name, one in joined.items()} == {"a": 0, "b": 1, "c": 2}

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2, max_nodes=3)


def test_outage_shorter_than_the_time_to_live_has_no_effect() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        for one in chaos.backends.values():
            one.cut()
        await asyncio.sleep(8)
        for one in chaos.backends.values():
            one.heal()
        await asyncio.sleep(60)
        assert world.of(WorldChanged) == []
        assert world.of(SessionLost) == []

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2)


def test_waiting_nodes_make_the_run_again_when_its_keys_vanish() -> None:
    async def scenario(world: CheckedWorld) -> None:
        calls = world.enter("a", "b")
        await asyncio.sleep(5)
        await MemoryBackend(world.server).revoke(world.server.engine.items[world.keys.config].lease)
        joined = await asyncio.gather(*calls)
        assert {one.size for one in joined} == {2}
        assert now() < 5 + 30 + 1

    run_scenario(scenario, min_nodes=2, max_nodes=3)


def test_round_is_over_when_its_state_vanishes_and_numbers_go_on() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await world.join_all("a", "b")
        await world.node("a").backend.txn([], [Delete(world.keys.round)])
        await asyncio.sleep(1)
        assert {(event.by, event.cause) for event in world.of(WorldChanged)} == {
            ("a", "round over"),
            ("b", "round over"),
        }
        assert [world.node(name).waiting_count() for name in "ab"] == [1, 1]
        joined = await world.join_all("a", "b")
        assert {one.number for one in joined.values()} == {3}

    run_scenario(scenario, min_nodes=2)


# Leaving


def test_leaving_ends_the_session_at_once_and_reports_the_reason() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        leases = len(world.server.engine.leases)
        assert await duration_of(world.node("c").leave("done here")) < 0.1
        assert set(world.present()) == {"a", "b"}
        assert len(world.server.engine.leases) == leases - 1
        await asyncio.sleep(1)
        assert world.status is not None
        assert "c left: done here" in world.status.reason
        assert world.node("a").waiting_count() == 1
        await world.node("c").leave("again")

    run_scenario(scenario, min_nodes=2, max_nodes=3)


def test_leaving_with_an_unanswered_confirmation_is_no_loss() -> None:
    sent = asyncio.Event()

    async def slow(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
        result = await execute()
        if "confirm" in writes:
            sent.set()
            await asyncio.sleep(1)  # it was executed, but the node has no answer yet
        return result

    async def scenario(world: CheckedWorld) -> None:
        world._wrap = lambda name, backend: InterceptingBackend(backend, slow if name == "b" else None)
        _, joining = world.enter("a", "b")
        await sent.wait()
        await world.node("b").leave("done here")
        with pytest.raises(RendezvousError, match="done here"):
            await joining
        await asyncio.sleep(1)
        assert world.status is not None
        assert "b left: done here" in world.status.reason
        assert world.of(NodeLost) == []

    run_scenario(scenario, min_nodes=2)


def slow_join(sent: asyncio.Event, *, executed: bool) -> Callable[[set[str], bool, Execute], Awaitable[TxnResult]]:
    """A hook that delays joins by a second: their answers (`executed`) or their execution."""

    async def slow(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
        if "join" not in writes:
            return await execute()
        sent.set()
        if executed:
            result = await execute()
            await asyncio.sleep(1)
            return result
        await asyncio.sleep(1)
        return await execute()

    return slow


def test_leaving_with_an_unanswered_join_is_no_loss() -> None:
    sent = asyncio.Event()

    async def scenario(world: CheckedWorld) -> None:
        world.enter("a")
        await asyncio.sleep(10)
        world._wrap = lambda name, backend: InterceptingBackend(backend, slow_join(sent, executed=True))
        (joining,) = world.enter("b")
        await sent.wait()
        await world.node("b").leave("done here")
        with pytest.raises(RendezvousError, match="done here"):
            await joining
        await asyncio.sleep(10)
        assert world.status is not None
        assert "left: b (done here)" in world.status.reason
        assert world.of(NodeLost) == []
        assert set(world.present()) == {"a"}

    run_scenario(scenario, min_nodes=2)


def test_leaving_before_the_join_is_executed_creates_no_key() -> None:
    sent = asyncio.Event()

    async def scenario(world: CheckedWorld) -> None:
        world.enter("a")
        await asyncio.sleep(10)
        world._wrap = lambda name, backend: InterceptingBackend(backend, slow_join(sent, executed=False))
        (joining,) = world.enter("b")
        await sent.wait()
        await world.node("b").leave("done here")
        with pytest.raises(RendezvousError, match="done here"):
            await joining
        await asyncio.sleep(10)
        changes = [change.key for batch in world.server.engine.history.batches for change in batch.changes]
        assert len({key for key in changes if key.startswith(world.keys.nodes)}) == 1

    run_scenario(scenario, min_nodes=2)


def test_leaving_is_bounded_when_the_backend_is_unreachable() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        chaos.backends["b"].cut()
        assert await duration_of(world.node("b").leave("no answer")) <= 10.1
        await asyncio.sleep(20)
        assert set(world.present()) == {"a"}
        chaos.backends["b"].heal()

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2)


def test_node_that_left_may_join_again() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await world.node("b").leave("a break")
        joined = await world.join_all("a", "b")
        assert {one.number for one in joined.values()} == {2}

    run_scenario(scenario, min_nodes=2)


# Draining


def test_drained_member_is_notified_and_drained_waiting_node_exits_gracefully() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        (waiting,) = world.enter("c")
        await asyncio.sleep(5)
        run_config = world.node("a")._run_config
        await run_config.drain("c", "repair")
        with pytest.raises(RendezvousGracefulExitError, match="drained by a: repair"):
            await waiting
        assert set(world.present()) == {"a", "b"}
        await run_config.drain("b", "power")
        await asyncio.sleep(1)
        event = [event for event in world.of(WorldChanged) if event.by == "b"][-1]
        assert (event.cause, event.reason) == ("drain", "drained by a: power")
        assert world.node("b").waiting_count() == 1
        again = world.enter("b")[0]
        with pytest.raises(RendezvousGracefulExitError):
            await again

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


# Closing


def test_close_is_a_graceful_exit_for_spares_and_an_error_for_later_joins() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        (spare,) = world.enter("c")
        await asyncio.sleep(5)
        await world.node("a").close_run("done")
        with pytest.raises(RendezvousGracefulExitError, match="closed by a: done"):
            await spare
        await asyncio.sleep(60)
        assert world.of(WorldChanged) == []
        assert [world.node(name).waiting_count() for name in "ab"] == [0, 0]
        assert world.node("b").view.is_closed
        (again,) = world.enter("b")
        with pytest.raises(RendezvousClosedError):
            await again

    run_scenario(scenario, min_nodes=2)


def test_close_is_an_error_for_a_node_that_waits_for_a_free_place() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        (waiting,) = world.enter("c")
        await asyncio.sleep(5)
        await world.node("a").close_run("done")
        with pytest.raises(RendezvousClosedError, match="closed by a: done"):
            await waiting

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


@pytest.mark.parametrize("moment", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
def test_close_while_forming_admits_all_members_or_none(moment: float) -> None:
    """Each step of the forming takes a second; the run is closed before, during or after any of them."""
    chaos = Chaos(Faults(delay_s=(0.25, 0.25), watch_delay_s=(0.25, 0.25)))

    async def scenario(world: CheckedWorld) -> None:
        calls = world.enter("a", "b")
        await asyncio.sleep(moment)
        operator = world.start("operator")
        await operator.node.close_run("enough")
        results = await asyncio.gather(*calls, return_exceptions=True)
        entered = [one for one in results if not isinstance(one, BaseException)]
        for one in results:
            assert isinstance(one, RendezvousClosedError) or one in entered
        assert len(entered) in (0, 2)
        if not entered:
            assert "a" not in world.present()

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2)


def test_close_ends_all_calls_that_wait_for_more_nodes() -> None:
    async def scenario(world: CheckedWorld) -> None:
        calls = world.enter("a", "b")
        await asyncio.sleep(5)
        operator = world.start("operator")
        await operator.node.close_run("enough")
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in results] == [RendezvousClosedError, RendezvousClosedError]
        assert now() <= 5.1

    run_scenario(scenario, min_nodes=3)


def test_reopened_run_goes_on_with_higher_numbers() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await world.node("a").close_run("pause")
        await world.node("a").close_run("pause again")
        assert await world.node("b").reopen_run("on we go")
        assert not await world.node("b").reopen_run("on we go")
        joined = await world.join_all("a", "b")
        assert {one.number for one in joined.values()} == {2}

    run_scenario(scenario, min_nodes=2)


def test_node_that_has_not_seen_the_reopening_yet_can_join() -> None:
    chaos = Chaos(Faults(watch_delay_s=(2.0, 2.0)))

    async def scenario(world: CheckedWorld) -> None:
        (call,) = world.enter("a")
        await asyncio.sleep(10)
        operator = world.start("operator")
        await operator.node.close_run("pause")
        with pytest.raises(RendezvousClosedError):
            await call
        await operator.node.reopen_run("on we go")
        calls = world.enter("a", "b")
        assert world.node("a").view.is_closed
        await asyncio.gather(*calls)

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2)


def test_closing_an_unreachable_run_times_out_with_its_reason() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        world.start("a")
        chaos.backends["a"].cut()
        with pytest.raises(RendezvousTimeoutError, match="could not be closed within 7 s"):
            await world.node("a").close_run("done")
        assert now() == pytest.approx(7)
        chaos.backends["a"].heal()

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2, close_timeout=7)


def test_run_id_is_free_again_after_reopen_after() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await asyncio.sleep(1000)
        await world.node("a").close_run("done")
        for name in "ab":
            await world.node(name).leave("done")
        gone_at = now()
        for _ in range(100):
            (call,) = world.enter("c")
            try:
                await asyncio.wait_for(call, 1)
            except RendezvousClosedError:
                await asyncio.sleep(5)
            except TimeoutError:
                break
        assert 50 <= now() - gone_at <= 60 + 15 + 5 + 1.1
        joined = await world.join_all("c", "d")
        assert world.of(WorldChanged) == []
        assert {one.size for one in joined.values()} == {2}

    run_scenario(scenario, min_nodes=2)


# Reaching the backend


def test_backend_that_is_never_reached_is_a_connection_error() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        world.start("a")
        chaos.backends["a"].cut()
        with pytest.raises(RendezvousConnectionError, match="could not reach memory://") as caught:
            await world.join("a")
        assert "Is it running there" in str(caught.value)
        assert now() == pytest.approx(60, abs=5.1)
        chaos.backends["a"].heal()

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2, join_timeout=60)


def test_join_waits_for_a_backend_that_starts_late() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        for name in "ab":
            world.start(name)
            chaos.backends[name].cut()
        calls = world.enter("a", "b")
        await asyncio.sleep(50)
        for one in chaos.backends.values():
            one.heal()
        await asyncio.gather(*calls)
        assert len(world.of(BackendUnreachable)) == len(world.of(BackendReachable)) == 2

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2, join_timeout=60)


def test_timeout_names_the_outage_of_the_backend() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        (call,) = world.enter("a")
        await asyncio.sleep(5)
        chaos.backends["a"].cut()
        with pytest.raises(RendezvousTimeoutError, match="the backend has been unreachable for") as caught:
            await call
        assert not isinstance(caught.value, RendezvousConnectionError)
        chaos.backends["a"].heal()

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2, join_timeout=60)


def test_round_survives_an_outage_of_the_backend() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        joined = await world.join_all("a", "b")
        for one in chaos.backends.values():
            one.cut()
        await asyncio.sleep(10)
        for name in "ab":
            assert world.node(name).current == joined[name]
            assert world.node(name).waiting_count() == 0
        for one in chaos.backends.values():
            one.heal()
        await asyncio.sleep(30)
        assert world.round is not None
        assert (world.round.number, world.round.phase) == (1, RoundPhase.ACTIVE)

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2)
