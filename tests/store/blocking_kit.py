"""A kit that runs the store's conformance suite on the blocking API: members are handlers, calls block threads."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import rallypoint
from rallypoint.backends.tcp.client import TcpBackend
from rallypoint.backends.tcp.dial import dial
from rallypoint.kv.types import Revoke
from rallypoint.store.blocking import Store
from rallypoint.testing.conformance.store_kit import StoreKit
from tests.patience import in_thread
from tests.server.proxy import Proxy
from tests.server.threaded import ThreadedServer

CALLS = [
    "set",
    "get",
    "wait",
    "check",
    "add",
    "compare_set",
    "delete_key",
    "num_keys",
    "append",
    "multi_get",
    "multi_set",
    "barrier",
    "gather",
]
OPTIONS = "keep_alive_interval=2&keep_alive_max_attempt=5&disconnect_grace=10&last_call_timeout=0.1&is_host=false"


async def in_background(call: Any, *args: Any) -> Any:
    """Call it in a thread, which continues if the caller is cancelled."""
    calling = asyncio.wrap_future(in_thread(call, *args))
    calling.add_done_callback(lambda one: one.cancelled() or one.exception())  # mark the error as retrieved
    return await asyncio.shield(calling)


class AsyncFacade:
    """A blocking store with the interface of `AsyncStore`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.round, self.rank = store._store.round, store._store.rank
        for name in CALLS:
            setattr(self, name, self._call(getattr(store, name)))

    @staticmethod
    def _call(method: Any) -> Any:
        return lambda *args: in_background(method, *args)

    @property
    def timeout_s(self) -> float:
        return self.store.timeout.total_seconds()

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        self.store.set_timeout(value)

    async def watch(self, key: str) -> AsyncIterator[bytes | None]:
        loop, changes = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()

        def follow() -> None:
            for change in self.store.watch(key):
                loop.call_soon_threadsafe(changes.put_nowait, change)

        in_thread(follow)
        while True:
            yield await changes.get()


@dataclass(frozen=True)
class BlockingKit(StoreKit):
    """On a server in a thread; each member has its own proxy."""

    served: Any = None

    @asynccontextmanager
    async def members(self, count: int) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            group = BlockingGroup(self, self.served)
            stack.push_async_callback(group.leave)
            endpoint = f"127.0.0.1:{self.served.port}"
            group.backend = TcpBackend(endpoint, dial(endpoint, 1))
            stack.push_async_callback(group.backend.close)
            for index in range(count):
                group.add(index, count)
            await group.next_round()
            yield group


class BlockingGroup:
    """The members of a round, as in `store_kit.Group`."""

    backend: TcpBackend

    def __init__(self, kit: StoreKit, served: ThreadedServer) -> None:
        self.stores: list[AsyncFacade] = []
        self._kit = kit
        self._served = served
        self._members: list[tuple[rallypoint.RendezvousHandler, Proxy]] = []

    def add(self, index: int, size: int) -> None:
        proxy = Proxy(self._served.port)
        self._served.ask(proxy.listen())
        url = f"tcp://{proxy.endpoint}/{self._kit.run_id}?min_nodes={size}&name=n{index}&{OPTIONS}"
        self._members.append((rallypoint.create_handler(url), proxy))

    async def next_round(self) -> list[AsyncFacade]:
        worlds = await self._kit.soon(
            "a round forms when all its nodes have joined",
            asyncio.gather(*(in_background(handler.next_rendezvous) for handler, _ in self._members)),
        )
        self._members = [self._members[[world.rank for world in worlds].index(rank)] for rank in range(len(worlds))]
        self.stores = [AsyncFacade(world.store) for world in sorted(worlds, key=lambda world: world.rank)]
        assert all(one.store.usable_direct() is not None for one in self.stores)
        return self.stores

    async def leave_round(self, rank: int) -> None:
        await in_background(self._members[rank][0].leave)

    async def lose_session(self, rank: int) -> None:
        key = self.stores[rank].store._store._fence.key
        item = (await self.backend.get(key)).item
        assert item is not None
        self._served.ask(lambda: self._served.server.engine_host.execute(Revoke(item.lease)))

    @contextmanager
    def outage(self, rank: int, *, hanging: bool = False) -> Iterator[None]:
        proxy = self._members[rank][1]
        if hanging:
            proxy.swallows = proxy.deafens = True
        else:
            self._served.ask(proxy.refuse)
        try:
            yield
        finally:
            proxy.swallows = proxy.deafens = False
            if hanging:
                self._served.ask(proxy.cut)
            else:
                self._served.ask(proxy.listen())

    async def leave(self) -> None:
        await asyncio.gather(*(in_background(handler.close) for handler, _ in self._members))
        for _, proxy in self._members:
            await in_background(self._served.ask, proxy.close())


def threads() -> list[threading.Thread]:
    """The threads of calls that have not ended."""
    return [thread for thread in threading.enumerate() if thread.name == "test"]
