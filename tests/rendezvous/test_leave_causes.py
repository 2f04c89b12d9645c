"""Why members left a round: what a node writes about it with its next record. Virtual time."""

import asyncio

import msgspec

from rallypoint.events import SessionLost
from rallypoint.kv.types import Item
from rallypoint.rendezvous.records import LONGEST_WHY, LeaveCause, LeaveKind, NodeRecord, decode, encode, one_line
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
        left = written(world, "b")[0]
        assert left.round == 1
        assert "done here" in left.why or left.kind is LeaveKind.ADMISSION

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
