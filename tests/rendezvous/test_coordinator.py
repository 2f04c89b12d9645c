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
from tests.rendezvous.kit import InterceptingBackend, Town, TxnHook, now, play, wait_until

Execute = Callable[[], Awaitable[TxnResult]]


async def run_agent(town: Town, name: str) -> None:
    """Join, work until the round changes, join again, after any error."""
    node = town.node(name)
    while True:
        try:
            await town.join(name)
        except RendezvousError:
            await asyncio.sleep(1)
            continue
        changed = asyncio.Event()
        node.listen(lambda *_, changed=changed: changed.set())
        await changed.wait()


def all_joined(town: Town, *names: str) -> bool:
    record = town.round
    if record is None or record.phase is not RoundPhase.ACTIVE or record.size != len(names):
        return False
    currents = [town.node(name).current for name in names]
    return all(current is not None and current.number == record.number for current in currents)


def intercept(
    hook_of: Callable[[str], TxnHook | None], limits: Limits | None = None
) -> Callable[[str, Backend], Backend]:
    return lambda name, backend: InterceptingBackend(backend, hook_of(name), limits)


# Taking over


def test_successor_takes_over_at_once_when_the_coordinator_leaves() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c")
        await asyncio.sleep(60)
        leaving = town.coordinator()
        left_at = now()
        await town.node(leaving).leave("done")
        await wait_until(lambda: town.coordinator() not in ("", leaving), 1)
        assert now() - left_at < 0.3
        survivors = [name for name in "abc" if name != leaving]
        joined = await town.gathered(*survivors)
        assert {(one.number, one.size) for one in joined.values()} == {(2, 2)}

    play(scene, min_nodes=2, max_nodes=3)


def test_successor_takes_over_within_the_time_to_live_when_the_coordinator_dies() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c")
        await asyncio.sleep(62)
        dying = town.coordinator()
        town.crash(dying)
        taken_s = await wait_until(lambda: town.coordinator() not in ("", dying), 16)
        assert taken_s <= 15.3
        await wait_until(lambda: len(town.of(WorldChanged)) == 2, 1)

    play(scene, min_nodes=2, max_nodes=3)


def test_idle_run_keeps_its_coordinator() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c")
        await asyncio.sleep(3600)
        assert len(town.of(CoordinatorElected)) == 1

    play(scene, min_nodes=3)


def test_new_coordinator_knows_the_ranks_and_losses_of_the_round() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("c", "d", "e")
        waiting = town.enter("a", "b")
        await asyncio.sleep(2)
        await asyncio.gather(*town.enter("c", "d", "e"), *waiting)
        assert {name: town.node(name).current.rank for name in "cdeab"} == {  # type: ignore[union-attr]
            "c": 0,
            "d": 1,
            "e": 2,
            "a": 3,
            "b": 4,
        }
        assert town.coordinator() == "c"
        town.crash("c")
        await asyncio.sleep(20)
        assert town.status is not None
        assert town.status.lost == 1
        ranks = {name: joined.rank for name, joined in (await town.gathered(*"abde")).items()}
        assert ranks == {"b": 0, "d": 1, "e": 2, "a": 3}

    play(scene, min_nodes=3, max_nodes=5, last_call_timeout=1)


def test_coordinator_with_a_defect_is_replaced_or_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = coordinating.decide, iter(range(1000))

    def decide(*args: object) -> object:
        if next(calls) < 3:
            raise ZeroDivisionError("a defect")
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(coordinating, "decide", decide)

    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        assert len(town.of(CoordinatorElected)) == 4
        assert {event.reason for event in town.of(CoordinatorDeposed)} == {"it failed: ZeroDivisionError('a defect')"}

    play(scene, min_nodes=2)


