"""A server on which nothing is decided but by the test, and somebody who waits there for the place of a node."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from rallypoint.kv.types import Put, Txn
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.records import AssignRecord, NodePhase, NodeRecord, RoundPhase, RoundRecord, encode
from rallypoint.server import standing
from rallypoint.wire.frames import GREETING, frame
from rallypoint.wire.messages import NEWEST_VERSION, NOW, Hello, Stand, WatchStart, Welcome, encoder, welcome_decoder
from tests.server.kit import Raw, eventually, serving

KEYS = RunKeys("rallypoint", "run")
NODE = "n1"


def state(phase, number=1):
    record = RoundRecord(number=number, phase=phase, incarnation="life", size=3, term=1, addr="zero", port=5)
    return Put(KEYS.round, encode(record))


def assign(number=1, rank=2):
    return Put(KEYS.assign(NODE), encode(AssignRecord(number=number, rank=rank, join=4)))


def own_key(number):
    record = NodeRecord(id=NODE, name="n", addr="a", session=1, join=4, phase=NodePhase.MEMBER, round=number)
    return Put(KEYS.node(NODE), encode(record))


class Scene:
    """A server on which nothing is decided but here; a node's connection, and one on which somebody waits for it."""

    def __init__(self, server, node, other):
        self.server, self.node, self.other = server, node, other

    def write(self, *puts):
        """As the coordinator would; the revision."""
        return self.server.hub.execute(Txn((), puts)).revision

    def form(self):
        self.write(own_key(0))
        return self.write(state(RoundPhase.FORMING), assign())

    def activate(self):
        return self.write(state(RoundPhase.ACTIVE))

    async def go_through(self):
        """A round, of which the one who waits is told the beginning and the end."""
        self.form()
        assert not (await self.other.next_message()).is_active
        self.activate()
        assert (await self.other.next_message()).is_active


async def come(server, client, run_id=""):
    raw = await Raw.open(server)
    hello = Hello(oldest=NEWEST_VERSION, newest=NEWEST_VERSION, client=client, run=run_id)
    raw.send_bytes(GREETING + frame(encoder.encode(hello)))
    assert isinstance(welcome_decoder.decode(await raw.next_frame()), Welcome)
    return raw


@asynccontextmanager
async def scene(monkeypatch, held_s=60.0, **options):
    monkeypatch.setattr(standing, "HELD_S", held_s)
    async with serving(**options) as server:
        node = await come(server, "node", "run")
        node.send(WatchStart(1, KEYS.round, NOW), WatchStart(2, KEYS.assign(NODE), NOW))
        other = await come(server, "other")
        other.send(Stand("node", NODE))
        await eventually(lambda: any(one.stands for one in server.connections), "somebody stands")
        yield Scene(server, node, other)


async def nothing(raw):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await raw.next_message()
