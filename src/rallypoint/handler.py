"""The blocking API: the familiar handler, and `join`. A thin face over `rallypoint.aio` on one background loop a
process.

Thread-safe where one expects it: `num_nodes_waiting()` and `is_closed()` answer from any thread while
`next_rendezvous()` blocks in another. Handlers of one process are different nodes. A handler that is dropped ends its
session; one that was made before a fork refuses to work in the child.
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
from rallypoint.aio import AsyncHandler, AsyncWorld, BootstrapMaker, check_process, end_of_block, settings_of
from rallypoint.api import RendezvousHandler, RendezvousInfo
from rallypoint.backends.schemes import BackendOpener
from rallypoint.errors import RendezvousError, RendezvousGracefulExitError
from rallypoint.events import Sink
from rallypoint.parameters import RendezvousParameters
from rallypoint.rendezvous.membership import Cause
from rallypoint.settings import Settings
from rallypoint.static import handler_for
from rallypoint.store import Store

T = TypeVar("T")


class Changed:
    """Like `threading.Event`, set when the world is no longer what it was. `reason` and `cause` say why."""

    def __init__(self, check_process: Callable[[], None]) -> None:
        self.cause: Cause | None = None
        self.reason = ""
        self._check_process = check_process
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        """Made when somebody waits: a round is entered without it."""

    def is_set(self) -> bool:
        return self.cause is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Until the world has changed, or the time is over; whether it has. ForkedProcessError in a fork."""
        self._check_process()
        with self._lock:
            if self.cause is not None:
                return True
            event = self._event = self._event or threading.Event()
        return _background.block(event.wait, timeout)

    def set(self, cause: Cause, reason: str) -> None:
        """The driver's."""
        with self._lock:
            self.reason = reason
            self.cause = cause
            event = self._event
        if event is not None:
            event.set()


class World(RendezvousInfo):
    """A place in a round, with `changed`: set when a node waits, a member is lost, or this node is to go."""

    store: Store
    changed: Changed


class Handler(RendezvousHandler):
    """The blocking handler of one node of one run. `bootstrap` makes what rank 0 publishes for each round.

    `opener` opens the backend; by default the settings' scheme says what does.
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
        self._answers: list[bool] = []
        """Of `shutdown()`: the first one counts."""
        self._enders: list[Coroutine[Any, Any, Any]] = []
        """What ends it, on as many threads; no lock, which the handler of a signal could not take."""
        self._has_ended = False
        self._has_looked = False
        self._finalizer = weakref.finalize(self, _let_go, core, loop, user, self._pid)
        self._finalizer.atexit = False  # the background loop cleans up at exit itself

    def get_backend(self) -> str:
        return self._core.backend_name

    def get_run_id(self) -> str:
        return self._core.settings.run_id

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._core.settings

    def next_rendezvous(self) -> World:
        """Leave the current round, if any, and block for a place in the next. Ctrl-C withdraws the node."""
        return self._world(self._call(self._core.next_rendezvous()))

    def num_nodes_waiting(self) -> int:
        """From what was pushed last. Only the first look may block, up to `read_timeout`; 0 once it was shut down."""
        self._check_process()
        if self._core.closed_now is None and not self._has_looked and self.in_use:
            self._has_looked = True
            self._call(self._core.observe())
        return self._core.num_nodes_waiting()

    def is_closed(self) -> bool:
        """As in the interface; once the handler was shut down, what was known then."""
        self._check_process()
        closed = self._core.closed_now
        if closed is not None:
            return closed
        return self._call(self._core.is_closed()) if self.in_use else any(self._answers) or self._core.last_closed

    def set_closed(self, reason: str = "set_closed() was called") -> None:
        self._call(self._core.set_closed(reason))

    def reopen(self, reason: str = "reopen() was called") -> bool:
        """Let nodes join a closed run again; False if it was not closed."""
        return self._call(self._core.reopen(reason))

    def leave(self, reason: str = "leave() was called") -> None:
        """Leave the run without closing it. The handler can join again."""
        self._call(self._core.leave(reason))

    def shutdown(self) -> bool:
        """As in the interface. Again, or on several threads at once, and the answer is the same."""
        self._check_process()
        if self._answers:
            return self._answers[0]
        try:
            return self._end(self._core.shutdown(), self._answers.append)
        except RendezvousError:
            if not self._answers:  # else somebody else has done it just now
                raise
            return self._answers[0]

    def abandon(self) -> None:
        """Stop everything without a word, as a process that dies does: for tests and demonstrations of a loss."""
        self._call(self._core.abandon())
        self._finalizer()

    def close(self) -> None:
        """Leave and let go of everything, without closing the run. Idempotent."""
        self._check_process()
        if not self.in_use:
            return
        try:
            self._end(self._core.aclose(), lambda _: None)
        except RendezvousError:
            if self.in_use:  # else somebody else has done it just now
                raise

    @property
    def in_use(self) -> bool:
        """Whether it can be used: it was not shut down or closed, and this is the process that made it."""
        return os.getpid() == self._pid and self._finalizer.alive and not self._has_ended

    @property
    def has_left(self) -> bool:
        """Whether the node was told to leave since it last asked to join."""
        return self._core.has_left

    def _end(self, coro: Coroutine[Any, Any, T], ended: Callable[[T], None]) -> T:
        """The last of those who end it at the same time lets go of the loop, once `ended` was told the answer."""
        try:
            self._enders.append(coro)
            answer = self._call(coro)
            ended(answer)
            self._has_ended = True
            return answer
        finally:
            if coro in self._enders:
                self._enders.remove(coro)
            if self._has_ended and not self._enders:
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


def _let_go(core: AsyncHandler, loop: _background.BackgroundLoop, user: int, pid: int) -> None:
    """The handler was dropped or closed: end its session (if that has not happened), then release the loop."""
    if os.getpid() == pid:
        loop.spawn(core.aclose(), lambda: _background.release(user))


class Run:
    """Worlds as they come. Leaving the block leaves the run; it never closes it."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.handler.in_use:  # in a fork the block ends too, and that is no end for the parent
            self.handler.leave(end_of_block(error))
            self.handler.close()

    def rounds(self) -> Iterator[World]:
        """A world, and a new one each time it has changed: asking for the next waits for the change, then re-joins.

        Ends when this node is a spare of a run that ended, was asked to go, or was told to leave; raises what
        `next_rendezvous` raises. Break out of the loop when the work is done.
        """
        while True:
            try:
                world = self.handler.next_rendezvous()
            except RendezvousError as error:
                if isinstance(error, RendezvousGracefulExitError) or self.handler.has_left:
                    return
                raise
            yield world
            world.changed.wait()
            if self.handler.has_left:
                return


def join(target: str | RendezvousParameters | Settings, *, sinks: Iterable[Sink] = (), **options: object) -> Run:
    """Join a run: use it as `with`. `options` come on top of a URL's."""
    return Run(Handler(settings_of(target, options), sinks=sinks))
