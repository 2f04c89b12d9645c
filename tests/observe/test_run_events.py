"""The events that an observer derives are those that the run's own processes emitted."""

import asyncio

import pytest

from rallypoint.backends.memory import MemoryBackend
from rallypoint.events import (
    Event,
    JoinStarted,
    NodeHeldBack,
    NodeLeft,
    NodeLost,
    NodeRefused,
    RoundActive,
    RoundForming,
    RoundOver,
    RunClosed,
    RunReopened,
)
from rallypoint.observe.follower import Follower, read_report
from rallypoint.observe.run_events import RunEvents
from tests.rendezvous.kit import CheckedWorld, run_scenario

EMITTED_BY_BOTH = (RoundForming, RoundActive, RoundOver, NodeLost, NodeHeldBack, RunClosed, RunReopened, JoinStarted)


class Listener:
    """Follows a world's run and keeps its events."""

    def __init__(self, world: CheckedWorld) -> None:
        self.run_events = RunEvents()
        self.backend = MemoryBackend(world.server)
        self._keys = world.keys
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for _ in Follower(self.backend, self._keys, "memory://", on_changes=self.run_events.take):
            pass

    @property
    def told(self) -> list[Event]:
        return [one.event for one in self.run_events.events]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.backend.close()


def facts(events: list[Event]) -> set[tuple[str, str]]:
    return {(type(event).__name__, event.text()) for event in events if isinstance(event, EMITTED_BY_BOTH)}


@pytest.mark.parametrize("seed", range(8))
def test_derived_events_are_those_of_the_run_itself(seed):
    async def case(world: CheckedWorld) -> None:
        listener = Listener(world)
        await asyncio.sleep(0)
        await world.join_all("a", "b", "c")
        # Not the coordinator: its successor would know that the node is gone, but not how it was lost.
        deciding = (await read_report(listener.backend, world.keys, "memory://")).coordinator
        assert deciding is not None
        victim, *others = sorted({"a", "b", "c"} - {deciding.name})
        world.crash(victim)
        await asyncio.sleep(30.0)
        stays = [deciding.name, *others]
        await world.join_all(*stays)
        await world.processes[deciding.name].node.close_run("enough")
        await asyncio.sleep(1.0)
        await world.processes[deciding.name].node.reopen_run("not yet")
        await world.join_all(*stays, "d")
        world.crash("d")
        await asyncio.sleep(30.0)
        own = [event for _, event in world.events]
        assert facts(listener.told) == facts(own)
        late = Listener(world)  # whoever comes after it all sees the same, in the same order
        await asyncio.sleep(1.0)
        kept = (RoundForming, RoundActive, RoundOver, NodeLost, NodeHeldBack, JoinStarted)
        assert [e for e in late.told if isinstance(e, kept)] == [e for e in listener.told if isinstance(e, kept)]
        await late.stop()
        await listener.stop()

    run_scenario(case, seed=seed, min_nodes=2, max_nodes=3, last_call_timeout=1)


def test_node_that_leaves_or_is_refused_is_an_event():
    async def case(world: CheckedWorld) -> None:
        listener = Listener(world)
        await world.join_all("a", "b")
        world.start("odd", max_nodes=7)
        await asyncio.gather(world.join("odd"), return_exceptions=True)
        await world.processes["b"].node.leave("its work is done")
        await asyncio.sleep(1.0)
        events = listener.told
        assert [(event.by, event.reason) for event in events if isinstance(event, NodeLeft)] == [
            ("b", "its work is done")
        ]
        refused = [event for event in events if isinstance(event, NodeRefused)]
        assert [event.node for event in refused] == ["odd"]
        assert "max_nodes is 7 here and 3 there" in refused[0].reason
        late = Listener(world)
        await asyncio.sleep(1.0)
        assert {NodeRefused, NodeLeft, RoundActive, JoinStarted} <= {type(event) for event in late.told}
        await late.stop()
        await listener.stop()

    run_scenario(case, min_nodes=2, max_nodes=3, last_call_timeout=1)
