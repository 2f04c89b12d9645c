"""The API for asyncio, on virtual time: worlds and their changes, runs, leaving and closing."""

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import rallypoint
from rallypoint import aio
from rallypoint.backends import schemes
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
    SettingsError,
    StoreError,
    Unavailable,
)
from rallypoint.events import NodeLeft, RankNotGiven, RunClosed, ShutdownFailed, WaitingFor
from rallypoint.parameters import RendezvousParameters
from rallypoint.rendezvous.membership import Cause
from rallypoint.settings import Settings
from rallypoint.testing.chaos import ChaosBackend, Faults
from rallypoint.testing.loop import run
from tests.patience import unique


def place() -> str:
    return f"memory://{unique()}/run"


@asynccontextmanager
async def handlers(url, *names, **options):
    async with AsyncExitStack() as stack:
        made = [aio.create_handler(url, name=name, **options) for name in names]
        for handler in made:
            stack.push_async_callback(handler.aclose)
        yield made


async def gather(*handlers):
    return await asyncio.gather(*(handler.next_rendezvous() for handler in handlers))


def virtual(main, limit_s=3_600.0):
    return run(main(), limit_s=limit_s)


@pytest.fixture
def scheme(monkeypatch):
    """Registers a new scheme whose backend is created by the given function; its URL."""
    name = unique().replace("-", "")

    def opens(make):
        async def opener(settings):
            return make()

        monkeypatch.setitem(schemes._openers, name, opener)
        return f"{name}://here/run"

    return opens


# --- worlds and their changes -----------------------------------------------------------------------------------------


def test_world_describes_the_round():
    async def main():
        async with handlers(place(), "a", "b", min_nodes=2, local_addr="10.0.0.1") as pair:
            worlds = sorted(await gather(*pair), key=lambda world: world.rank)
            assert [(world.rank, world.world_size, world.round) for world in worlds] == [(0, 2, 1), (1, 2, 1)]
            assert [member.name for member in await worlds[0].members()] == ["a", "b"]
            assert worlds[0].bootstrap_store_info == worlds[1].bootstrap_store_info
            assert worlds[0].bootstrap_store_info.master_addr == "10.0.0.1"
            assert "round=1 rank=0 world_size=2" in repr(worlds[0])

    virtual(main)


def test_world_changes_when_a_node_waits():
    async def main():
        async with handlers(place(), "a", "b", min_nodes=1, max_nodes=2, last_call_timeout=1) as (a, b):
            world = await a.next_rendezvous()
            assert not world.changed.is_set()
            assert a.num_nodes_waiting() == 0
            joining = asyncio.create_task(b.next_rendezvous())
            assert "b" in await world.changed.wait()
            assert world.changed.cause is Cause.WAITING
            assert a.num_nodes_waiting() == 1
            again, other = await a.next_rendezvous(), await joining
            assert again.round == other.round > world.round
            assert not again.changed.is_set()

    virtual(main)


def test_world_changes_when_a_member_is_lost():
    async def main():
        async with handlers(place(), "a", "b", min_nodes=1, max_nodes=2) as pair:
            worlds = await gather(*pair)
            pair[1]._node.abandon()
            reason = await worlds[0].changed.wait()
            assert worlds[0].changed.cause is Cause.LOSS
            assert "b" in reason
            assert pair[0].num_nodes_waiting() == 1

    virtual(main)


def test_world_changes_when_its_node_is_drained():
    async def main():
        async with handlers(place(), "a", "b", min_nodes=1, max_nodes=2) as pair:
            worlds = await gather(*pair)
            await pair[0]._node._run_config.drain("b", "the machine needs a new disk")
            assert "new disk" in await worlds[1].changed.wait()
            assert worlds[1].changed.cause is Cause.DRAIN
            assert not worlds[0].changed.is_set()

    virtual(main)


async def _revoke_session(handler) -> None:
    node = handler._node
    item = (await node.backend.get(node.keys.node(node.identity.id))).item
    await node.backend.revoke(item.lease)


