"""The coordinator dies between any two of its writes: a round comes about all the same, and everybody agrees on it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rallypoint.backends.contract import Backend, Limits
from rallypoint.kv.types import TxnResult
from tests.rendezvous.kit import Meddling, Town, play

NAMES = ("a", "b", "c", "d", "e")
SETTLED_S = 120.0


class Assassin:
    """Kills the process whose coordinator makes the `victim`-th decision, before or after it is committed."""

    def __init__(self, victim: int, *, after: bool, max_txn_ops: int) -> None:
        self.victim = victim
        self.after = after
        self.limits = Limits(max_txn_ops=max_txn_ops)
        self.decisions = 0
        self.killed: str | None = None
        self.killed_at: set[str] = set()
        self.town: Town | None = None

    def wrap(self, name: str, backend: Backend) -> Backend:
        async def hook(what: set[str], decision: bool, execute: Callable[[], Awaitable[TxnResult]]) -> TxnResult:
            if not decision or self.town is None:
                return await execute()
            self.decisions += 1
            if self.decisions != self.victim:
                return await execute()
            if self.after:
                await execute()
            self.killed, self.killed_at = name, what
            self.town.crash(name)
            return await asyncio.Future()  # nothing comes back to the dead

        return Meddling(backend, hook, self.limits)


async def live(town: Town, name: str) -> None:
    """What an agent does: join, work until the world changes, join again."""
    node = town.node(name)
    while True:
        await town.join(name)
        changed = asyncio.Event()
        node.listen(lambda *_, changed=changed: changed.set())
        await changed.wait()


def story(assassin: Assassin) -> Callable[[Town], Awaitable[None]]:
    """Five nodes come, a sixth comes late; one is lost; all the while somebody may be killed."""

    async def scene(town: Town) -> None:
        assassin.town = town
        agents = []
        for name in NAMES[:4]:
            town.start(name)
            agents.append(asyncio.create_task(live(town, name)))
        await asyncio.sleep(SETTLED_S)
        if "e" not in town.processes:
            town.start("e")
            agents.append(asyncio.create_task(live(town, "e")))
        await asyncio.sleep(SETTLED_S)
        currents = {name: process.node.current for name, process in town.processes.items()}
        record = town.round
        assert record is not None
        assert len(currents) == (5 if assassin.killed is None else 4)
        for name, current in currents.items():
            assert current is not None, f"{name} is in no round after decision {assassin.victim}"
            assert (current.number, current.size) == (record.number, len(currents))
        for agent in agents:
            agent.cancel()
        await asyncio.wait(agents)

    return scene


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("after", [False, True], ids=["before it is committed", "after it is committed"])
@pytest.mark.parametrize("max_txn_ops", [5, 128])
def test_coordinator_may_die_at_any_of_its_writes(max_txn_ops: int, after: bool, seed: int | None) -> None:
    killed_at: set[str] = set()
    for victim in range(1, 100):
        assassin = Assassin(victim, after=after, max_txn_ops=max_txn_ops)
        play(
            story(assassin),
            seed=seed,
            wrap=assassin.wrap,
            min_nodes=2,
            max_nodes=5,
            last_call_timeout=5,
            admission_window=1,
        )
        if assassin.killed is None:
            break
        killed_at |= assassin.killed_at
    assert assassin.killed is None
    assert victim > 8
    assert killed_at >= {"roster", "form", "assign", "active", "tell", "history"}
