"""The blocking API: the handler, and `join`. A thin layer over `rallypoint.aio` on one background loop per process.

What nodes do and know is in `aio`; here are only threads. Handlers are thread-safe: `num_nodes_waiting()` and
`is_closed()` return while `next_rendezvous()` blocks in another thread. Handlers of one process are different nodes.
A handler that is garbage-collected ends its session; one from before a fork raises ForkedProcessError in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from rallypoint import _background
from rallypoint.aio import (
    AsyncHandler,
    AsyncWorld,
    BootstrapMaker,
    cause_of_block,
    check_process,
    end_of_block,
    settings_of,
)
from rallypoint.api import RendezvousHandler, RendezvousInfo
from rallypoint.backends.schemes import BackendOpener
from rallypoint.errors import RendezvousError, RendezvousGracefulExitError
from rallypoint.events import Sink
from rallypoint.parameters import RendezvousParameters
from rallypoint.rendezvous.membership import Cause
from rallypoint.rendezvous.records import LeaveCause
from rallypoint.settings import Settings
from rallypoint.static import handler_for
from rallypoint.store import Store

T = TypeVar("T")


class Changed:
    """Like `threading.Event`, set when the world has changed. `cause` is the kind of change, `reason` a sentence."""

    def __init__(self, check_process: Callable[[], None]) -> None:
        self.cause: Cause | None = None
        self.reason = ""
        self._check_process = check_process
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        """Created by the first `wait`: entering a round does not need it."""

    def is_set(self) -> bool:
        return self.cause is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the world has changed, or for `timeout`; whether it has. ForkedProcessError in a forked child."""
        self._check_process()
        with self._lock:
            if self.cause is not None:
                return True
            event = self._event = self._event or threading.Event()
        return _background.block(event.wait, timeout)

    def set(self, cause: Cause, reason: str) -> None:
        """Called by the node."""
        with self._lock:
            self.reason = reason
            self.cause = cause
            event = self._event
        if event is not None:
            event.set()


class World(RendezvousInfo):
    """A place in a round. `changed` is set when a node waits, a member is lost, or this node has to leave."""

    store: Store
    changed: Changed


