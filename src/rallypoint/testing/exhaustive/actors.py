"""The processes of a tiny world: real drivers, each alone on its loop, moved by one input at a time.

A `NodeActor` is a real `Node` (with `NodeSession`, `NodeView`, its watched keys, `RunConfig`, and an `Election` where
the nodes elect the coordinator) in the hands of an agent that joins when it is told to. A `CoordinatorActor` is a real
`Election` with a session of its own, and the `Coordinator` that it becomes. An `OperatorActor` closes and reopens
through a real `RunConfig`.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from rallypoint.backends.contract import Limits, Session
from rallypoint.errors import RallypointError
from rallypoint.events import Emitter, Event
from rallypoint.kv.types import Op
from rallypoint.rendezvous.election import Election
from rallypoint.rendezvous.keys import RunKeys
from rallypoint.rendezvous.membership import Cause, Identity, Joined
from rallypoint.rendezvous.node import Node
from rallypoint.rendezvous.records import CoordinatorRecord
from rallypoint.rendezvous.run_config import RunConfig
from rallypoint.settings import Settings
from rallypoint.testing.exhaustive.controlled import ControlledBackend, ControlledWatch, Request, Strand, unknown
from rallypoint.testing.exhaustive.fingerprint import Fingerprint
from rallypoint.testing.exhaustive.symbols import Rev, number, rename_answer

Input: TypeAlias = tuple[Any, ...]
"""("answer", request, answer) | ("unknown", request) | ("deliver", watch, batches) | ("tick",) | ("lost",) |
("do", verb); requests and watches by their place among those of the process."""


@dataclass(frozen=True, slots=True)
class Status:
    """What the world can see of a process from outside."""

    lease: int = 0
    """Of its session, which it does not know to be lost; 0: there is none."""
    is_calling: bool = False
    joined: tuple[int, int, int] | None = None
    """Number, rank and size of the round that it returned from and has not left."""
    told: bool = False
    """It was told that this round is no longer what it was."""
    failed: str = ""
    """How its last call ended, if not well."""
    verbs: tuple[str, ...] = ()
    """What it may be asked to do."""
    is_over: bool = False
    """It has nothing to do any more, and nobody will ask it to."""


class Actor(ABC):
    """One process. `feed` is the only way to move it; then it runs until only the world could make it go on."""

    def __init__(self, *, has_coordinator: bool, limits: Limits) -> None:
        self.loop = Strand()
        self.backend = ControlledBackend(has_coordinator=has_coordinator, limits=limits)
        self.revs: list[Rev] = []
        """The revisions that it holds, in order."""
        self.made: list[Rev] = []
        """All that it was ever given, in the order in which it came upon them."""
        self.loop.settle(self._begin)

    def rebind(self, numbers: tuple[int, ...]) -> None:
        """Exchange the numbers of the revisions it holds; their order is the same."""
        for rev, at in zip(self.revs, numbers, strict=True):
            rev.at = at

    def feed(self, given: Input) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Move. For each request and watch of it afterwards: its place before, or -1."""
        requests, watches = list(self.backend.requests), list(self.backend.watches)
        if given[0] == "tick":
            self.loop.tick()
        else:
            self.loop.settle(lambda: self._take(given, requests, watches))
        kept = _places(watches, self.backend.watches)
        if -1 in kept and given[0] != "answer":
            raise NotImplementedError(
                "a watch starts later than its scan was answered: what was missed is not kept here"
            )
        return _places(requests, self.backend.requests), kept

    def _take(self, given: Input, requests: list[Request], watches: list[ControlledWatch]) -> None:
        match given:
            case ("answer", index, answer):
                self.backend.answer(requests[index], rename_answer(answer, self._symbol()))
            case ("unknown", index):
                self.backend.answer(requests[index], unknown())
            case ("deliver", index, batches):
                watches[index].deliver(rename_answer(batches, self._symbol()))
            case ("lost",):
                self._lose()
            case ("do", verb):
                self._do(verb)
            case _:
                raise ValueError(f"no such input: {given!r}")

    def fingerprint(self) -> Fingerprint:
        """What it is now; also notes which revisions it holds."""
        now = float(self.loop.time())
        taken = Fingerprint([type(self).__name__, *self._roots(), self.backend, self.loop.timers()], now)
        self.revs = taken.revs
        return taken

    def throw_away(self) -> None:
        """End everything without a trace."""
        self.backend.is_dead = True
        with suppress(Exception):
            self.loop.cancel_pending()
        self.loop.close()

    def pending(self) -> list[Op]:
        return [request.op for request in self.backend.requests]

    def _symbol(self) -> Callable[[int], int]:
        """Numbers to the symbols that stand for them in this process."""
        table = {rev.at: rev for rev in self.revs}

        def symbol(revision: int) -> int:
            at = number(revision)
            if at == 0:
                return 0
            if at not in table:
                table[at] = Rev(at)
                self.made.append(table[at])
            return table[at]

        return symbol

    @property
    @abstractmethod
    def status(self) -> Status: ...

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _roots(self) -> list[Any]: ...

    @abstractmethod
    def _lose(self) -> None: ...

    @abstractmethod
    def _do(self, verb: str) -> None: ...


