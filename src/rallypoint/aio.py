"""The public API for asyncio: the one implementation, which the blocking API is a face of.

    async with rallypoint.aio.join("memory:///my-run?min_nodes=2") as run:
        async for world in run.rounds():
            await train(world.rank, world.world_size, world.store, until=world.changed)

A handler belongs to the event loop it is first used on. Nothing is opened before that first use.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import secrets
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Self, TypeAlias

from rallypoint._address import own_address
from rallypoint._ending import drop, end, tell_left
from rallypoint._world import RETRY_S, AsyncChanged
from rallypoint._world import AsyncWorld as AsyncWorld
from rallypoint.api import free_port
from rallypoint.backends.contract import Backend
from rallypoint.backends.schemes import BackendOpener, backend_opener, register_backend
from rallypoint.errors import (
    ForkedProcessError,
    OutcomeUnknown,
    Rejected,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    Unavailable,
)
from rallypoint.events import Emitter, NodeLeft, ShutdownFailed, Sink
from rallypoint.parameters import RendezvousParameters
from rallypoint.rendezvous.membership import Bootstrap, Identity, Joined
from rallypoint.rendezvous.node import Node
from rallypoint.settings import Settings
from rallypoint.store import AsyncStore
from rallypoint.urls import shown


async def _open_tcp(settings: Settings) -> Backend:
    from rallypoint.server.hosting import open_tcp  # only those who use it pay for importing a server

    return await open_tcp(settings)


for _scheme in ("tcp", "static"):
    register_backend(_scheme, _open_tcp)

BootstrapMaker: TypeAlias = Callable[[Identity], Bootstrap]
"""What gives a node its `Bootstrap`, once it is known who it is."""

_local_ids = itertools.count()


class AsyncHandler:
    """One node of one run. `num_nodes_waiting`, `closed_now` and `settings` may be read from any thread."""

    def __init__(
        self,
        settings: Settings,
        *,
        backend_name: str | None = None,
        sinks: Iterable[Sink] = (),
        bootstrap: BootstrapMaker | None = None,
        opener: BackendOpener | None = None,
    ) -> None:
        self.settings = settings
        self.backend_name = backend_name or settings.scheme
        self._opener = opener or backend_opener(settings.scheme)
        self._emit = Emitter(*sinks)
        self._make_bootstrap = bootstrap or _free_port_of
        self._local_id = next(_local_ids)
        self._pid = os.getpid()
        self._opening = asyncio.Lock()
        self._dropped: weakref.finalize[..., AsyncHandler] | None = None
        self.last_closed = False
        """Whether the run was closed when this handler last let go of it."""
        self._backend: Backend | None = None
        self._node: Node | None = None
        self.changed: AsyncChanged | None = None
        """Of the world that the node is in."""
        self._joining: _Joining | None = None
        self._stores: list[weakref.ref[AsyncStore]] = []
        self._shutting_down: asyncio.Future[bool | None] | None = None
        """Whether the run was closed; None: that was cancelled."""
        self._ended = asyncio.Event()
        """Whether what was let go of last has ended."""
        self._ended.set()
        self.has_left = False
        """Whether the node was told to leave since it last asked to join."""

    async def next_rendezvous(self) -> AsyncWorld:
        """Leave the current round, if any, and wait for a place in the next. See `Node.next_round` for the errors."""
        joined, node = await self._join()
        store = AsyncStore(node.backend, node.keys, node.identity.id, joined)
        store.owner = self
        self._stores = [*(known for known in self._stores if known() is not None), weakref.ref(store)]
        world = AsyncWorld(node, joined, store)
        self.changed = world.changed
        node.listen(world.changed.set)
        return world

    async def _join(self) -> tuple[Joined, Node]:
        if self._joining is not None:
            raise RendezvousError("next_rendezvous is running already for this node: one call at a time")
        self.has_left = False
        self._leave_stores("it joins again")
        call = self._joining = _Joining()
        started_at = asyncio.get_running_loop().time()
        try:
            node = await self._open_within(self.settings.join_timeout_s)
            return await node.next_round(started_at), node
        except asyncio.CancelledError:
            if call.left_because is None or call.task.uncancel() > 0:
                raise
            why = call.left_because
            self._emit(NodeLeft(run_id=self.settings.run_id, by=self.name, reason=why))
            raise RendezvousError(f"this node left the run while it was joining: {why}") from None
        finally:
            self._joining = None
            call.ended.set()
            del call  # it refers to the call's task, and so to its error

    def num_nodes_waiting(self) -> int:
        """From what was pushed last; never raises, costs microseconds. 0 until the node has looked at the run."""
        node = self._node
        return node.waiting_count() if node is not None else 0

    async def observe(self) -> None:
        """Begin to follow the run without joining it. Returns once it was read, or after `read_timeout`."""
        if self._is_ending:
            return  # nothing is opened for that
        try:
            async with asyncio.timeout(self.settings.read_timeout_s):
                node = await self._open_within(self.settings.read_timeout_s)
                node.observe()
                await node.view.wait_synced()
        except (TimeoutError, RendezvousConnectionError):
            return

    @property
    def _is_ending(self) -> bool:
        return self._node is None and not self._ended.is_set()

    @property
    def closed_now(self) -> bool | None:
        """Whether the run is closed, from what was pushed last; None: nothing was yet."""
        node = self._node
        return node.view.is_closed if node is not None and node.view.is_synced else None

    async def is_closed(self) -> bool:
        """Whether the run is closed; False for one that does not exist, or that could not be read yet."""
        if self.closed_now is None:
            await self.observe()
        return self.last_closed if self._is_ending else bool(self.closed_now)

    async def set_closed(self, why: str = "set_closed() was called") -> None:
        """Close the run for everybody; fine if it is closed already."""
        started_at = asyncio.get_running_loop().time()
        await (await self._open_within(self.settings.close_timeout_s)).close_run(why, started_at)

    async def reopen(self, why: str = "reopen() was called") -> bool:
        """Let nodes join a closed run again; False if it was not closed."""
        started_at = asyncio.get_running_loop().time()
        return await (await self._open_within(self.settings.close_timeout_s)).reopen_run(why, started_at)

    async def leave(self, why: str = "leave() was called") -> None:
        """Leave the run without closing it. The handler can join again.

        A call of `next_rendezvous` that is under way ends with an error; who waits for a change of its world is told.
        Whoever waits for a key of the round's store gets a StoreError.
        """
        self._leave_stores(why)
        await self._stop_joining(why)
        if self._node is not None:
            await self._node.leave(why)
        changed, self.changed = self.changed, None
        tell_left(changed, why)

    async def shutdown(self, why: str = "shutdown() was called") -> bool:
        """Close the run, leave, and let go of everything. False, with a warning event, if closing did not work.

        In this order: if its place were free for a moment before, a spare would be told that it came too late.
        Whoever asks for it while it is under way waits for the same end and gets the same answer; if that is cancelled
        before the run is closed, it does it itself.
        """
        while self._shutting_down is not None:
            if (answer := await asyncio.shield(self._shutting_down)) is not None:
                return answer
        told = self._shutting_down = asyncio.get_running_loop().create_future()
        closed: bool | None = None
        try:
            closed = await self._close_for_all(why)
        finally:
            try:
                await self.leave(why)
            finally:
                try:
                    await self._end()
                finally:
                    self._shutting_down = None
                    told.set_result(closed)
        return closed

    async def _close_for_all(self, why: str) -> bool:
        self._leave_stores(why)
        try:
            await self._stop_joining(why)
            await self.set_closed(why)
        except RendezvousError as error:
            self._emit(ShutdownFailed(run_id=self.settings.run_id, by=self.name, reason=str(error)))
            return False
        return True

    async def aclose(self) -> None:
        """Leave and let go of everything, without closing the run. Idempotent; the handler may be used again.

        Whoever calls it while somebody else ends the handler waits for that. If it is cancelled at its goodbye, or
        later, nothing more is waited for.
        """
        if self._shutting_down is not None:
            await asyncio.shield(self._shutting_down)
        await self._end()

    async def _end(self) -> None:
        why = "its handler let go of the run"
        await self._stop_joining(why)
        async with self._opening:
            node, backend = self._let_go()
            changed, self.changed = self.changed, None
            for known in self._stores:
                if (store := known()) is not None:
                    store.end(why)
        earlier = self._ended
        try:
            if backend is not None:
                self._ended = asyncio.Event()
                await end(node, backend, self._ended.set)
        finally:
            tell_left(changed, why)
        await earlier.wait()

    async def abandon(self) -> None:
        """Stop everything without a word, as a process that dies does: for tests and demonstrations of a loss."""
        node, backend = self._let_go()
        if node is not None:
            node.abandon()
        if backend is not None:
            await backend.close()

    def _let_go(self) -> tuple[Node | None, Backend | None]:
        node, self._node = self._node, None
        backend, self._backend = self._backend, None
        if node is not None:
            self.last_closed = node.view.is_closed
        if self._dropped is not None:
            self._dropped.detach()
            self._dropped = None
        return node, backend

    @property
    def name(self) -> str:
        """The node's name."""
        return self.settings.name or socket.gethostname()

    async def _open_within(self, limit_s: float) -> Node:
        """The node, opened if need be; tried again until the limit. RendezvousConnectionError if it cannot be."""
        if self._node is not None:
            check_process(self._pid)
            return self._node
        trouble = "no answer"
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._open()
                    except (Unavailable, OutcomeUnknown) as error:
                        trouble = str(error)
                        await asyncio.sleep(RETRY_S)
        except Rejected as error:
            raise RendezvousConnectionError(f"{self.settings.scheme} refused this node: {error}") from error
        except TimeoutError:
            raise RendezvousConnectionError(
                f"could not open {self.settings.where} within {limit_s:g} s: {trouble}"
            ) from None

    async def _open(self) -> Node:
        check_process(self._pid)
        async with self._opening:
            if self._node is None:
                identity = await self._identify()
                self._backend = await self._opener(self.settings)
                self._backend.tell_by(self._emit)
                self._node = Node(
                    self._backend,
                    self.settings,
                    identity,
                    bootstrap=self._make_bootstrap(identity),
                    emit=self._emit,
                    rng=random.Random(secrets.randbits(64)),
                    wall=time.time,
                )
                self._dropped = weakref.finalize(
                    self, drop, asyncio.get_running_loop(), self._node, self._backend, self._pid
                )
                self._dropped.atexit = False  # nothing runs then that could still say goodbye
            return self._node

    async def _identify(self) -> Identity:
        addr = self.settings.local_addr
        if addr is None:
            addr = await own_address()
        return Identity(
            id=secrets.token_hex(8),
            name=self.name,
            addr=addr,
            pid=os.getpid(),
            local_id=self._local_id,
            labels=self.settings.labels,
            node_rank=self.settings.node_rank,
        )

    async def _stop_joining(self, why: str) -> None:
        self.has_left = True
        call = self._joining
        if call is not None:
            call.leave(why)
            if self._node is not None and self._node.is_joining:
                self._node.left_because = call.left_because  # which its goodbye says too
            await call.ended.wait()

    def _leave_stores(self, why: str) -> None:
        for known in self._stores:
            if (store := known()) is not None:
                store.leave(why)


