"""The shortest way into a round, on a real server: who goes it, what is done later, and what does not disturb it."""

import asyncio
import random
import time
from contextlib import asynccontextmanager

import msgspec
import pytest

from rallypoint._marks import collect
from rallypoint.backends.dial import dial
from rallypoint.backends.tcp import TcpBackend
from rallypoint.errors import RendezvousError
from rallypoint.events import Confirmed, Emitter, RoundEntered
from rallypoint.kv.types import Put
from rallypoint.rendezvous.membership import Cause, Identity
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.presence import MOST_PLEDGED
from rallypoint.rendezvous.records import DrainRecord, encode
from rallypoint.settings import Settings
from tests.server.kit import eventually, run, serving
from tests.server.proxy import through

CALM_S = 1.0
"""What is given to everybody after a while is given within this."""
LEFT = "b (rank 1) left before the round was active"


class Group:
    """Nodes of one run on one server; the first that joins is rank 0, and the last one completes the round."""

    def __init__(self, server, size):
        self.server = server
        self.size = size
        self.events = []
        self.backends = []
        self.nodes = []
        self.endpoints = {}
        """Of nodes that come by another way."""

    def node(self, name, sink=True, held_s=2.0, **options):
        settings = Settings.build(
            scheme="tcp",
            run_id="run",
            name=name,
            **{
                "min_nodes": self.size,
                "max_nodes": self.size,
                "admission_window": 0,
                "last_call_timeout": 0.1,
                **options,
            },
        )
        endpoint = self.endpoints.get(name, self.server.addresses[0])
        backend = TcpBackend(endpoint, dial(endpoint, 1), run="run")
        backend.shortcut().held_s = held_s
        node = Node(
            backend,
            settings,
            Identity(f"{len(self.nodes):016x}", name, "127.0.0.1", 1, len(self.nodes), {}),
            bootstrap=self.bootstrap,
            emit=Emitter(*([self.events.append] if sink else [])),
            rng=random.Random(len(self.nodes)),
            wall=lambda: 0.0,
        )
        self.backends.append(backend)
        self.nodes.append(node)
        return node

    async def bootstrap(self, number, size):
        return "127.0.0.1", 1234

    async def waiting(self, name, **options):
        """A node that waits for a place: it, its call, and what it is released with."""
        node = self.node(name, **options)
        released = asyncio.get_running_loop().create_future()
        call = asyncio.create_task(node.next_round(released=Elsewhere(released.set_result)))
        await eventually(lambda: is_open(node), f"{name} waits")
        return node, call, released

    async def gathering(self, **options):
        """The same of "b", between "a", which is rank 0, and "c", whose call has just begun; and the calls of those."""
        first = asyncio.create_task(self.node("a").next_round())
        node, call, released = await self.waiting("b", **options)
        return node, call, released, [first, asyncio.create_task(self.node("c").next_round())]


class Elsewhere:
    """Somebody who waits on another thread, so to say, and is told."""

    def __init__(self, told):
        self._told = told

    def prepare(self):
        pass

    def __call__(self, joined):
        self._told(joined)


def watched(requests):
    """The requests that are made from now on, but for one that was ready."""
    asked, add = [], requests.add
    requests.add = lambda *of, **how: asked.append(add(*of, **how)) or asked[-1]
    return asked


def is_open(node):
    return node.backend.shortcut().on_push is not None


def said_by(nodes, name):
    return [type(event) for event in nodes.events if event.by == name and isinstance(event, Confirmed | RoundEntered)]


@asynccontextmanager
async def group(size):
    said = []
    async with serving(emit=Emitter(lambda event: said.append(str(event)))) as server:
        made = Group(server, size)
        made.said = said
        try:
            yield made
        finally:
            for node in made.nodes:
                node.abandon()
            for backend in made.backends:
                await backend.close()


def test_a_caller_is_released_before_its_call_has_ended_and_the_call_comes_to_the_same():
    async def main():
        async with group(3) as nodes:
            node, call, released, others = await nodes.gathering()
            joined = await released
            assert (joined.number, joined.rank, joined.size, joined.port) == (1, 1, 3, 1234)
            assert not call.done()
            assert node.current == joined
            assert node.sight.round is None, "what was pushed is shown to everybody later"
            node.settle()
            assert node.sight.round is not None
            assert await call == joined
            assert {one.rank for one in await asyncio.gather(*others)} == {0, 2}

    run(main())