class NodeActor(Actor):
    """A node and its agent. Verbs: join, leave."""

    def __init__(self, name: str, settings: Settings, *, has_coordinator: bool, limits: Limits) -> None:
        self._name = name
        self._settings = settings
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._is_told = False
        self._rng = Undrawn(name)
        super().__init__(has_coordinator=has_coordinator, limits=limits)

    def _begin(self) -> None:
        self.node = Node(
            self.backend,
            self._settings,
            Identity(self._name, self._name, self._name, 1, 0, {}),
            bootstrap=_bootstrap(self._name),
            emit=Silence(),
            rng=self._rng,
            wall=_no_time,
        )
        self.node.listen(self._on_change)

    @property
    def session(self) -> Session | None:
        session = self.node._node_session.session
        return None if session is None or session.lost.is_set() else session

    @property
    def status(self) -> Status:
        call = self._tasks.get("join")
        current = self.node.current
        session = self.session
        is_calling = call is not None and not call.done()
        failed = ""
        if call is not None and call.done() and not call.cancelled() and call.exception() is not None:
            failed = type(call.exception()).__name__
        joined: Joined | None = None if is_calling or failed else current
        has_left = "leave" in self._tasks and not self._is_doing("leave") and not is_calling
        return Status(
            lease=session.lease if session else 0,
            is_calling=is_calling,
            joined=(joined.number, joined.rank, joined.size) if joined else None,
            told=self._is_told,
            failed=failed,
            verbs=tuple(verb for verb in ("join", "leave") if not self._is_doing(verb)),
            is_over=session is None and (bool(failed) or has_left),
        )

    def _is_doing(self, verb: str) -> bool:
        task = self._tasks.get(verb)
        return task is not None and not task.done()

    def _do(self, verb: str) -> None:
        verbs: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "join": self.node.next_round,
            "leave": lambda: self.node.leave("asked to"),
        }
        if verb == "join":
            self._is_told = False
        self._tasks[verb] = asyncio.get_running_loop().create_task(verbs[verb](), name=verb)

    def _lose(self) -> None:
        session = self.session
        assert session is not None
        session.lost.set("the explorer says so")

    def _roots(self) -> list[Any]:
        _ = self.node.view.waiting  # a watch's items do not count, so nothing may be left to decode
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and not isinstance(task.exception(), RallypointError | None):
                task.result()  # a defect: let it out
        running = {verb: task for verb, task in self._tasks.items() if not task.done()}
        return [self.node, running, self._is_told, self.status.failed, self._rng.ids]

    def _on_change(self, cause: Cause, reason: str) -> None:
        self._is_told = True


