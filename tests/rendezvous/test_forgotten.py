"""A round counts only in the incarnation that a node joined: the same number in another one is another round."""

import asyncio

import msgspec

from rallypoint.backends.memory import MemoryBackend
from rallypoint.kv.types import Put
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.records import RoundRecord, decode, encode
from rallypoint.testing.loop import run
from rallypoint.testing.world import World


def test_round_with_the_same_number_in_another_incarnation_is_another_round():
    async def main():
        world = World(min_nodes=1, max_nodes=1)
        node = world.start("a").node
        joined = await world.join("a")
        causes = []
        node.listen(lambda cause, reason: causes.append(cause))
        item = world.server.engine.items[node.keys.round]
        other = msgspec.structs.replace(decode(RoundRecord, item), incarnation="another one")
        await MemoryBackend(world.server).txn((), [Put(node.keys.round, encode(other), item.lease)])
        await asyncio.sleep(1)
        assert joined.number == other.number
        assert causes == [Cause.ROUND_OVER]
        await world.stop()

    run(main())
