"""Simulated connections have the guarantees of TCP, and no more."""

import asyncio
import contextvars
import random

import pytest

from rallypoint.testing.loop import MACHINE, run
from rallypoint.testing.sim.network import LinkConditions
from rallypoint.testing.sim.streams import HIGH_BYTES, KERNEL_BYTES, NOTICED_S, WINDOW_BYTES, Stream

CUT = LinkConditions(to_server=False, from_server=False)


class Side(asyncio.Protocol):
    """Records the calls of its transport."""

    def __init__(self):
        self.chunks = []
        self.transport = None
        self.ends = []
        self.has_received_eof = False
        self.paused = []

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.chunks.append(data)

    def eof_received(self):
        self.has_received_eof = True

    def connection_lost(self, error):
        self.ends.append(error)

    def pause_writing(self):
        self.paused.append(True)

    def resume_writing(self):
        self.paused.append(False)

    @property
    def data(self):
        return b"".join(self.chunks)


class Pair:
    """A connection whose near side belongs to machine `near`, with link conditions that can be changed."""

    def __init__(self, seed=0):
        self.conditions = LinkConditions(delay_s=(0.001, 0.05))
        self.near, self.far = Side(), Side()
        self.stream = Stream("test", self, random.Random(f"stream {seed}"))
        context = contextvars.copy_context()
        context.run(MACHINE.set, "near")
        self.stream.join((self.near, context), (self.far, contextvars.copy_context()))
        self.stream.near.open()
        self.stream.far.open()

    def change(self, conditions):
        self.conditions = conditions
        self.stream.kick()


def with_pair(scene, seed=0):
    """Run a scene with a pair on virtual time."""

    async def main():
        await scene(Pair(seed))

    run(main(), seed=seed, limit_s=600)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_arrive_in_order_each_once_in_both_directions(seed):
    async def scene(pair):
        rng = random.Random(seed)
        sent = {pair.near: b"", pair.far: b""}
        for _ in range(60):
            side = rng.choice((pair.near, pair.far))
            data = rng.randbytes(rng.randint(1, 300))
            sent[side] += data
            side.transport.write(data)
            await asyncio.sleep(rng.uniform(0.0, 0.01))
        await asyncio.sleep(30)
        assert pair.far.data == sent[pair.near]
        assert pair.near.data == sent[pair.far]
        assert pair.near.ends == pair.far.ends == []

    with_pair(scene, seed)


def test_bytes_are_cut_and_merged_anywhere():
    async def scene(pair):
        for _ in range(200):
            pair.near.transport.write(b"x" * 10)
            await asyncio.sleep(0.004)
        await asyncio.sleep(30)
        sizes = {len(chunk) for chunk in pair.far.chunks}
        assert any(size % 10 for size in sizes), "some writes are cut"
        assert any(size > 10 for size in sizes), "some writes are merged"
        assert len(pair.far.data) == 2000

    with_pair(scene)


def test_bytes_wait_until_the_end_of_a_cut():
    async def scene(pair):
        pair.change(CUT)
        pair.near.transport.write(b"up")
        pair.far.transport.write(b"down")
        await asyncio.sleep(100)
        assert pair.far.data == pair.near.data == b""
        pair.change(LinkConditions())
        await asyncio.sleep(1)
        assert (pair.far.data, pair.near.data) == (b"up", b"down")

    with_pair(scene)


@pytest.mark.parametrize(
    ("conditions", "arrived"),
    [(LinkConditions(to_server=False), (b"", b"down")), (LinkConditions(from_server=False), (b"up", b""))],
)
def test_bytes_of_one_direction_wait_during_a_one_way_cut(conditions, arrived):
    async def scene(pair):
        pair.change(conditions)
        pair.near.transport.write(b"up")
        pair.far.transport.write(b"down")
        await asyncio.sleep(10)
        assert (pair.far.data, pair.near.data) == arrived

    with_pair(scene)


def test_closing_delivers_everything_and_then_ends_both_sides():
    async def scene(pair):
        pair.near.transport.write(b"last bytes" * 20)
        pair.near.transport.close()
        pair.near.transport.write(b"too late")
        await asyncio.sleep(10)
        assert pair.far.data == b"last bytes" * 20
        assert pair.far.has_received_eof
        assert pair.near.ends == pair.far.ends == [None]
        assert pair.stream.is_over

    with_pair(scene)


@pytest.mark.parametrize("seed", range(20))
def test_reset_ends_both_sides_and_loses_only_bytes_in_flight(seed):
    async def scene(pair):
        pair.near.transport.write(b"first")
        await asyncio.sleep(5)
        pair.near.transport.write(b"second")
        pair.stream.reset()
        pair.near.transport.write(b"third")
        await asyncio.sleep(5)
        assert pair.far.data in (b"first", b"firstsecond")
        assert isinstance(pair.near.ends[0], ConnectionResetError)
        assert isinstance(pair.far.ends[0], OSError)
        assert len(pair.near.ends) == len(pair.far.ends) == 1

    with_pair(scene, seed)


def test_reset_can_happen_before_and_after_a_request_has_arrived():
    arrived = set()
    for seed in range(20):

        async def scene(pair):
            pair.near.transport.write(b"request")
            pair.stream.reset()
            await asyncio.sleep(5)
            arrived.add(pair.far.data)

        with_pair(scene, seed)
    assert arrived == {b"", b"request"}


def test_connection_of_a_killed_process_is_closed():
    async def scene(pair):
        pair.near.transport.write(b"in flight")
        pair.stream.near.die()
        await asyncio.sleep(5)
        assert pair.far.data == b"in flight"
        assert pair.far.ends == [None]
        assert pair.near.ends == []

    with_pair(scene)


def test_dead_machine_is_noticed_after_a_time_out():
    async def scene(pair):
        pair.near.transport.write(b"in flight")
        pair.stream.near.vanish()
        await asyncio.sleep(NOTICED_S[0] - 1)
        pair.far.transport.write(b"data")
        assert pair.far.data == b"in flight"
        assert pair.far.ends == []
        await asyncio.sleep(NOTICED_S[1])
        assert isinstance(pair.far.ends[0], TimeoutError)
        assert pair.near.data == b""

    with_pair(scene)


def test_writing_to_a_closed_side_ends_the_connection():
    async def scene(pair):
        pair.far.transport.abort()
        pair.near.transport.write(b"data")
        await asyncio.sleep(5)
        assert len(pair.near.ends) == 1
        assert pair.far.data == b""

    with_pair(scene)


def test_frozen_machine_reads_nothing_and_its_peer_pauses_writing():
    async def scene(pair):
        loop = asyncio.get_running_loop()
        loop.freeze("near")
        written = 0
        while not pair.far.paused:
            pair.far.transport.write(b"x" * 100)
            written += 100
            await asyncio.sleep(0.1)
        assert written > WINDOW_BYTES + KERNEL_BYTES + HIGH_BYTES - 200
        assert pair.far.transport.get_write_buffer_size() > HIGH_BYTES
        assert pair.near.data == b""
        loop.thaw("near")
        await asyncio.sleep(10)
        assert len(pair.near.data) == written
        assert pair.far.paused == [True, False]

    with_pair(scene)