class CoordinatorActor(Actor):
    """A process that does nothing but stand for election. Verb: start."""

    def __init__(self, name: str, keys: RunKeys, ttl_s: float, *, limits: Limits) -> None:
        self._name = name
        self._keys = keys
        self._ttl_s = ttl_s
        self._session: Session | None = None
        self._main: asyncio.Task[None] | None = None
        super().__init__(has_coordinator=False, limits=limits)

    def _begin(self) -> None:
        """Nothing runs before it is started."""

    @property
    def status(self) -> Status:
        session = self._session
        lease = session.lease if session is not None and not session.lost.is_set() else 0
        verbs = ("start",) if self._main is None else ()
        return Status(lease=lease, verbs=verbs, is_over=self._main is not None and self._main.done())

    def _do(self, verb: str) -> None:
        self._main = asyncio.get_running_loop().create_task(self._run(), name="candidate")

    async def _run(self) -> None:
        self._session = await self.backend.open_session(self._ttl_s)
        record = CoordinatorRecord(id=self._name, name=self._name)
        emit, rng = Silence(), Undrawn(self._name)
        candidate = Election(self.backend, self._keys, self._session, record, emit, rng, _no_time, lambda: True)
        await candidate.run()

    def _lose(self) -> None:
        assert self._session is not None
        assert self._main is not None
        self._session.lost.set("the explorer says so")
        self._session.abandon()
        self._main.cancel()

    def _roots(self) -> list[Any]:
        if self._main is not None and self._main.done() and not self._main.cancelled():
            self._main.result()  # a defect: let it out
        return [self._session, self._main]


class OperatorActor(Actor):
    """Somebody with a tool, and no node. Verbs: close, reopen."""

    def __init__(self, settings: Settings, keys: RunKeys, *, limits: Limits) -> None:
        self._settings = settings
        self._keys = keys
        self._task: asyncio.Task[Any] | None = None
        super().__init__(has_coordinator=True, limits=limits)

    def _begin(self) -> None:
        self.run_config = RunConfig(
            self.backend, self._keys, self._settings, "operator", lambda: "made-by-operator", _no_time
        )

    @property
    def status(self) -> Status:
        return Status(verbs=("make", "close", "reopen") if self._task is None or self._task.done() else ())

    def _do(self, verb: str) -> None:
        verbs: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "make": self.run_config.find_or_make,
            "close": lambda: self.run_config.close("asked to"),
            "reopen": lambda: self.run_config.reopen("asked to"),
        }
        self._task = asyncio.get_running_loop().create_task(verbs[verb](), name=verb)

    def _lose(self) -> None:
        raise AssertionError("an operator has no session")

    def _roots(self) -> list[Any]:
        if self._task is not None and self._task.done():
            self._task.result()  # a defect: let it out
            return []
        return [self._task]


class Silence(Emitter):
    """Tells nobody anything."""

    def __call__(self, event: Event) -> None:
        pass


class Undrawn(random.Random):
    """Draws nothing: always the longest pause, and ids in order."""

    def __init__(self, name: str) -> None:
        super().__init__(0)
        self.ids = int.from_bytes(name.encode()[:4], "big") << 16

    def uniform(self, a: float, b: float) -> float:
        return b

    def getrandbits(self, k: int) -> int:
        self.ids += 1
        return self.ids


def _no_time() -> float:
    """A wall clock for people is no part of this."""
    return 0.0


def _places(before: list[Any], after: list[Any]) -> tuple[int, ...]:
    return tuple(before.index(one) if one in before else -1 for one in after)


def _bootstrap(addr: str) -> Callable[[int, int], asyncio.Future[tuple[str, int]]]:
    def port(round_number: int, size: int) -> asyncio.Future[tuple[str, int]]:
        future: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        future.set_result((addr, 20_000 + round_number))
        return future

    return port
