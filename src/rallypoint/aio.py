"""The public API for asyncio, and the only implementation: the blocking API in `handler` calls it.

    async with rallypoint.aio.join("memory:///my-run?min_nodes=2") as run:
        async for world in run.rounds():
            await train(world.rank, world.world_size, world.store, until=world.changed)

A handler belongs to the event loop of its first use, and must open nothing before.
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
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeAlias

from rallypoint._address import own_address
from rallypoint._ending import drop, end, signal_left
from rallypoint._requested_rank import why_not_given
from rallypoint._world import RETRY_S, AsyncChanged
from rallypoint._world import AsyncWorld as AsyncWorld
from rallypoint.api import free_port
from rallypoint.backends.contract import Backend
from rallypoint.backends.schemes import BackendOpener, backend_opener, register_backend
from rallypoint.errors import (
    BackendError,
    ForkedProcessError,
    OutcomeUnknown,
    Rejected,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    Unavailable,
)
from rallypoint.events import Emitter, NodeLeft, RankNotGiven, ShutdownFailed, Sink
from rallypoint.parameters import RendezvousParameters
from rallypoint.rendezvous.membership import Bootstrap, Cause, Identity, Joined
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.records import ClosedRecord, LeaveCause, LeaveKind, one_line
from rallypoint.settings import Settings
from rallypoint.store import AsyncStore
from rallypoint.urls import shown


async def _open_tcp(settings: Settings) -> Backend:
    from rallypoint.server.hosting import open_tcp  # imported only if it is used

    return await open_tcp(settings)


for _scheme in ("tcp", "static"):
    register_backend(_scheme, _open_tcp)

EXPLAIN_S = 2.0
"""The time limit for finding out why a node did not get the rank it asked for."""
BootstrapMaker: TypeAlias = Callable[[Identity], Bootstrap]
"""Creates the `Bootstrap` of a node from its identity."""

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
        self._finalizer: weakref.finalize[..., AsyncHandler] | None = None
        self.last_closed = False
        """Whether the run was closed when this handler last released it."""
        self._backend: Backend | None = None
        self._node: Node | None = None
        self.changed: AsyncChanged | None = None
        """The `changed` of the node's current world."""
        self._joining: _Joining | None = None
        self._stores: list[weakref.ref[AsyncStore]] = []
        self._shutting_down: asyncio.Future[bool | None] | None = None
        """The result of the running shutdown: whether the run was closed; None: the shutdown was cancelled before."""
        self._ended = asyncio.Event()
        """Set unless the node and backend that were released last are still ending."""
        self._ended.set()
        self.has_left = False
        """Whether the node was told to leave or end after the last call of `next_rendezvous`."""
        self.on_closed: Callable[[ClosedRecord], None] | None = None
        """Called on the event loop for each close of the run that the node is told of. Set it before the first use."""

    async def next_rendezvous(self, *, cause: LeaveCause | None = None) -> AsyncWorld:
        """Leave the current round, if any, and wait for a place in the next. See `Node.next_round` for the errors.

        `cause`: why the node leaves that round, for all who want to know. None: because of the last change of the round
        that it was told of.
        """
        joined, node = await self._join(cause)
        store = AsyncStore(node.backend, node.keys, node.identity.id, joined)
        store.owner = self
        self._stores = [*(ref for ref in self._stores if ref() is not None), weakref.ref(store)]
        world = AsyncWorld(node, joined, store)
        self.changed = world.changed
        node.listen(_listener(world.changed, node, weakref.ref(store)))
        wanted = self.settings.node_rank
        if wanted is not None and wanted != world.rank and self.settings.ranks == "node_rank":
            await self._explain_rank(node, joined, wanted)
        return world

    async def _explain_rank(self, node: Node, joined: Joined, wanted: int) -> None:
        """Say why this node does not have the rank it asked for."""
        reason = "it could not be read why"
        with suppress(RendezvousError, BackendError, TimeoutError):
            async with asyncio.timeout(EXPLAIN_S):
                reason = await why_not_given(node, joined, wanted)
        self._emit(
            RankNotGiven(
                run_id=self.settings.run_id,
                by=self.name,
                round=joined.number,
                requested=wanted,
                rank=joined.rank,
                reason=reason,
            )
        )

    async def _join(self, cause: LeaveCause | None) -> tuple[Joined, Node]:
        if self._joining is not None:
            raise RendezvousError("next_rendezvous is running already for this node: one call at a time")
        self.has_left = False
        self._leave_stores("it joins again")
        call = self._joining = _Joining()
        started_at = asyncio.get_running_loop().time()
        try:
            node = await self._open_within(self.settings.join_timeout_s)
            return await node.next_round(started_at, cause=cause), node
        except asyncio.CancelledError:
            if call.left_because is None or call.task.uncancel() > 0:
                raise
            why = call.left_because
            self._emit(NodeLeft(run_id=self.settings.run_id, by=self.name, reason=why))
            raise RendezvousError(f"this node left the run while it was joining: {why}") from None
        finally:
            self._joining = None
            call.ended.set()
            del call  # it references the task, and so the error: a reference cycle

    def num_nodes_waiting(self) -> int:
        """From the last pushed state: never raises, never blocks. 0 before the first `observe` or `next_rendezvous`."""
        node = self._node
        return node.waiting_count() if node is not None else 0

    @property
    def gives_up_at(self) -> float | None:
        """When the running `next_rendezvous` gives up, on the loop's clock; None: never, as for a spare."""
        return self._node.gives_up_at if self._node is not None else None

    async def observe(self) -> None:
        """Start watching the run without joining it. Returns when it has been read, or after `read_timeout`."""
        if self._is_ending:
            return  # do not open the backend again for this
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
        """Whether the run is closed, from the last pushed state; None: no state was pushed yet."""
        node = self._node
        return node.view.is_closed if node is not None and node.view.is_synced else None

    @property
    def closed(self) -> ClosedRecord | None:
        """Who closed the run, and why, as far as this node was ever told."""
        mark = self._node.view.mark if self._node is not None else None
        return mark.state if mark is not None else None

    def _told_closed(self, closed: ClosedRecord) -> None:
        if closed.outcome:
            self._leave_stores(f"the run has failed: {closed.why}")
        if self.on_closed is not None:
            self.on_closed(closed)

    async def is_closed(self) -> bool:
        """Whether the run is closed; False if it does not exist or could not be read."""
        if self.closed_now is None:
            await self.observe()
        return self.last_closed if self._is_ending else bool(self.closed_now)

    async def set_closed(self, why: str = "set_closed() was called", *, outcome: int | None = None) -> None:
        """Close the run for all nodes. Idempotent.

        `outcome`: the run has ended with this exit code. If it has failed, waits of its stores end, and members are
        asked to join again (`num_nodes_waiting`), which raises RendezvousClosedError.
        """
        started_at = asyncio.get_running_loop().time()
        node = await self._open_within(self.settings.close_timeout_s)
        await node.close_run(why, started_at, outcome=outcome)

    async def reopen(self, why: str = "reopen() was called") -> bool:
        """Let nodes join a closed run again; False if it was not closed."""
        started_at = asyncio.get_running_loop().time()
        return await (await self._open_within(self.settings.close_timeout_s)).reopen_run(why, started_at)

    async def leave(self, why: str = "leave() was called", *, cause: LeaveCause | None = None) -> None:
        """Leave the run without closing it. The handler can join again. `cause` as in `next_rendezvous`.

        A running call of `next_rendezvous` raises an error, `changed` of the current world is set, and waits for keys
        of the round's store raise StoreError.
        """
        self._leave_stores(why)
        await self._stop_joining(why)
        if self._node is not None:
            await self._node.leave(why, cause=cause)
        changed, self.changed = self.changed, None
        signal_left(changed, why)

    async def shutdown(
        self,
        why: str = "shutdown() was called",
        *,
        cause: LeaveCause | None = None,
        outcome: int | None = None,
    ) -> bool:
        """Close the run, leave, and release all resources. False, with a warning event, if closing failed.

        `cause`: why the run is closed and its round left; its sentence takes the place of `why`. `outcome` is that of
        `set_closed`.

        In this order: if the node left first, a spare could be admitted just before the close. Concurrent calls wait
        for the first one and return its result; if that one is cancelled before the run is closed, another takes over.
        """
        why = one_line(cause.why) if cause is not None else why
        while self._shutting_down is not None:
            if (result := await asyncio.shield(self._shutting_down)) is not None:
                return result
        shutting_down = self._shutting_down = asyncio.get_running_loop().create_future()
        closed: bool | None = None
        try:
            closed = await self._close_for_all(why, outcome)
        finally:
            try:
                await self.leave(why, cause=cause)
            finally:
                try:
                    await self._end()
                finally:
                    self._shutting_down = None
                    shutting_down.set_result(closed)
        return closed

    async def _close_for_all(self, why: str, outcome: int | None) -> bool:
        self._leave_stores(why)
        try:
            await self._stop_joining(why)
            await self.set_closed(why, outcome=outcome)
        except RendezvousError as error:
            self._emit(ShutdownFailed(run_id=self.settings.run_id, by=self.name, reason=str(error)))
            return False
        return True

    async def aclose(self) -> None:
        """Leave and release all resources, without closing the run. Idempotent; the handler may be used again.

        If the handler is already ending, waits for that. If it is cancelled while the node leaves, or later, the
        backend is closed without waiting for other processes.
        """
        if self._shutting_down is not None:
            await asyncio.shield(self._shutting_down)
        await self._end()

    async def _end(self) -> None:
        why = "its handler was closed"
        await self._stop_joining(why)
        async with self._opening:
            node, backend = self._release()
            changed, self.changed = self.changed, None
            for ref in self._stores:
                if (store := ref()) is not None:
                    store.end(why)
        earlier = self._ended
        try:
            if backend is not None:
                self._ended = asyncio.Event()
                await end(node, backend, self._ended.set)
        finally:
            signal_left(changed, why)
        await earlier.wait()

    async def abandon(self) -> None:
        """Stop without leaving, as a process that dies: for tests and demonstrations of a loss."""
        node, backend = self._release()
        if node is not None:
            node.abandon()
        if backend is not None:
            await backend.close()

    def _release(self) -> tuple[Node | None, Backend | None]:
        node, self._node = self._node, None
        backend, self._backend = self._backend, None
        if node is not None:
            self.last_closed = node.view.is_closed
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        return node, backend

    @property
    def name(self) -> str:
        """The node's name."""
        return self.settings.name or socket.gethostname()

    async def _open_within(self, limit_s: float) -> Node:
        """The node; opened if necessary, and retried until the limit. RendezvousConnectionError if that fails."""
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
                self._backend.on_event(self._emit)
                self._node = Node(
                    self._backend,
                    self.settings,
                    identity,
                    bootstrap=self._make_bootstrap(identity),
                    emit=self._emit,
                    rng=random.Random(secrets.randbits(64)),
                    wall=time.time,
                )
                self._node.on_closed = _weakly(self._told_closed)
                self._finalizer = weakref.finalize(
                    self, drop, asyncio.get_running_loop(), self._node, self._backend, self._pid
                )
                self._finalizer.atexit = False  # at exit no loop runs that could leave
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
                self._node.left_because = call.left_because  # the reason in its `NodeLeft` event
            await call.ended.wait()

    def _leave_stores(self, why: str) -> None:
        for ref in self._stores:
            if (store := ref()) is not None:
                store.leave(why)


