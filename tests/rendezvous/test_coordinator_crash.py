"""The coordinator dies before or after any of its writes: a round forms all the same, and all members agree on it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rallypoint.backends.contract import Backend, Limits
from rallypoint.kv.types import TxnResult
from tests.rendezvous.kit import CheckedWorld, InterceptingBackend, run_scenario

NAMES = ("a", "b", "c", "d", "e")
SETTLED_S = 120.0


class CoordinatorKiller:
    """Kills the coordinator's process at its `nth` write, before or after the write is committed."""

    def __init__(self, nth: int, *, after: bool, max_txn_ops: int) -> None:
        self.nth = nth
        self.after = after
        self.limits = Limits(max_txn_ops=max_txn_ops)
        self.count = 0
        self.killed: str | None = None
        self.killed_at: set[str] = set()
        self.world: CheckedWorld | None = None

    def wrap(self, name: str, backend: Backend) -> Backend:
        async def hook(
            writes: set[str], by_coordinator: bool, execute: Callable[[], Awaitable[TxnResult]]
        ) -> TxnResult:
            if not by_coordinator or self.world is None:
                return await execute()
            self.count += 1
            if self.count != self.nth:
                return await execute()
            if self.after:
                await execute()
            self.killed, self.killed_at = name, writes
            self.world.crash(name)
            return await asyncio.Future()  # the dead process gets no answer

        return InterceptingBackend(backend, hook, self.limits)


async def run_agent(world: CheckedWorld, name: str) -> None:
    """Join, work until the round changes, join again."""
    node = world.node(name)
    while True:
        await world.join(name)
        changed = asyncio.Event()
        node.listen(lambda *_, changed=changed: changed.set())
        await changed.wait()


def scenario_with(killer: CoordinatorKiller) -> Callable[[CheckedWorld], Awaitable[None]]:
    """Four nodes join, a fifth joins late; meanwhile a coordinator may be killed."""

    async def scenario(world: CheckedWorld) -> None:
        killer.world = world
        agents = []
        for name in NAMES[:4]:
            world.start(name)
            agents.append(asyncio.create_task(run_agent(world, name)))
        await asyncio.sleep(SETTLED_S)
        if "e" not in world.processes:
            world.start("e")
            agents.append(asyncio.create_task(run_agent(world, "e")))
        await asyncio.sleep(SETTLED_S)
        currents = {name: process.node.current for name, process in world.processes.items()}
        record = world.round
        assert record is not None
        assert len(currents) == (5 if killer.killed is None else 4)
        for name, current in currents.items():
            assert current is not None, f"{name} is in no round after write {killer.nth}"
            assert (current.number, current.size) == (record.number, len(currents))
        for agent in agents:
            agent.cancel()
        await asyncio.wait(agents)

    return scenario


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("after", [False, True], ids=["before it is committed", "after it is committed"])
@pytest.mark.parametrize("max_txn_ops", [5, 128])
def test_coordinator_may_die_at_any_of_its_writes(max_txn_ops: int, after: bool, seed: int | None) -> None:
    killed_at: set[str] = set()
    for nth in range(1, 100):
        killer = CoordinatorKiller(nth, after=after, max_txn_ops=max_txn_ops)
        run_scenario(
            scenario_with(killer),
            seed=seed,
            wrap=killer.wrap,
            min_nodes=2,
            max_nodes=5,
            last_call_timeout=5,
            admission_window=1,
        )
        if killer.killed is None:
            break
        killed_at |= killer.killed_at
    assert killer.killed is None
    assert nth > 8
    assert killed_at >= {"roster", "form", "assign", "active", "status", "history"}
