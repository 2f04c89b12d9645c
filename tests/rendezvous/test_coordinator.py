"""The coordinator: taking over, writes of unknown outcome, late writes, the status it writes, the data it deletes."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from rallypoint.backends.contract import Backend, Limits
from rallypoint.backends.memory import MemoryBackend
from rallypoint.errors import OutcomeUnknown, RendezvousError, Unavailable
from rallypoint.events import (
    CoordinatorDeposed,
    CoordinatorElected,
    NodeHeldBack,
    RoundForming,
    RoundGivenUp,
    WorldChanged,
)
from rallypoint.kv.types import Delete, Put, TxnResult
from rallypoint.rendezvous import coordinator as coordinating
from rallypoint.rendezvous.history import KEPT
from rallypoint.rendezvous.records import HealthRecord, HistoryRecord, RoundPhase, decode
from rallypoint.testing.chaos import ChaosBackend, Faults
from tests.rendezvous.kit import CheckedWorld, InterceptingBackend, TxnHook, now, run_scenario, wait_until

Execute = Callable[[], Awaitable[TxnResult]]


async def run_agent(world: CheckedWorld, name: str) -> None:
    """Join, work until the round changes, join again, after any error."""
    node = world.node(name)
    while True:
        try:
            await world.join(name)
        except RendezvousError:
            await asyncio.sleep(1)
            continue
        changed = asyncio.Event()
        node.listen(lambda *_, changed=changed: changed.set())
        await changed.wait()


def all_joined(world: CheckedWorld, *names: str) -> bool:
    record = world.round
    if record is None or record.phase is not RoundPhase.ACTIVE or record.size != len(names):
        return False
    currents = [world.node(name).current for name in names]
    return all(current is not None and current.number == record.number for current in currents)


def intercept(
    hook_of: Callable[[str], TxnHook | None], limits: Limits | None = None
) -> Callable[[str, Backend], Backend]:
    return lambda name, backend: InterceptingBackend(backend, hook_of(name), limits)


# Taking over


def test_successor_takes_over_at_once_when_the_coordinator_leaves() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        await asyncio.sleep(60)
        leaving = world.coordinator()
        left_at = now()
        await world.node(leaving).leave("done")
        await wait_until(lambda: world.coordinator() not in ("", leaving), 1)
        assert now() - left_at < 0.3
        survivors = [name for name in "abc" if name != leaving]
        joined = await world.join_all(*survivors)
        assert {(one.number, one.size) for one in joined.values()} == {(2, 2)}

    run_scenario(scenario, min_nodes=2, max_nodes=3)


def test_successor_takes_over_within_the_time_to_live_when_the_coordinator_dies() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        await asyncio.sleep(62)
        dying = world.coordinator()
        world.crash(dying)
        taken_s = await wait_until(lambda: world.coordinator() not in ("", dying), 16)
        assert taken_s <= 15.3
        await wait_until(lambda: len(world.of(WorldChanged)) == 2, 1)

    run_scenario(scenario, min_nodes=2, max_nodes=3)


def test_idle_run_keeps_its_coordinator() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        await asyncio.sleep(3600)
        assert len(world.of(CoordinatorElected)) == 1

    run_scenario(scenario, min_nodes=3)


def test_new_coordinator_knows_the_ranks_and_losses_of_the_round() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("c", "d", "e")
        waiting = world.enter("a", "b")
        await asyncio.sleep(2)
        await asyncio.gather(*world.enter("c", "d", "e"), *waiting)
        assert {name: world.node(name).current.rank for name in "cdeab"} == {  # type: ignore[union-attr]
            "c": 0,
            "d": 1,
            "e": 2,
            "a": 3,
            "b": 4,
        }
        assert world.coordinator() == "c"
        world.crash("c")
        await asyncio.sleep(20)
        assert world.status is not None
        assert world.status.lost == 1
        ranks = {name: joined.rank for name, joined in (await world.join_all(*"abde")).items()}
        assert ranks == {"b": 0, "d": 1, "e": 2, "a": 3}

    run_scenario(scenario, min_nodes=3, max_nodes=5, last_call_timeout=1)


def test_coordinator_with_a_defect_is_replaced_or_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = coordinating.decide, iter(range(1000))

    def decide(*args: object) -> object:
        if next(calls) < 3:
            raise ZeroDivisionError("a defect")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(coordinating, "decide", decide)

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        assert len(world.of(CoordinatorElected)) == 4
        assert {event.reason for event in world.of(CoordinatorDeposed)} == {"it failed: ZeroDivisionError('a defect')"}

    run_scenario(scenario, min_nodes=2)


def test_late_write_of_a_deposed_coordinator_is_refused() -> None:
    """Its write is delayed; meanwhile its session ends, and another coordinator forms a round."""
    refused: list[bool] = []

    async def scenario(world: CheckedWorld) -> None:
        stalled = asyncio.Event()

        async def delay_once(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if not ("active" in writes and by_coordinator and not stalled.is_set()):
                return await execute()
            stalled.set()
            return await asyncio.shield(world.call(world.coordinator(), execute_late(execute)))

        async def execute_late(execute: Execute) -> TxnResult:
            await asyncio.sleep(60)
            result = await execute()
            refused.append(not result.committed)
            return result

        world._wrap = intercept(lambda _: delay_once)
        calls = dict(zip("abcd", world.enter(*"abcd"), strict=True))
        await stalled.wait()
        deposed = world.coordinator()
        await MemoryBackend(world.server).revoke(world.server.engine.items[world.keys.coordinator].lease)
        await asyncio.sleep(100)
        assert refused == [True]
        assert world.coordinator() != deposed
        del calls[deposed]
        assert {one.size for one in await asyncio.gather(*calls.values())} == {3}

    run_scenario(scenario, min_nodes=3, max_nodes=4, last_call_timeout=1, confirm_timeout=200)


def test_coordinator_whose_key_is_deleted_stops_deciding() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        term = world.server.engine.items[world.keys.coordinator].create_revision
        await MemoryBackend(world.server).txn([], [Delete(world.keys.coordinator)])
        await asyncio.sleep(1)
        assert world.server.engine.items[world.keys.coordinator].create_revision > term
        assert [event.term for event in world.of(CoordinatorDeposed)] == [term]
        await world.join_all("a", "b")

    run_scenario(scenario, min_nodes=2)


# Writes of unknown outcome

KINDS = [
    "config",
    "coordinator",
    "join",
    "confirm",
    "roster",
    "form",
    "assign",
    "active",
    "status",
    "history",
    "left",
    "events",
]


@pytest.mark.parametrize("outcome", ["executed", "not executed", "late", "unavailable"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [Limits(), Limits(max_txn_ops=5)], ids=["whole", "split"])
def test_round_forms_despite_a_write_of_unknown_outcome(kind: str, outcome: str, limits: Limits) -> None:
    """The first write of this kind of every node has this outcome. Numbers stay unique: the history is checked."""

    def fail_once(name: str) -> TxnHook:
        has_failed = False

        async def hook(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            nonlocal has_failed
            if kind not in writes or has_failed:
                return await execute()
            has_failed = True
            if outcome == "unavailable":
                raise Unavailable("not executed")
            if outcome == "executed":
                await execute()
            elif outcome == "late":
                late_tasks.append(asyncio.get_running_loop().create_task(execute_late(execute)))
            raise OutcomeUnknown(f"{name} does not know")

        return hook

    late_tasks: list[asyncio.Task[None]] = []

    async def execute_late(execute: Execute) -> None:
        await asyncio.sleep(3)
        try:
            await execute()
        except RendezvousError:
            raise
        except Exception:  # refused by the backend, for example because its lease has ended
            return

    async def scenario(world: CheckedWorld) -> None:
        agents = []
        for name in "abcd":
            world.start(name)
            agents.append(asyncio.create_task(run_agent(world, name)))
        await wait_until(lambda: all_joined(world, *"abcd"), 60)
        await asyncio.sleep(20)
        leaver = next(name for name in "abcd" if name != world.coordinator())
        agents["abcd".index(leaver)].cancel()
        await world.node(leaver).leave("done")
        rest = [name for name in "abcd" if name != leaver]
        await wait_until(lambda: all_joined(world, *rest), 60)
        await asyncio.sleep(20)
        assert all_joined(world, *rest)
        for agent in agents:
            agent.cancel()
        await asyncio.wait([*agents, *late_tasks])

    run_scenario(scenario, wrap=intercept(fail_once, limits), min_nodes=3, max_nodes=4, last_call_timeout=2)


@pytest.mark.parametrize("seed", [*range(8), 1189])
def test_heavy_faults_break_no_guarantee_and_a_round_forms_when_they_stop(seed: int) -> None:
    chaos: list[ChaosBackend] = []

    def wrap(name: str, backend: Backend) -> Backend:
        chaos.append(ChaosBackend(backend, random.Random(f"{seed} {name}"), Faults.cruel()))
        return chaos[-1]

    async def scenario(world: CheckedWorld) -> None:
        agents = []
        for name in "abcde":
            world.start(name)
            agents.append(asyncio.create_task(run_agent(world, name)))
        await asyncio.sleep(400)
        for one in chaos:
            one.faults = Faults.none()
        for one in chaos:
            await one.settled()
        await wait_until(lambda: all_joined(world, *"abcde"), 300)
        for agent in agents:
            agent.cancel()
        await asyncio.wait(agents)

    run_scenario(scenario, seed=seed, wrap=wrap, min_nodes=3, max_nodes=5, last_call_timeout=5, hold_back_losses=0)


# Forming


def test_forming_of_another_coordinator_is_not_continued() -> None:
    async def scenario(world: CheckedWorld) -> None:
        async def crash(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "active" in writes and len(world.processes) == 4:
                world.crash(world.coordinator())
                return await asyncio.Future()
            return await execute()

        world._wrap = intercept(lambda _: crash)
        calls = dict(zip("abcd", world.enter(*"abcd"), strict=True))
        await asyncio.sleep(60)
        joined = [call.result() for name, call in calls.items() if name in world.processes]
        assert {(one.number, one.size) for one in joined} == {(2, 3)}
        assert [event.round for event in world.of(RoundForming)] == [1, 2]

    run_scenario(scenario, min_nodes=3, max_nodes=4, last_call_timeout=1)


def test_member_that_is_lost_while_forming_makes_the_rest_form_again() -> None:
    async def scenario(world: CheckedWorld) -> None:
        async def crash(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "confirm" in writes:
                session = world.node("b")._node_session.session
                assert session is not None
                await world.node("b").backend.revoke(session.lease)
                world.crash("b")
                return await asyncio.Future()
            return await execute()

        world._wrap = intercept(lambda name: crash if name == "b" else None)
        calls = world.enter("a", "b", "c")
        joined = await asyncio.gather(calls[0], calls[2])
        assert {(one.number, one.size) for one in joined} == {(2, 2)}
        assert [event.round for event in world.of(RoundGivenUp)] == [1]

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


@pytest.mark.parametrize("victim", ["a", "b", "c", "d"])
def test_member_that_is_lost_just_before_activation_is_not_in_the_round(victim: str) -> None:
    """All members have confirmed and the coordinator is about to activate the round: then a session ends."""

    async def scenario(world: CheckedWorld) -> None:
        victims: list[str] = []

        async def lose_session(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "active" in writes and not victims and victim != world.coordinator():
                victims.append(victim)
                session = world.node(victim)._node_session.session
                assert session is not None
                await MemoryBackend(world.server).revoke(session.lease)
                result = await execute()
                assert not result.committed
                return result
            return await execute()

        world._wrap = intercept(lambda _: lose_session)
        calls = dict(zip("abcd", world.enter(*"abcd"), strict=True))
        await asyncio.sleep(30)
        sizes = {call.result().size for name, call in calls.items() if name not in victims}
        assert len(sizes) == 1

    run_scenario(scenario, min_nodes=3, max_nodes=4, last_call_timeout=1)


def test_attempt_with_a_missing_assignment_is_given_up_at_once() -> None:
    async def scenario(world: CheckedWorld) -> None:
        failed: list[set[str]] = []

        async def fail_assign_once(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if writes == {"assign"} and not failed:
                failed.append(writes)
                raise Unavailable("not executed")
            return await execute()

        world._wrap = intercept(lambda _: fail_assign_once, Limits(max_txn_ops=5))
        joined = await world.join_all(*"abcdefgh")
        assert failed
        assert {one.number for one in joined.values()} == {2}
        assert now() < 2

    run_scenario(scenario, min_nodes=8)


def test_confirm_timeout_starts_after_the_assignments_are_written() -> None:
    async def scenario(world: CheckedWorld) -> None:
        async def slow(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if writes == {"assign"}:
                await asyncio.sleep(4)
            if "confirm" in writes:
                await asyncio.sleep(4)
            return await execute()

        world._wrap = intercept(lambda _: slow, Limits(max_txn_ops=5))
        joined = await world.join_all(*"abcdefgh")
        assert {one.number for one in joined.values()} == {1}

    run_scenario(scenario, min_nodes=8, confirm_timeout=5)


def test_large_roster_is_split_and_complete_before_the_round_is_active() -> None:
    async def scenario(world: CheckedWorld) -> None:
        names = [f"node{index}" for index in range(300)]
        joined = await world.join_all(*names)
        roster = await world.node("node7").roster(joined["node7"])
        assert [member.name for member in roster] == names

    run_scenario(scenario, wrap=intercept(lambda _: None, Limits(max_txn_ops=20)), min_nodes=300)


# Status


def test_counts_are_corrected_after_a_write_of_unknown_outcome() -> None:
    """The members receive that a node waits; the answer to that write is lost, and the node leaves."""

    async def scenario(world: CheckedWorld) -> None:
        async def lose_answer(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            result = await execute()
            if writes - {"events"} == {"status"} and world.status and world.status.waiting and "c" in world.processes:
                await world.node("c").leave("changed its mind")
                del world.processes["c"]
                raise OutcomeUnknown("no answer")
            return result

        world._wrap = intercept(lambda name: lose_answer if name != "c" else None)
        await world.join_all("a", "b")
        await asyncio.sleep(10)
        (call,) = world.enter("c")
        await asyncio.sleep(30)
        assert "c" not in world.processes
        assert world.status is not None
        assert world.status.waiting == 0
        assert [world.node(name).waiting_count() for name in "ab"] == [0, 0]
        await asyncio.wait([call])

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_counts_are_corrected_after_a_late_write() -> None:
    async def scenario(world: CheckedWorld) -> None:
        late: list[Execute] = []

        async def delay_status(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if writes == {"status"} and "c" in world.present() and not late:
                late.append(execute)
                raise OutcomeUnknown("no answer")
            return await execute()

        world._wrap = intercept(lambda name: delay_status if name != "c" else None)
        await world.join_all("a", "b")
        await asyncio.sleep(10)
        (call,) = world.enter("c")
        await asyncio.sleep(10)
        await world.node("c").leave("changed its mind")
        await asyncio.wait([call])
        await asyncio.sleep(10)
        assert world.status is not None
        before = world.status
        await late[0]()
        assert world.status != before
        await asyncio.sleep(10)
        assert world.status == before

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1, admission_window=1)


def test_status_is_written_at_most_four_times_a_second() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        for index in range(100):
            world.enter(f"late{index}")
            await asyncio.sleep(0.05)
        started_at, before = now(), _revisions(world)
        for index in range(100):
            world.enter(f"later{index}")
            await asyncio.sleep(0.05)
        assert now() - started_at == pytest.approx(5)
        assert 2 <= _revisions(world) - before <= 21

    def _revisions(world: CheckedWorld) -> int:
        return world.server.engine.items[world.keys.waiting].version

    run_scenario(scenario, min_nodes=2, max_nodes=1000, last_call_timeout=1, admission_window=0)


# Holding back


def test_node_that_is_lost_repeatedly_is_held_back_and_admitted_later() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")  # one of these two is the coordinator from now on
        for _ in range(3):
            (call,) = world.enter("bad")
            await wait_until(lambda: "bad" in world.present(), 10)
            survivors = await world.join_all("a", "b")
            assert (await call).number == survivors["a"].number
            world.crash("bad")
            await asyncio.sleep(16)
        (event,) = world.of(NodeHeldBack)
        assert (event.node, event.hold_s) == ("bad", 30)
        assert isinstance(world.record(HealthRecord, world.keys.health("bad")), HealthRecord)
        calls = world.enter("bad", "a", "b")
        joined = await asyncio.gather(*calls[1:])
        assert {one.size for one in joined} == {2}
        held_at = now()
        assert not calls[0].done()
        await wait_until(lambda: world.node("a").waiting_count() == 1, 40)
        assert now() - held_at > 5
        joined = [*await asyncio.gather(*world.enter("a", "b")), await calls[0]]
        assert {one.size for one in joined} == {3}
        await asyncio.sleep(700)
        assert world.record(HealthRecord, world.keys.health("bad")) is None

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


# Deleting old data


def test_only_data_of_recent_rounds_is_kept() -> None:
    async def scenario(world: CheckedWorld) -> None:
        engine = world.server.engine
        for _ in range(30):
            joined = await world.join_all("a", "b")
            number = joined["a"].number
            await world.node("a").backend.txn(
                [], [Put(world.keys.store(number) + "key", b"value", joined["a"].data_lease)]
            )
        await asyncio.sleep(1)
        histories = [item for key, item in engine.items.items() if key.startswith(world.keys.histories)]
        assert len(histories) == KEPT
        reports = [decode(HistoryRecord, item) for item in histories]
        assert max(report.number for report in reports) == 30
        assert {report.ended for report in reports if report.number < 30} == {"a asked for the next round"}
        for part in ("roster/", "store/"):
            assert len([key for key in engine.items if key.startswith(world.keys.data + part)]) == 2

    run_scenario(scenario, min_nodes=2)


def test_all_keys_are_deleted_hours_after_the_run() -> None:
    async def scenario(world: CheckedWorld) -> None:
        joined = await world.join_all("a", "b")
        await world.node("a").backend.txn([], [Put(world.keys.store(1) + "key", b"", joined["a"].data_lease)])
        await asyncio.sleep(3 * 3600)
        assert world.of(WorldChanged) == []
        assert any(key.startswith(world.keys.roster(1)) for key in world.server.engine.items)
        for name in "ab":
            await world.node(name).stop()
        await asyncio.sleep(80)
        assert not any(key.startswith(world.keys.control) for key in world.server.engine.items)
        await asyncio.sleep(2.1 * 3600)
        await MemoryBackend(world.server).status()
        assert not world.server.engine.items
        assert not list(world.server.engine.leases)

    run_scenario(scenario, min_nodes=2)


def test_active_round_keeps_its_data_when_an_operator_deletes_the_config() -> None:
    """As the error about a damaged config advises. The next node to join makes a new config."""

    async def scenario(world: CheckedWorld) -> None:
        joined = await world.join_all("a", "b")
        key = world.keys.store(1) + "key"
        await world.node("a").backend.txn([], [Put(key, b"value", joined["a"].data_lease)])
        await world.node("a").backend.txn([], [Delete(world.keys.config)])
        world.enter("c")
        await asyncio.sleep(10)
        assert world.keys.config in world.server.engine.items
        assert key in world.server.engine.items
        assert len(await world.node("a").roster(joined["a"])) == 2
        again = await world.join_all("a", "b")
        assert {one.number for one in again.values()} == {2}

    run_scenario(scenario, min_nodes=2)


def test_store_of_an_earlier_incarnation_is_never_seen_by_a_later_round() -> None:
    async def scenario(world: CheckedWorld) -> None:
        joined = await world.join_all("a", "b")
        number = joined["a"].number
        await world.node("a").backend.txn([], [Put(world.keys.store(number) + "key", b"old", joined["a"].data_lease)])
        for name in "ab":
            await world.node(name).stop()
        await asyncio.sleep(100)
        assert world.keys.config not in world.server.engine.items
        joined = await world.join_all("c", "d")
        for one in joined.values():
            seen = await world.node("c").backend.scan(world.keys.store(one.number))
            assert not seen.items

    run_scenario(scenario, min_nodes=2)