def test_world_changes_and_calls_listeners_when_its_session_is_lost():
    async def main():
        async with handlers(place(), "a", min_nodes=1) as (a,):
            world = await a.next_rendezvous()
            causes = []
            world.changed.add_listener(lambda cause, reason: causes.append(cause))
            await _revoke_session(a)
            await world.changed.wait()
            world.changed.add_listener(lambda cause, reason: causes.append(f"late {cause.value}"))
            assert world.changed.cause is Cause.SESSION_LOST
            assert causes == [Cause.SESSION_LOST, "late session lost"]
            assert a.num_nodes_waiting() == 1
            assert (await a.next_rendezvous()).round > world.round

    virtual(main)


@pytest.mark.parametrize("end", ["leave", "aclose", "shutdown"])
def test_wait_for_a_change_ends_when_the_node_leaves(end):
    async def main():
        async with handlers(place(), "a", min_nodes=1) as (a,):
            world = await a.next_rendezvous()
            waiting = asyncio.create_task(world.changed.wait())
            await asyncio.sleep(1.0)
            await getattr(a, end)()
            assert "left" in await waiting
            assert world.changed.cause is Cause.ROUND_OVER

    virtual(main)


def test_lost_session_remains_the_cause_when_the_node_leaves():
    async def main():
        async with handlers(place(), "a", min_nodes=1) as (a,):
            world = await a.next_rendezvous()
            await _revoke_session(a)
            await world.changed.wait()
            await a.leave()
            return world.changed.cause

    assert virtual(main) is Cause.SESSION_LOST


# --- runs -------------------------------------------------------------------------------------------------------------


def test_rounds_yield_a_new_world_each_time_it_changes():
    async def main():
        url = place()
        sizes = []
        async with handlers(url, "b", min_nodes=1, max_nodes=2, last_call_timeout=1) as (b,):
            async with aio.join(url, name="a", min_nodes=1, max_nodes=2, last_call_timeout=1) as run_a:
                late = None
                async for world in run_a.rounds():
                    sizes.append(world.world_size)
                    if len(sizes) == 1:
                        late = asyncio.create_task(b.next_rendezvous())
                    elif len(sizes) == 2:
                        await late
                        b._node.abandon()
                    else:
                        break
            assert await b.is_closed() is False  # leaving the block never closes
        return sizes

    assert virtual(main) == [1, 2, 1]


def test_rounds_end_when_the_node_is_drained():
    async def main():
        seen = []
        async with aio.join(place(), name="a", min_nodes=1) as run_a:
            async for world in run_a.rounds():
                seen.append(world.round)
                await run_a.handler._node._run_config.drain("a", "go")
        return seen

    assert virtual(main) == [1]


def test_rounds_end_for_a_spare_of_a_run_that_is_closed():
    async def main():
        url = place()
        async with handlers(url, "a", min_nodes=1) as (member,):
            await member.next_rendezvous()
            async with aio.join(url, name="spare", min_nodes=1) as spare:
                closing = asyncio.get_running_loop().call_later(
                    5.0, lambda: tasks.append(asyncio.ensure_future(member.set_closed()))
                )
                tasks = []
                worlds = [world async for world in spare.rounds()]
                assert closing.when() <= asyncio.get_running_loop().time()
            await asyncio.gather(*tasks)
            return worlds

    assert virtual(main) == []


@pytest.mark.parametrize("when", ["member", "joining"])
def test_rounds_end_when_the_node_is_told_to_leave(when):
    async def main():
        async with aio.join(place(), min_nodes=1 if when == "member" else 2) as run_a:

            async def leave():
                await asyncio.sleep(5.0)
                await run_a.handler.leave("enough")

            leaving = asyncio.create_task(leave())
            worlds = [world async for world in run_a.rounds()]
            await leaving
            return len(worlds)

    assert virtual(main) == (1 if when == "member" else 0)


def test_rounds_raise_when_the_run_is_closed():
    async def main():
        async with aio.join(place(), min_nodes=1) as run_a:
            async for _ in run_a.rounds():
                await run_a.handler.set_closed()
                await _revoke_session(run_a.handler)

    with pytest.raises(RendezvousClosedError):
        virtual(main)