def test_the_call_ends_by_itself_a_little_later():
    async def main():
        async with group(3) as nodes:
            _, call, released, others = await nodes.gathering(held_s=0.1)
            joined = await released
            async with asyncio.timeout(CALM_S):
                assert await call == joined
            await asyncio.gather(*others)

    run(main())


def test_what_is_answered_to_somebody_else_meanwhile_does_not_close_the_way():
    async def main():
        async with group(3) as nodes:
            first = asyncio.create_task(nodes.node("a").next_round())
            node, call, released = await nodes.waiting("b")
            await node.backend.get("anything")  # as a renewal is, now and then
            assert is_open(node)
            asked = watched(node.backend._requests)
            last = asyncio.create_task(nodes.node("c").next_round())
            await asyncio.wait((released, call), return_when=asyncio.FIRST_COMPLETED)
            assert released.done()
            assert not asked, "the confirmation was ready, under a number that is free"
            await asyncio.gather(first, last, call)

    run(main())


def test_a_confirmation_that_was_made_ready_is_not_sent_under_a_number_that_somebody_else_took():
    async def main():
        async with group(3) as nodes:
            first = asyncio.create_task(nodes.node("a").next_round())
            node, call, released = await nodes.waiting("b")
            requests = node.backend._requests
            taken, asked = requests.number(), watched(requests)
            last = asyncio.create_task(nodes.node("c").next_round())
            joined = await released
            assert [pending.message.seq for pending in asked] == [taken + 1]
            node.settle()
            assert await call == joined
            await asyncio.gather(first, last)

    run(main())


def test_who_is_heard_says_it_in_order_and_before_the_caller_is_released():
    async def main():
        async with group(3) as nodes:
            _, call, released, others = await nodes.gathering()
            joined = await released
            assert said_by(nodes, "b") == [Confirmed, RoundEntered]
            assert await call == joined
            await asyncio.gather(*others)
            assert said_by(nodes, "b") == [Confirmed, RoundEntered]

    run(main())


@pytest.mark.parametrize("sink", [True, False])
def test_rank_0_and_whoever_is_not_released_elsewhere_go_the_ordinary_way(sink):
    async def main():
        async with group(3) as nodes:
            hits = collect()
            zero, call, released = await nodes.waiting("a", sink=sink)
            other = asyncio.create_task(nodes.node("b").next_round())
            last = asyncio.create_task(nodes.node("c").next_round())
            assert (await call).rank == 0
            assert zero.sight.round is not None
            await asyncio.gather(other, last)
            assert not released.done()
            assert not hits & {"express.confirmed", "express.entered"}

    run(main())


def test_a_connection_that_breaks_after_the_confirmation_disturbs_nobody():
    async def main():
        async with group(3) as nodes:
            zero_may = asyncio.Event()

            async def bootstrap(number, size):
                await zero_may.wait()
                return "127.0.0.1", 1234

            nodes.bootstrap = bootstrap
            first = asyncio.create_task(nodes.node("a").next_round())
            node, call, released = await nodes.waiting("b")
            hits = collect()
            last = asyncio.create_task(nodes.node("c").next_round())
            await eventually(lambda: "express.confirmed" in hits, "b has confirmed")
            assert node._presence.floor == 1
            node.backend._link.abort("the test breaks it")
            assert node.sight.round is not None, "what came before is seen before the end"
            assert node.backend._lookout._timer is not None, "the answer is looked out for"
            await eventually(lambda: node._presence.record is not None and node._presence.record.round == 1, "answered")
            zero_may.set()
            assert (await call).rank == 1
            await asyncio.gather(first, last)
            assert not released.done(), "it went the rest of the ordinary way"

    run(main())


def test_who_takes_long_to_become_active_goes_on_in_the_ordinary_way():
    async def main():
        async with group(3) as nodes:

            async def bootstrap(number, size):
                await asyncio.sleep(0.4)
                return "127.0.0.1", 1234

            nodes.bootstrap = bootstrap
            _, call, released, others = await nodes.gathering(held_s=0.1)
            assert {joined.rank for joined in await asyncio.gather(call, *others)} == {0, 1, 2}
            assert not released.done()

    run(main())


def test_a_session_that_is_lost_after_the_release_is_told():
    async def main():
        async with group(3) as nodes:
            node, call, released, others = await nodes.gathering()
            joined = await released
            session = node._presence.session
            session.lost.set("the test says so")
            assert await call == joined
            told = []
            node.listen(lambda cause, why: told.append((cause, why)))
            await eventually(lambda: told, "it is told")
            assert told == [(Cause.SESSION_LOST, "the test says so")]
            await asyncio.gather(*others)

    run(main())