def check_process(pid: int) -> None:
    """ForkedProcessError if `pid` is another process."""
    if os.getpid() != pid:
        raise ForkedProcessError(
            f"this handler belongs to process {pid} and was inherited by a fork: its session is the parent's. "
            f"Create a new handler in this process"
        )


class _Joining:
    """A running call of `next_rendezvous`, which `leave` can end at any point."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.left_because: str | None = None
        self.ended = asyncio.Event()

    def leave(self, why: str) -> None:
        """Cancel the call. Idempotent."""
        if self.left_because is None:
            self.left_because = why
            self.task.cancel()


class AsyncRun:
    """The worlds of a run. The end of the `async with` block leaves the run and never closes it."""

    def __init__(self, handler: AsyncHandler) -> None:
        self.handler = handler
        self._world: AsyncWorld | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        world, name = self._world, self.handler.name
        cause = cause_of_block(error, name, world.rank, world.changed.is_set()) if world is not None else None
        await self.handler.leave(end_of_block(error), cause=cause)
        await self.handler.aclose()

    async def rounds(self) -> AsyncIterator[AsyncWorld]:
        """A world, and a new one after each change: the next step waits for the change, then joins again.

        Ends when the node was drained or left, or was a spare of a run that ended. Raises the errors of
        `next_rendezvous`. Leave the loop with `break` when the work is done.
        """
        while True:
            try:
                world = await self.handler.next_rendezvous()
            except RendezvousError as error:
                if isinstance(error, RendezvousGracefulExitError) or self.handler.has_left:
                    return
                raise
            self._world = world
            yield world
            await world.changed.wait()
            if self.handler.has_left:
                return


def create_handler(
    target: str | RendezvousParameters | Settings, *, sinks: Iterable[Sink] = (), **options: object
) -> AsyncHandler:
    """A handler from a URL, parameters or settings. `options` replace those of a URL. SettingsError if invalid."""
    from rallypoint.static import handler_for  # it imports this module

    return handler_for(settings_of(target, options), sinks=sinks)


def join(target: str | RendezvousParameters | Settings, *, sinks: Iterable[Sink] = (), **options: object) -> AsyncRun:
    """Join a run: `async with join(...) as run`. `options` replace those of a URL."""
    return AsyncRun(create_handler(target, sinks=sinks, **options))


def end_of_block(error: BaseException | None) -> str:
    """The reason for leaving that the other nodes get."""
    return "its block ended" if error is None else f"its block raised {shown(error)}"


def cause_of_block(error: BaseException | None, name: str, rank: int, has_changed: bool) -> LeaveCause | None:
    """Why the node `name` leaves its round at the end of the block. None: because of the change that it was told of."""
    match error:
        case None if has_changed:
            return None
        case None:
            return LeaveCause(kind=LeaveKind.FINISHED, why=f"{name} has finished")
        case RendezvousError():
            return None
        case Exception():
            why = f"rank {rank} on {name} raised {type(error).__name__}: {error}"
            return LeaveCause(kind=LeaveKind.WORKER_FAILED, why=why, rank=rank)
        case _:  # Ctrl-C, sys.exit(), a cancelled task
            return LeaveCause(kind=LeaveKind.STOPPED, why=f"{name} was stopped ({type(error).__name__})")


def settings_of(target: str | RendezvousParameters | Settings, options: dict[str, object]) -> Settings:
    """Settings from a URL, parameters or settings."""
    if isinstance(target, str):
        return Settings.from_url(target, **options)
    if options:
        given = ", ".join(sorted(options))
        raise TypeError(f"options ({given}) can be added to a URL only: put them into the {type(target).__name__}")
    if isinstance(target, RendezvousParameters):
        return Settings.from_parameters(target, target.backend)
    return target


def _listener(changed: AsyncChanged, node: Node, store: weakref.ref[AsyncStore]) -> Callable[[Cause, str], None]:
    """Tell `changed`. In a closed run, waits of the store end with the session: no server will answer them."""

    def told(cause: Cause, why: str) -> None:
        changed.set(cause, why)
        if cause is Cause.SESSION_LOST and node.view.mark is not None and (kept := store()) is not None:
            kept.leave(f"the run is closed, and its server has gone: {why}")

    return told


def _weakly(told: Callable[[ClosedRecord], None]) -> Callable[[ClosedRecord], None]:
    """Call a method of a handler without keeping the handler alive."""
    method = weakref.WeakMethod(told)

    def call(closed: ClosedRecord) -> None:
        if (told := method()) is not None:
            told(closed)

    return call


def _free_port_of(identity: Identity) -> Bootstrap:
    """The default bootstrap: this node's address and a free port, for every round in which it is rank 0."""

    async def publish(number: int, size: int) -> tuple[str, int]:
        return identity.addr, free_port()

    return publish
