"""A server that takes renewals together, and what ends that."""

import asyncio
import socket
import sys

import pytest

from rallypoint.events import Emitter
from rallypoint.kv.engine import Engine
from rallypoint.kv.types import Grant, KeepAlive, Put, Txn
from rallypoint.server.door import Door
from rallypoint.server.limits import ServerLimits
from rallypoint.server.rest import LEAST, REST_S, Rest
from rallypoint.server.server import Server
from rallypoint.server.traffic import Traffic
from rallypoint.wire.messages import Do
from tests.server.kit import Raw, eventually, run, serving

TURNS = 10


class Scene:
    """A server's sums, and how often its loop was kept from looking. Seconds pass when they are told to."""

    def __init__(self):
        self.traffic = Traffic()
        self.engine = Engine()
        self.door = Door(ServerLimits(), Emitter(), "server")
        self.slept = []
        self.rest = Rest(self.traffic, self.engine, self.door, self.slept.append)

    def renewals(self, count=LEAST):
        self.traffic.frames_in += count
        self.traffic.renewals += count

    def request(self):
        self.traffic.frames_in += 1

    def end_of_a_lease(self):
        self.engine.apply(Txn((), (Put("k", b""),)), 0.0)

    def look_at_the_page(self):
        self.door.page_asked += 1

    def second(self):
        self.rest._timer.cancel()
        self.rest._judge()

    async def rested(self):
        """How often it rested in some turns of the loop."""
        before = len(self.slept)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return len(self.slept) - before


def played(play):
    async def main():
        scene = Scene()
        await play(scene)
        scene.rest.stop()
        assert await scene.rested() == 0
        assert set(scene.slept) <= {REST_S}

    asyncio.run(main())


def test_rests_in_every_other_turn_after_a_second_of_many_renewals_and_nothing_else():
    async def play(scene):
        scene.renewals()
        assert await scene.rested() == 0
        scene.second()
        assert await scene.rested() == TURNS / 2
        scene.renewals()
        scene.second()
        assert await scene.rested() == TURNS / 2

    played(play)


def test_does_not_rest_for_few():
    async def play(scene):
        scene.renewals(LEAST - 1)
        scene.second()
        assert await scene.rested() == 0

    played(play)


@pytest.mark.parametrize("what", [Scene.request, Scene.end_of_a_lease, Scene.look_at_the_page])
def test_does_not_rest_after_a_second_in_which_something_else_came(what):
    async def play(scene):
        scene.renewals()
        what(scene)
        scene.second()
        assert await scene.rested() == 0
        scene.renewals()
        scene.second()
        assert await scene.rested() == TURNS / 2

    played(play)


@pytest.mark.parametrize("what", [Scene.request, Scene.end_of_a_lease, Scene.look_at_the_page])
def test_the_first_other_thing_ends_it_until_there_was_a_second_of_renewals_again(what):
    async def play(scene):
        scene.renewals()
        scene.second()
        assert await scene.rested() == TURNS / 2
        what(scene)
        assert await scene.rested() == 0
        scene.renewals()
        scene.second()
        assert await scene.rested() == 0
        scene.renewals()
        scene.second()
        assert await scene.rested() == TURNS / 2

    played(play)


def test_ends_when_renewals_become_few():
    async def play(scene):
        scene.renewals()
        scene.second()
        assert await scene.rested() == TURNS / 2
        scene.second()
        assert await scene.rested() == 0

    played(play)


def test_what_has_come_is_taken_before_it_rests_again():
    """asyncio's own loop looks for what has come first, and takes it after what was due in the same turn."""

    async def play(scene):
        one, other = socket.socketpair()
        taken = []
        asyncio.get_running_loop().add_reader(one, lambda: taken.append(one.recv(1)))
        scene.rest._sleep = lambda _: (scene.slept.append(REST_S), other.send(b"x"))
        scene.renewals()
        scene.second()
        try:
            for _ in range(TURNS):
                await asyncio.sleep(0)
                assert len(scene.slept) - len(taken) <= 1
        finally:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
            other.close()

    played(play)


@pytest.mark.skipif(sys.platform != "linux", reason="only there")
@pytest.mark.parametrize("is_dedicated", [True, False])
def test_only_a_server_of_its_own_rests(is_dedicated):
    async def main():
        server = Server(is_dedicated=is_dedicated)
        rest = server._rest
        await server.stop()
        assert rest is None or rest._timer.cancelled()
        return rest is not None

    assert asyncio.run(main()) is is_dedicated


@pytest.mark.skipif(sys.platform != "linux", reason="only there")
def test_a_server_that_gets_nothing_but_renewals_rests_and_answers_on():
    async def main():
        async with serving(is_dedicated=True) as server:
            raw, _ = await Raw.welcomed(server)
            raw.send(Do(1, Grant(60)))
            lease = (await raw.answer(1)).lease
            assert not await rests_after(server, raw, lease, 2)  # somebody came, and asked
            assert await rests_after(server, raw, lease, 2 + LEAST)
            raw.send(Do(2 + 2 * LEAST, KeepAlive(lease)))
            assert (await raw.answer(2 + 2 * LEAST)).alive
            assert server._rest.is_resting
            raw.send(Do(3 + 2 * LEAST, Txn((), (Put("k", b"v"),))))
            assert (await raw.answer(3 + 2 * LEAST)).committed
            await eventually(lambda: not server._rest.is_resting, "the end of its rest")

    run(main())


async def rests_after(server, raw, lease, first):
    """Whether it does after a second of renewals."""
    for seq in range(first, first + LEAST):
        raw.send(Do(seq, KeepAlive(lease)), acked=seq - 1)
    assert (await raw.answer(first + LEAST - 1)).alive
    server._rest._timer.cancel()
    server._rest._judge()
    return server._rest.is_resting