def test_the_world_before_is_not_told_what_happens_after_the_release():
    async def main():
        async with group(3) as nodes:
            others = [nodes.node("a"), nodes.node("c")]
            node, told = nodes.node("b"), []
            node.listen(lambda cause, _: told.append(cause))  # of a world before
            calls = [asyncio.create_task(others[0].next_round())]

            def lose(joined):
                node._presence.session.lost.set("the test says so")

            calls.append(asyncio.create_task(node.next_round(released=Elsewhere(lose))))
            await eventually(lambda: is_open(node), "b waits")
            calls.append(asyncio.create_task(others[1].next_round()))
            await asyncio.gather(*calls)
            await asyncio.sleep(0.05)
            assert not told
            node.listen(lambda cause, _: told.append(cause))
            assert told == [Cause.SESSION_LOST]

    run(main())


def test_what_is_pushed_after_the_release_is_told_at_once_and_after_the_rest():
    async def main():
        async with group(3) as nodes:
            node, call, released, others = await nodes.gathering()
            joined = await released
            await nodes.backends[0].txn((), [Put(node.keys.drain(node.identity.id), encode(DrainRecord(by="test")))])
            assert await call == joined
            told = []
            node.listen(lambda cause, _: told.append(cause))
            await eventually(lambda: told, "it is told")
            assert told == [Cause.DRAIN]
            await asyncio.gather(*others)

    run(main())


def test_a_deadline_that_passes_after_the_release_takes_nothing_back():
    async def main():
        async with group(3) as nodes:
            first = asyncio.create_task(nodes.node("a").next_round())
            node, got = nodes.node("b", held_s=0.3, join_timeout=1.5), []

            def stand_still(joined):
                got.append(joined)
                time.sleep(1.6)

            call = asyncio.create_task(node.next_round(released=Elsewhere(stand_still)))
            await eventually(lambda: is_open(node), "b waits")
            last = asyncio.create_task(nodes.node("c").next_round())
            joined = await call
            assert got == [joined]
            assert node.current == joined
            assert node._presence.session is not None
            await asyncio.gather(first, last)

    run(main())


async def confirmed(nodes):
    """A node that has confirmed by the shortest way, its call, what it is released with, and the others' calls.

    The round is active as soon as the event is set.
    """
    may = asyncio.Event()

    async def bootstrap(number, size):
        await may.wait()
        return "127.0.0.1", 1234

    nodes.bootstrap = bootstrap
    others = [asyncio.create_task(nodes.node("a").next_round())]
    node, call, released = await nodes.waiting("b")
    hits = collect()
    others.append(asyncio.create_task(nodes.node("c").next_round()))
    await eventually(lambda: "express.confirmed" in hits, "b has confirmed")
    return node, call, released, others, may


def test_a_call_that_is_cancelled_after_its_confirmation_says_goodbye():
    async def main():
        async with group(3) as nodes:
            node, call, released, others, _ = await confirmed(nodes)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not is_open(node)
            assert node.current is None
            assert node._presence.sent is None
            assert not released.done()
            await eventually(lambda: any(LEFT in line for line in nodes.said), "the server says that it left")
            for other in others:
                other.cancel()

    run(main())


def test_a_call_that_is_cancelled_after_the_release_withdraws():
    async def main():
        async with group(3) as nodes:
            node, call, released, others = await nodes.gathering()
            await released
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert node.current is None
            assert node._presence.session is None
            await asyncio.gather(*others)

    run(main())


def test_leaving_while_the_answer_to_the_confirmation_is_under_way_ends_the_call():
    async def main():
        async with group(3) as nodes, through(nodes.server) as proxy:
            nodes.endpoints["b"] = proxy.endpoint
            first = asyncio.create_task(nodes.node("a").next_round())
            node, call, released = await nodes.waiting("b", held_s=0.05)
            hits = collect()
            proxy.delay_s = 0.3  # the answer comes with the word that the round is active
            last = asyncio.create_task(nodes.node("c").next_round())
            await eventually(lambda: "express.confirmed" in hits and not is_open(node), "it waits for the answer")
            leaving = asyncio.create_task(node.leave("it was told to"))
            with pytest.raises(RendezvousError, match="it was told to"):
                await call
            await leaving
            assert node.current is None
            assert not released.done()
            await asyncio.gather(first, last)  # which had a round for a moment

    run(main())