def test_async_with_block_that_raises_leaves_with_the_reason():
    seen = []

    async def main():
        async with aio.join(place(), min_nodes=1, sinks=[seen.append]) as run_a:
            async for _ in run_a.rounds():
                raise KeyError("x" * 10_000)

    with pytest.raises(KeyError):
        virtual(main)
    (left,) = [event for event in seen if isinstance(event, NodeLeft)]
    assert "KeyError" in left.reason
    assert len(left.reason) < 300
    assert not [event for event in seen if isinstance(event, RunClosed)]


# --- leaving and closing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("no such file"), "rank 1 on b raised ValueError: no such file"),
        (None, "b has finished"),
        (KeyboardInterrupt(), "b was stopped (KeyboardInterrupt)"),
    ],
    ids=["raises", "ends", "is interrupted"],
)
def test_other_members_learn_how_the_block_of_a_member_ended(error, why):
    async def main():
        url = place()
        async with handlers(url, "a", min_nodes=2) as (a,):
            first = asyncio.ensure_future(a.next_rendezvous())
            await asyncio.sleep(0.1)
            run_b = aio.join(url, name="b", min_nodes=2)
            async for _ in run_b.rounds():
                break
            world = await first
            await run_b.__aexit__(type(error) if error is not None else None, error, None)
            assert await world.changed.wait() == f"members are leaving round 1: {why}"

    virtual(main)


def test_given_cause_is_told_to_the_other_members():
    async def main():
        async with handlers(place(), "a", "b", min_nodes=2) as (a, b):
            world, _ = await gather(a, b)
            why = "rank 1 on b exited with 1: RuntimeError: CUDA out of memory"
            cause = rallypoint.LeaveCause(kind=rallypoint.LeaveKind.WORKER_FAILED, why=why, rank=1)
            again = asyncio.ensure_future(b.next_rendezvous(cause=cause))
            assert await world.changed.wait() == f"members are leaving round 1: {why}"
            await asyncio.gather(a.next_rendezvous(), again)

    virtual(main)


def test_second_concurrent_call_raises_and_the_first_continues():
    async def main():
        async with handlers(place(), "a", "b", min_nodes=2) as (a, b):
            first = asyncio.create_task(a.next_rendezvous())
            await asyncio.sleep(1.0)
            with pytest.raises(RendezvousError, match="one call at a time"):
                await a.next_rendezvous()
            await b.next_rendezvous()
            world = await first
            assert not world.changed.is_set()
            joining = asyncio.create_task(b.next_rendezvous())  # it leaves the round, which changes the world of a
            await asyncio.sleep(0)
            await a.next_rendezvous()
            await joining

    virtual(main)


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 1.0, 3.0])
def test_leave_ends_a_call_at_any_point(scheme, after_s):
    server = MemoryServer()
    url = scheme(
        lambda: ChaosBackend(MemoryBackend(server), random.Random(0), Faults(delay_s=(0.02, 0.03), unavailable=0.1))
    )

    async def main():
        async with handlers(url, "a", min_nodes=2, local_addr="here") as (a,):
            call = asyncio.create_task(a.next_rendezvous())
            await asyncio.sleep(after_s)
            await a.leave("I changed my mind")
            async with asyncio.timeout(30.0):
                with pytest.raises(RendezvousError, match="I changed my mind"):
                    await call
        await asyncio.sleep(60.0)
        return [key for key in server.engine.items if "/nodes/" in key]

    assert virtual(main) == []


@pytest.mark.parametrize(("end", "why"), [("leave", "leave() was called"), ("aclose", "its handler was closed")])
def test_other_nodes_get_the_reason_of_a_node_that_left_while_joining(end, why):
    events = []

    async def main():
        url = place()
        async with (
            handlers(url, "a", min_nodes=3, sinks=[events.append]) as (a,),
            handlers(url, "b", min_nodes=3) as (b,),
        ):
            waiting = asyncio.create_task(a.next_rendezvous())
            await asyncio.sleep(10.0)
            joining = asyncio.create_task(b.next_rendezvous())
            await asyncio.sleep(10.0)
            await getattr(b, end)()
            with pytest.raises(RendezvousError, match="left the run while it was joining"):
                await joining
            await asyncio.sleep(10.0)
            await a.leave()
            with pytest.raises(RendezvousError):
                await waiting

    virtual(main)
    reasons = [event.reason for event in events if isinstance(event, WaitingFor)]
    assert f"left: b ({why})" in reasons[-1]


