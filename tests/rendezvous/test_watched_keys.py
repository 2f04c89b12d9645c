"""A local copy of keys: it follows a prefix, survives outages of the backend, and never goes back."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from rallypoint.backends.contract import Watch
from rallypoint.backends.memory import MemoryBackend, MemoryServer
from rallypoint.errors import BackendError, Rejected
from rallypoint.kv.types import Batch, Delete, Put
from rallypoint.rendezvous.watched_keys import WatchedKeys
from rallypoint.server.engine_host import EngineHost
from rallypoint.server.local_backend import LocalBackend
from rallypoint.testing import loop as virtual
from rallypoint.testing.chaos import ChaosBackend, Faults
from tests.server.kit import eventually, run


class Follower:
    """`WatchedKeys` of `/a/` behind a `ChaosBackend`, and a direct backend for writes."""

    def __init__(self, faults: Faults | None = None, seed: int = 1) -> None:
        self.direct = MemoryBackend(MemoryServer())
        self.chaos = ChaosBackend(MemoryBackend(self.direct._server), random.Random(seed), faults or Faults.none())
        self.changes: list[dict[str, bytes]] = []
        self.errors: list[BackendError | None] = []
        self.watched = WatchedKeys(self.chaos, ["/a/"], random.Random(seed), self._changed, self.errors.append)

    def _changed(self, _: Sequence[str] | None) -> None:
        self.changes.append(self.values)

    @property
    def values(self) -> dict[str, bytes]:
        return {key: item.value for key, item in self.watched.items.items()}

    async def put(self, key: str, value: bytes) -> None:
        await self.direct.txn([], [Put(key, value)])


def follow(scenario: Callable[[Follower], Awaitable[None]], faults: Faults | None = None, seed: int = 1) -> Follower:
    async def main() -> Follower:
        follower = Follower(faults, seed)
        await scenario(follower)
        follower.watched.stop()
        return follower

    return virtual.run(main(), seed=seed, limit_s=10_000)


def test_copy_has_existing_values_and_later_changes() -> None:
    async def scenario(follower: Follower) -> None:
        await follower.put("/a/1", b"one")
        await follower.put("/b/1", b"other")
        await follower.watched.synced.wait()
        assert follower.values in ({"/a/1": b"one"}, {})
        await follower.put("/a/2", b"two")
        await follower.direct.txn([], [Delete("/a/1"), Put("/a/2", b"zwei"), Put("/b/1", b"")])
        await asyncio.sleep(1)
        assert follower.values == {"/a/2": b"zwei"}

    follow(scenario)


def test_each_revision_is_reported_once() -> None:
    async def scenario(follower: Follower) -> None:
        await follower.watched.synced.wait()
        for number in range(3):
            await follower.direct.txn([], [Put("/a/x", b"%d" % number), Put("/a/y", b"%d" % number)])
        await asyncio.sleep(1)

    changes = follow(scenario).changes
    assert changes == [{}, *({"/a/x": b"%d" % number, "/a/y": b"%d" % number} for number in range(3))]


def test_values_stay_during_an_outage_and_catch_up_afterwards() -> None:
    async def scenario(follower: Follower) -> None:
        await follower.put("/a/x", b"before")
        await asyncio.sleep(1)
        follower.chaos.cut()
        await follower.put("/a/x", b"meanwhile")
        await asyncio.sleep(60)
        assert follower.values == {"/a/x": b"before"}
        follower.chaos.heal()
        await asyncio.sleep(1)
        assert follower.values == {"/a/x": b"meanwhile"}

    follow(scenario)


def test_unreachable_backend_is_retried_and_reported() -> None:
    async def scenario(follower: Follower) -> None:
        follower.chaos.cut()
        await asyncio.sleep(60)
        assert not follower.watched.synced.is_set()
        assert any(error is not None for error in follower.errors)
        follower.chaos.heal()
        await asyncio.sleep(10)
        assert follower.watched.synced.is_set()
        assert follower.errors[-1] is None

    follow(scenario)


def test_compacted_history_leads_to_a_new_scan() -> None:
    async def scenario(follower: Follower) -> None:
        await follower.watched.synced.wait()
        for number in range(30):
            await follower.put("/a/x", b"%d" % number)
            await asyncio.sleep(0.1)
        await asyncio.sleep(10)
        assert follower.values == {"/a/x": b"29"}

    follow(scenario, Faults(history_gone=0.5))


def test_values_never_go_back_under_faults() -> None:
    async def scenario(follower: Follower) -> None:
        for number in range(100):
            await follower.put("/a/x", b"%03d" % number)
            await asyncio.sleep(0.2)
        follower.chaos.faults = Faults.none()
        await asyncio.sleep(30)
        assert follower.values == {"/a/x": b"099"}

    for seed in range(5):
        seen = [one["/a/x"] for one in follow(scenario, Faults.cruel(), seed).changes if one]
        assert seen == sorted(seen)


def test_stopped_copy_does_not_change() -> None:
    async def scenario(follower: Follower) -> None:
        await follower.put("/a/x", b"1")
        await asyncio.sleep(1)
        follower.watched.stop()
        await follower.put("/a/x", b"2")
        await asyncio.sleep(1)
        assert follower.values == {"/a/x": b"1"}

    follow(scenario)


class RejectsFirstWatch(MemoryBackend):
    """Its first watch fails with Rejected."""

    def __init__(self) -> None:
        super().__init__(MemoryServer())
        self.watches = 0

    def watch(self, prefix: str, after_revision: int) -> Watch:
        self.watches += 1
        return (
            RejectedWatch(super().watch(prefix, after_revision))
            if self.watches == 1
            else super().watch(prefix, after_revision)
        )


class RejectedWatch(Watch):
    """Calls back, and raises Rejected."""

    def __init__(self, inner: Watch) -> None:
        self._inner = inner

    async def __anext__(self) -> Batch:
        raise Rejected("permission denied")

    def ready(self) -> Batch | None:
        raise Rejected("permission denied")

    def follow(self, on_ready: Callable[[], None]) -> bool:
        asyncio.get_running_loop().call_soon(on_ready)
        return True

    def cancel(self) -> None:
        self._inner.cancel()


def test_rejected_watch_is_reported_and_scanned_again() -> None:
    async def main() -> tuple[list[BackendError | None], dict[str, bytes]]:
        backend, errors = RejectsFirstWatch(), []
        watched = WatchedKeys(backend, ["/a/"], random.Random(1), lambda _: None, errors.append)
        await watched.synced.wait()
        await backend.txn([], [Put("/a/1", b"one")])
        await asyncio.sleep(30)
        watched.stop()
        return errors, {key: item.value for key, item in watched.items.items()}

    errors, values = virtual.run(main(), seed=1, limit_s=1_000)
    assert [str(error) for error in errors if error is not None] == ["permission denied"]
    assert values == {"/a/1": b"one"}


def test_watch_inside_a_server_calls_back():
    async def main():
        backend, changes = LocalBackend(EngineHost()), []
        watched = WatchedKeys(backend, ["/a/"], random.Random(1), changes.append, lambda _: None)
        await watched.synced.wait()
        await asyncio.sleep(0)
        await backend.txn((), [Put("/a/x", b"1")])
        await eventually(lambda: "/a/x" in watched.items, "the change arrives")
        watched.stop()

    run(main())