def test_leaving_after_the_confirmation_is_no_loss():
    async def main():
        async with group(3) as nodes:
            node, call, _, others, _ = await confirmed(nodes)
            await node.leave("it was told to")
            with pytest.raises(RendezvousError, match="it was told to"):
                await call
            await eventually(lambda: any(LEFT in line for line in nodes.said), "the server says that it left")
            for other in others:
                other.cancel()

    run(main())


def test_a_session_that_ends_before_the_round_is_active_does_not_release_the_caller():
    async def main():
        async with group(3) as nodes:
            node, call, released, others, may = await confirmed(nodes)
            node._presence.session.expires_at = 0.0
            may.set()
            joined = await call
            assert not released.done()
            told = []
            node.listen(lambda cause, _: told.append(cause))
            await eventually(lambda: told, "it is told that its session is lost")
            assert told == [Cause.SESSION_LOST]
            assert joined.rank == 1
            await asyncio.gather(*others)

    run(main())


def test_a_client_that_is_closed_after_a_confirmation_holds_nothing():
    async def main():
        async with group(3) as nodes:
            node, call, _, others, _ = await confirmed(nodes)
            await node.backend.close()
            assert node.sight.round is not None
            for one in (call, *others):
                one.cancel()

    run(main())


def with_no_time(node, waiter, now):
    return waiter._replace(deadline=now + 0.05)


def with_a_session_that_ends(node, waiter, now):
    waiter.session.expires_at = now + 0.05
    return waiter


def with_another_session(node, waiter, now):
    return waiter._replace(session=object())


def of_another_life(node, waiter, now):
    return waiter._replace(incarnation="another")


def of_another_call(node, waiter, now):
    return waiter._replace(own=msgspec.structs.replace(waiter.own, join=waiter.own.join + 1))


def of_a_later_round(node, waiter, now):
    return waiter._replace(own=msgspec.structs.replace(waiter.own, round=1))


@pytest.mark.parametrize(
    "changed",
    [
        with_no_time,
        with_a_session_that_ends,
        with_another_session,
        of_another_life,
        of_another_call,
        of_a_later_round,
    ],
)
def test_one_whose_standing_is_not_what_the_place_is_for_goes_the_ordinary_way(changed):
    async def main():
        async with group(3) as nodes:
            first = asyncio.create_task(nodes.node("a").next_round())
            node, call, released = await nodes.waiting("b")
            hits, opens = collect(), node._express.open

            def open_changed(*standing):
                opens(*standing)
                node._express._waiter = changed(node, node._express._waiter, asyncio.get_running_loop().time())

            node._express.open = open_changed
            node._wake.set()
            await eventually(lambda: not node._wake.is_set(), "it sleeps again")
            last = asyncio.create_task(nodes.node("c").next_round())
            assert {joined.rank for joined in await asyncio.gather(first, call, last)} == {0, 1, 2}
            assert not released.done()
            assert "express.confirmed" not in hits

    run(main())


def test_who_polls_is_not_told_of_the_round_before():
    async def main():
        async with group(2) as nodes:
            options = {"max_nodes": 3}
            node, call, released = await nodes.waiting("b", **options)
            other = nodes.node("a", **options)
            await asyncio.gather(call, other.next_round())
            third = asyncio.create_task(nodes.node("c", **options).next_round())
            await eventually(lambda: node.waiting_count() == 1, "somebody waits")
            released = asyncio.get_running_loop().create_future()
            call = asyncio.create_task(node.next_round(released=Elsewhere(released.set_result)))
            await eventually(lambda: is_open(node), "b waits")
            again = asyncio.create_task(other.next_round())
            await released
            assert not call.done()
            assert node.waiting_count() == 0
            await asyncio.gather(call, again, third)
            assert node.waiting_count() == 0

    run(main())


def test_one_who_waits_through_many_attempts_does_not_remember_all_that_it_has_confirmed_beforehand():
    async def main():
        async with group(3) as nodes:
            node, call, _ = await nodes.waiting("b")
            presence = node._presence
            for number in range(1, 200):
                presence.pledge([presence.prepare_ahead(number).record])
            assert len(presence._pledged) == MOST_PLEDGED
            assert presence.floor == 0, "what it has confirmed is another thing"
            call.cancel()
            await asyncio.wait([call])
            assert presence._pledged == {}

    run(main())
