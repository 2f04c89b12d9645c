"""The coordinator: taking over, writes of unknown outcome, late writes, what it tells and what it cleans up."""

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
from tests.rendezvous.kit import Meddling, Town, TxnHook, now, play, wait_until

Execute = Callable[[], Awaitable[TxnResult]]


async def live(town: Town, name: str) -> None:
    """What an agent does: join, work until the world changes, join again, whatever the error."""
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


def everybody_is_in(town: Town, *names: str) -> bool:
    record = town.round
    if record is None or record.phase is not RoundPhase.ACTIVE or record.size != len(names):
        return False
    currents = [town.node(name).current for name in names]
    return all(current is not None and current.number == record.number for current in currents)


def meddle(hook_of: Callable[[str], TxnHook | None], limits: Limits | None = None) -> Callable[[str, Backend], Backend]:
    return lambda name, backend: Meddling(backend, hook_of(name), limits)


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


def test_idle_run_has_one_coordinator_for_ever() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b", "c")
        await asyncio.sleep(3600)
        assert len(town.of(CoordinatorElected)) == 1

    play(scene, min_nodes=3)


def test_successor_knows_the_ranks_and_the_losses_of_the_round() -> None:
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
        assert town.told is not None
        assert town.told.lost == 1
        ranks = {name: joined.rank for name, joined in (await town.gathered(*"abde")).items()}
        assert ranks == {"b": 0, "d": 1, "e": 2, "a": 3}

    play(scene, min_nodes=3, max_nodes=5, last_call_timeout=1)


