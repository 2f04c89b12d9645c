"""The interface of a compare-and-set cell, and how a cell with blocking calls is used from an event loop.

A cell holds bytes and a token for them, or nothing yet. A write with the current token replaces the content. A write
with any other token, or without a token where there is content, writes nothing and returns the current content. This is
the interface of `torch.distributed.elastic.rendezvous.dynamic_rendezvous.RendezvousBackend`: every implementation of
that can be used here unchanged.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from rallypoint.errors import BackendError, Unavailable, UnreadableState

P = ParamSpec("P")
T = TypeVar("T")

Token: TypeAlias = Any
Found: TypeAlias = tuple[bytes, Token] | None
"""The content of a cell and its token; None: nothing yet."""
Answer: TypeAlias = tuple[bytes, Token, bool] | None
"""The content after a write, its token, and whether the write was executed; None: unknown."""

IDLE_THREAD_S = 5.0
"""An idle thread ends after this time."""


class Cell(Protocol):
    """A cell with blocking calls. They may raise any exception; a write that raises may have been executed."""

    @property
    def name(self) -> str: ...

    def get_state(self) -> Found: ...

    def set_state(self, state: bytes, token: Token | None = None) -> Answer: ...


class AsyncCell(ABC):
    """A cell for the event loop. Raises only `Unavailable` and `UnreadableState`; one call at a time."""

    name: str
    endpoint: str = ""
    """Its location, for messages."""

    @abstractmethod
    async def get(self) -> Found: ...

    @abstractmethod
    async def set(self, state: bytes, token: Token | None) -> Answer: ...

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn after a lost race, if the cell supports that. Only an optimisation."""
        yield

    async def close(self) -> None:  # noqa: B027 - most hold no resources
        """Release resources."""


class BlockingCell(AsyncCell):
    """A blocking cell, called in a thread. All users of the same cell in this process share one thread."""

    def __init__(self, cell: Cell, endpoint: str = "") -> None:
        self.name = cell.name
        self.endpoint = endpoint
        self._cell = cell
        self._thread = _thread_of(cell)

    async def get(self) -> Found:
        return await self._call("read", self._cell.get_state)

    async def set(self, state: bytes, token: Token | None) -> Answer:
        return await self._call("written", self._cell.set_state, state, token)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Uses `take_turn() -> release | None` of the cell, if it has that method."""
        take = getattr(self._cell, "take_turn", None)
        release: Callable[[], None] | None = None
        if take is not None:
            loop = asyncio.get_running_loop()
            taking = loop.run_in_executor(self._thread, take)
            try:
                release = await asyncio.shield(taking)
            except asyncio.CancelledError:
                taking.add_done_callback(_give_back)
                raise
        try:
            yield
        finally:
            if release is not None:
                release()  # does not block: it closes a file

    async def _call(self, what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))
        except BackendError:
            raise
        except Exception as error:
            where = f" at {self.endpoint}" if self.endpoint else ""
            if _is_about_state(error):
                raise UnreadableState(f"what {self.name}{where} holds cannot be used: {error}") from error
            cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
            raise Unavailable(
                f"{self.name}{where} could not be {what}: {type(error).__name__}: {error}{cause}"
            ) from error


def _give_back(taking: asyncio.Future[Callable[[], None] | None]) -> None:
    """Release a turn whose caller was cancelled."""
    if not taking.cancelled() and taking.exception() is None and (release := taking.result()) is not None:
        release()


def _is_about_state(error: Exception) -> bool:
    """Whether it is a `RendezvousStateError`, Rallypoint's or torch's: cells may raise either."""
    return any(kind.__name__ == "RendezvousStateError" for kind in type(error).__mro__)


class OneThread(Executor):
    """Runs calls one after the other in a daemon thread, which ends when idle.

    A daemon, because a cell that hangs must not keep the process from exiting.
    """

    def __init__(self) -> None:
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._is_running = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._calls.put((future, lambda: fn(*args, **kwargs)))
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, name="rallypoint cell", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                future, call = self._calls.get(timeout=IDLE_THREAD_S)
            except queue.Empty:
                with self._lock:
                    if self._calls.empty():
                        self._is_running = False
                        return
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, call


_all: WeakSet[OneThread] = WeakSet()
_by_cell: WeakKeyDictionary[object, OneThread] = WeakKeyDictionary()


def _thread_of(cell: object) -> OneThread:
    """The thread of a cell, shared by all users of the cell in this process."""
    try:
        return _by_cell.setdefault(cell, OneThread())
    except TypeError:  # not hashable or not weakly referenceable: its users must serialise calls themselves
        return OneThread()


def _after_fork_in_child() -> None:
    for thread in list(_all):
        thread._forget()  # the threads and the owners of the locks exist only in the parent


os.register_at_fork(after_in_child=_after_fork_in_child)
