"""Whether one node can reach the backend. Emits one event when that changes."""

from __future__ import annotations

import asyncio

from rallypoint.errors import BackendError
from rallypoint.events import BackendReachable, BackendUnreachable, Emitter


class Reachability:
    """All requests of a node report their results here: `failed` or `succeeded`."""

    def __init__(self, emit: Emitter, run_id: str, by: str) -> None:
        self.ever_reached = False
        self._emit = emit
        self._run_id = run_id
        self._by = by
        self._failing_since: float | None = None
        self._error = ""

    def restart(self) -> None:
        """A new call begins: `ever_reached` is about that call."""
        self.ever_reached = False

    def failed(self, error: BackendError) -> None:
        """A request failed."""
        self._error = str(error)
        if self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()
            self._emit(BackendUnreachable(run_id=self._run_id, by=self._by, reason=str(error)))

    def succeeded(self) -> None:
        """A request was answered."""
        self.ever_reached = True
        if self._failing_since is not None:
            after_s = asyncio.get_running_loop().time() - self._failing_since
            self._failing_since = None
            self._emit(BackendReachable(run_id=self._run_id, by=self._by, after_s=after_s))

    @property
    def is_failing(self) -> bool:
        """The last request that ended was not answered."""
        return self._failing_since is not None

    def sentence(self) -> str:
        """How long the backend has been unreachable, and why, for an error message; empty while it is reachable."""
        if self._failing_since is None:
            return ""
        for_s = asyncio.get_running_loop().time() - self._failing_since
        return f"the backend has been unreachable for {for_s:.0f} s ({self._error})"