def test_coordinator_that_fails_is_replaced_or_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """It stalls in the middle of a write; meanwhile its session ends, and another forms a round."""
    refused: list[bool] = []

    async def scene(town: Town) -> None:
        stalled = asyncio.Event()

        async def stall(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if not ("active" in what and decision and not stalled.is_set()):
                return await execute()
            stalled.set()
            return await asyncio.shield(town.call(town.coordinator(), late(execute)))

        async def late(execute: Execute) -> TxnResult:
            await asyncio.sleep(60)
            result = await execute()
            refused.append(not result.committed)
            return result

        town._wrap = meddle(lambda _: stall)
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


def test_coordinator_whose_key_is_taken_away_stops_deciding() -> None:
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

KINDS = ["config", "coordinator", "join", "confirm", "roster", "form", "assign", "active", "tell", "history", "goodbye"]


@pytest.mark.parametrize("fate", ["done", "not done", "late", "unavailable"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [Limits(), Limits(max_txn_ops=5)], ids=["whole", "split"])
def test_write_of_unknown_outcome_leads_to_a_round_all_the_same(kind: str, fate: str, limits: Limits) -> None:
    """The first such write of every node has that fate. Numbers are unique: the past is checked."""

    def unlucky(name: str) -> TxnHook:
        met = False

        async def hook(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            nonlocal met
            if kind not in what or met:
                return await execute()
            met = True
            if fate == "unavailable":
                raise Unavailable("not executed")
            if fate == "done":
                await execute()
            elif fate == "late":
                ghosts.append(asyncio.get_running_loop().create_task(haunt(execute)))
            raise OutcomeUnknown(f"{name} does not know")

        return hook

    ghosts: list[asyncio.Task[None]] = []

    async def haunt(execute: Execute) -> None:
        await asyncio.sleep(3)
        try:
            await execute()
        except RendezvousError:
            raise
        except Exception:  # its lease has ended, say: that is for the backend to refuse
            return

    async def scene(town: Town) -> None:
        agents = []
        for name in "abcd":
            town.start(name)
            agents.append(asyncio.create_task(live(town, name)))
        await wait_until(lambda: everybody_is_in(town, *"abcd"), 60)
        await asyncio.sleep(20)
        leaver = next(name for name in "abcd" if name != town.coordinator())
        agents["abcd".index(leaver)].cancel()
        await town.node(leaver).leave("done")
        rest = [name for name in "abcd" if name != leaver]
        await wait_until(lambda: everybody_is_in(town, *rest), 60)
        await asyncio.sleep(20)
        assert everybody_is_in(town, *rest)
        for agent in agents:
            agent.cancel()
        await asyncio.wait([*agents, *ghosts])

    play(scene, wrap=meddle(unlucky, limits), min_nodes=3, max_nodes=4, last_call_timeout=2)


@pytest.mark.parametrize("seed", [*range(8), 1189])
def test_cruel_backends_break_no_guarantee_and_a_round_comes_when_they_heal(seed: int) -> None:
    chaos: list[ChaosBackend] = []

    def wrap(name: str, backend: Backend) -> Backend:
        chaos.append(ChaosBackend(backend, random.Random(f"{seed} {name}"), Faults.cruel()))
        return chaos[-1]

    async def scene(town: Town) -> None:
        agents = []
        for name in "abcde":
            town.start(name)
            agents.append(asyncio.create_task(live(town, name)))
        await asyncio.sleep(400)
        for one in chaos:
            one.faults = Faults.none()
        for one in chaos:
            await one.settled()
        await wait_until(lambda: everybody_is_in(town, *"abcde"), 300)
        for agent in agents:
            agent.cancel()
        await asyncio.wait(agents)

    play(scene, seed=seed, wrap=wrap, min_nodes=3, max_nodes=5, last_call_timeout=5, hold_back_losses=0)


# Forming


def test_forming_of_another_coordinator_is_not_continued() -> None:
    async def scene(town: Town) -> None:
        async def dies(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if "active" in what and len(town.processes) == 4:
                town.crash(town.coordinator())
                return await asyncio.Future()
            return await execute()

        town._wrap = meddle(lambda _: dies)
        calls = dict(zip("abcd", town.enter(*"abcd"), strict=True))
        await asyncio.sleep(60)
        joined = [call.result() for name, call in calls.items() if name in town.processes]
        assert {(one.number, one.size) for one in joined} == {(2, 3)}
        assert [event.round for event in town.of(RoundForming)] == [1, 2]

    play(scene, min_nodes=3, max_nodes=4, last_call_timeout=1)


def test_member_that_is_lost_while_forming_makes_the_rest_form_again() -> None:
    async def scene(town: Town) -> None:
        async def dies(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if "confirm" in what:
                await town.node("b").backend.revoke(town.node("b")._node_session.session.lease)  # type: ignore[union-attr]
                town.crash("b")
                return await asyncio.Future()
            return await execute()

        town._wrap = meddle(lambda name: dies if name == "b" else None)
        calls = town.enter("a", "b", "c")
        joined = await asyncio.gather(calls[0], calls[2])
        assert {(one.number, one.size) for one in joined} == {(2, 2)}
        assert [event.round for event in town.of(RoundGivenUp)] == [1]

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1)


@pytest.mark.parametrize("victim", ["a", "b", "c", "d"])
def test_member_that_is_lost_in_the_last_instant_is_not_in_the_round(victim: str) -> None:
    """All have confirmed and the coordinator is about to say so: then a session ends."""

    async def scene(town: Town) -> None:
        victims: list[str] = []

        async def loses(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if "active" in what and not victims and victim != town.coordinator():
                victims.append(victim)
                session = town.node(victim)._node_session.session
                assert session is not None
                await MemoryBackend(town.server).revoke(session.lease)
                result = await execute()
                assert not result.committed
                return result
            return await execute()

        town._wrap = meddle(lambda _: loses)
        calls = dict(zip("abcd", town.enter(*"abcd"), strict=True))
        await asyncio.sleep(30)
        sizes = {call.result().size for name, call in calls.items() if name not in victims}
        assert len(sizes) == 1

    play(scene, min_nodes=3, max_nodes=4, last_call_timeout=1)


def test_attempt_whose_assignments_are_not_all_written_is_not_waited_for() -> None:
    async def scene(town: Town) -> None:
        failed: list[set[str]] = []

        async def fails_once(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if what == {"assign"} and not failed:
                failed.append(what)
                raise Unavailable("not executed")
            return await execute()

        town._wrap = meddle(lambda _: fails_once, Limits(max_txn_ops=5))
        joined = await town.gathered(*"abcdefgh")
        assert failed
        assert {one.number for one in joined.values()} == {2}
        assert now() < 2

    play(scene, min_nodes=8)


def test_time_that_the_assignments_take_is_not_that_of_the_members() -> None:
    async def scene(town: Town) -> None:
        async def slow(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if what == {"assign"}:
                await asyncio.sleep(4)
            if "confirm" in what:
                await asyncio.sleep(4)
            return await execute()

        town._wrap = meddle(lambda _: slow, Limits(max_txn_ops=5))
        joined = await town.gathered(*"abcdefgh")
        assert {one.number for one in joined.values()} == {1}

    play(scene, min_nodes=8, confirm_timeout=5)


def test_large_roster_is_split_and_whole_before_the_round_is_active() -> None:
    async def scene(town: Town) -> None:
        names = [f"node{index}" for index in range(300)]
        joined = await town.gathered(*names)
        roster = await town.node("node7").roster(joined["node7"])
        assert [member.name for member in roster] == names

    play(scene, wrap=meddle(lambda _: None, Limits(max_txn_ops=20)), min_nodes=300)


# Telling


def test_told_counts_are_set_right_after_a_write_of_unknown_outcome() -> None:
    """The members are told that one waits; the answer is lost, and so is the one that waits."""

    async def scene(town: Town) -> None:
        async def loses_the_answer(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            result = await execute()
            if what == {"tell"} and town.told and town.told.waiting and "c" in town.processes:
                await town.node("c").leave("changed its mind")
                del town.processes["c"]
                raise OutcomeUnknown("no answer")
            return result

        town._wrap = meddle(lambda name: loses_the_answer if name != "c" else None)
        await town.gathered("a", "b")
        await asyncio.sleep(10)
        (call,) = town.enter("c")
        await asyncio.sleep(30)
        assert "c" not in town.processes
        assert town.told is not None
        assert town.told.waiting == 0
        assert [town.node(name).waiting_count() for name in "ab"] == [0, 0]
        await asyncio.wait([call])

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_told_counts_are_set_right_after_a_late_write() -> None:
    async def scene(town: Town) -> None:
        late: list[Execute] = []

        async def late_tell(what: set[str], decision: bool, execute: Execute) -> TxnResult:
            if what == {"tell"} and "c" in town.present() and not late:
                late.append(execute)
                raise OutcomeUnknown("no answer")
            return await execute()

        town._wrap = meddle(lambda name: late_tell if name != "c" else None)
        await town.gathered("a", "b")
        await asyncio.sleep(10)
        (call,) = town.enter("c")
        await asyncio.sleep(10)
        await town.node("c").leave("changed its mind")
        await asyncio.wait([call])
        await asyncio.sleep(10)
        assert town.told is not None
        before = town.told
        await late[0]()
        assert town.told != before
        await asyncio.sleep(10)
        assert town.told == before

    play(scene, min_nodes=2, max_nodes=3, last_call_timeout=1, admission_window=0)


def test_nodes_are_told_at_most_four_times_a_second() -> None:
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


def test_node_that_is_lost_again_and_again_is_held_back_and_admitted_later() -> None:
    async def scene(town: Town) -> None:
        await town.gathered("a", "b")  # one of them decides from now on
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


# What is left behind


def test_only_recent_rounds_leave_anything_behind() -> None:
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


def test_everything_is_gone_hours_after_the_run() -> None:
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


def test_running_round_keeps_its_data_when_the_config_is_removed_by_hand() -> None:
    """As an error about a damaged config advises; whoever comes next makes a new one."""

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


def test_store_of_an_earlier_incarnation_is_never_that_of_a_later_round() -> None:
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