class Handler(RendezvousHandler):
    """The blocking handler of one node of one run.

    `bootstrap` creates the function that rank 0 calls for the address and port of each round. `opener` opens the
    backend; the default depends on the scheme.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        backend_name: str | None = None,
        sinks: Iterable[Sink] = (),
        bootstrap: BootstrapMaker | None = None,
        opener: BackendOpener | None = None,
    ) -> None:
        core = handler_for(settings, backend_name=backend_name, sinks=sinks, bootstrap=bootstrap, opener=opener)
        loop, user = _background.acquire(core.aclose)
        self._core = core
        self._loop = loop
        self._pid = os.getpid()
        self._shutdown_results: list[bool] = []
        """The first one is the result of all calls of `shutdown()`."""
        self._ending: list[Coroutine[Any, Any, Any]] = []
        """Running calls that end the handler, one per thread. Without a lock, because a signal handler may end it."""
        self._has_ended = False
        self._has_observed = False
        self._finalizer = weakref.finalize(self, _finalize, core, loop, user, self._pid)
        self._finalizer.atexit = False  # the background loop cleans up at exit

    def get_backend(self) -> str:
        return self._core.backend_name

    def get_run_id(self) -> str:
        return self._core.settings.run_id

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._core.settings

    @property
    def name(self) -> str:
        """The node's name."""
        return self._core.name

    def next_rendezvous(self, *, cause: LeaveCause | None = None) -> World:
        """Leave the current round, if any, and block until this node has a place in the next. Ctrl-C withdraws it.

        `cause`: why it leaves that round, for all who want to know. None: because of the last change of the round that
        it was told of.
        """
        return self._world(self._call(self._core.next_rendezvous(cause=cause)))

    def num_nodes_waiting(self) -> int:
        """As in the interface. Only the first call may block, up to `read_timeout`. 0 after the shutdown."""
        self._check_process()
        if self._core.closed_now is None and not self._has_observed and self.in_use:
            self._has_observed = True
            self._call(self._core.observe())
        return self._core.num_nodes_waiting()

    def is_closed(self) -> bool:
        """As in the interface. After the shutdown, the last known state."""
        self._check_process()
        closed = self._core.closed_now
        if closed is not None:
            return closed
        return (
            self._call(self._core.is_closed()) if self.in_use else any(self._shutdown_results) or self._core.last_closed
        )

    def set_closed(self, reason: str = "set_closed() was called") -> None:
        self._call(self._core.set_closed(reason))

    def reopen(self, reason: str = "reopen() was called") -> bool:
        """Let nodes join a closed run again; False if it was not closed."""
        return self._call(self._core.reopen(reason))

    def leave(self, reason: str = "leave() was called", *, cause: LeaveCause | None = None) -> None:
        """Leave the run without closing it. The handler can join again. `cause` as in `next_rendezvous`."""
        self._call(self._core.leave(reason, cause=cause))

    def shutdown(
        self,
        reason: str = "shutdown() was called",
        *,
        cause: LeaveCause | None = None,
        outcome: int | None = None,
    ) -> bool:
        """As in the interface. Further and concurrent calls return the same result.

        `cause`: why the run is closed and its round left; its sentence takes the place of `reason`. `outcome` is the
        exit code of a run that has ended: see `AsyncHandler.set_closed`.
        """
        self._check_process()
        if self._shutdown_results:
            return self._shutdown_results[0]
        try:
            return self._end(self._core.shutdown(reason, cause=cause, outcome=outcome), self._shutdown_results.append)
        except RendezvousError:
            if not self._shutdown_results:  # else a concurrent call has succeeded
                raise
            return self._shutdown_results[0]

    def abandon(self) -> None:
        """Stop without leaving, as a process that dies: for tests and demonstrations of a loss."""
        self._call(self._core.abandon())
        self._finalizer()

    def close(self) -> None:
        """Leave the run and release all resources, without closing the run. Idempotent."""
        self._check_process()
        if not self.in_use:
            return
        try:
            self._end(self._core.aclose(), lambda _: None)
        except RendezvousError:
            if self.in_use:  # else a concurrent call has succeeded
                raise

    @property
    def in_use(self) -> bool:
        """Whether it can be used: it was not shut down or closed, and this process created it."""
        return os.getpid() == self._pid and self._finalizer.alive and not self._has_ended

    @property
    def has_left(self) -> bool:
        """Whether `leave`, `shutdown` or `close` was called after the last call of `next_rendezvous`."""
        return self._core.has_left

    def _end(self, coro: Coroutine[Any, Any, T], on_result: Callable[[T], None]) -> T:
        """End the handler. The last one of concurrent calls releases the loop, after `on_result`."""
        try:
            self._ending.append(coro)
            result = self._call(coro)
            on_result(result)
            self._has_ended = True
            return result
        finally:
            if coro in self._ending:
                self._ending.remove(coro)
            if self._has_ended and not self._ending:
                self._finalizer()

    def _call(self, coro: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_usable()
        except RendezvousError:
            coro.close()
            raise
        return self._loop.call(coro)

    def _check_usable(self) -> None:
        self._check_process()
        if not self.in_use:
            raise RendezvousError("this handler was shut down: make a new one")

    def _check_process(self) -> None:
        check_process(self._pid)

    def _world(self, world: AsyncWorld) -> World:
        result = World(
            store=Store(world.store, self._call, self),
            rank=world.rank,
            world_size=world.world_size,
            bootstrap_store_info=world.bootstrap_store_info,
            round=world.round,
            read_members=lambda: self._call(world.members()),
        )
        result.changed = changed = Changed(partial(check_process, self._pid))
        world.changed.add_listener(changed.set)
        return result


def _finalize(core: AsyncHandler, loop: _background.BackgroundLoop, user: int, pid: int) -> None:
    """The handler was garbage-collected or closed: end its session, if it has one, then release the loop."""
    if os.getpid() == pid:
        loop.spawn(core.aclose(), lambda: _background.release(user))


class Run:
    """The worlds of a run. The end of the `with` block leaves the run and never closes it."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self._world: World | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.handler.in_use:  # not in a forked child: the parent continues
            world, name = self._world, self.handler.name
            cause = cause_of_block(error, name, world.rank, world.changed.is_set()) if world is not None else None
            self.handler.leave(end_of_block(error), cause=cause)
            self.handler.close()

    def rounds(self) -> Iterator[World]:
        """A world, and a new one after each change: the next step waits for the change, then joins again.

        Ends when the node was drained or left, or was a spare of a run that ended. Raises the errors of
        `next_rendezvous`. Leave the loop with `break` when the work is done.
        """
        while True:
            try:
                world = self.handler.next_rendezvous()
            except RendezvousError as error:
                if isinstance(error, RendezvousGracefulExitError) or self.handler.has_left:
                    return
                raise
            self._world = world
            yield world
            world.changed.wait()
            if self.handler.has_left:
                return


def join(target: str | RendezvousParameters | Settings, *, sinks: Iterable[Sink] = (), **options: object) -> Run:
    """Join a run: `with join(...) as run`. `options` replace those of a URL."""
    return Run(Handler(settings_of(target, options), sinks=sinks))
