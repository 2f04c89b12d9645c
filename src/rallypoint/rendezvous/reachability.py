"""Whether the backend can be reached, as one node sees it: told once when that changes."""

from __future__ import annotations

import asyncio

from rallypoint.errors import BackendError
from rallypoint.events import BackendReachable, BackendUnreachable, Emitter


class Reachability:
    """Fed by everyone who talks to the backend for a node."""

    def __init__(self, emit: Emitter, run_id: str, by: str) -> None:
        self.ever_reached = False
        self._emit = emit
        self._run_id = run_id
        self._by = by
        self._since: float | None = None
        self._error = ""

    def restart(self) -> None:
        """A new call begins: what counts is whether it reaches the backend."""
        self.ever_reached = False

    def failed(self, error: BackendError) -> None:
        """A request failed."""
        self._error = str(error)
        if self._since is None:
            self._since = asyncio.get_running_loop().time()
            self._emit(BackendUnreachable(run_id=self._run_id, by=self._by, reason=str(error)))

    def succeeded(self) -> None:
        """A request was answered."""
        self.ever_reached = True
        if self._since is not None:
            after_s = asyncio.get_running_loop().time() - self._since
            self._since = None
            self._emit(BackendReachable(run_id=self._run_id, by=self._by, after_s=after_s))

    def sentence(self) -> str:
        """For an error, while the backend cannot be reached; else empty."""
        if self._since is None:
            return ""
        for_s = asyncio.get_running_loop().time() - self._since
        return f"the backend has been unreachable for {for_s:.0f} s ({self._error})"