def check_process(pid: int) -> None:
    """ForkedProcessError if this is not the process of that id."""
    if os.getpid() != pid:
        raise ForkedProcessError(
            f"this handler belongs to process {pid} and was inherited by a fork: its session is the parent's. "
            f"Make a new handler in this process"
        )


class _Joining:
    """A call of `next_rendezvous` under way, so that `leave` can end it wherever it stands."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.left_because: str | None = None
        self.ended = asyncio.Event()

    def leave(self, why: str) -> None:
        """Once is enough."""
        if self.left_because is None:
            self.left_because = why
            self.task.cancel()


class AsyncRun:
    """Worlds as they come. Leaving the block leaves the run; it never closes it."""

    def __init__(self, handler: AsyncHandler) -> None:
        self.handler = handler

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.handler.leave(end_of_block(error))
        await self.handler.aclose()

    async def rounds(self) -> AsyncIterator[AsyncWorld]:
        """A world, and a new one each time it has changed: asking for the next waits for the change, then re-joins.

        Ends when this node is a spare of a run that ended, was asked to go, or was told to leave; raises what
        `next_rendezvous` raises. Break out of the loop when the work is done.
        """
        while True:
            try:
                world = await self.handler.next_rendezvous()
            except RendezvousError as error:
                if isinstance(error, RendezvousGracefulExitError) or self.handler.has_left:
                    return
                raise
            yield world
            await world.changed.wait()
            if self.handler.has_left:
                return


def create_handler(
    target: str | RendezvousParameters | Settings, *, sinks: Iterable[Sink] = (), **options: object
) -> AsyncHandler:
    """A handler from a URL, parameters or settings. `options` come on top of a URL's. SettingsError if it is wrong."""
    from rallypoint.static import handler_for  # which is made of what is here

    return handler_for(settings_of(target, options), sinks=sinks)


def join(target: str | RendezvousParameters | Settings, *, sinks: Iterable[Sink] = (), **options: object) -> AsyncRun:
    """Join a run: use it as `async with`."""
    return AsyncRun(create_handler(target, sinks=sinks, **options))


def end_of_block(error: BaseException | None) -> str:
    """The reason that the others are told."""
    return "its block ended" if error is None else f"its block raised {shown(error)}"


def settings_of(target: str | RendezvousParameters | Settings, options: dict[str, object]) -> Settings:
    """Settings from whatever names a run."""
    if isinstance(target, str):
        return Settings.from_url(target, **options)
    if options:
        given = ", ".join(sorted(options))
        raise TypeError(f"options ({given}) can be added to a URL only: put them into the {type(target).__name__}")
    if isinstance(target, RendezvousParameters):
        return Settings.from_parameters(target, target.backend)
    return target


def _free_port_of(identity: Identity) -> Bootstrap:
    """Publish this node's address and a free port of it for every round in which it is rank 0."""

    async def publish(number: int, size: int) -> tuple[str, int]:
        return identity.addr, free_port()

    return publish
