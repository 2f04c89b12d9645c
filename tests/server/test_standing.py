"""Who waits for a node's place on a connection of its own is told it there; the node's connection holds that back."""

import asyncio

import pytest

from rallypoint.kv.types import Grant, Put, Txn
from rallypoint.rendezvous.records import RoundPhase
from rallypoint.server import standing
from rallypoint.testing.loop import run as virtual
from rallypoint.wire.messages import Answer, Do, Hold, Place, Push, Stand
from tests.server.kit import eventually, run
from tests.server.standing_kit import NODE, assign, come, nothing, own_key, scene, state


def test_a_place_and_the_end_of_the_attempt_are_said_where_somebody_waits_and_held_back_elsewhere(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            there.form()
            told = await there.other.next_message()
            assert told == Place(False, 1, 4, "life", 2, 3, told.revision, "zero", 5)
            await nothing(there.node)
            confirmed = there.write(own_key(1))
            active = there.activate()
            assert await there.other.next_message() == Place(True, 1, 4, "life", 2, 3, confirmed, "zero", 5)
            await nothing(there.node)
            there.node.send(Do(1, Txn((), (Put("/x", b""),))))  # what is asked is answered, behind all of it
            seen = [await there.node.next_message() for _ in range(4)]
            assert [type(one) for one in seen] == [Push, Push, Push, Answer]
            assert seen[2].batch.revision == active

    run(main())


def test_what_was_held_back_goes_out_after_a_moment(monkeypatch):
    async def main():
        async with scene(monkeypatch, held_s=0.05) as there:
            formed = there.form()
            assert isinstance(await there.other.next_message(), Place)
            assert (await there.node.next_message()).batch.revision == formed

    run(main())


def test_what_was_held_back_goes_out_at_once_when_the_one_who_waited_is_gone(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            formed = there.form()
            assert isinstance(await there.other.next_message(), Place)
            there.other.close()
            assert (await there.node.next_message()).batch.revision == formed
            active = there.activate()
            assert (await there.node.next_message()).batch.revision == formed  # the assignment
            assert (await there.node.next_message()).batch.revision == active, "nothing is held back any more"

    run(main())


def test_the_same_is_so_when_it_is_gone_after_the_end_of_the_attempt(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            await there.go_through()
            there.other.close()
            assert isinstance(await there.node.next_message(), Push)

    run(main())


def test_somebody_who_was_told_the_end_waits_no_more(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            await there.go_through()
            there.write(state(RoundPhase.FORMING, 2), assign(2))
            await nothing(there.other)
            seen = [await there.node.next_message() for _ in range(5)]
            assert all(isinstance(one, Push) for one in seen)

    run(main())


def test_what_is_no_news_of_the_place_is_pushed_as_ever(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            revision = there.write(state(RoundPhase.FORMING), own_key(0))  # and no place for this node
            assert (await there.node.next_message()).batch.revision == revision
            await nothing(there.other)

    run(main())


@pytest.mark.parametrize("client", ["nobody", "third", "other"])
def test_waiting_for_nobody_for_oneself_or_for_one_without_a_run_changes_nothing(monkeypatch, client):
    async def main():
        async with scene(monkeypatch) as there:
            one = await come(there.server, "third")
            one.send(Stand(client, NODE))
            there.form()
            assert isinstance(await there.other.next_message(), Place)
            await nothing(one)

    run(main())


def test_with_very_many_connections_nobody_is_told_that_way(monkeypatch):
    async def main():
        monkeypatch.setattr(standing, "MOST_CONNECTIONS", 1)
        async with scene(monkeypatch) as there:
            formed = there.form()
            assert (await there.node.next_message()).batch.revision == formed
            await nothing(there.other)

    run(main())


def test_all_who_hold_something_back_let_it_go_in_time_with_one_timer(monkeypatch):
    class One:
        def __init__(self, held):
            self.released_at, self.entry = [], held.add(self)

        def is_held(self, entry):
            return entry is self.entry

        def release(self):
            self.released_at.append(asyncio.get_running_loop().time())

    async def main():
        monkeypatch.setattr(standing, "HELD_S", 0.1)
        loop, held = asyncio.get_running_loop(), standing.Held()
        begun = loop.time()
        first, again = One(held), One(held)
        await asyncio.sleep(0.06)
        again.entry = held.add(again)  # what it held back before has gone out meanwhile
        last = One(held)
        await asyncio.sleep(0.2)
        assert [round(at - begun, 3) for one in (first, again, last) for at in one.released_at] == [0.1, 0.16, 0.16]
        await asyncio.sleep(0.2)
        assert One(held).released_at == []
        await asyncio.sleep(0.2)
        assert not held._waiting

    virtual(main())


async def granted(raw, seq, lease, *others):
    """Open a session, and do something with it."""
    raw.send(*others, Do(seq, Grant(60.0, lease)), Hold(lease, 0.5))
    assert isinstance(await raw.next_message(), Answer)


def test_a_session_that_is_opened_where_somebody_stands_is_that_of_the_node(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            clients, engine = there.server.clients, there.server.hub.engine
            await granted(there.other, 1, 77)
            await eventually(lambda: clients.known("node").sessions == {77: 0.5}, "it is held")
            there.other.close()
            await eventually(lambda: clients.known("other") is None, "who stood is gone")
            assert engine.leases.get(77).deadline > engine.now + 50.0, "which says nothing about the node"
            there.node.close()
            await eventually(lambda: engine.leases.get(77) is None, "it ends with its grace")

    run(main())


def test_a_session_that_is_opened_for_a_node_that_is_away_lasts_until_it_says_so(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            clients, engine = there.server.clients, there.server.hub.engine
            there.node.close()
            await eventually(lambda: clients.known("node") is None, "it is away")
            await granted(there.other, 1, 77)
            again = await come(there.server, "node", "run")
            again.send(Hold(77, 0.5))
            await eventually(lambda: clients.known("node").sessions == {77: 0.5}, "it has said so")
            assert engine.leases.get(77) is not None

    run(main())


def test_a_session_that_a_node_opens_is_its_own_although_somebody_stands_for_it_elsewhere(monkeypatch):
    async def main():
        async with scene(monkeypatch) as there:
            await granted(there.node, 1, 77)
            await eventually(lambda: there.server.clients.known("node").sessions == {77: 0.5}, "it is held")

    run(main())
