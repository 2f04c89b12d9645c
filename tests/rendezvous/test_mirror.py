"""A local copy of keys: follows a prefix, survives the loss of the backend, only goes forward."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from quorate.backends.memory import MemoryBackend, MemoryServer
from quorate.errors import BackendError
from quorate.kv.types import Delete, Put
from quorate.rendezvous.mirror import Mirror
from quorate.testing import loop as virtual
from quorate.testing.chaos import ChaosBackend, Faults


class Follower:
    """A mirror of `/a/` through a chaotic connection, and a faultless one to write with."""

    def __init__(self, faults: Faults | None = None, seed: int = 1) -> None:
        self.direct = MemoryBackend(MemoryServer())
        self.chaos = ChaosBackend(MemoryBackend(self.direct._server), random.Random(seed), faults or Faults.none())
        self.changes: list[dict[str, bytes]] = []
        self.troubles: list[BackendError | None] = []
        self.mirror = Mirror(self.chaos, ["/a/"], random.Random(seed), self._changed, self.troubles.append)

    def _changed(self, _: Sequence[str] | None) -> None:
        self.changes.append(self.values)

    @property
    def values(self) -> dict[str, bytes]:
        return {key: item.value for key, item in self.mirror.items.items()}

    async def put(self, key: str, value: bytes) -> None:
        await self.direct.txn([], [Put(key, value)])


def follow(scene: Callable[[Follower], Awaitable[None]], faults: Faults | None = None, seed: int = 1) -> Follower:
    async def main() -> Follower:
        follower = Follower(faults, seed)
        await scene(follower)
        follower.mirror.stop()
        return follower

    return virtual.run(main(), seed=seed, limit_s=10_000)


def test_mirror_has_what_was_there_and_what_comes() -> None:
    async def scene(follower: Follower) -> None:
        await follower.put("/a/1", b"one")
        await follower.put("/b/1", b"other")
        await follower.mirror.synced.wait()
        assert follower.values in ({"/a/1": b"one"}, {})
        await follower.put("/a/2", b"two")
        await follower.direct.txn([], [Delete("/a/1"), Put("/a/2", b"zwei"), Put("/b/1", b"")])
        await asyncio.sleep(1)
        assert follower.values == {"/a/2": b"zwei"}

    follow(scene)


def test_mirror_tells_each_revision_once() -> None:
    async def scene(follower: Follower) -> None:
        await follower.mirror.synced.wait()
        for number in range(3):
            await follower.direct.txn([], [Put("/a/x", b"%d" % number), Put("/a/y", b"%d" % number)])
        await asyncio.sleep(1)

    told = follow(scene).changes
    assert told == [{}, *({"/a/x": b"%d" % number, "/a/y": b"%d" % number} for number in range(3))]


def test_values_stay_while_the_backend_is_away_and_catch_up_after() -> None:
    async def scene(follower: Follower) -> None:
        await follower.put("/a/x", b"before")
        await asyncio.sleep(1)
        follower.chaos.cut()
        await follower.put("/a/x", b"meanwhile")
        await asyncio.sleep(60)
        assert follower.values == {"/a/x": b"before"}
        follower.chaos.heal()
        await asyncio.sleep(1)
        assert follower.values == {"/a/x": b"meanwhile"}

    follow(scene)


def test_backend_that_is_not_there_yet_is_tried_again_and_told() -> None:
    async def scene(follower: Follower) -> None:
        follower.chaos.cut()
        await asyncio.sleep(60)
        assert not follower.mirror.synced.is_set()
        assert any(trouble is not None for trouble in follower.troubles)
        follower.chaos.heal()
        await asyncio.sleep(10)
        assert follower.mirror.synced.is_set()
        assert follower.troubles[-1] is None

    follow(scene)


def test_history_that_is_gone_means_a_new_scan() -> None:
    async def scene(follower: Follower) -> None:
        await follower.mirror.synced.wait()
        for number in range(30):
            await follower.put("/a/x", b"%d" % number)
            await asyncio.sleep(0.1)
        await asyncio.sleep(10)
        assert follower.values == {"/a/x": b"29"}

    follow(scene, Faults(history_gone=0.5))


def test_mirror_never_goes_back_whatever_happens() -> None:
    async def scene(follower: Follower) -> None:
        for number in range(100):
            await follower.put("/a/x", b"%03d" % number)
            await asyncio.sleep(0.2)
        follower.chaos.faults = Faults.none()
        await asyncio.sleep(30)
        assert follower.values == {"/a/x": b"099"}

    for seed in range(5):
        seen = [one["/a/x"] for one in follow(scene, Faults.cruel(), seed).changes if one]
        assert seen == sorted(seen)


def test_stopped_mirror_follows_nothing() -> None:
    async def scene(follower: Follower) -> None:
        await follower.put("/a/x", b"1")
        await asyncio.sleep(1)
        follower.mirror.stop()
        await follower.put("/a/x", b"2")
        await asyncio.sleep(1)
        assert follower.values == {"/a/x": b"1"}

    follow(scene)
