"""What an operator does to a run, and what is said before it is done."""

import asyncio

import pytest

from rallypoint.backends.memory import MemoryBackend
from rallypoint.events import Event, JoinStarted, NodeLost, RoundActive, RoundOver, RunReopened
from rallypoint.observe.follower import Follower, read_report
from rallypoint.observe.operator_actions import NoSuchKey, RoundStore, drain_warning
from rallypoint.observe.run_events import RunEvents
from rallypoint.observe.target import read_target
from tests.observe.situations import WHERE, operator
from tests.rendezvous.kit import CheckedWorld, run_scenario

TARGET = read_target(f"{WHERE}/run")


async def warning(world: CheckedWorld, node: str) -> str:
    return drain_warning(await read_report(MemoryBackend(world.server), world.keys, WHERE), node)


def test_drain_that_leaves_too_few_nodes_is_warned_of_and_no_other_one():
    async def case(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        assert await warning(world, "b") == (
            "without b, run 'run' has 1 of at least 2 nodes: when b leaves, the round ends, and the job stands still "
            "until 1 more node is started"
        )
        (by_id,) = [record.id for name, record in world.present().items() if name == "b"]
        assert (await warning(world, by_id)).startswith("without b, run 'run' has 1 of at least 2 nodes")
        assert await warning(world, "nobody") == ""
        world.enter("c")
        await asyncio.sleep(5.0)
        assert await warning(world, "b") == "", "c takes the place"
        await operator(world).drain("c", "")
        await asyncio.sleep(1.0)
        assert await warning(world, "b") != ""

    run_scenario(case, min_nodes=2, max_nodes=2)


def test_run_that_is_below_its_minimum_already_can_be_drained_without_a_warning():
    async def case(world: CheckedWorld) -> None:
        world.enter("a")
        await asyncio.sleep(1.0)
        assert await warning(world, "a") == ""

    run_scenario(case, min_nodes=2, max_nodes=2)


def test_node_that_is_not_held_back_cannot_be_freed():
    async def case(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        with pytest.raises(NoSuchKey, match="run 'run' holds no node 'a' back; held back: none"):
            await operator(world).free("a")

    run_scenario(case, min_nodes=2)


def test_store_of_a_round_whose_members_have_all_left_is_not_written():
    async def case(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        backend = MemoryBackend(world.server)
        store = await RoundStore.of(backend, TARGET, None)
        await store.set("k", b"1")
        world.crash("b")
        await asyncio.sleep(20.0)
        await store.set("k", b"2")
        world.join("a")
        await asyncio.sleep(2.0)
        with pytest.raises(NoSuchKey, match="round 1 is over: nothing was written"):
            await store.set("k", b"3")
        assert await store.get("k") == b"2"

    run_scenario(case, min_nodes=2)


async def past_events(world: CheckedWorld) -> list[Event]:
    run_events = RunEvents()
    async for _ in Follower(MemoryBackend(world.server), world.keys, WHERE, on_changes=run_events.take):
        break
    return [one.event for one in run_events.events]


def test_past_events_are_in_the_order_of_time_and_none_lacks_a_reason():
    async def case(world: CheckedWorld) -> None:
        await world.join_all("a", "b")
        await operator(world).close("")
        await asyncio.sleep(5.0)
        await operator(world).reopen("")
        world.crash("b")
        await asyncio.sleep(20.0)
        world.join("a")
        await asyncio.sleep(2.0)
        past = await past_events(world)
        texts = [event.text() for event in past]
        kinds = [type(event) for event in past]
        order = [kinds.index(kind) for kind in (JoinStarted, RoundActive, RunReopened, NodeLost, RoundOver)]
        assert order == sorted(order), texts
        assert "reopened the run: no reason given" in texts
        assert not [text for text in texts if text.rstrip().endswith(":")]

    run_scenario(case, min_nodes=2)
