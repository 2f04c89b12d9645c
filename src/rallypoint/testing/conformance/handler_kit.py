"""The kit of the handler checks: nodes of one run, each a handler whose blocking calls run in threads.

Time is real, so the time-outs are short: waits take fractions of a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Self, TypeAlias, TypeVar

from rallypoint.aio import settings_of
from rallypoint.errors import RendezvousError
from rallypoint.handler import Handler, World
from rallypoint.testing.conformance.kit import NotConforming

_T = TypeVar("_T")

SHORT: dict[str, object] = {
    "last_call_timeout": 1.0,
    "admission_window": 0,
    "keep_alive_interval": 0.5,
    "keep_alive_max_attempt": 3,
    "join_timeout": 30,
    "close_timeout": 5,
    "read_timeout": 5,
}
LOOK_S = 0.2
"""How long a check waits to see that nothing happens."""


@dataclass(frozen=True)
class HandlerKit:
    """Creates the handlers to check. Their runs must have no other users."""

    create: Callable[[str, dict[str, object]], Handler]
    """Creates a handler of a run with the options of a URL: one node."""
    run_id: str
    """Fresh for each check."""
    options: dict[str, object] = field(default_factory=lambda: dict(SHORT))
    """The default options of every handler."""
    patience_s: float = 20.0
    """The longest wait for an expected event."""

    @classmethod
    def at(cls, place: str, run_id: str, **options: object) -> Self:
        """Handlers of the run at `place`: a URL without the run, such as `tcp://head:29400`."""

        def create(run_id: str, options: dict[str, object]) -> Handler:
            return Handler(settings_of(f"{place}/{run_id}", options))

        return cls(create, run_id, {**SHORT, **options})

    @contextmanager
    def nodes(self, *names: str, **options: object) -> Iterator[list[Node]]:
        """Nodes that have not joined yet; shut down at the end."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.node(name, **options)) for name in names]

    @contextmanager
    def node(self, name: str, **options: object) -> Iterator[Node]:
        """One node, as in `nodes`."""
        node = Node(self, name, self.create(self.run_id, {**self.options, "name": name, **options}))
        try:
            yield node
        finally:
            node.handler.close()

    def until(self, promise: str, condition: Callable[[], object]) -> None:
        """Poll until it holds; NotConforming if it does not in time."""
        deadline = time.monotonic() + self.patience_s
        while not (seen := condition()):
            if time.monotonic() > deadline:
                raise NotConforming(promise, f"{seen!r} after {self.patience_s:g} s")
            time.sleep(0.01)


class Node:
    """A handler by the name of its node."""

    def __init__(self, kit: HandlerKit, name: str, handler: Handler) -> None:
        self.kit = kit
        self.name = name
        self.handler = handler

    def join(self) -> Call[World]:
        """`next_rendezvous`, in a thread."""
        return self.call(self.handler.next_rendezvous)

    def call(self, function: Callable[[], _T]) -> Call[_T]:
        """Anything, in a thread."""
        return Call(self.kit, self.name, function)

    def counts(self, waiting: int) -> bool:
        """Whether it reports this number of waiting nodes."""
        return self.handler.num_nodes_waiting() == waiting

    def crash(self) -> None:
        """Abandon the node, as if its process had been killed."""
        self.handler._loop.call(self._abandon())

    async def _abandon(self) -> None:
        core = self.handler._core
        if core._node is not None:
            core._node.abandon()
        if core._joining is not None:
            core._joining.leave("it was killed")  # a pending call would join again


class Call(Generic[_T]):
    """A blocking call in a thread of its own."""

    def __init__(self, kit: HandlerKit, name: str, function: Callable[[], _T]) -> None:
        self._kit = kit
        self._name = name
        self._done: Future[_T] = Future()
        threading.Thread(target=self._work, args=(function,), name=f"{name} of a check", daemon=True).start()

    def _work(self, function: Callable[[], _T]) -> None:
        try:
            result = function()
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(result)

    @property
    def blocks(self) -> bool:
        return not self._done.done()

    def still_blocks(self, promise: str, for_s: float = LOOK_S) -> None:
        """NotConforming if it ends within LOOK_S."""
        deadline = time.monotonic() + for_s
        while time.monotonic() < deadline:
            if not self.blocks:
                raise NotConforming(promise, f"{self._name}: {self._outcome()!r}")
            time.sleep(0.01)

    def result(self) -> _T:
        """Its result; NotConforming if it does not end."""
        try:
            return self._done.result(self._kit.patience_s)
        except TimeoutError as error:
            if self.blocks:
                raise NotConforming(
                    "a call ends", f"{self._name} still blocks after {self._kit.patience_s:g} s"
                ) from error
            raise

    def error(self, promise: str, kind: type[RendezvousError]) -> RendezvousError:
        """Its error, of exactly this type; NotConforming otherwise."""
        try:
            result = self.result()
        except NotConforming:
            raise
        except Exception as error:
            if isinstance(error, RendezvousError) and type(error) is kind:
                return error
            raise NotConforming(promise, f"{error!r} instead of {kind.__name__}") from error
        raise NotConforming(promise, f"{result!r} instead of {kind.__name__}")

    def _outcome(self) -> object:
        return self._done.exception() or self._done.result()


HandlerCheck: TypeAlias = Callable[[HandlerKit], None]


def gather(nodes: list[Node]) -> list[World]:
    """All nodes join; their worlds, in the order of the nodes."""
    return [call.result() for call in [node.join() for node in nodes]]


def ranks_of(worlds: list[World]) -> list[int]:
    return [world.rank for world in worlds]


def names_of(world: World) -> list[str]:
    """The members, in rank order."""
    return [member.name for member in world.members]
