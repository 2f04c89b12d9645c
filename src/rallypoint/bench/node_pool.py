"""The node processes of one sample, seen from the process that measures: it sends commands and receives reports.

A report carries the node's own reading of `time.monotonic()`, which is the same clock for all processes of a machine.
"""

from __future__ import annotations

import enum
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from rallypoint.bench.processes import ChildProcess, MessageSocket, PeerClosed, kill_all

BATCH_S = 0.005
"""Reports are read in batches, so that reading them does not compete with nodes that are still at work."""
REPORT_DELAY_S = 0.25
"""Nodes report that they are in a complete world with this delay, so that sending does not compete with them either."""


class Action(enum.Enum):
    """What a node is told to do."""

    CONNECT = "connect"
    JOIN = "join"
    FOLLOW = "follow"
    """Wait until the rendezvous says that the world has changed, then join again."""
    ABANDON = "abandon"
    """Drop the connection without leaving. Only for nodes that share a process: others are killed."""


class Event(enum.Enum):
    """What a node reports."""

    READY = "ready"
    CONNECTED = "connected"
    CALLING = "calling"
    """It is about to call."""
    RELEASED = "released"
    FAILED = "failed"


class Command(msgspec.Struct, frozen=True):
    """`at`: not before that instant."""

    action: Action
    nodes: tuple[int, ...]
    at: float = 0.0


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """`rank`, `size` and the instant of the call are set with RELEASED, `error` with FAILED."""

    node: int
    event: Event
    at: float
    rank: int = -1
    size: int = 0
    called_at: float = 0.0
    error: str = ""


class DeadlinePassed(Exception):
    """The deadline passed before the awaited reports came."""


class NodeFailed(Exception):
    """A node's call raised an error, or its process ended."""


class NodePool:
    """All nodes of a sample. Leaving the block kills their processes."""

    def __init__(self, hosted: Sequence[tuple[int, ...]], start: Callable[[int], ChildProcess]) -> None:
        """`hosted`: the nodes of each process; `start` starts a process by its index. If one fails, all are killed."""
        self._socket_of: dict[int, MessageSocket[Report]] = {}
        self._process_of: dict[int, ChildProcess] = {}
        self._sharing: set[int] = set()
        self._processes: list[ChildProcess] = []
        self._killed: set[int] = set()
        self.called_at: dict[int, float] = {}
        """When the nodes of the last world had called."""
        self._reports: dict[Event, dict[int, Report]] = {event: {} for event in Event}
        self._selector = selectors.DefaultSelector()
        try:
            for index, nodes in enumerate(hosted):
                self._add(start(index), nodes)
        except BaseException:
            kill_all(self._processes)
            raise

    def _add(self, process: ChildProcess, nodes: tuple[int, ...]) -> None:
        messages = MessageSocket(process.sock, Report)
        self._processes.append(process)
        self._selector.register(process.sock, selectors.EVENT_READ, (messages, nodes))
        for node in nodes:
            self._socket_of[node] = messages
            self._process_of[node] = process
        if len(nodes) > 1:
            self._sharing.update(nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()
        kill_all(self._processes)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The numbers of all nodes."""
        return tuple(self._socket_of)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of all processes."""
        return tuple(process.pid for process in self._processes)

    def send(self, action: Action, nodes: Iterable[int], at: float = 0.0) -> None:
        """Send each process one command for those of its nodes. NodeFailed."""
        by_socket: dict[MessageSocket[Report], list[int]] = {}
        for node in nodes:
            by_socket.setdefault(self._socket_of[node], []).append(node)
        for messages, numbers in by_socket.items():
            try:
                messages.send([Command(action, tuple(numbers), at)])
            except PeerClosed as error:
                raise NodeFailed(f"node {numbers[0]}: {error}") from error

    def kill(self, node: int) -> float:
        """SIGKILL its process; a node that shares a process abandons its handler instead. The instant of it."""
        self._killed.add(node)
        at = time.monotonic()
        if node in self._sharing:
            self.send(Action.ABANDON, [node])
        else:
            self._process_of[node].kill()
        return at

    def wait_for(self, event: Event, nodes: Iterable[int], deadline: float) -> dict[int, Report]:
        """A report of that event from each of the nodes. DeadlinePassed, NodeFailed."""
        wanted = set(nodes)
        found = self._reports[event]
        while not wanted <= found.keys():
            self._read(deadline)
        return {node: found.pop(node) for node in wanted}

    def wait_for_world(self, nodes: Iterable[int], deadline: float) -> float:
        """Wait until exactly these nodes are one world; the instant at which the slowest was released.

        A node that is in a smaller world follows it into the next. DeadlinePassed, NodeFailed.
        """
        wanted = set(nodes)
        ranks = set(range(len(wanted)))
        placed: dict[int, Report] = {}
        while True:
            for report in self._take(Event.RELEASED):
                if report.size == len(wanted):
                    placed[report.node] = report
                    self.called_at[report.node] = report.called_at
                else:
                    placed.pop(report.node, None)
                    self.send(Action.FOLLOW, [report.node])
            if placed.keys() == wanted and {report.rank for report in placed.values()} == ranks:
                return max(report.at for report in placed.values())
            self._read(deadline, lambda: f"{len(placed)} of {len(wanted)} nodes released")

    def _take(self, event: Event) -> list[Report]:
        found = list(self._reports[event].values())
        self._reports[event].clear()
        return found

    def _read(self, deadline: float, so_far: Callable[[], str] = lambda: "") -> None:
        ready = self._selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
            raise DeadlinePassed(so_far())
        time.sleep(BATCH_S)
        for key, _ in ready:
            messages, nodes = key.data
            try:
                reports = messages.receive()
            except PeerClosed as error:
                self._selector.unregister(key.fileobj)
                lost = sorted(set(nodes) - self._killed)
                if lost:
                    raise NodeFailed(f"the process of node {lost[0]} ended") from error
                continue
            for report in reports:
                if report.event is Event.FAILED and report.node not in self._killed:
                    raise NodeFailed(f"node {report.node}: {report.error}")
                self._reports[report.event][report.node] = report
