"""Why members left a round: what a node writes about it with its next record. Virtual time."""

import asyncio

import msgspec

from rallypoint.events import NodeLost, RoundOver, SessionLost, WorldChanged
from rallypoint.kv.types import Delete, Item
from rallypoint.rendezvous.records import (
    LONGEST_WHY,
    HistoryRecord,
    LeaveCause,
    LeaveKind,
    NodeRecord,
    decode,
    encode,
    one_line,
)
from tests.rendezvous.kit import CheckedWorld, run_scenario, wait_until
from tests.rendezvous.test_node import Chaos

OOM = LeaveCause(
    kind=LeaveKind.WORKER_FAILED, why="rank 1 on b exited with 1: RuntimeError: CUDA out of memory", rank=1
)


def written(world: CheckedWorld, name: str) -> list[LeaveCause]:
    """The causes in the records that the node has written, without repetitions."""
    causes: list[LeaveCause] = []
    for batch in world.server.engine.history.batches:
        for change in batch.changes:
            if change.item is not None and change.key.startswith(world.keys.nodes):
                record = decode(NodeRecord, change.item)
                if record.name == name and record.left is not None and record.left not in causes:
                    causes.append(record.left)
    return causes


def test_join_after_a_round_says_why_the_round_was_left() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        assert [node.left for node in world.present().values()] == [None, None]
        leaving = asyncio.gather(world.node("b").next_round(cause=OOM), world.node("a").next_round())
        await leaving
        assert written(world, "b") == [msgspec.structs.replace(OOM, round=1)]
        assert [node.left for node in world.present().values()] == [None, None]

    run_scenario(scenario, min_nodes=2)


def test_cause_that_is_not_given_is_derived_from_the_last_change() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        late = world.enter("c")
        await asyncio.sleep(5)
        await asyncio.gather(*world.enter("a", "b"), *late)
        assert [cause.kind for cause in written(world, "a")] == [LeaveKind.ADMISSION]
        await world.node("a")._run_config.drain("c", "power")
        await asyncio.sleep(1)
        await world.node("c").leave("its block ended")
        assert written(world, "c")[-1].kind is LeaveKind.DRAIN
        world.crash("b")
        await asyncio.sleep(20)
        world.join("a")
        await asyncio.sleep(1)
        assert written(world, "a")[-1].kind is LeaveKind.MEMBER_LOST

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_node_that_asks_for_the_next_round_or_leaves_without_a_change_says_so() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        world.join("a")
        await asyncio.sleep(1)
        await world.node("b").leave("done here")
        assert [(cause.kind, cause.why, cause.round) for cause in written(world, "a")] == [
            (LeaveKind.REQUESTED, "a asked for the next round", 1)
        ]
        assert [(cause.kind, cause.why, cause.round) for cause in written(world, "b")] == [
            (LeaveKind.ROUND_OVER, "a asked for the next round", 1)
        ]
        (told,) = [event for event in world.of(WorldChanged) if event.by == "b"]
        assert (told.cause, told.reason) == ("waiting", "members are leaving round 1: a asked for the next round")

    run_scenario(scenario, min_nodes=2)


def test_node_that_leaves_without_a_change_says_so_in_its_own_words() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await world.node("b").leave("done here")
        (cause,) = written(world, "b")
        assert (cause.kind, cause.why, cause.round) == (LeaveKind.REQUESTED, "b left: done here", 1)

    run_scenario(scenario, min_nodes=2)


def test_node_that_lost_its_session_says_so_when_it_joins_again() -> None:
    chaos = Chaos()

    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        chaos.backends["b"].cut()
        await wait_until(lambda: bool(world.of(SessionLost)), 15.1)
        chaos.backends["b"].heal()
        await asyncio.sleep(2)
        await world.join_all("a", "b", "c")
        (cause,) = written(world, "b")
        assert cause.kind is LeaveKind.SESSION_LOST
        assert cause.why.startswith("b lost its session: ")
        assert cause.round == 1

    run_scenario(scenario, wrap=chaos.wrap, min_nodes=2, max_nodes=3)


def test_long_last_line_of_a_traceback_keeps_the_record_small() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        huge = msgspec.structs.replace(OOM, why="rank 1 on b exited with 1:\n" + "x" * 100_000)
        await asyncio.gather(world.node("b").next_round(cause=huge), world.node("a").next_round())
        (cause,) = written(world, "b")
        assert cause.why.startswith("rank 1 on b exited with 1: xxx")
        assert len(cause.why) == LONGEST_WHY

    run_scenario(scenario, min_nodes=2)


def test_text_is_shortened_to_one_line() -> None:
    assert one_line(" two\n\tlines ") == "two lines"
    assert len(one_line("word " * 1000)) == LONGEST_WHY


def test_kind_of_a_newer_version_leaves_the_record_readable() -> None:
    cause = LeaveCause(kind=LeaveKind.STALLED, why="rank 0 on a says nothing", round=3)
    value = b'{"v":2,"id":"1","name":"a","addr":"a","session":1,"join":1,"phase":"joining","left":%s}'
    item = Item("nodes/1", value % msgspec.json.encode(cause).replace(b"stalled", b"bored"), 1, 1, 1, 0)
    record = decode(NodeRecord, item)
    assert record.left == msgspec.structs.replace(cause, kind=LeaveKind.REQUESTED)
    assert decode(NodeRecord, msgspec.structs.replace(item, value=encode(record))) == record


