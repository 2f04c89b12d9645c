"""Answers that wait a moment for a push that they can go out with, so that the peer is woken once for both.

A node that has joined or confirmed is told next where it stands, most often when all others have done the same. While
such requests keep coming the end of that is ahead, whatever the number of nodes and the speed of the machine; when
there was none for a moment, everybody is answered. One timer for all: a round of 10,000 nodes must not cost as many.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from rallypoint.kv.types import Op, Put, Txn
from rallypoint.server.outbox import guarded

NODES = "nodes"
WITH_NODES = f"/{NODES}/"
LEAVES = b'"phase":"left"'
"""In the record of a node that says goodbye."""
QUIET_S = 0.003
QUIET_EACH_S = 0.00005
MOST_QUIET_S = 0.3
"""How long nobody must have asked: the more connections, the longer a machine may be busy with something else."""
MOST_WAIT_S = 2.0
"""An answer never waits longer than that."""


class Waiting(Protocol):
    """A connection with an answer that waits."""

    def flush_soon(self) -> None:
        """Send what has not gone out yet, if there is any."""


class Soon:
    """Those who wait, on the clock of the loop it is made on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Waiting] = []
        self._asked = self._seen = 0
        self._since = 0.0
        self._is_armed = False

    def asked(self) -> None:
        """Somebody who waits already has asked again."""
        self._asked += 1

    def add(self, one: Waiting, connections: int) -> None:
        """Have it flushed in a moment; once for every time that it is added."""
        self._asked += 1
        self._waiting.append(one)
        if not self._is_armed:
            self._is_armed = True
            self._since = self._loop.time()
            quiet_s = min(max(QUIET_EACH_S * connections, QUIET_S), MOST_QUIET_S)
            self._loop.call_soon(self._arm, quiet_s)  # not while somebody waits for what this request brings about

    def _arm(self, quiet_s: float) -> None:
        self._seen = self._asked
        self._loop.call_at(self._loop.time() + quiet_s, self._look, quiet_s, self._loop.time() + 2 * quiet_s)

    def _look(self, quiet_s: float, late_at: float) -> None:
        now = self._loop.time()
        is_late = now > late_at  # it did not get to run, and so not to read: nobody can tell whether somebody asked
        if (self._asked != self._seen or is_late) and now - self._since < MOST_WAIT_S:
            self._arm(quiet_s)
            return
        self._is_armed = False
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            guarded(self._loop, one.flush_soon)


def is_of_a_node(op: Op) -> bool:
    """Whether a node writes its own key: it joins, or confirms. Something is pushed to it next, unless it leaves."""
    if not (isinstance(op, Txn) and op.then and isinstance(op.then[0], Put) and WITH_NODES in op.then[0].key):
        return False
    parts = op.then[0].key.split("/", 4)  # /rallypoint/run/nodes/id; a user's key may have any words further on
    return len(parts) == 5 and parts[3] == NODES and LEAVES not in op.then[0].value