def test_late_write_of_a_deposed_coordinator_is_refused() -> None:
    """Its write is delayed; meanwhile its session ends, and another coordinator forms a round."""
    refused: list[bool] = []

    async def scene(town: Town) -> None:
        stalled = asyncio.Event()

        async def delay_once(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if not ("active" in writes and by_coordinator and not stalled.is_set()):
                return await execute()
            stalled.set()
            return await asyncio.shield(town.call(town.coordinator(), execute_late(execute)))

        async def execute_late(execute: Execute) -> TxnResult:
            await asyncio.sleep(60)
            result = await execute()
            refused.append(not result.committed)
            return result

        town._wrap = intercept(lambda _: delay_once)
        calls = dict(zip("abcd", town.enter(*"abcd"), strict=True))
        await stalled.wait()
        deposed = town.coordinator()
        await MemoryBackend(town.server).revoke(town.server.engine.items[town.keys.coordinator].lease)
        await asyncio.sleep(100)
        assert refused == [True]
        assert town.coordinator() != deposed
        del calls[deposed]
        assert {one.size for one in await asyncio.gather(*calls.values())} == {3}

    play(scene, min_nodes=3, max_nodes=4, last_call_timeout=1, confirm_timeout=200)


def test_coordinator_whose_key_is_deleted_stops_deciding() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        term = town.server.engine.items[town.keys.coordinator].create_revision
        await MemoryBackend(town.server).txn([], [Delete(town.keys.coordinator)])
        await asyncio.sleep(1)
        assert town.server.engine.items[town.keys.coordinator].create_revision > term
        assert [event.term for event in town.of(CoordinatorDeposed)] == [term]
        await town.gathered("a", "b")

    play(scene, min_nodes=2)


# Writes of unknown outcome

KINDS = ["config", "coordinator", "join", "confirm", "roster", "form", "assign", "active", "status", "history", "left"]


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

    async def scene(town: Town) -> None:
        agents = []
        for name in "abcd":
            town.start(name)
            agents.append(asyncio.create_task(run_agent(town, name)))
        await wait_until(lambda: all_joined(town, *"abcd"), 60)
        await asyncio.sleep(20)
        leaver = next(name for name in "abcd" if name != town.coordinator())
        agents["abcd".index(leaver)].cancel()
        await town.node(leaver).leave("done")
        rest = [name for name in "abcd" if name != leaver]
        await wait_until(lambda: all_joined(town, *rest), 60)
        await asyncio.sleep(20)
        assert all_joined(town, *rest)
        for agent in agents:
            agent.cancel()
        await asyncio.wait([*agents, *late_tasks])

    play(scene, wrap=intercept(fail_once, limits), min_nodes=3, max_nodes=4, last_call_timeout=2)


@pytest.mark.parametrize("seed", [*range(8), 1189])
def test_heavy_faults_break_no_guarantee_and_a_round_forms_when_they_stop(seed: int) -> None:
    chaos: list[ChaosBackend] = []

    def wrap(name: str, backend: Backend) -> Backend:
        chaos.append(ChaosBackend(backend, random.Random(f"{seed} {name}"), Faults.cruel()))
        return chaos[-1]

    async def scene(town: Town) -> None:
        agents = []
        for name in "abcde":
            town.start(name)
            agents.append(asyncio.create_task(run_agent(town, name)))
        await asyncio.sleep(400)
        for one in chaos:
            one.faults = Faults.none()
        for one in chaos:
            await one.settled()
        await wait_until(lambda: all_joined(town, *"abcde"), 300)
        for agent in agents:
            agent.cancel()
        await asyncio.wait(agents)

    play(scene, seed=seed, wrap=wrap, min_nodes=3, max_nodes=5, last_call_timeout=5, hold_back_losses=0)


# Forming


def test_forming_of_another_coordinator_is_not_continued() -> None:
    async def scene(town: Town) -> None:
        async def crash(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "active" in writes and len(town.processes) == 4:
                town.crash(town.coordinator())
                return await asyncio.Future()
            return await execute()

        town._wrap = intercept(lambda _: crash)
        calls = dict(zip("abcd", town.enter(*"abcd"), strict=True))
        await asyncio.sleep(60)
        joined = [call.result() for name, call in calls.items() if name in town.processes]
        assert {(one.number, one.size) for one in joined} == {(2, 3)}
        assert [event.round for event in town.of(RoundForming)] == [1, 2]

    play(scene, min_nodes=3, max_nodes=4, last_call_timeout=1)


def test_member_that_is_lost_while_forming_makes_the_rest_form_again() -> None:
    async def scene(town: Town) -> None:
        async def crash(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "confirm" in writes:
                await town.node("b").backend.revoke(town.node("b")._node_session.session.lease)  # type: ignore[union-attr]
                town.crash("b")
                return await asyncio.Future()
            return await execute()

        town._wrap = intercept(lambda name: crash if name == "b" else None)
        calls = town.enter("a", "b", "c")
        joined = await asyncio.gather(calls[0], calls[2])
        assert {(one.number, one.size) for one in joined} == {(2, 2)}
        assert [event.round for event in town.of(RoundGivenUp)] == [1]

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1)


@pytest.mark.parametrize("victim", ["a", "b", "c", "d"])
def test_member_that_is_lost_just_before_activation_is_not_in_the_round(victim: str) -> None:
    """All members have confirmed and the coordinator is about to activate the round: then a session ends."""

    async def scene(town: Town) -> None:
        victims: list[str] = []

        async def lose_session(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if "active" in writes and not victims and victim != town.coordinator():
                victims.append(victim)
                session = town.node(victim)._node_session.session
                assert session is not None
                await MemoryBackend(town.server).revoke(session.lease)
                result = await execute()
                assert not result.committed
                return result
            return await execute()

        town._wrap = intercept(lambda _: lose_session)
        calls = dict(zip("abcd", town.enter(*"abcd"), strict=True))
        await asyncio.sleep(30)
        sizes = {call.result().size for name, call in calls.items() if name not in victims}
        assert len(sizes) == 1

    play(scene, min_nodes=3, max_nodes=4, last_call_timeout=1)


def test_attempt_with_a_missing_assignment_is_given_up_at_once() -> None:
    async def scene(town: Town) -> None:
        failed: list[set[str]] = []

        async def fail_assign_once(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if writes == {"assign"} and not failed:
                failed.append(writes)
                raise Unavailable("not executed")
            return await execute()

        town._wrap = intercept(lambda _: fail_assign_once, Limits(max_txn_ops=5))
        joined = await town.gathered(*"abcdefgh")
        assert failed
        assert {one.number for one in joined.values()} == {2}
        assert now() < 2

    play(scene, min_nodes=8)


def test_confirm_timeout_starts_after_the_assignments_are_written() -> None:
    async def scene(town: Town) -> None:
        async def slow(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if writes == {"assign"}:
                await asyncio.sleep(4)
            if "confirm" in writes:
                await asyncio.sleep(4)
            return await execute()

        town._wrap = intercept(lambda _: slow, Limits(max_txn_ops=5))
        joined = await town.gathered(*"abcdefgh")
        assert {one.number for one in joined.values()} == {1}

    play(scene, min_nodes=8, confirm_timeout=5)


def test_large_roster_is_split_and_complete_before_the_round_is_active() -> None:
    async def scene(town: Town) -> None:
        names = [f"node{index}" for index in range(300)]
        joined = await town.gathered(*names)
        roster = await town.node("node7").roster(joined["node7"])
        assert [member.name for member in roster] == names

    play(scene, wrap=intercept(lambda _: None, Limits(max_txn_ops=20)), min_nodes=300)


# Status


def test_counts_are_corrected_after_a_write_of_unknown_outcome() -> None:
    """The members receive that a node waits; the answer to that write is lost, and the node leaves."""

    async def scene(town: Town) -> None:
        async def lose_answer(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            result = await execute()
            if writes == {"status"} and town.status and town.status.waiting and "c" in town.processes:
                await town.node("c").leave("changed its mind")
                del town.processes["c"]
                raise OutcomeUnknown("no answer")
            return result

        town._wrap = intercept(lambda name: lose_answer if name != "c" else None)
        await town.gathered("a", "b")
        await asyncio.sleep(10)
        (call,) = town.enter("c")
        await asyncio.sleep(30)
        assert "c" not in town.processes
        assert town.status is not None
        assert town.status.waiting == 0
        assert [town.node(name).waiting_count() for name in "ab"] == [0, 0]
        await asyncio.wait([call])

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_counts_are_corrected_after_a_late_write() -> None:
    async def scene(town: Town) -> None:
        late: list[Execute] = []

        async def delay_status(writes: set[str], by_coordinator: bool, execute: Execute) -> TxnResult:
            if writes == {"status"} and "c" in town.present() and not late:
                late.append(execute)
                raise OutcomeUnknown("no answer")
            return await execute()

        town._wrap = intercept(lambda name: delay_status if name != "c" else None)
        await town.gathered("a", "b")
        await asyncio.sleep(10)
        (call,) = town.enter("c")
        await asyncio.sleep(10)
        await town.node("c").leave("changed its mind")
        await asyncio.wait([call])
        await asyncio.sleep(10)
        assert town.status is not None
        before = town.status
        await late[0]()
        assert town.status != before
        await asyncio.sleep(10)
        assert town.status == before

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1, admission_window=0)


def test_status_is_written_at_most_four_times_a_second() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")
        for index in range(100):
            town.enter(f"late{index}")
            await asyncio.sleep(0.05)
        started_at, before = now(), _revisions(town)
        for index in range(100):
            town.enter(f"later{index}")
            await asyncio.sleep(0.05)
        assert now() - started_at == pytest.approx(5)
        assert 2 <= _revisions(town) - before <= 21

    def _revisions(town: Town) -> int:
        return town.server.engine.items[town.keys.waiting].version

    play(scene, min_nodes=2, max_nodes=1000, last_call_timeout=1, admission_window=0)


# Holding back


def test_node_that_is_lost_repeatedly_is_held_back_and_admitted_later() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")  # one of these two is the coordinator from now on
        for _ in range(3):
            (call,) = town.enter("bad")
            await wait_until(lambda: "bad" in town.present(), 10)
            survivors = await town.gathered("a", "b")
            assert (await call).number == survivors["a"].number
            town.crash("bad")
            await asyncio.sleep(16)
        (event,) = town.of(NodeHeldBack)
        assert (event.node, event.hold_s) == ("bad", 30)
        assert isinstance(town.record(HealthRecord, town.keys.health("bad")), HealthRecord)
        calls = town.enter("bad", "a", "b")
        joined = await asyncio.gather(*calls[1:])
        assert {one.size for one in joined} == {2}
        held_at = now()
        assert not calls[0].done()
        await wait_until(lambda: town.node("a").waiting_count() == 1, 40)
        assert now() - held_at > 5
        joined = [*await asyncio.gather(*town.enter("a", "b")), await calls[0]]
        assert {one.size for one in joined} == {3}
        await asyncio.sleep(700)
        assert town.record(HealthRecord, town.keys.health("bad")) is None

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1)


# Deleting old data


def test_only_data_of_recent_rounds_is_kept() -> None:
    async def scene(town: Town) -> None:
        engine = town.server.engine
        for _ in range(30):
            joined = await town.gathered("a", "b")
            number = joined["a"].number
            await town.node("a").backend.txn(
                [], [Put(town.keys.store(number) + "key", b"value", joined["a"].data_lease)]
            )
        await asyncio.sleep(1)
        histories = [item for key, item in engine.items.items() if key.startswith(town.keys.histories)]
        assert len(histories) == KEPT
        reports = [decode(HistoryRecord, item) for item in histories]
        assert max(report.number for report in reports) == 30
        assert {report.ended for report in reports if report.number < 30} == {"2 joined again"}
        for part in ("roster/", "store/"):
            assert len([key for key in engine.items if key.startswith(town.keys.data + part)]) == 2

    play(scene, min_nodes=2)


def test_all_keys_are_deleted_hours_after_the_run() -> None:
    async def scene(town: Town) -> None:
        joined = await town.gathered("a", "b")
        await town.node("a").backend.txn([], [Put(town.keys.store(1) + "key", b"", joined["a"].data_lease)])
        await asyncio.sleep(3 * 3600)
        assert town.of(WorldChanged) == []
        assert any(key.startswith(town.keys.roster(1)) for key in town.server.engine.items)
        for name in "ab":
            await town.node(name).stop()
        await asyncio.sleep(80)
        assert not any(key.startswith(town.keys.control) for key in town.server.engine.items)
        await asyncio.sleep(2.1 * 3600)
        await MemoryBackend(town.server).status()
        assert not town.server.engine.items
        assert not list(town.server.engine.leases)

    play(scene, min_nodes=2)


def test_active_round_keeps_its_data_when_an_operator_deletes_the_config() -> None:
    """As the error about a damaged config advises. The next node to join makes a new config."""

    async def scene(town: Town) -> None:
        joined = await town.gathered("a", "b")
        key = town.keys.store(1) + "key"
        await town.node("a").backend.txn([], [Put(key, b"value", joined["a"].data_lease)])
        await town.node("a").backend.txn([], [Delete(town.keys.config)])
        town.enter("c")
        await asyncio.sleep(10)
        assert town.keys.config in town.server.engine.items
        assert key in town.server.engine.items
        assert len(await town.node("a").roster(joined["a"])) == 2
        again = await town.gathered("a", "b")
        assert {one.number for one in again.values()} == {2}

    play(scene, min_nodes=2)


def test_store_of_an_earlier_incarnation_is_never_seen_by_a_later_round() -> None:
    async def scene(town: Town) -> None:
        joined = await town.gathered("a", "b")
        number = joined["a"].number
        await town.node("a").backend.txn([], [Put(town.keys.store(number) + "key", b"old", joined["a"].data_lease)])
        for name in "ab":
            await town.node(name).stop()
        await asyncio.sleep(100)
        assert town.keys.config not in town.server.engine.items
        joined = await town.gathered("c", "d")
        for one in joined.values():
            seen = await town.node("c").backend.scan(town.keys.store(one.number))
            assert not seen.items

    play(scene, min_nodes=2)