# The cause of a round's end, composed by the coordinator and told to everybody


def ends(world: CheckedWorld) -> list[tuple[str, str]]:
    """Kind and reason of each `RoundOver` so far; the report of the round must say the same."""
    for event in world.of(RoundOver):
        report = world.record(HistoryRecord, world.keys.history(event.round))
        assert report is not None
        assert report.ended_kind is not None
        assert (report.ended, report.ended_kind.value) == (event.reason, event.kind)
    return [(event.kind, event.reason) for event in world.of(RoundOver)]


def reason_of(world: CheckedWorld, name: str) -> str:
    """What the node was told of its round last."""
    return [event.reason for event in world.of(WorldChanged) if event.by == name][-1]


def test_failed_worker_is_the_cause_for_all_members() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        await asyncio.sleep(41)
        call = asyncio.ensure_future(world.node("b").next_round(cause=OOM))
        await asyncio.sleep(1)
        for name in ("a", "c"):
            assert reason_of(world, name) == f"members are leaving round 1: {OOM.why}"
        assert world.status is not None
        assert f"its members are leaving it: {OOM.why}" in world.status.reason
        again = world.enter("a", "c")
        assert {one.number for one in await asyncio.gather(call, *again)} == {2}
        assert ends(world) == [("worker failed", OOM.why)]
        assert {written(world, name)[0].kind for name in ("a", "c")} == {LeaveKind.ROUND_OVER}

    run_scenario(scenario, min_nodes=3)


def test_loss_is_the_cause_although_a_worker_failed_before_it_was_known() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        await asyncio.sleep(10)
        world.crash("c")
        failed = LeaveCause(kind=LeaveKind.WORKER_FAILED, why="rank 0 on a exited with 1: Connection reset", rank=0)
        calls = [asyncio.ensure_future(world.node("a").next_round(cause=failed))]
        await asyncio.sleep(20)
        calls += world.enter("b")
        assert {one.size for one in await asyncio.gather(*calls)} == {2}
        assert ends(world) == [
            ("member lost", "c was lost (its session ended); rank 0 on a exited with 1: Connection reset")
        ]

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_round_ends_to_admit_a_waiting_node() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        late = world.enter("c")
        await asyncio.sleep(5)
        await asyncio.gather(*world.enter("a", "b"), *late)
        assert ends(world) == [("admission", "to admit c")]

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_drained_member_is_the_cause_and_not_a_loss() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        await world.node("a")._run_config.drain("b", "kernel update")
        await asyncio.sleep(1)
        await world.node("b").leave("its block ended")
        await asyncio.sleep(1)
        assert reason_of(world, "c") == "members are leaving round 1: b was drained by a: kernel update"
        await asyncio.gather(*world.enter("a", "c"))
        assert ends(world) == [("drain", "b was drained by a: kernel update")]

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_node_that_waits_for_the_next_round_is_told_why_the_last_one_ended() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await asyncio.sleep(41)
        await world.node("b").leave("", cause=OOM)
        world.enter("a")
        await asyncio.sleep(2)
        assert world.status is not None
        assert world.status.reason == f"1 of at least 2 nodes joined: a; round 1 ended after 41 s: {OOM.why}"
        assert world.status.end is not None
        assert world.status.end.kind is LeaveKind.WORKER_FAILED

    run_scenario(scenario, min_nodes=2)


def test_next_coordinator_composes_the_same_cause() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        coordinator = world.coordinator()
        failing, other = [name for name in "abc" if name != coordinator]
        call = asyncio.ensure_future(world.node(failing).next_round(cause=OOM))
        await asyncio.sleep(1)
        await world.node(coordinator).leave(
            "", cause=LeaveCause(kind=LeaveKind.STOPPED, why=f"{coordinator} was stopped")
        )
        await wait_until(lambda: world.coordinator() not in ("", coordinator), 60)
        calls = [call, *world.enter(other)]
        assert {one.size for one in await asyncio.gather(*calls)} == {2}
        assert ends(world) == [("worker failed", OOM.why)]

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_round_of_an_earlier_life_of_the_run_is_no_cause_in_the_next() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        backend = world.node("a").backend
        everything = [key for key in world.server.engine.items if key.startswith(world.keys.control)]
        await backend.txn([], [Delete(key) for key in everything])
        await asyncio.sleep(1)
        again = await world.join_all("a", "b")
        assert {one.size for one in again.values()} == {2}
        assert written(world, "a") == []

    run_scenario(scenario, min_nodes=2)


def test_node_that_had_left_its_round_is_not_reported_as_a_lost_member_of_it() -> None:
    async def scenario(world: CheckedWorld) -> None:
        await world.join_all("a", "b", "c")
        world.join("b")
        await asyncio.sleep(1)
        world.crash("b")
        await wait_until(lambda: bool(world.of(NodeLost)), 60)
        (lost,) = world.of(NodeLost)
        assert (lost.node, lost.round) == ("b", 0)
        await asyncio.gather(*world.enter("a", "c"))
        assert ends(world) == [("requested", "b asked for the next round")]

    run_scenario(scenario, min_nodes=2, max_nodes=3, last_call_timeout=1)
