"""The nodes of one sample as the conductor sees them: it tells them what to do, and they report what happened when.

Every node reports with its own reading of `time.monotonic()`, which is the same clock for all processes of a machine.
"""

from __future__ import annotations

import enum
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from rallypoint.bench.helper import Gone, Helper, Line, end_all

BATCH_S = 0.005
"""Reports are read in batches, so that reading them does not compete with the nodes that are still at work."""
REPORT_S = 0.25
"""Nodes that are where they should be report it so much later: sending it does not compete with the others, either."""


class Do(enum.Enum):
    """What a node can be told."""

    CONNECT = "connect"
    JOIN = "join"
    FOLLOW = "follow"
    """Wait until the rendezvous says that it is time, then join again."""
    ABANDON = "abandon"
    """Die without a word; for nodes that share a process."""


class What(enum.Enum):
    """What a node reports."""

    READY = "ready"
    CONNECTED = "connected"
    INSIDE = "inside"
    """It is about to make its call."""
    RELEASED = "released"
    FAILED = "failed"


class Command(msgspec.Struct, frozen=True):
    """`at`: not before that instant."""

    do: Do
    nodes: tuple[int, ...]
    at: float = 0.0


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """`rank`, `size` and the instant of the call with RELEASED, `text` with FAILED."""

    node: int
    what: What
    at: float
    rank: int = -1
    size: int = 0
    called_at: float = 0.0
    text: str = ""


class NoneInTime(Exception):
    """What was waited for did not happen before the deadline."""


class NodeFailed(Exception):
    """A node's call raised an error, or its process ended."""


class Crew:
    """All nodes of a sample. Leaving the block kills every process of it."""

    def __init__(self, hosted: Sequence[tuple[int, ...]], start: Callable[[int], Helper]) -> None:
        """`hosted`: the nodes of each process, which `start` starts by its number. If one cannot be, none is left."""
        self._line_of: dict[int, Line[Report]] = {}
        self._helper_of: dict[int, Helper] = {}
        self._shared: set[int] = set()
        self._helpers: list[Helper] = []
        self._gone: set[int] = set()
        self.called_at: dict[int, float] = {}
        """When the nodes that were gathered had called."""
        self._reports: dict[What, dict[int, Report]] = {what: {} for what in What}
        self._selector = selectors.DefaultSelector()
        try:
            for number, nodes in enumerate(hosted):
                self._adopt(start(number), nodes)
        except BaseException:
            end_all(self._helpers)
            raise

    def _adopt(self, helper: Helper, nodes: tuple[int, ...]) -> None:
        line = Line(helper.sock, Report)
        self._helpers.append(helper)
        self._selector.register(helper.sock, selectors.EVENT_READ, (line, nodes))
        for node in nodes:
            self._line_of[node] = line
            self._helper_of[node] = helper
        if len(nodes) > 1:
            self._shared.update(nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()
        end_all(self._helpers)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The numbers of all nodes."""
        return tuple(self._line_of)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of all processes."""
        return tuple(helper.pid for helper in self._helpers)

    def tell(self, do: Do, nodes: Iterable[int], at: float = 0.0) -> None:
        """Each process is sent one command for those of its nodes."""
        by_line: dict[Line[Report], list[int]] = {}
        for node in nodes:
            by_line.setdefault(self._line_of[node], []).append(node)
        for line, numbers in by_line.items():
            try:
                line.send([Command(do, tuple(numbers), at)])
            except Gone as error:
                raise NodeFailed(f"node {numbers[0]}: {error}") from error

    def kill(self, node: int) -> float:
        """SIGKILL its process; one that shares a process abandons its handler instead. The instant it was done."""
        self._gone.add(node)
        at = time.monotonic()
        if node in self._shared:
            self.tell(Do.ABANDON, [node])
        else:
            self._helper_of[node].kill()
        return at

    def wait(self, what: What, nodes: Iterable[int], deadline: float) -> dict[int, Report]:
        """A report of that kind from each of the nodes. NoneInTime, NodeFailed."""
        wanted = set(nodes)
        found = self._reports[what]
        while not wanted <= found.keys():
            self._read(deadline)
        return {node: found.pop(node) for node in wanted}

    def gather(self, nodes: Iterable[int], deadline: float) -> float:
        """Wait until these nodes, and no others, make up a world; the instant the slowest was released.

        One that finds itself in a smaller world follows it into the next. NoneInTime, NodeFailed.
        """
        wanted = set(nodes)
        ranks = set(range(len(wanted)))
        placed: dict[int, Report] = {}
        while True:
            for report in self._take(What.RELEASED):
                if report.size == len(wanted):
                    placed[report.node] = report
                    self.called_at[report.node] = report.called_at
                else:
                    placed.pop(report.node, None)
                    self.tell(Do.FOLLOW, [report.node])
            if placed.keys() == wanted and {report.rank for report in placed.values()} == ranks:
                return max(report.at for report in placed.values())
            self._read(deadline, lambda: f"{len(placed)} of {len(wanted)} nodes released")

    def _take(self, what: What) -> list[Report]:
        found = list(self._reports[what].values())
        self._reports[what].clear()
        return found

    def _read(self, deadline: float, so_far: Callable[[], str] = lambda: "") -> None:
        ready = self._selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
            raise NoneInTime(so_far())
        time.sleep(BATCH_S)
        for key, _ in ready:
            line, nodes = key.data
            try:
                reports = line.receive()
            except Gone as error:
                self._selector.unregister(key.fileobj)
                lost = sorted(set(nodes) - self._gone)
                if lost:
                    raise NodeFailed(f"the process of node {lost[0]} ended") from error
                continue
            for report in reports:
                if report.what is What.FAILED and report.node not in self._gone:
                    raise NodeFailed(f"node {report.node}: {report.text}")
                self._reports[report.what][report.node] = report