def test_node_that_left_can_join_again():
    async def main():
        async with handlers(place(), "a", min_nodes=1) as (a,):
            first = await a.next_rendezvous()
            await a.leave()
            await a.leave()
            second = await a.next_rendezvous()
            assert second.round > first.round
            assert not a.has_left

    virtual(main)


def test_cancelled_call_withdraws_the_node():
    async def main():
        url = place()
        async with handlers(url, "a", "b", "c", min_nodes=2) as (a, b, c):
            call = asyncio.create_task(a.next_rendezvous())
            await asyncio.sleep(5.0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            with pytest.raises(RendezvousTimeoutError):
                async with asyncio.timeout(10.0):
                    await aio.AsyncHandler(Settings.from_url(url, min_nodes=2, join_timeout=5)).next_rendezvous()
            assert sorted(world.world_size for world in await gather(b, c)) == [2, 2]

    virtual(main)


def test_shutdown_that_cannot_close_the_run_returns_false_and_releases_resources(scheme):
    server, events = MemoryServer(), []
    url = scheme(lambda: chaos)

    async def main():
        nonlocal chaos
        chaos = ChaosBackend(MemoryBackend(server), random.Random(0), Faults.none())
        handler = aio.create_handler(url, min_nodes=1, close_timeout=2, name="a", sinks=[events.append])
        world = await handler.next_rendezvous()
        chaos.faults = Faults(unavailable=1.0)
        started_at = asyncio.get_running_loop().time()
        assert await handler.shutdown() is False
        assert asyncio.get_running_loop().time() - started_at < 10.0
        with pytest.raises(StoreError, match="its handler was closed"):
            await world.store.get("k")

    chaos = None
    virtual(main)
    (failed,) = [event for event in events if isinstance(event, ShutdownFailed)]
    assert failed.by == "a"
    assert "2 s" in failed.reason


def test_shutdown_propagates_other_errors(scheme):
    class Defective(MemoryBackend):
        async def txn(self, compares, then, otherwise=()):
            raise ZeroDivisionError("a bug")

    url = scheme(lambda: Defective(MemoryServer()))

    async def main():
        handler = aio.create_handler(url, min_nodes=1)
        with pytest.raises(ZeroDivisionError):
            await handler.shutdown()
        assert handler._node is None

    virtual(main)


def test_backend_that_was_never_reached_is_a_connection_error(scheme):
    url = scheme(lambda: ChaosBackend(MemoryBackend(MemoryServer()), random.Random(0), Faults(unavailable=1.0)))

    async def main():
        handler = aio.create_handler(url, min_nodes=1, join_timeout=3)
        with pytest.raises(RendezvousConnectionError, match="could not reach"):
            await handler.next_rendezvous()
        await handler.aclose()

    virtual(main)


def test_backend_that_cannot_be_opened_is_a_rendezvous_error(scheme):
    def fail():
        raise Unavailable("no such machine")

    url = scheme(fail)

    async def main():
        handler = aio.create_handler(url, min_nodes=1)
        with pytest.raises(RendezvousError, match="no such machine"):
            await handler.next_rendezvous()

    virtual(main)


def test_unreachable_run_returns_the_last_known_state(scheme):
    server = MemoryServer()
    url = scheme(lambda: ChaosBackend(MemoryBackend(server), random.Random(0), Faults.none()))

    async def main():
        async with handlers(url, "a", "b", min_nodes=1, max_nodes=2, last_call_timeout=1) as (a, b):
            world = await a.next_rendezvous()
            joining = asyncio.create_task(b.next_rendezvous())
            await world.changed.wait()
            a._backend.cut()
            await asyncio.sleep(5.0)
            assert a.num_nodes_waiting() == 1
            assert a.closed_now is False
            assert await a.is_closed() is False
            a._backend.heal()
            await a.next_rendezvous()
            await joining

    virtual(main)


def test_members_are_read_again_until_the_backend_answers(scheme):
    server = MemoryServer()
    url = scheme(lambda: ChaosBackend(MemoryBackend(server), random.Random(0), Faults.none()))

    async def main():
        async with handlers(url, "a", min_nodes=1, read_timeout=4) as (a,):
            world = await a.next_rendezvous()
            a._backend.faults = Faults(unavailable=1.0)
            reading = asyncio.create_task(world.members())
            await asyncio.sleep(1.0)
            a._backend.faults = Faults.none()
            assert [member.name for member in await reading] == ["a"]
            a._backend.faults = Faults(unavailable=1.0)
            with pytest.raises(RendezvousConnectionError, match="within 4 s: chaos"):
                await world.members()
            a._backend.faults = Faults.none()
            await a.next_rendezvous()
            with pytest.raises(RendezvousError, match="is over"):
                await world.members()

    virtual(main)


def test_observing_writes_nothing():
    async def main():
        url = place()
        server = MemoryServer()
        schemes._memory_servers[url.split("/")[2]] = server
        async with handlers(url, "a", min_nodes=1) as (a,):
            assert a.num_nodes_waiting() == 0
            assert a.closed_now is None
            assert await a.is_closed() is False
            assert not server.engine.items
            assert len(server.engine.leases) == 0

    virtual(main)


# --- creating handlers ------------------------------------------------------------------------------------------------


def test_handlers_are_created_from_urls_parameters_and_settings():
    params = RendezvousParameters("memory", "x", "run", 1, 2, join_timeout="7")
    settings = Settings.from_url("memory://x/run", min_nodes=1, max_nodes=2, join_timeout=7)
    for target in (params, settings, "memory://x/run?min_nodes=1&max_nodes=2&join_timeout=7"):
        made = aio.create_handler(target)
        assert made.settings == settings
        assert made.backend_name == "memory"
    assert aio.create_handler("memory://x/run?min_nodes=1", max_nodes=3).settings.max_nodes == 3


@pytest.mark.parametrize(
    "target", [RendezvousParameters("memory", "", "r", 1, 1), Settings.from_url("memory:///r?min_nodes=1")]
)
def test_options_are_accepted_with_a_url_only(target):
    with pytest.raises(TypeError, match="max_nodes"):
        aio.create_handler(target, max_nodes=3)


def test_unknown_options_and_schemes_are_refused_with_the_known_ones():
    with pytest.raises(SettingsError, match="did you mean join_timeout"):
        aio.create_handler("memory:///run?min_nodes=1&join_timout=3")
    with pytest.raises(SettingsError, match=r"no backend for scheme 'carrier': There are .*memory"):
        aio.create_handler("carrier://pigeon/run?min_nodes=1")
    with pytest.raises(SettingsError, match="min_nodes"):
        aio.create_handler("memory:///run")


@pytest.mark.parametrize(
    ("ranks", "wanted", "words"),
    [
        ((1, 1), {1: (0, "b asked for rank 1, too, and joined earlier. Give each node its own node_rank")}, "too"),
        ((0, 7), {7: (1, "the round has 2 nodes, whose ranks are given in the order of what they asked for")}, "order"),
        ((1, 0), {}, "each has its own"),
    ],
)
def test_node_that_does_not_get_the_rank_it_asked_for_is_told_why(ranks, wanted, words):
    async def main():
        told = []
        url = place()
        options = {"min_nodes": 2, "ranks": "node_rank", "sinks": [told.append]}
        first = aio.create_handler(url, name="b", node_rank=ranks[0], **options)
        second = aio.create_handler(url, name="a", node_rank=ranks[1], **options)
        try:
            joining = asyncio.create_task(first.next_rendezvous())
            await asyncio.sleep(1)
            await second.next_rendezvous()
            await joining
        finally:
            await second.aclose()
            await first.aclose()
        return [event for event in told if isinstance(event, RankNotGiven)]

    found = {event.requested: (event.rank, event.reason) for event in virtual(main)}
    assert found == wanted, words
